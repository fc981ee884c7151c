"""Reading sites while a model runs, without changing a bit of what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvdrift.errors import ModelError, SiteError
from kvdrift.models.coverage import Coverage
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.models.sites import GLOBAL_SITES, HEAD_SITES, LOGITS, PATTERN, choose_heads, choose_layers, parse_sites
from kvdrift.tracing.aside import IN_PLACE
from kvdrift.tracing.seam import AttentionCall, Order, Output, seam

Values = dict[str, dict[int, Tensor]]
"""Site → layer → tensor; sites that exist once sit under layer 0."""
Where = Literal["current", "all"] | int


def hidden(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Tensor:
    """The residual stream among a block's arguments: ``hidden_states=``, else the first tensor.

    Raises
    ------
    ModelError
        If there is no tensor among them.
    """
    if "hidden_states" in keywords:
        return keywords["hidden_states"]
    if arguments and isinstance(arguments[0], Tensor):
        return arguments[0]
    found = next((x for x in (*arguments, *keywords.values()) if isinstance(x, Tensor)), None)
    if found is None:
        raise ModelError("A decoder block was called without a tensor, so that no residual stream can be read there.")
    return found


def first_tensor(output: Any) -> Tensor:
    """A module's main output: the tensor itself, or the first element of its tuple."""
    return output[0] if isinstance(output, (tuple, list)) else output


def n_tokens(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> int:
    """How many tokens a pass of a model consumes, by the ids or embeddings that it is given; 0 if it is given neither.

    Examples
    --------
    >>> n_tokens((torch.tensor([[5, 7, 11]]),), {}), n_tokens((), {"pixel_values": None})
    (3, 0)
    """
    given = keywords.get("input_ids", arguments[0] if arguments else None)
    given = keywords.get("inputs_embeds") if given is None else given
    return given.shape[1] if isinstance(given, Tensor) else 0


class Tap:
    """Collects the tensors at chosen sites during a forward pass, on their own device.

    A context manager: hooks and the attention seam are in place inside it only. `values` holds the latest
    top-level forward pass; with ``keep=True`` every pass is kept in `steps`.

    Parameters
    ----------
    model
        The model to watch.
    sites
        Site → layers, or None for all layers that have it.
    where
        Positions of residual sites, ``q`` and ``z``: ``"current"`` (the last one of the pass, its axis dropped),
        ``"all"`` (every one of the pass), or a number: the last rows, where each may be a step of its own (`at_row`).
    kv_where
        Positions of ``k`` and ``v``: ``"current"``, a number of the last ones, or ``"all"`` that the kernel reads.
    heads
        Query heads to keep, or None for all; ``k`` and ``v`` keep the KV heads that these read.
    copy
        Copy whole K/V tensors. Without it they are the kernel's own, valid until a cache overwrites them.
    keep
        Keep every pass in `steps`, and how many tokens each consumed in `consumed`.
    scaled
        Multiply terms by the model's residual multiplier, as they are added; without it they are what the module
        returns, which is what a patch writes back.
    coverage
        Where the sites are; by default ``model.coverage``.
    """

    order = Order.OBSERVE

    def __init__(
        self,
        model: Model,
        sites: Mapping[str, frozenset[int] | None],
        *,
        where: Where = "current",
        kv_where: Where = "current",
        heads: Sequence[int] | None = None,
        copy: bool = True,
        keep: bool = False,
        scaled: bool = True,
        coverage: Coverage | None = None,
    ) -> None:
        self.model = model
        self.coverage = model.coverage if coverage is None else coverage
        self.layers = {site: self.coverage.resolve(site, layers) for site, layers in sites.items()}
        self.where, self.kv_where = where, kv_where
        self.heads = None if heads is None else list(heads)
        self.copy, self.keep, self.scaled = copy, keep, scaled
        self._seen = {site: frozenset(self.layers.get(site, ())) for site in (*HEAD_SITES, PATTERN)}
        self.enabled = True
        self.values: Values = {}
        self.steps: list[Values] = []
        self.consumed: list[int] = []
        self._consumed = 0
        self._stack = ExitStack()
        self._active = False

    # --- reading

    def take(self) -> tuple[Sequence[Values], Sequence[int]]:
        """What was read since the last time, pass by pass, and how many tokens each consumed; both are handed over.

        Without ``keep`` it is the latest pass alone.
        """
        taken = self.steps, self.consumed
        if not self.keep:
            taken = ([self.values], [self._consumed]) if self.values else ([], [])
        self.values, self.steps, self.consumed = {}, [], []
        return taken

    def __getitem__(self, site: str) -> Tensor:
        """The latest pass at ``site``, stacked over layers: ``[layer, batch, …]`` (or ``[batch, …]``)."""
        if site not in self.values:
            raise SiteError(f"This tap has no {site!r} yet; it watches {', '.join(self.layers)}.")
        tensors = list(self.values[site].values())
        return tensors[0] if site in (*GLOBAL_SITES, LOGITS) else torch.stack(tensors)

    # --- hooks

    def __enter__(self) -> Tap:
        if self._active:
            raise SiteError("This tap is in place already; make another one for the inner block.")
        with ExitStack() as stack:
            stack.enter_context(_hook(self.model.hf.register_forward_pre_hook(self._begin, with_kwargs=True)))
            stack.enter_context(_hook(self.model.hf.register_forward_hook(self._end)))
            for site, layers in self.layers.items():
                for layer in layers:
                    self._place(stack, site, layer)
            if any(site in (*HEAD_SITES, PATTERN) for site in self.layers):
                stack.enter_context(seam(self.model.hf, self))
            self._stack = stack.pop_all()
        self._active = True
        IN_PLACE.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._active = False
        IN_PLACE[:] = [other for other in IN_PLACE if other is not self]
        self._stack.close()

    def _place(self, stack: ExitStack, site: str, layer: int) -> None:
        place = self.coverage.places.get(site, {}).get(layer)
        if place is None:
            return

        scale = place.scale if self.scaled else 1

        def read(tensor: Tensor) -> None:
            if self.enabled:
                tensor = place.rows(tensor)
                value = _kept(tensor, 1, self.where).clone()
                self.values.setdefault(site, {})[layer] = value if scale == 1 else value * scale

        if place.kind == "input":
            handle = place.module.register_forward_pre_hook(
                lambda _, args, kwargs: read(hidden(args, kwargs)), with_kwargs=True
            )
        else:
            handle = place.module.register_forward_hook(lambda _m, _a, out: read(first_tensor(out)))
        stack.enter_context(_hook(handle))

    def _begin(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.enabled:
            self.values, self._consumed = {}, n_tokens(args, kwargs)

    def _end(self, _module: nn.Module, _args: object, output: Any) -> None:
        if not self.enabled:
            return
        if LOGITS in self.layers:
            self.values[LOGITS] = {0: _logits(output)[:, -1].clone()}
        if self.keep:
            self.steps.append(self.values)
            self.consumed.append(self._consumed)

    def __call__(self, call: AttentionCall, proceed: Callable[[AttentionCall], Output]) -> Output:
        """The link in the attention seam: read ``q``, ``k``, ``v`` before the kernel, ``z`` after it."""
        if not self.enabled:
            return proceed(call)
        layer = self.model.layer_of[id(call.module)]
        for site, tensor in (("q", call.query), ("k", call.key), ("v", call.value)):
            if layer in self._seen[site]:
                self._keep(site, layer, tensor)
        output = proceed(call)
        if layer in self._seen["z"]:
            self._keep("z", layer, output[0].transpose(1, 2))
        if layer in self._seen[PATTERN] and output[1] is not None:
            self._keep(PATTERN, layer, output[1])
        return output

    def _keep(self, site: str, layer: int, tensor: Tensor) -> None:
        kv = site in ("k", "v")
        if self.heads is not None:
            group = self.model.architecture.n_heads // tensor.shape[1]
            tensor = tensor[:, sorted({head // group for head in self.heads}) if kv else self.heads]
        where = self.kv_where if kv else self.where
        tensor = _kept(tensor, 2, where)
        if self.copy or not kv or where != "all":
            tensor = tensor.clone()
        self.values.setdefault(site, {})[layer] = tensor


def _kept(tensor: Tensor, axis: int, where: Where) -> Tensor:
    """The positions of a pass that are kept, a view."""
    if where == "current":
        return tensor.select(axis, -1)
    if where == "all":
        return tensor
    n = min(where, tensor.shape[axis])
    return tensor.narrow(axis, tensor.shape[axis] - n, n)


def at_row(values: Values, sites: Iterable[str], row: int | slice) -> Values:
    """What a pass showed, with one of its rows (its axis dropped), or some, at these sites.

    Parameters
    ----------
    values
        Read with ``where="all"`` or a number of rows.
    sites
        Those that have the rows that are meant; the others stay as they are.
    row
        Which row, counted from the end of the pass: -1 is the last.
    """
    chosen = {
        site: {
            layer: value[:, :, row] if site in (*HEAD_SITES, PATTERN) else value[:, row]
            for layer, value in values[site].items()
        }
        for site in sites
        if site in values and site != LOGITS
    }
    return values | chosen


def _logits(output: Any) -> Tensor:
    """The logits among a model's outputs: by name, or the first ``[batch, position, vocab]`` of a tuple."""
    if isinstance(output, tuple):
        found = next((x for x in output if isinstance(x, Tensor) and x.ndim == 3), None)
        if found is None:
            raise ModelError("The model returned a tuple without logits [batch, position, vocab] in it.")
        return found
    return output.logits


@contextmanager
def _hook(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def tap(
    model: Any,
    sites: str | Iterable[str],
    *,
    layers: Iterable[int] | int | None = None,
    heads: Sequence[int] | int | None = None,
    positions: Where = "current",
) -> Tap:
    """Watch sites in a loop of your own; each top-level forward pass is one step.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes.
    sites
        Site names, short or full.
    layers
        Layers to watch; all by default.
    heads
        Query heads to keep (``k`` and ``v`` keep the KV heads that these read); all by default.
    positions
        ``"current"``: the last position of each pass. ``"all"``: every position of the pass; for ``k`` and
        ``v`` every position that the kernel reads.

    Returns
    -------
    Tap
        A context manager. ``taps[site]`` is the latest pass stacked over layers; ``taps.steps[i][site][layer]``
        is any pass. Shapes: residual sites ``[batch, (position,) d_model]``, ``q k v z``
        ``[batch, head, (position,) feature]``.

    Raises
    ------
    SiteError
        If the model does not give a site, with the reason, or ``positions`` is something else.

    Examples
    --------
    >>> import kvdrift as kd, torch
    >>> hf = kd.models.tiny("llama")
    >>> with kd.tap(hf, ["resid_post", "k"]) as taps:
    ...     _ = hf(torch.tensor([[1, 2, 3]]))
    >>> taps["resid_post"].shape
    torch.Size([4, 1, 256])
    """
    wrapped = load(model, quiet=True)
    wanted = choose_layers(parse_sites(sites), layers, wrapped.architecture.n_layers)
    if positions not in ("current", "all"):
        raise SiteError(f"positions={positions!r}: a tap keeps 'current' or 'all' positions.")
    kept = choose_heads(heads, wrapped.architecture.n_heads)
    return Tap(wrapped, wanted, where=positions, kv_where=positions, heads=kept, keep=True)
