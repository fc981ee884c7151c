"""Which module a difference begins in: the first whose inputs agree in both paths while its outputs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from kvdrift.controls import Control
from kvdrift.diagnosis.locate import PAST, Equal, Where
from kvdrift.diagnosis.lockstep import Moment, alone
from kvdrift.models.model import Model
from kvdrift.paths.path import Path


def pinpoint(
    model: Model,
    b: Path,
    computed: Moment,
    moment: Moment,
    where: Where,
    equal: Equal,
    controls: tuple[Control, ...] = (),
) -> Where:
    """A place with the very module named, and the hook that stands there if one does.

    Both paths run again up to a step, and every module's inputs and outputs are compared at the positions that both
    computed. Modules are looked at in the order in which they end, so that the innermost one is named.

    Parameters
    ----------
    model
        What runs.
    b
        The reference; path a is that of the moments' case.
    computed, moment
        The step of path a, and that of path b, which may be a later one.
    where
        The layer and site at which the paths differ first.
    equal
        Decides whether two tensors are equal.
    controls
        Entered by both paths beside their own.

    Returns
    -------
    Where
        ``where`` itself if it is in a cache, or no module of that layer can be named.
    """
    if where.site in PAST.values():
        return where
    calls_a = _calls(model, computed, None, controls)
    calls_b = _calls(model, moment, b, controls)
    name = next(calls_a.departing(calls_b, equal), None)
    if name is None or (layer_of(model, name) != where.layer and name):
        return where
    module = model.hf.get_submodule(name)
    hooks = _hooks(module)
    if module in model.tree.attention_modules and not hooks:
        return where  # which says in which of its parts
    if not name and not hooks:
        return where
    return Where(where.layer, f"{model.backend.plain_name(name) or type(module).__name__}{hooks}", where.site)


def layer_of(model: Model, name: str) -> int | None:
    """The block in which a module sits, by its name."""
    prefix = f"{model.tree.prefix}."
    number = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
    return int(number) if number.isdecimal() else None


def _hooks(module: nn.Module) -> str:
    """A clause on the hooks that somebody put on a module."""
    kinds = {"forward pre-hook": module._forward_pre_hooks, "forward hook": module._forward_hooks}
    found = [
        f"{kind} {getattr(hook, '__name__', type(hook).__name__)}"
        for kind, hooks in kinds.items()
        for hook in hooks.values()
    ]
    return f" (with the {' and the '.join(found)})" if found else ""


@dataclass
class _Calls:
    """What every module was given and returned in the latest pass, in the order in which they ended.

    Attributes
    ----------
    n_tokens
        Tokens of the pass.
    end
        The position after its last one.
    ended
        ``(name, how often it ran before, inputs, outputs)``.
    """

    n_tokens: int = 0
    end: int = 0
    ended: list[tuple[str, int, list[Tensor], list[Tensor]]] = field(default_factory=list)

    def departing(self, other: _Calls, equal: Equal) -> Iterator[str]:
        """Names of modules whose inputs agree with those of the other pass while their outputs do not."""
        theirs = {(name, number): (given, returned) for name, number, given, returned in other.ended}
        for name, number, given, returned in self.ended:
            if (name, number) not in theirs:
                continue
            given_b, returned_b = theirs[name, number]
            if self._agree(given, given_b, other, equal) and self._agree(returned, returned_b, other, equal) is False:
                yield name

    def _agree(self, ours: list[Tensor], theirs: list[Tensor], other: _Calls, equal: Equal) -> bool | None:
        """Whether tensors agree at the positions of both passes; None if none has an axis of tokens."""
        if len(ours) != len(theirs):
            return None
        pairs = [self._shared(x, y, other) for x, y in zip(ours, theirs, strict=True)]
        found = [equal(*pair) for pair in pairs if pair is not None]
        return all(found) if found else None

    def _shared(self, x: Tensor, y: Tensor, other: _Calls) -> tuple[Tensor, Tensor] | None:
        n_a, n_b = self.n_tokens, other.n_tokens
        if x.dim() != y.dim():
            return None
        axis = next((axis for axis in range(x.dim()) if (x.shape[axis], y.shape[axis]) == (n_a, n_b)), None)
        first = max(self.end - n_a, other.end - n_b, 0)
        n = min(self.end, other.end) - first
        if axis is None or n < 1:
            return None
        x, y = (z.narrow(axis, first - (calls.end - calls.n_tokens), n) for z, calls in ((x, self), (y, other)))
        return (x, y) if x.shape == y.shape else None


@contextmanager
def _recording(hf: nn.Module) -> Iterator[_Calls]:
    calls, given, counts = _Calls(), list[list[Tensor]](), dict[str, int]()

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        calls.n_tokens = int(ids.shape[-1])
        calls.ended.clear()
        given.clear()
        counts.clear()

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.append([tensor.clone() for tensor in _tensors([*args, *kwargs.values()])])

    def leave(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            returned = [tensor.clone() for tensor in _tensors([output])]
            calls.ended.append((name, counts.get(name, 0), given.pop(), returned))
            counts[name] = counts.get(name, 0) + 1

        return hook

    with ExitStack() as stack:
        for name, module in hf.named_modules():  # as given to the module, before hooks of its own; as it leaves them
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave(name)).remove)
        stack.callback(hf.register_forward_pre_hook(begin, with_kwargs=True, prepend=True).remove)
        yield calls


def _tensors(values: list[Any]) -> Iterator[Tensor]:
    """Floating tensors among values, and among the entries of tuples and mappings."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(list(value))
        elif isinstance(value, dict):
            yield from _tensors(list(value.values()))


def _calls(model: Model, moment: Moment, b: Path | None, controls: tuple[Control, ...]) -> _Calls:
    """The modules of path a, or of ``b`` over the same tokens, in the pass that ends at a moment."""
    case, fed = moment.case, moment.tokens[len(moment.case.prompt) :]
    if b is not None:
        case = replace(case, a=b, feed=fed, steps=len(fed), passes=())
        moment = replace(moment, step=len(fed))
    with _recording((case.a.model or model).hf) as calls:
        for now in alone(model, case, controls):
            if now.step > moment.step:
                break
    calls.end = moment.position + 1
    return calls
