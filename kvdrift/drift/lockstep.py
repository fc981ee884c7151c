"""Two paths over one prompt, one step of each at a time, measured while both tensors are alive."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvdrift.bits import same_bits
from kvdrift.controls.reroll import ReRoll
from kvdrift.drift import measure
from kvdrift.drift.measure import Arrays, Reading, pad_stack
from kvdrift.drift.metrics import kl_divergence, logit_metrics
from kvdrift.models.head import Float32Head
from kvdrift.models.model import Model
from kvdrift.models.sites import BLOCK_SITES, GLOBAL_SITES
from kvdrift.paths.capabilities import unplaced
from kvdrift.paths.nonfinite import explain_nonfinite
from kvdrift.paths.path import Path, Run, Step
from kvdrift.tracing.borrow import Borrow
from kvdrift.tracing.finite import is_nonfinite
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
class _Live:
    """One run, the tap on its model, and what its latest step left."""

    run: Run
    tap: Tap
    step: Step | None = None
    values: Values = field(default_factory=dict)
    key_positions: dict[int, Sequence[int]] = field(default_factory=dict)
    left_out: dict[str, set[int]] = field(default_factory=dict)

    def advance(self, token: int | None) -> None:
        self.values = {}
        self.tap.enabled = True
        self.step = self.run.step(token)
        self.values = self.tap.take()
        lengths = {layer: key.shape[2] for layer, key in self.values.get("k", {}).items()}
        self.key_positions = {layer: self.run.key_positions(layer, n) for layer, n in lengths.items()}
        for layer, why in unplaced(self.run, lengths).items():
            self.left_out.setdefault(why, set()).add(layer)

    def skip(self, token: int) -> None:
        self.tap.enabled = False
        self.run.skip(token)

    def keys(self, layer: int, n_keys: int) -> Sequence[int]:
        """Absolute positions of the keys that the kernel of ``layer`` read in the latest step."""
        return self.key_positions[layer]

    @property
    def reading(self) -> Reading:
        """The keys and values that the kernels read in the latest step."""
        layers = self.run.model.architecture.layers
        first_seen = {info.index: info.first_seen(self.position) for info in layers}
        return Reading(self.values, self.key_positions, first_seen, self.position)

    @property
    def logits(self) -> Tensor:
        """Logits of the latest step, ``[vocab]``."""
        assert self.step is not None, "no step was taken yet"
        return self.step.logits

    @property
    def position(self) -> int:
        """The current position."""
        assert self.step is not None, "no step was taken yet"
        return self.step.position


class _Forks(list[Run]):
    """Forks, each closed as soon as it has served, and the others when the block is left."""

    def taken(self) -> Iterator[Run]:
        """One after the other."""
        while self:
            try:
                yield self[0]
            finally:
                self.pop(0).close()

    def __enter__(self) -> _Forks:
        return self

    def __exit__(self, *exception: object) -> None:
        while self:
            self.pop(0).close()


class Lockstep:
    """Walks two paths over one prompt and gathers what `Plan` asks for.

    Parameters
    ----------
    a, b
        The paths.
    model
        The model they run, unless they have their own.
    plan
        What to measure.

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
        choose: Callable[[Tensor, Tensor | None, int], int],
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
        steps: list[Arrays] = []
        kept: dict[int, Arrays] = {}
        tokens = list(ids)
        for model in (self.model_a, self.model_b):
            if id(model) not in self._heads:
                self._heads[id(model)] = _float32_head(model)
        with ExitStack() as stack:
            tap_a = stack.enter_context(self._tap(self.model_a))
            tap_b = tap_a if self.model_b is self.model_a else stack.enter_context(self._tap(self.model_b))
            a = self._live(stack, self.a.start(self.model_a, ids), tap_a)
            b = self._live(stack, self.b.start(self.model_b, ids), tap_b)
            self.left_out = {self.a.label: a.left_out, self.b.label: b.left_out}
            floors = [
                self._live(stack, self.a.start(self.model_a, ids, (*self.a.controls, ReRoll(seed))), tap_a)
                for seed in self.plan.seeds
            ]
            for number in range(n_steps):
                token = tokens[-1] if number else None
                measured = number % self.plan.every == 0
                if measured:
                    steps.append(self._measure(a, b, floors, token, tokens))
                    if number % self.plan.kv_every == 0 and self.plan.kv:
                        kept[number] = self._positions(a, b)
                else:
                    self._pass_over(a, b, floors, tokens)
                tokens.append(choose(a.logits, b.logits if measured else None, number))
                tick()
                if tokens[-1] in stop:
                    break
        return self._gather(steps, kept, tokens[len(ids) :])

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
        return Tap(model, sites, kv_where="all", copy=self.plan.self_drift)

    @staticmethod
    def _live(stack: ExitStack, run: Run, tap: Tap) -> _Live:
        stack.callback(run.close)
        return _Live(run, tap)

    # --- steps

    def _pass_over(self, a: _Live, b: _Live, floors: list[_Live], tokens: list[int]) -> None:
        """A step that is not measured: path a predicts, the others only consume."""
        a.advance(tokens[-1])
        self._refuse_nonfinite(a, tokens)
        for live in (b, *floors):
            live.skip(tokens[-1])

    def _measure(self, a: _Live, b: _Live, floors: list[_Live], token: int | None, tokens: list[int]) -> Arrays:
        """One step of everything; the numbers of this step."""
        plan = self.plan
        earlier = [copy.copy(live) for live in (a, b)] if plan.self_drift else []  # keeps their K/V a step longer
        with _Forks() as forks:
            if token is not None and plan.local_layers:
                forks.append(a.run.fork())
                forks.extend(a.run.fork((*a.run.controls, ReRoll(seed))) for seed in plan.seeds)
            b.advance(token)
            self._refuse_nonfinite(b, tokens)
            found = self._local(a, b, forks, token)
        a.advance(token)
        self._refuse_nonfinite(a, tokens)
        self.dtypes = {"a": _dtypes(a.values), "b": _dtypes(b.values)}
        found |= _under("drift", self._drift(a, b, tokens))
        found |= self._floor(a, floors, token, tokens)
        if token is not None:
            for name, live, before in zip(("self_a", "self_b"), (a, b), earlier, strict=False):
                found |= _under(name, self._self_drift(live, before))
        found["top1_a"], found["top1_b"] = (np.array(int(x.logits.argmax())) for x in (a, b))
        return found

    def _drift(self, a: _Live, b: _Live, tokens: list[int]) -> Arrays:
        plan, device = self.plan, a.logits.device
        found = measure.residual_metrics(a.values, b.values, plan.residual, device)
        if any(np.isnan(values).any() for values in _rel_l2(found).values()):
            raise explain_nonfinite(a.run, tokens)
        found |= measure.head_metrics(a.values, b.values, plan.queries)
        found |= measure.kv_metrics(a.reading, b.reading, plan.kv)
        logits = logit_metrics(a.logits, b.logits.to(device))
        if (kl := self._kl_float32_head(a, b)) is not None:
            logits["kl_float32_head"] = kl
        return found | {f"logits/{name}": value.cpu().numpy() for name, value in logits.items()}

    def _kl_float32_head(self, a: _Live, b: _Live) -> Tensor | None:
        """KL(b‖a) with the LM head in float32 on the same states, where both heads are understood."""
        heads = [self._heads[id(model)] for model in (self.model_a, self.model_b)]
        if heads[0] is None or heads[1] is None:
            return None
        state_a, state_b = (live.values["final_norm"][0] for live in (a, b))
        if heads[0] is not heads[1]:
            logits_a, logits_b = heads[0](state_a)[0], heads[1](state_b)[0]
        elif same_bits(state_a, state_b):
            logits_a = logits_b = heads[0](state_a)[0]
        else:
            logits_a, logits_b = heads[0](torch.cat([state_a, state_b]))
        return kl_divergence(logits_b.to(logits_a.device), logits_a)

    def _floor(self, a: _Live, floors: list[_Live], token: int | None, tokens: list[int]) -> Arrays:
        """Path a against its re-rolls: ``floor/{site}/rel_l2 [seed, layer]`` and logit metrics ``[seed]``."""
        rows: list[Arrays] = []
        for live in floors:
            live.advance(token)
            self._refuse_nonfinite(live, tokens)
            row = measure.residual_metrics(live.values, a.values, self.plan.floored, a.logits.device)
            logits = logit_metrics(live.logits, a.logits)
            rows.append(_rel_l2(row) | {f"logits/{name}": logits[name].cpu().numpy() for name in FLOOR_LOGITS})
            live.values = {}
        return _stack_seeds("floor", rows)

    def _local(self, a: _Live, b: _Live, forks: _Forks, token: int | None) -> Arrays:
        """Path a's own work on path b's inputs, against b's outputs; and against its re-rolls."""
        if not forks:
            return {}
        plan, outputs = self.plan, []
        for fork in forks.taken():
            with Borrow(self.model_a, b.values, b.keys, fork.key_positions, b.position):
                borrower = _Live(fork, a.tap)
                borrower.advance(token)
            outputs.append(
                {
                    site: {layer: borrower.values[site][layer] for layer in plan.local_layers}
                    for site in plan.local_sites
                }
            )
        own, *reordered = outputs
        device = b.logits.device
        reference = {site: {layer: b.values[site][layer] for layer in plan.local_layers} for site in plan.local_sites}
        found = _under("local", measure.residual_metrics(own, reference, plan.local_sites, device))
        rows = [_rel_l2(measure.residual_metrics(other, own, plan.local_sites, device)) for other in reordered]
        return found | _stack_seeds("local_floor", rows)

    def _self_drift(self, live: _Live, before: _Live) -> Arrays:
        """This step's K/V against the same path's previous step, at the positions both read."""
        return _rel_l2(measure.kv_metrics(live.reading, before.reading, self.plan.kv))

    def _positions(self, a: _Live, b: _Live) -> Arrays:
        return measure.kv_positions(a.reading, b.reading, self.plan.kv)

    @staticmethod
    def _refuse_nonfinite(live: _Live, tokens: list[int]) -> None:
        if is_nonfinite(live.logits):
            raise explain_nonfinite(live.run, tokens)

    # --- results

    def _gather(self, steps: list[Arrays], kept: dict[int, Arrays], fed: list[int]) -> Arrays:
        names = dict.fromkeys(name for step in steps for name in step)
        arrays = {name: pad_stack(_filled(steps, name)) for name in names}
        for name in names:
            if name.startswith(("floor/", "local_floor/")):
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
