"""`falsify`: measure cache-ON against cache-OFF in one arithmetic after another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from kvdrift import provenance
from kvdrift.controls.attention_backend import WatchSdpa
from kvdrift.controls.precision import cast_copy, experts_note
from kvdrift.controls.upcast import HALVES
from kvdrift.drift.compare import compare
from kvdrift.drift.result import Drift
from kvdrift.errors import FileError, InputError, KvdriftError, NonFiniteError
from kvdrift.fingerprint import one_job
from kvdrift.ladder.arms import ARMS, BASE, HALF, Arithmetic, chosen
from kvdrift.ladder.result import METRICS, Ladder
from kvdrift.ladder.rung import Rung
from kvdrift.models.load import DTYPES, load
from kvdrift.models.model import Model
from kvdrift.models.prompts import as_prompts
from kvdrift.paths.cache_off import CacheOff
from kvdrift.paths.cache_on import CacheOn
from kvdrift.paths.path import Path
from kvdrift.renamed import renamed

SITE = "resid_post"


@renamed(resume="store")
@one_job()
def falsify(
    model: Any,
    prompts: Any,
    *,
    arms: Iterable[str] | None = None,
    max_new_tokens: int = 24,
    tokens: Any = None,
    chat: bool = False,
    ignore_eos: bool = False,
    seed: int = 0,
    progress: bool = True,
    store: str | FilePath | None = None,
) -> Ladder:
    """Compare cache-ON with cache-OFF in one arithmetic after another, with the same weights on the same tokens.

    Whoever says that rounding makes the difference predicts how it shrinks with precision, that it is gone where
    both paths round alike, and that reordered sums without any cache make as much of it. Each arm tests one of these
    predictions. The model as given is the base arm, always run first; it chooses the tokens that all arms consume.
    Arms in another dtype run on a named copy of the weights, one at a time.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes.
    prompts
        Text, token ids or a tensor (one prompt), or a list of those: the unit of intervals and bounds.
    arms
        Names of `kvdrift.ladder.arms.ARMS`; all by default. An arm that the machine or the model cannot run is
        reported with its reason, one that overflows with the place.
    max_new_tokens
        Steps per prompt.
    tokens
        Token ids that all arms consume instead (one list per prompt).
    chat
        Put text prompts into the chat template.
    ignore_eos
        Go on past an end-of-sequence token.
    seed
        Seed of the re-rolls.
    progress
        Show a progress bar.
    store
        A folder that keeps finished prompts of every arm: the same call goes on from there, whatever stopped it.

    Raises
    ------
    InputError
        If an argument cannot be used.
    NonFiniteError
        If the base arm overflows, so that it can choose no tokens.

    Examples
    --------
    >>> import kvdrift as kd
    >>> ladder = kd.falsify(kd.models.tiny("llama"), [1, 2, 3], arms=["fixed-shape"], max_new_tokens=4, progress=False)
    >>> ladder.identical("fixed-shape")
    1.0
    """
    loaded = load(model, quiet=not progress)
    given, _ = as_prompts(prompts)
    base = ARMS.get(loaded.dtype_name)
    if base is None:
        raise InputError(f"The model is in {loaded.dtype_name}; a ladder starts from {', '.join(DTYPES)}.")
    wanted = [arm for arm in chosen(arms) if arm is not base]
    encoded = [loaded.encode(prompt, chat) for prompt in given]
    setup = _Setup(loaded, encoded, max_new_tokens, seed, None if store is None else FilePath(store))
    results: dict[str, tuple[Rung, Drift | None]] = {}
    with tqdm(total=1 + len(wanted), desc="falsify", unit="arm", disable=not progress) as bar:
        bar.set_postfix_str(base.name)
        drift = setup.compare(base, given, "a" if tokens is None else tokens, chat, ignore_eos)
        if not drift.counted.any():
            wanted = []  # the text ended at once: no arm has a step to measure
        n_steps = drift.measured.sum(axis=1)
        setup.forced = [row[:n].tolist() for row, n in zip(drift.fed, n_steps, strict=True)]
        setup.longest = max(len(ids) + len(fed) for ids, fed in zip(encoded, setup.forced, strict=True))
        results[base.name] = (setup.rung(base), drift)
        bar.update()
        for arm in wanted:
            bar.set_postfix_str(arm.name)
            results[arm.name] = setup.run(arm)
            bar.update()
    return _ladder(loaded, base, results, drift, seed)


@dataclass
class _Setup:
    """What all arms share: the base model, one cast copy at a time, the prompts and the tokens."""

    model: Model
    prompts: list[list[int]]
    steps: int
    seed: int
    store: FilePath | None
    longest: int = 1
    forced: list[list[int]] = field(default_factory=list)
    copy: Model | None = None

    def run(self, arm: Arithmetic) -> tuple[Rung, Drift | None]:
        """One arm on the forced tokens; an arm that cannot run, or overflows, comes with the reason."""
        rung = self.described(arm)
        try:
            rung = self.rung(arm)
            return rung, self.compare(arm, self.prompts, self.forced)
        except NonFiniteError as error:
            return replace(rung, status="not finite", reason=str(error)), None
        except FileError:  # of the store, not of the arm
            raise
        except (KvdriftError, RuntimeError) as error:
            return replace(rung, status="not run", reason=" ".join(str(error).split())), None

    def compare(
        self, arm: Arithmetic, prompts: Any, tokens: Any, chat: bool = False, ignore_eos: bool = False
    ) -> Drift:
        """The comparison of one arm."""
        model = self.in_dtype(arm)
        a, b = self.paths(arm)
        return compare(
            model, prompts, a=a, b=b, tokens=tokens, max_new_tokens=self.steps, chat=chat, ignore_eos=ignore_eos,
            sites=[SITE if SITE in model.coverage.sites else "logits"], floor=0, local=False, progress=False,
            store=None if self.store is None else self.store / arm.name,
        )  # fmt: skip

    def paths(self, arm: Arithmetic, *more: Any) -> tuple[Path, Path]:
        """Both paths of an arm, with more controls."""
        controls = (*arm.controls(self.seed, self.longest), *more)
        on = CacheOn(attn=arm.attn, controls=controls)
        if arm.against_itself:
            return replace(on, label="cache-ON, re-rolled"), CacheOn(attn=arm.attn, controls=more)
        return on, CacheOff(attn=arm.attn, controls=controls)

    def dtype(self, arm: Arithmetic) -> torch.dtype:
        """The dtype of an arm's weights."""
        if arm.dtype == BASE or (arm.dtype == HALF and self.model.dtype in HALVES):
            return self.model.dtype
        return torch.bfloat16 if arm.dtype == HALF else DTYPES[arm.dtype]

    def in_dtype(self, arm: Arithmetic) -> Model:
        """The base model, or its copy in an arm's dtype; the copy before is let go first."""
        dtype = self.dtype(arm)
        if dtype == self.model.dtype:
            return self.model
        if self.copy is None or self.copy.dtype != dtype:
            self.copy = None
            self.copy = self.model.around(cast_copy(self.model.hf, dtype))
        return self.copy

    def described(self, arm: Arithmetic) -> Rung:
        """An arm in words, before anything ran."""
        name = str(self.dtype(arm)).removeprefix("torch.")
        a, b = self.paths(arm)
        return Rung(
            name=arm.name, what=arm.what, dtype=name, stored=arm.stored or name, attn=arm.attn or self.model.attn,
            a=a.label, b=b.label,
        )  # fmt: skip

    def rung(self, arm: Arithmetic) -> Rung:
        """An arm in words, with the kernels that run on a few tokens and the weights that its cast rounds."""
        model, watch = self.in_dtype(arm), WatchSdpa()
        ids = self.prompts[0][:16]
        for path in self.paths(arm, watch):
            run = path.start(model, ids)
            try:
                run.step()
                run.step(ids[0])
            finally:
                run.close()
        return replace(
            self.described(arm), kernels=tuple(sorted(watch.ran)), weights_changed=weights_changed(self.model, model)
        )


def weights_changed(base: Model, cast: Model) -> float:
    """Share of the weights whose value another dtype rounds."""
    if cast is base:
        return 0.0
    changed = total = 0
    for one, two in zip(base.hf.parameters(), cast.hf.parameters(), strict=True):
        total += one.numel()
        if one.dtype != two.dtype:
            changed += int((two.to(torch.float64) != one.to(torch.float64)).sum())
    return changed / max(total, 1)


def _ladder(
    model: Model, base: Arithmetic, results: dict[str, tuple[Rung, Drift | None]], drift: Drift, seed: int
) -> Ladder:
    names = [name for name in ARMS if name in results]
    arrays: dict[str, np.ndarray] = {
        metric: np.stack([_values(*results[name], metric, drift.measured) for name in names]) for metric in METRICS
    }
    arrays["fed"], arrays["n_steps"] = drift.fed, drift.measured.sum(axis=1)
    found = provenance.collect(model)
    settings = {"seed": seed, "weights": model.fingerprint, "arms": names}
    return Ladder(
        model=drift.a,
        base=base.name,
        rungs=tuple(results[name][0] for name in names),
        architecture=model.architecture,
        prompts=drift.prompts,
        arrays=arrays,
        token_texts=drift.token_texts,
        notes=(*drift.notes, *_experts(model, results)),
        provenance=found | {"settings": settings, "ends": drift.provenance["ends"]},
    )


def _experts(model: Model, results: dict[str, tuple[Rung, Drift | None]]) -> list[str]:
    """The sentence on experts that run otherwise in an arm in float64, if there is such an arm."""
    note = experts_note(model.hf)
    return [note] if note is not None and any(rung.dtype == "float64" for rung, _ in results.values()) else []


def _values(rung: Rung, drift: Drift | None, metric: str, measured: np.ndarray) -> np.ndarray:
    """One metric of one arm, ``[prompt, step]``; NaN where it has none (a float32 head is no better than float32)."""
    empty = np.full(measured.shape, np.nan)
    if drift is None or (metric == "kl_float32_head" and rung.stored in ("float32", "float64")):
        return empty
    if metric == "drift":
        return drift.values(SITE)[..., -1] if drift.has(SITE) else empty
    if metric == "tie":
        return np.fmax(drift.values("logits", "tie_a"), drift.values("logits", "tie_b"))
    return np.asarray(drift.values("logits", metric), dtype=float) if drift.has("logits", metric) else empty
