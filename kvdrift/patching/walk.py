"""Donor, unpatched recipient and every patched recipient over one prompt, one step of each at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kvdrift.controls.control import Control
from kvdrift.controls.precision import cast_copy
from kvdrift.controls.reroll import ReRoll
from kvdrift.errors import InputError, NonFiniteError, SiteError
from kvdrift.models.model import Model
from kvdrift.patching.arm_metrics import FLOATS, arm_metrics
from kvdrift.patching.blocks import Replacement, check, gather, layers_of, moved
from kvdrift.patching.noise import generator, noisy, nudged
from kvdrift.patching.outcome import Arm
from kvdrift.patching.schedule import Schedule
from kvdrift.patching.spec import Cell, Patch
from kvdrift.patching.state import Recorded, State, States, lacking, live, state
from kvdrift.paths.capabilities import overwritable, stateless
from kvdrift.paths.path import Path, on_copy
from kvdrift.paths.path_capabilities import anew, holds, rows_per_pass
from kvdrift.paths.stepper import Stepper, rows_where, started
from kvdrift.shapes import Logits
from kvdrift.tracing.finite import is_nonfinite
from kvdrift.tracing.tap import Tap, Where
from kvdrift.tracing.trace import Trace
from kvdrift.tracing.writer import Block, Writer

Choose = Callable[[State, Logits, int], int]
"""``(donor, logits of the first patched arm, step)`` → the token that all consume next."""
Rows = dict[str, np.ndarray]


@dataclass(frozen=True)
class Company:
    """Which arms run beside the patched one.

    Attributes
    ----------
    placebos
        Noise arms per cell.
    shared
        Run the re-roll and the full patch.
    each
        Run each cell's self-patch, one-ulp noise, patch into re-rolled sums and patch from a float32 donor.
    seed
        Of the noise and the re-rolls.
    only
        The cells that get controls of their own; None for all.

    Raises
    ------
    InputError
        If ``placebos`` is no count.
    """

    placebos: int
    shared: bool
    each: bool
    seed: int
    only: frozenset[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.placebos, int) or self.placebos < 0:
            raise InputError(f"placebos={self.placebos}: give a whole number, 0 for none.")


@dataclass
class _Runner:
    """One arm under way; before its first step it is the unpatched recipient itself."""

    arm: Arm
    first: int
    patches: tuple[Patch, ...]
    controls: tuple[Control, ...] | None = None
    stepper: Stepper | None = None


class Walk:
    """Runs the arms of some cells over prompts.

    Parameters
    ----------
    model
        What runs, unless the paths have models of their own.
    donor
        A path, stepping in lockstep.
    recipient
        A path.
    company
        Which arms run.
    trace
        A recorded donor, which takes the place of the path.
    """

    def __init__(
        self, model: Model, donor: Path, recipient: Path, company: Company, trace: Trace | None = None
    ) -> None:
        self.donor, self.recipient, self.company, self.trace = donor, recipient, company, trace
        self.model = recipient.model or model
        self.donor_model = self.model if trace is not None else donor.model or model
        self._limits: dict[str, None] = {}
        self._absent: dict[int, dict[tuple[str, int, str], dict[int, int]]] = {}
        self._reroll = ReRoll(company.seed)
        self._wide: Model | None = None
        self._widens = company.each and self.model.dtype not in (torch.float32, torch.float64)
        if company.each and not self._widens:
            self._limits[f"no float32 donor and no signature: the model runs in {self.model.dtype_name}"] = None

    def _prepare(self) -> None:
        """Make what runs need and checks do not: the float32 copy."""
        if self._wide is None and self._widens:
            base = self.donor_model
            self._wide = base.around(cast_copy(base.hf, torch.float32), f"{base.name} in float32")

    def close(self) -> None:
        """Free the float32 copy."""
        self._wide = None

    @property
    def notes(self) -> list[str]:
        """What could not be done, in sentences."""
        merged: dict[tuple[str, int, str], dict[int, int]] = {}
        for of_cell in self._absent.values():
            for key, since in of_cell.items():
                for position, step in since.items():
                    _earliest(merged.setdefault(key, {}), position, step)
        absent = []
        for (site, layer, reason), since in sorted(merged.items()):
            at = [f"{position} (step {step})" for position, step in sorted(since.items())]
            absent.append(
                f"{site} of layer {layer}: positions named that are {reason} were not written, each from the step "
                f"given on: {', '.join(at)}"
            )
        return [*self._limits, *absent]

    def absent(self, cell: int) -> list[list[Any]]:
        """Named positions that a cell could not write: rows of site, layer, reason, position, first step."""
        found = self._absent.get(cell, {})
        return [[*key, position, step] for key, since in found.items() for position, step in since.items()]

    def recall(self, cell: int, absent: Sequence[Sequence[Any]]) -> None:
        """Take in what `absent` said when this cell ran."""
        for site, layer, reason, position, step in absent:
            self._report(cell, (site, layer, reason), position, step)

    def forget(self) -> None:
        """Let `absent` tell of what runs from here on alone."""
        self._absent.clear()

    def _report(self, cell: int, key: tuple[str, int, str], position: int, step: int) -> None:
        _earliest(self._absent.setdefault(cell, {}).setdefault(key, {}), position, step)

    # --- the arms

    def shared_arms(self) -> list[Arm]:
        """The arms that all cells share."""
        names = ["unpatched"]
        if self.company.shared:
            names.append("re-roll")
            if self._full_sites():
                names.append("full patch")
        return [Arm(name, seed=self.company.seed if name == "re-roll" else None) for name in names]

    def cell_arms(self, number: int) -> list[Arm]:
        """The arms of one cell."""
        seeds = range(self.company.seed, self.company.seed + self.company.placebos)
        arms = [Arm("patched", number), *(Arm("placebo", number, seed) for seed in seeds)]
        if self.company.each and (self.company.only is None or number in self.company.only):
            arms += [Arm("self-patch", number), Arm("one ulp", number, self.company.seed)]
            arms.append(Arm("re-rolled patched", number, self.company.seed))
            if self._widens:
                arms.append(Arm("float32 donor", number))
        return arms

    def check(self, cells: Sequence[Cell], n_prompt: int, n_steps: int) -> None:
        """Refuse cells that this model and run do not have room for, or a donor that cannot give them."""
        for cell in cells:
            for patch in cell.patches:
                check(patch, self.model, n_prompt + n_steps - 1, n_steps)
                for site in patch.sites:
                    given = self.donor_model.coverage.layers(site)
                    missing = [layer for layer in layers_of(self.model, patch, site) if layer not in given]
                    if missing:
                        raise SiteError(
                            f"The donor's model does not give {site!r} in layer {', '.join(map(str, missing))}; name "
                            "layers that both models have."
                        )

    def _full_sites(self) -> tuple[str, ...]:
        """The sites of the full patch; empty where the donor cannot give them, or in another dtype."""
        sites = tuple(s for s in ("resid_post", "final_norm") if s in self.model.coverage.sites)
        layers: dict[str, Sequence[int]] = {site: self.model.coverage.layers(site) for site in sites}
        if self.trace is not None and any(lacking(self.trace, Patch(site), layers) for site in sites):
            self._limits[f"no full patch: the donor trace holds no {' and '.join(sites)} at every layer"] = None
            return ()
        if any(self.donor_model.coverage.layers(site) != layers[site] for site in sites):
            self._limits["no full patch: donor and recipient have different layers"] = None
            return ()
        if self.donor_model.dtype != self.model.dtype:
            self._limits["no full patch: donor and recipient run in different dtypes"] = None
            return ()
        if self.trace is None and self.donor.controls != self.recipient.controls:
            self._limits["no full patch: donor and recipient run their LM heads under different controls"] = None
            return ()
        return sites

    def _runner(self, arm: Arm, cells: dict[int, Cell], first: int) -> _Runner:
        rerolled = (*self.recipient.controls, self._reroll)
        if arm.role == "unpatched":
            return _Runner(arm, 0, ())
        if arm.role == "re-roll":
            return _Runner(arm, first, (), rerolled)
        if arm.role == "full patch":
            schedule = Schedule.persistent(first)
            return _Runner(arm, first, tuple(Patch(site, schedule=schedule) for site in self._full_sites()))
        assert arm.cell is not None, f"{arm.role} belongs to a cell"
        cell = cells[arm.cell]
        controls = rerolled if arm.role == "re-rolled patched" else None
        return _Runner(arm, cell.first, cell.patches, controls)

    # --- the walk

    def over(
        self,
        ids: Sequence[int],
        cells: dict[int, Cell],
        arms: Sequence[Arm],
        choose: Choose,
        n_steps: int,
        stop: frozenset[int] = frozenset(),
        tick: Callable[[int], object] = lambda n: None,
    ) -> Rows:
        """Run the arms over one prompt.

        Parameters
        ----------
        ids
            The prompt.
        cells
            Number → cell, for the cells that ``arms`` name.
        arms
            What to run; the first must be the unpatched recipient.
        choose
            The token that all consume next.
        n_steps, stop
            How many predictions at most, and the tokens that end the run.
        tick
            Called after each step with the number of arms that took it.

        Returns
        -------
        dict
            `FLOATS` and ``top1``, each ``[arm, step]``; ``fed`` and ``donor_top1 [step]``.
        """
        self._prepare()
        first = min((cell.first for cell in cells.values()), default=1)
        runners = [self._runner(arm, cells, first) for arm in arms]
        collected: list[list[dict[str, float]]] = []
        tokens, donor_top1 = list(ids), []
        chosen = next((place for place, arm in enumerate(arms) if arm.role == "patched"), 0)
        with ExitStack() as stack:
            source, exact, base, writer = self._start(stack, ids, runners)
            for number in range(n_steps):
                token = tokens[-1] if number else None
                watch = any(patch.schedule.covers(number) for runner in runners for patch in runner.patches)
                donor = source(number, token, watch)
                wide = None if exact is None else exact(number, token, watch)
                for runner in runners:
                    if runner.first == number and number:
                        runner.stepper = stack.enter_context(base.fork(runner.controls))
                own = state(base.step(token, watch=watch))
                logits = []
                for runner in runners:
                    given = wide if runner.arm.role == "float32 donor" and wide is not None else donor
                    logits.append(self._advance(runner, number, token, given, own, writer))
                collected.append(arm_metrics(logits, donor.logits, own.logits, None if wide is None else wide.logits))
                donor_top1.append(int(donor.logits.argmax()))
                tokens.append(choose(donor, logits[chosen][0], number))
                tick(len(runners))
                if tokens[-1] in stop:
                    break
        found: Rows = {name: np.array([[row[name] for row in rows] for rows in collected]).T for name in FLOATS}
        found["top1"] = np.array([[int(row["top1"]) for row in rows] for rows in collected], dtype=np.int64).T
        found["fed"] = np.array(tokens[len(ids) :])
        found["donor_top1"] = np.array(donor_top1)
        return found

    def _start(
        self, stack: ExitStack, ids: Sequence[int], runners: Sequence[_Runner]
    ) -> tuple[States, States | None, Stepper, Writer]:
        """The donor, the float32 donor if one is needed, the unpatched recipient, and what writes into the others."""
        patches = [patch for runner in runners for patch in runner.patches]
        sites: dict[str, frozenset[int]] = {}
        for patch in patches:
            for site in patch.sites:
                sites[site] = sites.get(site, frozenset()) | set(layers_of(self.model, patch, site))
        beyond = any(patch.beyond_current for patch in patches)

        def start(path: Path, model: Model) -> Stepper:
            where: Where = "all" if beyond else rows_where(path)
            tap = Tap(model, sites, where=where, kv_where="all", copy=rows_per_pass(path) > 1, scaled=False)
            tap.enabled = False
            stepper = stack.enter_context(started(path, model, ids, tap))
            stack.enter_context(tap)
            return stepper

        base = start(self.recipient, self.model)
        source: States
        if self.trace is None:
            source = live(start(self.donor, self.donor_model))
        else:
            for patch in patches:
                missing = lacking(self.trace, patch, {site: layers_of(self.model, patch, site) for site in patch.sites})
                if missing:
                    raise SiteError(
                        f"The donor trace lacks {missing}, and {patch} writes it; record it (K/V with positions='all')."
                    )
            source = Recorded(self.trace, self.model, ids, {site: sorted(layers) for site, layers in sites.items()})
        exact: States | None = None
        if self._wide is not None and any(runner.arm.role == "float32 donor" for runner in runners):
            wide = self._wide
            exact = live(start(on_copy(anew(self.donor, holds(self.donor, ids)), lambda _: wide), wide))
        writer = stack.enter_context(Writer(self.model, {site: sorted(layers) for site, layers in sites.items()}))
        return source, exact, base, writer

    def _advance(
        self,
        runner: _Runner,
        number: int,
        token: int | None,
        source: State,
        own: State,
        writer: Writer,
    ) -> tuple[Logits, float]:
        """One step of one arm: its logits, and how far what was written lies from its own values."""
        if runner.stepper is None:
            return own.logits, np.nan
        run = runner.stepper.run
        due = [patch for patch in runner.patches if patch.schedule.covers(number)]
        if runner.arm.role == "one ulp" and number > runner.first:
            due = []
        if not due and runner.controls is None and stateless(run):
            return own.logits, np.nan  # nothing is left of what was written before
        given = self._replacements(runner, due, number, source, own)
        if runner.arm.role == "one ulp" and given:  # only what is nudged: other values would wash it out on the way
            given = [given[int(torch.randint(len(given), (1,), generator=generator(runner.arm.seed, "one ulp")))]]
        blocks = self._content(runner, number, given)
        store = overwritable(run)
        for block in (block for block, g in zip(blocks, given, strict=True) if g.into_cache):
            assert store is not None
            store.overwrite(block.layer, block.site, block.heads, block.positions, block.value)
        writer.load(block for block, g in zip(blocks, given, strict=True) if not g.into_cache)
        writer.position, writer.keys = own.position, run.key_positions
        try:
            logits = runner.stepper.step(token, watch=False, finite=False).logits
        finally:
            writer.load(())
        if is_nonfinite(logits):
            raise NonFiniteError(
                f"The {runner.arm.role} arm leaves the finite numbers at step {number}: what was written does not fit "
                f"{self.model.dtype_name} there; patch fewer sites, or run in float32."
            )
        return logits, moved([block.value for block in blocks], [g.before for g in given]) if given else np.nan

    def _replacements(
        self, runner: _Runner, due: Sequence[Patch], number: int, source: State, own: State
    ) -> list[Replacement]:
        """What the patches that are due write at this step, with the donor's values."""
        found: list[Replacement] = []
        store = None if runner.stepper is None else overwritable(runner.stepper.run)
        held = None if store is None else store.held
        for patch in due:
            blocks, absent = gather(patch, self.model, own, source, held, number)
            found += blocks
            for lost in absent if runner.arm.role == "patched" else ():
                for position in lost.positions:
                    self._report(runner.arm.cell or 0, (lost.site, lost.layer, lost.reason), position, number)
        return found

    def _content(self, runner: _Runner, number: int, given: Sequence[Replacement]) -> list[Block]:
        """The donor's values, or what the arm writes instead of them."""
        role, seed = runner.arm.role, runner.arm.seed
        if role == "self-patch":
            return [replace(g.block, value=g.before) for g in given]
        if role == "placebo":
            return [
                replace(g.block, value=noisy(g.before, g.block.value, generator(seed, number, site, layer)))
                for g in given
                for site, layer in [(g.block.site, g.block.layer)]
            ]
        if role == "one ulp":
            return [replace(g.block, value=nudged(g.before, generator(seed, "entry"))) for g in given]
        return [g.block for g in given]


def _earliest(since: dict[int, int], position: int, step: int) -> None:
    since[position] = min(step, since.get(position, step))
