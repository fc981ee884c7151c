"""Two paths over one prompt, one step of each at a time, measured while both tensors are alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvdrift.bits import same_bits
from kvdrift.controls.reroll import ReRoll
from kvdrift.drift import step_metrics
from kvdrift.drift.layout import Arrays, prompt_axis
from kvdrift.drift.metrics import kl_divergence, logit_metrics
from kvdrift.drift.stacking import pad_stack
from kvdrift.drift.step_metrics import Reading
from kvdrift.models.head import Float32Head
from kvdrift.models.model import Model
from kvdrift.models.sites import BLOCK_SITES, GLOBAL_SITES
from kvdrift.paths.path import Path
from kvdrift.paths.stepper import Shown, Stepper, rows_where, started
from kvdrift.shapes import Logits
from kvdrift.tracing.borrow import Borrow
from kvdrift.tracing.tap import Tap, Values

RESIDUAL = ("embed", *BLOCK_SITES, "final_norm")
FLOOR_LOGITS = ("kl", "flip", "logit_l2")


@dataclass(frozen=True)
class Plan:
    """What a comparison measures, and when.

    Attributes
    ----------
    sites
        Sites to compare.
    every
        Measure each so many steps.
    kv_every
        Keep K/V drift in full position resolution at each so many steps.
    seeds
        One re-roll for each, for the rounding floors.
    local_sites, local_layers
        Where to measure local drift (and its floor); empty for none.
    self_drift
        Compare each path's K/V with its own previous step.
    """

    sites: tuple[str, ...]
    every: int
    kv_every: int
    seeds: tuple[int, ...]
    local_sites: tuple[str, ...]
    local_layers: tuple[int, ...]
    self_drift: bool

    @property
    def residual(self) -> tuple[str, ...]:
        """The residual sites among `sites`."""
        return tuple(site for site in RESIDUAL if site in self.sites)

    @property
    def floored(self) -> tuple[str, ...]:
        """The residual sites that get a floor: those with a layer axis."""
        return tuple(site for site in self.residual if site not in GLOBAL_SITES)

    @property
    def queries(self) -> tuple[str, ...]:
        """``q`` and ``z``, where asked for."""
        return tuple(site for site in ("q", "z") if site in self.sites)

    @property
    def kv(self) -> tuple[str, ...]:
        """``k`` and ``v``, where asked for."""
        return tuple(site for site in ("k", "v") if site in self.sites)


@dataclass
class _Walk:
    """One prompt under way.

    Attributes
    ----------
    a, b, floors
        The paths and the re-rolls of path a.
    before
        What the kernels of each path read at its latest watched step, kept for self-drift alone.
    steps
        The numbers of each measured step.
    kept
        Step → K/V drift at every position.
    """

    a: Stepper
    b: Stepper
    floors: Sequence[Stepper]
    before: dict[str, Reading] = field(default_factory=dict)
    steps: list[Arrays] = field(default_factory=list)
    kept: dict[int, Arrays] = field(default_factory=dict)


class Lockstep:
    """Walks two paths over one prompt and gathers what `Plan` asks for.

    Attributes
    ----------
    dtypes
        What was seen on each path (``a``, ``b``) at its latest measured step: the dtypes of ``activations`` and,
        where K/V were read, of the ``cache``.
    left_out
        Label of a path → why the positions of its keys cannot be told → in which layers, over the latest prompt.
    """

    def __init__(self, a: Path, b: Path, model: Model, plan: Plan) -> None:
        self.a, self.b, self.plan = a, b, plan
        self.model_a, self.model_b = a.model or model, b.model or model
        self.dtypes: dict[str, dict[str, str]] = {}
        self.left_out: dict[str, dict[str, set[int]]] = {}
        self._heads: dict[int, Float32Head | None] = {}

    def close(self) -> None:
        """Free what is kept from one prompt to the next: float32 LM heads."""
        self._heads.clear()

    def walk(
        self,
        ids: Sequence[int],
        choose: Callable[[Logits, Logits | None, int], int],
        n_steps: int,
        stop: frozenset[int] = frozenset(),
        tick: Callable[[], object] = lambda: None,
    ) -> Arrays:
        """Run both paths over ``ids`` and up to ``n_steps`` predictions.

        Parameters
        ----------
        ids
            The prompt.
        choose
            Given the logits of a and of b (None where b was not run) and the step number: the token that both
            consume next.
        n_steps
            How many predictions at most.
        stop
            Tokens that end the run.
        tick
            Called after each step.

        Returns
        -------
        dict
            The arrays of one prompt, as `kvdrift.drift.result.Drift` lays them out, without the prompt axis.

        Raises
        ------
        NonFiniteError
            If a path produces NaN or infinity, with the place where it began.
        """
        fed: list[int] = []
        self.left_out = {path.label: {} for path in (self.a, self.b)}
        for model in (self.model_a, self.model_b):
            if id(model) not in self._heads:
                self._heads[id(model)] = _float32_head(model)
        with ExitStack() as stack:
            tap_a = stack.enter_context(self._tap(self.model_a))
            tap_b = tap_a if self.model_b is self.model_a else stack.enter_context(self._tap(self.model_b))
            a = stack.enter_context(started(self.a, self.model_a, ids, tap_a))
            b = stack.enter_context(started(self.b, self.model_b, ids, tap_b))
            rerolled = [(*self.a.controls, ReRoll(seed)) for seed in self.plan.seeds]
            floors = [stack.enter_context(started(self.a, self.model_a, ids, tap_a, with_)) for with_ in rerolled]
            walk = _Walk(a, b, floors)
            for number in range(n_steps):
                token = fed[-1] if fed else None
                if number % self.plan.every == 0:
                    logits = self._measure(walk, number, token)
                else:
                    logits = self._pass_over(walk, fed[-1])
                fed.append(choose(*logits, number))
                tick()
                if fed[-1] in stop:
                    break
        return self._gather(walk.steps, walk.kept, fed)

    # --- set-up

    def _tap(self, model: Model) -> Tap:
        """One tap for everything this comparison reads from ``model``."""
        sites: dict[str, frozenset[int] | None] = dict.fromkeys(self.plan.sites)
        if self.plan.kv:
            sites["k"] = None
        if "final_norm" in model.coverage.sites:
            sites["final_norm"] = None
        if self.plan.local_layers:
            sites |= dict.fromkeys(("resid_pre", "k", "v", *self.plan.local_sites))
        # A cache that writes in place (a static one) would change the previous step's K/V under our hands.
        run_by = [path for path, owner in ((self.a, self.model_a), (self.b, self.model_b)) if owner is model]
        where = rows_where(*run_by)
        return Tap(model, sites, where=where, kv_where="all", copy=self.plan.self_drift or where != "current")

    # --- steps

    def _pass_over(self, walk: _Walk, token: int) -> tuple[Logits, Logits | None]:
        """A step that is not measured: path a predicts, the others only consume."""
        shown = walk.a.step(token, watch=self.plan.self_drift)
        for stepper in (walk.b, *walk.floors):
            stepper.skip(token)
        if self.plan.self_drift:
            walk.before["self_a"] = _reading(walk.a, shown)
        return shown.logits, None

    def _measure(self, walk: _Walk, number: int, token: int | None) -> tuple[Logits, Logits | None]:
        """One step of everything; keeps its numbers, and gives the logits of a and b."""
        plan = self.plan
        b = walk.b.step(token)
        found = self._local(walk, b, token)
        a = walk.a.step(token)
        self.dtypes = {"a": _dtypes(a.values), "b": _dtypes(b.values)}
        for path, shown in ((self.a, a), (self.b, b)):
            for layer, reason in shown.left_out.items():
                self.left_out[path.label].setdefault(reason, set()).add(layer)
        readings = _reading(walk.a, a), _reading(walk.b, b)
        found |= _under("drift", self._drift(walk, a, b, *readings))
        found |= self._floor(walk.floors, a, token)
        for name, reading in zip(("self_a", "self_b"), readings, strict=True):
            if name in walk.before:  # this step's K/V against the same path's previous step, where both read
                found |= _under(name, _rel_l2(step_metrics.kv_metrics(reading, walk.before[name], plan.kv)))
            if plan.self_drift:
                walk.before[name] = reading
        found["top1_a"], found["top1_b"] = (np.array(int(x.logits.argmax())) for x in (a, b))
        walk.steps.append(found)
        if number % plan.kv_every == 0 and plan.kv:
            walk.kept[number] = step_metrics.kv_positions(*readings, plan.kv)
        return a.logits, b.logits

    def _drift(self, walk: _Walk, a: Shown, b: Shown, reading_a: Reading, reading_b: Reading) -> Arrays:
        plan, device = self.plan, a.logits.device
        found = step_metrics.residual_metrics(a.values, b.values, plan.residual, device)
        if any(np.isnan(values).any() for values in _rel_l2(found).values()):
            raise walk.a.nonfinite()
        found |= step_metrics.head_metrics(a.values, b.values, plan.queries)
        found |= step_metrics.kv_metrics(reading_a, reading_b, plan.kv)
        logits = logit_metrics(a.logits, b.logits.to(device))
        if (kl := self._kl_float32_head(a, b)) is not None:
            logits["kl_float32_head"] = kl
        return found | {f"logits/{name}": value.cpu().numpy() for name, value in logits.items()}

    def _kl_float32_head(self, a: Shown, b: Shown) -> Tensor | None:
        """KL(b‖a) with the LM head in float32 on the same states, where both heads are understood."""
        heads = [self._heads[id(model)] for model in (self.model_a, self.model_b)]
        if heads[0] is None or heads[1] is None:
            return None
        state_a, state_b = (shown.values["final_norm"][0] for shown in (a, b))
        if heads[0] is not heads[1]:
            logits_a, logits_b = heads[0](state_a)[0], heads[1](state_b)[0]
        elif same_bits(state_a, state_b):
            logits_a = logits_b = heads[0](state_a)[0]
        else:
            logits_a, logits_b = heads[0](torch.cat([state_a, state_b]))
        return kl_divergence(logits_b.to(logits_a.device), logits_a)

    def _floor(self, floors: Sequence[Stepper], a: Shown, token: int | None) -> Arrays:
        """Path a against its re-rolls: ``floor/{site}/rel_l2 [seed, layer]`` and logit metrics ``[seed]``."""
        rows: list[Arrays] = []
        for stepper in floors:
            shown = stepper.step(token)
            row = step_metrics.residual_metrics(shown.values, a.values, self.plan.floored, a.logits.device)
            logits = logit_metrics(shown.logits, a.logits)
            rows.append(_rel_l2(row) | {f"logits/{name}": logits[name].cpu().numpy() for name in FLOOR_LOGITS})
            del shown
        return _stack_seeds("floor", rows)

    def _local(self, walk: _Walk, b: Shown, token: int | None) -> Arrays:
        """Path a's own work on path b's inputs, against b's outputs; and against its re-rolls."""
        plan, outputs = self.plan, []
        if token is None or not plan.local_layers:
            return {}
        for controls in (None, *((*walk.a.run.controls, ReRoll(seed)) for seed in plan.seeds)):
            with (
                walk.a.fork(controls) as fork,
                Borrow(self.model_a, b.values, lambda layer, _: b.keys[layer], fork.run.key_positions, b.position),
            ):
                values = fork.step(token, finite=False).values
            outputs.append(
                {site: {layer: values[site][layer] for layer in plan.local_layers} for site in plan.local_sites}
            )
        own, *reordered = outputs
        device = b.logits.device
        reference = {site: {layer: b.values[site][layer] for layer in plan.local_layers} for site in plan.local_sites}
        found = _under("local", step_metrics.residual_metrics(own, reference, plan.local_sites, device))
        rows = [_rel_l2(step_metrics.residual_metrics(other, own, plan.local_sites, device)) for other in reordered]
        return found | _stack_seeds("local_floor", rows)

    # --- results

    def _gather(self, steps: list[Arrays], kept: dict[int, Arrays], fed: list[int]) -> Arrays:
        names = dict.fromkeys(name for step in steps for name in step)
        arrays = {name: pad_stack(_filled(steps, name)) for name in names}
        for name in names:
            if prompt_axis(name) == 1:  # seeds stand first
                arrays[name] = np.moveaxis(arrays[name], 1, 0)
        arrays["steps"] = np.arange(len(steps)) * self.plan.every
        arrays["fed"] = np.array(fed)
        if kept:
            arrays["positions/steps"] = np.array(list(kept))
            for name in next(iter(kept.values())):
                arrays[f"positions/{name}"] = pad_stack([found[name] for found in kept.values()])
        return arrays


def _float32_head(model: Model) -> Float32Head | None:
    """The float32 LM head of ``model``, found on a plain pass over one token."""
    if "final_norm" not in model.coverage.sites:
        return None
    with model.evaluating(), Tap(model, {"final_norm": None}) as tap:
        logits = model.backend.forward(torch.tensor([[0]], device=model.device), 0)
    return Float32Head.find(model, tap.values["final_norm"][0], logits)


def _reading(stepper: Stepper, shown: Shown) -> Reading:
    """The keys and values that the kernels read in a step."""
    layers = stepper.run.model.architecture.layers
    first_seen = {info.index: info.first_seen(shown.position) for info in layers}
    kv = {site: of_layers for site, of_layers in shown.values.items() if site in ("k", "v")}
    return Reading(kv, shown.keys, first_seen, shown.position)


def _dtypes(values: Values) -> dict[str, str]:
    """Dtypes of the residual stream and of the keys, as far as they were read."""
    sites = {"activations": next((site for site in BLOCK_SITES if site in values), None), "cache": "k"}
    return {
        name: "/".join(sorted({str(x.dtype).removeprefix("torch.") for x in values[site].values()}))
        for name, site in sites.items()
        if site in values
    }


def _under(kind: str, found: Arrays) -> Arrays:
    return {f"{kind}/{name}": value for name, value in found.items()}


def _rel_l2(found: Arrays) -> Arrays:
    """What floors and self-drift keep of the metrics."""
    return {name: value for name, value in found.items() if name.endswith("/rel_l2")}


def _stack_seeds(kind: str, rows: list[Arrays]) -> Arrays:
    """``{kind}/{name} [seed, …]`` from one dict of arrays per seed."""
    return {f"{kind}/{name}": np.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}


def _filled(steps: list[Arrays], name: str) -> list[np.ndarray]:
    """The array ``name`` of every step, NaN-filled at steps that do not have it (step 0 has no local drift)."""
    like = next(step[name] for step in steps if name in step)
    return [step[name] if name in step else np.full_like(like, np.nan) for step in steps]
