"""The attention seam: one wrapper in transformers' attention table, with a chain of links inside.

Every supported model asks a table (`transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS`, or one of its own)
for its attention function and calls it with the queries, keys and values that the kernel is about to read.
While a link is in place the entries are wrapped *under their own names*, so that models which branch on
the name still take their own branch, and whatever was there is put back when the last link leaves.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from kvdrift.backends.kinds import kind_of
from kvdrift.errors import InputError
from kvdrift.shapes import Attended, Keys, KeyValues, Queries

ATTENTION_KERNEL = "the kernel that attention runs"
"""What a link at `Order.KERNEL` decides alone."""

Output = tuple[Attended, Tensor | None]
"""What an attention function returns: ``[batch, query, head, feature]`` and, under eager, the pattern."""


@dataclass
class AttentionCall:
    """One call of an attention function, before it is executed.

    Attributes
    ----------
    module
        The attention module that calls.
    query
        ``[batch, head, query, feature]``, after RoPE and QK-norm.
    key, value
        ``[batch, kv_head, key, feature]``, as the kernel reads them (cached entries included).
    mask
        What the model passes as mask, or None.
    kwargs
        Everything else the model passes (scaling, window, sinks, …).
    native
        The function that the model would have called.
    """

    module: nn.Module
    query: Queries
    key: Keys
    value: KeyValues
    mask: Tensor | None
    kwargs: dict[str, Any]
    native: Callable[..., Output]

    def execute(self) -> Output:
        """Run the native function on the call as it stands now."""
        return self.native(self.module, self.query, self.key, self.value, self.mask, **self.kwargs)


class Order(IntEnum):
    """The stages of the seam: where a link stands in the chain, outermost first.

    Links of one stage stand in the order in which they were put in place. What a link returns passes the stages the
    other way round. A kernel that is replaced twice runs once, so two links at `KERNEL` over one module are refused,
    unless they are equal (``==``): then they replace it alike.
    """

    READ = 0
    """Hands the kernel something else than the bits that are stored: keys rounded to eight bits, a choice of them."""
    WRITE = 1
    """Changes what the kernel reads, as a patch does, before others observe it."""
    OBSERVE = 2
    """Looks at what the kernel reads and returns."""
    WRITE_OUTPUT = 3
    """Changes what the kernel returns before others observe that."""
    EXECUTE = 4
    """Hands the call on in another precision."""
    KERNEL = 5
    """Replaces the native function; a call that it leaves alone it hands on."""


class Link(Protocol):
    """One link of the chain. It may change the call, must call ``proceed`` (or execute by itself), may change
    the output."""

    order: Order

    def __call__(self, call: AttentionCall, proceed: Callable[[AttentionCall], Output]) -> Output:
        """Handle one attention call."""
        ...


@dataclass
class _Table:
    """A wrapped attention table: the entries that were local to it before, and how many links use it."""

    table: MutableMapping[str, Callable[..., Output]]
    before: dict[str, Callable[..., Output]]
    wrappers: dict[str, Callable[..., Output]]
    users: int = 0


@dataclass
class _Registered:
    link: Link
    modules: frozenset[int]


Chain = Callable[[AttentionCall], Output]


@dataclass
class _State:
    """What is wrapped, which links are in place, and the chain of each module (by its id) that has called since."""

    tables: dict[int, _Table] = field(default_factory=dict)
    links: list[_Registered] = field(default_factory=list)
    chains: dict[int, Chain] = field(default_factory=dict)


_STATE = _State()
_EAGER = "eager"


def attention_tables(model: nn.Module) -> list[MutableMapping[str, Callable[..., Output]]]:
    """The attention tables that the files of this model's modules use, without repeats."""
    files = {sys.modules.get(cls.__module__) for module in model.modules() for cls in type(module).__mro__}
    tables = {
        id(table): table for file in files if (table := getattr(file, "ALL_ATTENTION_FUNCTIONS", None)) is not None
    }
    return list(tables.values())


def eager_function(module: nn.Module) -> Callable[..., Output]:
    """The eager attention that ``module`` falls back to: the one in the file where its forward is written.

    For an attention component of a TransformerLens bridge it is the bridge's own.

    Raises
    ------
    LookupError
        If that file has none.
    """
    namespace = inspect.unwrap(type(module).forward).__globals__
    function = namespace.get("eager_attention_forward") or kind_of(module).attention_of(module)
    if function is None:
        raise LookupError(f"{type(module).__name__} has no eager_attention_forward beside its forward")
    return function


@contextmanager
def seam(model: nn.Module, link: Link) -> Iterator[None]:
    """Put ``link`` into the chain of ``model``'s attention calls.

    Links of one model do not see another model's calls. Nested use is fine; the tables are restored when the
    last link leaves, also after an exception.

    Parameters
    ----------
    model
        The module whose attention calls are handled.
    link
        The link; its ``order`` places it among the others.

    Raises
    ------
    InputError
        If it replaces the kernel, and another link over these modules does so otherwise.

    Examples
    --------
    >>> import torch
    >>> import kvdrift as kd
    >>> from kvdrift.tracing.seam import Order, seam
    >>> class Count:
    ...     order, calls = Order.OBSERVE, 0
    ...     def __call__(self, call, proceed):
    ...         self.calls += 1
    ...         return proceed(call)
    >>> model, count = kd.models.tiny("llama"), Count()
    >>> with seam(model, count):
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> count.calls
    4
    """
    registered = _Registered(link, frozenset(id(module) for module in model.modules()))
    _refuse_second_kernel(registered)
    tables = attention_tables(model)
    for table in tables:
        _wrap(table)
    _STATE.links.append(registered)
    _STATE.chains.clear()
    try:
        with kind_of(model).rerouted(model, _attend):
            yield
    finally:
        _STATE.links[:] = [other for other in _STATE.links if other is not registered]
        _STATE.chains.clear()
        for table in tables:
            _unwrap(table)


def both_decide(one: object, other: object, what: str) -> InputError:
    """The sentence that refuses two things of which one would undo the other."""
    return InputError(f"{one} and {other} both decide {what}, so one would undo the other; give one of them.")


def _refuse_second_kernel(new: _Registered) -> None:
    for other in _STATE.links if new.link.order == Order.KERNEL else ():
        if other.link.order == Order.KERNEL and other.link != new.link and other.modules & new.modules:
            raise both_decide(other.link, new.link, ATTENTION_KERNEL)


def _wrap(table: MutableMapping[str, Callable[..., Output]]) -> None:
    known = _STATE.tables.get(id(table))
    if known is None:
        wrappers = {name: _wrapper(table.get(name)) for name in dict.fromkeys((*table, _EAGER))}
        local = getattr(table, "_local_mapping", table)
        known = _STATE.tables[id(table)] = _Table(table, dict(local), wrappers)
        for name, wrapper in wrappers.items():
            table[name] = wrapper
    known.users += 1


def _unwrap(table: MutableMapping[str, Callable[..., Output]]) -> None:
    known = _STATE.tables[id(table)]
    known.users -= 1
    if known.users:
        return
    del _STATE.tables[id(table)]
    for name, wrapper in known.wrappers.items():
        if table.get(name) is not wrapper:  # somebody put their own there meanwhile: it is theirs to keep
            continue
        if name in known.before:
            table[name] = known.before[name]
        else:
            del table[name]


def _wrapper(original: Callable[..., Output] | None) -> Callable[..., Output]:
    def attention(
        module: nn.Module,
        query: Queries,
        key: Keys,
        value: KeyValues,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Output:
        native = original if original is not None else eager_function(module)
        return _attend(module, query, key, value, attention_mask, kwargs, native)

    return attention


def _attend(
    module: nn.Module,
    query: Queries,
    key: Keys,
    value: KeyValues,
    mask: Tensor | None,
    kwargs: dict[str, Any],
    native: Callable[..., Output],
) -> Output:
    """Send one call through the links that watch its module."""
    chain = _STATE.chains.get(id(module))
    if chain is None:
        chain = _STATE.chains[id(module)] = _chain(module)
    return chain(AttentionCall(module, query, key, value, mask, kwargs, native))


def _chain(module: nn.Module) -> Chain:
    """The links that watch a module, one inside the other, around the native function."""
    links = sorted((r.link for r in _STATE.links if id(module) in r.modules), key=lambda link: link.order)
    proceed: Chain = AttentionCall.execute
    for link in reversed(links):  # the last is the innermost; no closure that holds itself and the links' tensors
        proceed = partial(_through, link, proceed)
    return proceed


def _through(link: Link, proceed: Chain, call: AttentionCall) -> Output:
    return link(call, proceed)
