"""A comparison made ready: what both models give, what is measured, and how one prompt is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kvdrift import provenance
from kvdrift.controls.precision import cast_copy
from kvdrift.drift.layout import layers_name
from kvdrift.drift.lockstep import Lockstep, Plan
from kvdrift.drift.result import Drift
from kvdrift.drift.stacking import one_prompt
from kvdrift.errors import InputError, SiteError
from kvdrift.models.ending import stops
from kvdrift.models.labels import Prompt
from kvdrift.models.load import DTYPES
from kvdrift.models.model import Model
from kvdrift.models.sites import ALL_SITES, GLOBAL_SITES, LOGITS, PATTERN, parse_sites
from kvdrift.paths.path import Path, on_copy, path_info, path_settings
from kvdrift.paths.path_capabilities import anew, holds, rows_per_pass
from kvdrift.paths.sampling import greedy
from kvdrift.shapes import Logits

LOCAL_SITES = ("attn_out", "mlp_out", "resid_post")


@dataclass(frozen=True)
class Job:
    """A comparison, ready to be run on one prompt after another."""

    model: Model
    a: Path
    b: Path
    plan: Plan
    tokens: str
    ignore_eos: bool
    lockstep: Lockstep
    notes: tuple[str, ...]
    control: Job | None = None

    @classmethod
    def prepare(
        cls,
        model: Model,
        a: Path,
        b: Path,
        *,
        sites: Iterable[str] | None,
        timing: tuple[int, int],
        seeds: tuple[int, ...],
        local: bool,
        self_drift: bool,
        tokens: str,
        ignore_eos: bool = False,
        notes: Sequence[str] = (),
    ) -> Job:
        """Find out what both models give and decide what is measured.

        Raises
        ------
        InputError
            If the two paths' models cannot be compared layer by layer.
        SiteError
            If a site was asked for that one of them lacks.
        """
        one, two = a.model or model, b.model or model
        said = [*notes, *(note for m in dict.fromkeys((one, two)) for note in m.coverage.notes)]
        for attribute in ("n_layers", "d_model", "vocab_size"):
            x, y = getattr(one.architecture, attribute), getattr(two.architecture, attribute)
            if x != y:
                raise InputError(f"The two paths' models differ in {attribute} ({x} and {y}); compare alike models.")
        shared = {
            site: tuple(layer for layer in one.coverage.layers(site) if layer in two.coverage.layers(site))
            for site in ALL_SITES
            if site not in (PATTERN, LOGITS)
        }
        every, _ = timing
        if every > 1:
            said.append(f"one step in {every} was measured: flips between them are not seen")
        alike = _same_heads(one, two)
        if not alike:
            shared |= dict.fromkeys(("q", "k", "v", "z"), ())
            said.append("q, k, v and z were not compared: the two models have other heads")
        if sites is None:
            chosen = tuple(site for site, layers in shared.items() if layers)
        else:
            wanted = parse_sites(sites)
            if PATTERN in wanted:
                raise SiteError("Patterns are not compared; use kd.record(..., sites=['pattern']) on each path.")
            if any(layers is not None for layers in wanted.values()):
                raise SiteError("A comparison takes whole sites: write 'resid_post', not 'blocks.5.hook_resid_post'.")
            chosen = tuple(site for site in wanted if site != LOGITS)
            for site in chosen:
                one.coverage.resolve(site, None)
                two.coverage.resolve(site, None)
                if not shared[site]:
                    raise SiteError(f"{site!r} cannot be compared: the two paths' models have it in no common shape.")
        local_layers = shared["k"] if local else ()
        whole = len(shared["resid_pre"]) == one.architecture.n_layers
        if local and not (local_layers and whole and one.dtype == two.dtype and rows_per_pass(a) == 1):
            why = (
                f"{a.label} serves several rows of one pass, which has one set of inputs"
                if rows_per_pass(a) > 1
                else "past K/V cannot be written"
                if not local_layers
                else "the two paths run in different dtypes"
                if whole
                else "what some layers are given has no row per token"
            )
            said.append(f"local drift was not measured: {why}")
            local_layers = ()
        local_sites = tuple(s for s in LOCAL_SITES if set(local_layers) <= set(shared[s]))
        plan = Plan(chosen, *timing, seeds, local_sites, local_layers, self_drift)
        return cls(model, a, b, plan, tokens, ignore_eos, Lockstep(a, b, model, plan), tuple(said))

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text: none where the tokens are given."""
        return frozenset() if self.tokens == "given" else stops(self.model, self.ignore_eos)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.lockstep.close()
        if self.control is not None:
            self.control.lockstep.close()

    def in_dtype(self, name: str, ids: Sequence[int] = ()) -> Job:
        """The same job on copies of the models cast to another dtype; ``ids`` is one of the prompts."""
        if name not in DTYPES:
            raise InputError(f"also_in={name!r} is no dtype; choose {', '.join(DTYPES)}.")
        if DTYPES[name] == self.model.dtype:
            raise InputError(f"also_in={name!r} is the model's own dtype; choose another one.")

        def cast(model: Model) -> Model:
            return model.around(cast_copy(model.hf, DTYPES[name]))

        def with_copy(path: Path) -> Path:
            return on_copy(anew(path, holds(path, ids)), cast)

        model, a, b = cast(self.model), with_copy(self.a), with_copy(self.b)
        return replace(self, model=model, a=a, b=b, lockstep=Lockstep(a, b, model, self.plan))

    def run(self, prompt: Prompt, forced: list[int] | None, n_steps: int, tick: Callable[[], object]) -> Drift:
        """The drift over one prompt, with its control's on the same tokens."""

        def choose(logits_a: Logits, logits_b: Logits | None, step: int) -> int:
            if forced is not None:
                return forced[step]
            logits = logits_a if self.tokens == "a" else logits_b
            assert logits is not None, "tokens='b' runs path b at every step"
            return greedy(logits, step)

        stop = self.ends if forced is None else frozenset()  # a control follows the base's tokens
        arrays = one_prompt(self.lockstep.walk(prompt.ids, choose, n_steps, stop, tick))
        one, two = self.a.model or self.model, self.b.model or self.model
        for site in self.plan.sites:
            if site not in GLOBAL_SITES:
                arrays[layers_name(site)] = _numbers(one, two, site)
        arrays[layers_name("local")] = np.array(self.plan.local_layers, dtype=np.int64)
        fed = [int(token) for token in arrays["fed"][0]]
        seen = {*prompt.ids, *fed, *arrays["top1_a"].flatten().tolist(), *arrays["top1_b"].flatten().tolist()}
        control = None if self.control is None else self.control.run(prompt, fed, len(fed), tick)
        return Drift(
            a=path_info(self.a, one),
            b=path_info(self.b, two),
            architecture=one.architecture,
            prompts=(prompt,),
            arrays=arrays,
            token_texts={int(token): self.model.token_text(int(token)) for token in sorted(seen)},
            control=control,
            provenance=provenance.collect(one, two)
            | {"dtypes": self.lockstep.dtypes, "settings": self.settings, "ends": sorted(self.ends)},
            notes=(*self.notes, *_left_out(self.lockstep)),
        )

    @property
    def models(self) -> tuple[Model, Model]:
        """What paths a and b run."""
        return self.a.model or self.model, self.b.model or self.model

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the numbers, beside the prompts."""
        return {
            "a": path_settings(self.a, self.model),
            "b": path_settings(self.b, self.model),
            "weights": [m.fingerprint for m in self.models],
            "driver": [m.backend.driver for m in self.models],
            "threads": torch.get_num_threads(),
            "software": provenance.collect()["software"],
            "plan": asdict(self.plan),
            "tokens": self.tokens,
            "ignore_eos": self.ignore_eos,
            "control": None if self.control is None else self.control.model.dtype_name,
        }


def _same_heads(one: Model, two: Model) -> bool:
    heads = [[(x.n_kv_heads, x.head_dim) for x in m.architecture.layers] for m in (one, two)]
    return heads[0] == heads[1] and one.architecture.n_heads == two.architecture.n_heads


def _numbers(one: Model, two: Model, site: str) -> np.ndarray:
    return np.array([x for x in one.coverage.layers(site) if x in two.coverage.layers(site)], dtype=np.int64)


def _left_out(lockstep: Lockstep) -> list[str]:
    """Sentences on keys and values whose positions cannot be told."""
    return [
        f"{label}: K/V by position are left out in layers {', '.join(map(str, sorted(layers)))}: {why}"
        for label, reasons in lockstep.left_out.items()
        for why, layers in reasons.items()
    ]
