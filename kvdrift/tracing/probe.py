"""Finding where a model's sites are by watching a probe pass, and proving that reading them changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvdrift.bits import same_bits
from kvdrift.errors import KvdriftError, ModelError, NotFaithfulError, one_line
from kvdrift.models.coverage import Coverage, Place
from kvdrift.models.model import Model
from kvdrift.models.sites import BLOCK_SITES, GLOBAL_SITES, HEAD_SITES, PATTERN
from kvdrift.tracing.seam import AttentionCall, Order, Output, seam
from kvdrift.tracing.tap import Tap, first_tensor, hidden

PROBE_TOKENS = 6
_NO_ROWS = "no axis of it is that of the tokens of a pass, so that nothing in it belongs to a position"
Prepared = Callable[[], Callable[[], Tensor]]
"""Prepares a probe pass (fills its cache) and returns the pass itself."""


@dataclass
class _Event:
    """What one module received or returned in a probe pass."""

    module: nn.Module
    kind: Literal["input", "output"]
    value: Tensor


def probe(model: Model) -> Coverage:
    """Find where the sites of ``model`` are, and prove that reading them changes nothing.

    Two passes over a few random tokens are watched from every module: one without a cache, one decoding a
    single token with it. `attn_out` and `mlp_out` are the modules (if any) for which
    ``resid_mid = resid_pre + attn_out`` and ``resid_post = resid_mid + mlp_out`` hold in every bit in both.

    Raises
    ------
    ModelError
        If the model cannot run, or keeps state outside its cache.
    NotFaithfulError
        If the logits with all taps in place differ in a bit from those without.
    """
    if model.device.type == "meta":
        raise ModelError(f"{model.name} is on the meta device, without weights, so it cannot run; load it with them.")
    with model.evaluating():
        passes = _passes(model)
        plain = _plain(model, passes)
        _refuse_module_state(model, passes, plain)
        coverage = _at_hook_points(model, passes, _find(model, passes))
        _prove(model, coverage, passes, plain)
    return replace(coverage, remarks=model.backend.notes())


def _plain(model: Model, passes: list[Prepared]) -> list[Tensor]:
    """The logits of the probe passes with nothing watching."""
    found = []
    for prepare, how in zip(passes, ("without a cache", "with a cache"), strict=True):
        try:
            found.append(prepare()())
        except KvdriftError:
            raise
        except Exception as error:  # whatever a model raises
            raise ModelError(
                f"{model.name} fails on a few tokens {how}, with nothing of kvdrift's in place "
                f"({type(error).__name__}: {one_line(error)}), so there is nothing to study; mend that first, or "
                "give a model that is called with input_ids, a cache and position_ids."
            ) from error
    return found


def _passes(model: Model) -> list[Prepared]:
    """The probe passes: the whole sequence without a cache, and its last token with one already filled."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (1, PROBE_TOKENS), generator=generator).to(model.device)

    def uncached() -> Callable[[], Tensor]:
        return lambda: model.backend.forward(ids, 0)

    def decoding() -> Callable[[], Tensor]:
        cache = model.backend.new_cache()
        model.backend.forward(ids[:, :-1], 0, cache)
        return lambda: model.backend.forward(ids[:, -1:], PROBE_TOKENS - 1, cache)

    return [uncached, decoding]


class _Watch:
    """Records what every module inside a block receives and returns, and the attention calls."""

    order = Order.OBSERVE

    def __init__(self, model: Model) -> None:
        self.model = model
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.events: dict[int, list[_Event]] = {layer: [] for layer in range(len(model.tree.blocks))}
        self.calls: dict[int, list[int]] = {}
        self.pattern = False
        self.norm: Tensor | None = None
        self.head_input: Tensor | None = None

    def __call__(self, call: AttentionCall, proceed: Callable[[AttentionCall], Output]) -> Output:
        output = proceed(call)
        layer = self.model.layer_of.get(id(call.module))
        if layer is not None:
            self.calls.setdefault(layer, []).append(call.key.shape[2])
            self.pattern = output[1] is not None
        return output

    def run(self, forward: Callable[[], Tensor]) -> _Watch:
        tree = self.model.tree
        with ExitStack() as stack:
            stack.enter_context(seam(self.model.hf, self))
            for layer, block in enumerate(tree.blocks):
                for module in block.modules():
                    self._watch(stack, layer, module, module is block)
            if tree.final_norm is not None:
                self._on(stack, tree.final_norm.register_forward_hook(self._saw_norm))
            if tree.head is not None:
                self._on(stack, tree.head.register_forward_pre_hook(self._saw_head))
            forward()
        return self

    @staticmethod
    def _on(stack: ExitStack, handle: torch.utils.hooks.RemovableHandle) -> None:
        stack.callback(handle.remove)

    def _saw_norm(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self.norm = first_tensor(output)[:, -1].clone()

    def _saw_head(self, _module: nn.Module, args: Any) -> None:
        self.head_input = args[0][:, -1].clone()

    def _watch(self, stack: ExitStack, layer: int, module: nn.Module, is_block: bool) -> None:
        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if "hidden_states" not in kwargs and not any(isinstance(x, Tensor) for x in args):
                return
            found = hidden(args, kwargs)
            if is_block:
                self.inputs[layer] = found.clone()
            elif layer in self.inputs and found.shape == self.inputs[layer].shape:
                self.events[layer].append(_Event(module, "input", found.clone()))

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            found = first_tensor(output) if output is not None else None
            if not isinstance(found, Tensor):
                return
            if is_block:
                self.outputs[layer] = found.clone()
            elif layer in self.inputs and found.shape == self.inputs[layer].shape:
                self.events[layer].append(_Event(module, "output", found.clone()))

        self._on(stack, module.register_forward_pre_hook(before, with_kwargs=True))
        self._on(stack, module.register_forward_hook(after))


def _find(model: Model, passes: list[Prepared]) -> Coverage:
    watched = [_Watch(model).run(prepare()) for prepare in passes]
    tree, n_layers = model.tree, len(model.tree.blocks)
    places: dict[str, dict[int, Place]] = {site: {} for site in (*GLOBAL_SITES, *BLOCK_SITES)}
    reasons: dict[str, str] = {}
    multiplier = float(getattr(model.hf.config, "residual_multiplier", 1.0) or 1.0)

    axes = _token_axes(model)
    if "embed" in axes:
        places["embed"][0] = Place(model.hf.get_input_embeddings(), "output", axes=axes["embed"])
    if tree.final_norm is not None and all(
        w.norm is not None and w.head_input is not None and same_bits(w.norm, w.head_input) for w in watched
    ):
        places["final_norm"][0] = Place(tree.final_norm, "output")
    else:
        reasons["final_norm"] = "no norm module returns what the LM head reads"
    for layer, block in enumerate(tree.blocks):
        before, after = axes.get(("input", layer)), axes.get(("output", layer))
        if before is not None:
            places["resid_pre"][layer] = Place(block, "input", axes=before)
        if after is not None:
            places["resid_post"][layer] = Place(block, "output", axes=after)
        if before is None or before != after:
            continue
        added = _find_added(watched, layer, sorted({1.0, multiplier}), before)
        if added is not None:
            places["attn_out"][layer], places["mlp_out"][layer] = added
            middle = _find_middle(watched, layer, added[0])
            if middle is not None:
                places["resid_mid"][layer] = middle
    for site in ("embed", "resid_pre", "resid_post"):
        missing = [layer for layer in range(1 if site == "embed" else n_layers) if layer not in places[site]]
        if missing:
            reasons[site] = _in_layers(missing, n_layers) + _NO_ROWS
    for site in ("attn_out", "mlp_out", "resid_mid"):
        missing = [layer for layer in range(n_layers) if layer not in places[site]]
        if missing:
            why = (
                _NO_ROWS
                if any(layer not in places["resid_pre"] or layer not in places["resid_post"] for layer in missing)
                else "no module reads resid_pre + attn_out alone (a parallel block)"
                if site == "resid_mid" and len(places["attn_out"]) == n_layers
                else "no two modules add up to the residual stream one after the other in every bit"
            )
            reasons[site] = _in_layers(missing, n_layers) + why

    uncached, decoding = watched
    windows = [info.window or PROBE_TOKENS for info in model.architecture.layers]
    table_layers = {
        layer: set(calls) == {PROBE_TOKENS}
        and set(decoding.calls.get(layer, ())) in ({PROBE_TOKENS}, {min(PROBE_TOKENS, windows[layer])})
        for layer, calls in uncached.calls.items()
    }
    attention = tuple(
        layer
        for layer in range(n_layers)
        if table_layers.get(layer) and len(uncached.calls[layer]) == len(decoding.calls[layer]) == 1
    )
    missing = [layer for layer in range(n_layers) if layer not in attention]
    if missing:
        why = (
            "attention never calls transformers' attention table (recurrent, linear or older attention, or one that "
            "a bridge computes in a way of its own)"
            if not any(layer in table_layers for layer in missing)
            else "attention is not one call over one key per token"
        )
        reasons |= {site: _in_layers(missing, n_layers) + why for site in HEAD_SITES}
    pattern = bool(attention) and all(w.pattern for w in watched)
    if not pattern:
        reasons[PATTERN] = f"attn={model.attn!r} does not return attention weights; load with attn='eager'"
    return Coverage(places, attention, pattern, n_layers, reasons, table_layers)


def _token_axes(model: Model) -> dict[str | tuple[str, int], tuple[int, int]]:
    """The axes of batch and tokens of ``"embed"``, and of ``("input", i)`` and ``("output", i)`` of every block.

    The axis of tokens is the one that is as long as a pass, in passes of two lengths; what has none is left out. Every
    logit is asked for, since a layer whose keys nothing reads later may otherwise run the last token alone.
    """
    passes: list[dict[str | tuple[str, int], set[tuple[int, ...]]]] = []
    lengths = (PROBE_TOKENS, PROBE_TOKENS - 1)

    def note(key: str | tuple[str, int], value: Any) -> None:
        passes[-1].setdefault(key, set()).add(tuple(value.shape) if isinstance(value, Tensor) else ())

    def before(layer: int, _module: nn.Module, args: Any, kwargs: Any) -> None:
        note(("input", layer), hidden(args, kwargs))

    def after(key: str | tuple[str, int], _module: nn.Module, _args: Any, output: Any) -> None:
        note(key, first_tensor(output))

    with torch.no_grad(), ExitStack() as stack:
        embedding = model.hf.get_input_embeddings()
        stack.callback(embedding.register_forward_hook(partial(after, "embed")).remove)
        for layer, block in enumerate(model.tree.blocks):
            stack.callback(block.register_forward_pre_hook(partial(before, layer), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(partial(after, ("output", layer))).remove)
        for n_tokens in lengths:
            passes.append({})
            ids = torch.arange(n_tokens, device=model.device).unsqueeze(0) % model.vocab_size
            arguments = model.backend.arguments(ids, 0)
            arguments.pop("logits_to_keep", None)
            model.backend.call(arguments)
    found = {}
    for key in passes[0].keys() & passes[1].keys():
        longer, shorter = passes[0][key], passes[1][key]
        if len(longer) != 1 or len(shorter) != 1:  # a block that runs more than once, on other shapes
            continue
        sizes = list(zip(*longer, *shorter, strict=False))
        tokens = [axis for axis, pair in enumerate(sizes) if pair == lengths]
        ones = [axis for axis, pair in enumerate(sizes) if pair == (1, 1)]
        if len(tokens) == 1 and ones and len(sizes) > 2:
            found[key] = (ones[0], tokens[0])
    return found


def _at_hook_points(model: Model, passes: list[Prepared], coverage: Coverage) -> Coverage:
    """Read sites at the model's own hook points (a bridge's), where these hold the same bits in both passes."""
    points = model.backend.hook_points(model.tree.blocks, model.tree.final_norm)
    if not points:
        return coverage
    agree = dict.fromkeys(points, True)
    known = [site for site, places in coverage.places.items() if places]
    for prepare in passes:
        seen: dict[tuple[str, int], Tensor] = {}
        run = prepare()
        with (
            Tap(model, dict.fromkeys(known), where="all", scaled=False, coverage=coverage) as tap,
            ExitStack() as stack,
        ):
            for key, point in points.items():
                stack.callback(point.register_forward_hook(partial(_remember, seen, key)).remove)
            run()
        for (site, layer), same in agree.items():
            own, found = seen.get((site, layer)), tap.values.get(site, {}).get(layer)
            agree[site, layer] = same and own is not None and found is not None and same_bits(own, found)
    places = {site: dict(by_layer) for site, by_layer in coverage.places.items()}
    for (site, layer), same in agree.items():
        if same:
            places[site][layer] = replace(places[site][layer], module=points[site, layer], kind="output")
    return replace(coverage, places=places)


def _remember(
    seen: dict[tuple[str, int], Tensor], key: tuple[str, int], _module: nn.Module, _args: Any, output: Tensor
) -> None:
    seen[key] = output.clone()


def _refuse_module_state(model: Model, passes: list[Prepared], plain: list[Tensor]) -> None:
    """Refuse a model that keeps what it has read in its modules: two runs of it would disturb each other."""
    uncached, decoding = passes
    decode = decoding()
    uncached()()
    if not same_bits(decode(), plain[1]):
        raise ModelError(
            f"{model.name} keeps state of a run outside its cache (or is not deterministic), so two paths cannot "
            "advance side by side; kvdrift cannot study it."
        )


def _in_layers(layers: list[int], n_layers: int) -> str:
    if len(layers) == n_layers:
        return ""
    shown = ", ".join(map(str, layers[:8])) + (", …" if len(layers) > 8 else "")
    return f"in layers {shown}: "


def _find_added(
    watched: list[_Watch], layer: int, scales: list[float], axes: tuple[int, int]
) -> tuple[Place, Place] | None:
    """The two modules whose outputs are added to the residual, in order; the last ones of equal bits."""
    found: set[tuple[int, int, float]] | None = None
    order: list[tuple[int, int, float]] = []
    names: dict[int, nn.Module] = {}
    for watch in watched:
        if layer not in watch.inputs or layer not in watch.outputs:
            return None
        if not watch.outputs[layer].isfinite().any():  # any two terms add up to NaN: it shows nothing
            continue
        outputs = [event for event in watch.events[layer] if event.kind == "output"]
        names |= {id(event.module): event.module for event in outputs}
        here: dict[tuple[int, int, float], None] = {}
        for scale in scales:
            for i, first in enumerate(outputs):
                middle = watch.inputs[layer] + first.value * scale
                for second in outputs[i + 1 :]:
                    if same_bits(middle + second.value * scale, watch.outputs[layer]):
                        here[id(first.module), id(second.module), scale] = None
        found = set(here) if found is None else found & set(here)
        order = list(here)
    if not found:
        return None
    attn, mlp, scale = [key for key in order if key in found][-1]
    return Place(names[attn], "output", scale, axes), Place(names[mlp], "output", scale, axes)


def _find_middle(watched: list[_Watch], layer: int, attn_out: Place) -> Place | None:
    """The first module that reads ``resid_pre + attn_out``."""
    readers: list[int] | None = None
    names: dict[int, nn.Module] = {}
    for watch in watched:
        added = [e for e in watch.events[layer] if e.kind == "output" and e.module is attn_out.module][-1]
        middle = watch.inputs[layer] + added.value * attn_out.scale
        events = [e for e in watch.events[layer] if e.kind == "input" and same_bits(e.value, middle)]
        names |= {id(e.module): e.module for e in events}
        here = [id(e.module) for e in events]
        readers = here if readers is None else [key for key in readers if key in here]
    return Place(names[readers[0]], "input", axes=attn_out.axes) if readers else None


def _prove(model: Model, coverage: Coverage, passes: list[Prepared], plain: list[Tensor]) -> None:
    """Run the probe passes with every tap in place and compare the logits bit by bit."""
    sites = dict.fromkeys(coverage.sites)
    for prepare, untraced in zip(passes, plain, strict=True):
        run = prepare()
        with Tap(model, sites, where="all", kv_where="all", coverage=coverage) as taps:
            traced = run()
        if not same_bits(traced, untraced):
            raise NotFaithfulError(
                f"Tracing {model.name} changes its logits on a probe pass, so kvdrift would measure itself; "
                "nothing was traced. If the model is not deterministic, make it so first."
            )
        silent = [
            f"{site}[{layer}]"
            for site, layers in taps.layers.items()
            for layer in layers
            if layer not in taps.values.get(site, {})
        ]
        if silent:
            raise NotFaithfulError(f"These sites of {model.name} never fired on a probe pass: {', '.join(silent)}.")
