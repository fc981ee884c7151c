"""`compare`: run two paths over prompts in lockstep and measure the drift between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path as FilePath
from typing import Any, Literal

from torch import Tensor
from tqdm.auto import tqdm

from kvdrift.drift.job import Job
from kvdrift.drift.result import Drift
from kvdrift.drift.resume import FinishedPrompts
from kvdrift.drift.stacking import concatenate
from kvdrift.errors import InputError
from kvdrift.fingerprint import one_job
from kvdrift.models.ending import template_notes
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.models.prompts import as_prompts
from kvdrift.paths.cache_off import CacheOff
from kvdrift.paths.cache_on import CacheOn
from kvdrift.paths.own import check_path
from kvdrift.paths.path import Path
from kvdrift.paths.path_capabilities import check_room, path_notes
from kvdrift.renamed import renamed
from kvdrift.runs.comparable import kept_with

Tokens = Literal["a", "b"] | Sequence[int] | Sequence[Sequence[int]] | Tensor
KEPT_STEPS = 8
"""At most about so many steps keep K/V drift in full position resolution, unless ``kv_every`` says otherwise."""


@renamed(resume="store", control="also_in")
@one_job()
def compare(
    model: Any,
    prompts: Any,
    *,
    max_new_tokens: int = 32,
    a: Path | None = None,
    b: Path | None = None,
    tokens: Tokens = "a",
    sites: Iterable[str] | None = None,
    every: int = 1,
    kv_every: int | None = None,
    floor: int = 3,
    local: bool = True,
    also_in: str | None = None,
    self_drift: bool = False,
    chat: bool = False,
    ignore_eos: bool = False,
    seed: int = 0,
    progress: bool = True,
    store: str | FilePath | None = None,
) -> Drift:
    """Measure the drift between two paths on the same tokens.

    The paths advance in lockstep; metrics are taken on the device while both tensors are alive, so memory does
    not grow with the number of steps except for the numbers themselves.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes.
    prompts
        Text, token ids or a tensor ``[n]`` / ``[1, n]`` (one prompt), or a list of those.
    max_new_tokens
        Steps per prompt; a prompt ends earlier at an end-of-sequence token.
    a, b
        The path under test and the reference; by default ``CacheOn()`` and ``CacheOff()``.
    tokens
        Who chooses the tokens that both consume: ``"a"`` or ``"b"`` (greedily), or given ids (one list per
        prompt), which are followed to the end.
    sites
        Sites to compare; all that both models give by default. Logits always are.
    every
        Measure each so many steps only.
    kv_every
        Keep K/V drift at every position at each so many steps; by default about eight steps are kept.
    floor
        Re-rolls of path a for the rounding floors; 0 for none.
    local
        Also measure local drift: what each layer makes by itself on path b's inputs.
    also_in
        Repeat on the same tokens with the same base weights cast to this dtype, in a named copy.
    self_drift
        Also compare each path's K/V with its own previous step.
    chat
        Put text prompts into the chat template.
    ignore_eos
        Go on past an end-of-sequence token.
    seed
        First seed of the re-rolls.
    progress
        Show a progress bar.
    store
        A folder that keeps finished prompts: the same call goes on from there, whatever stopped it.

    Raises
    ------
    InputError, SiteError
        If an argument does not fit the model, the paths or the prompts; a site is not offered by the model.
    NonFiniteError
        If a run leaves the finite numbers.
    NotFaithfulError
        If a site does not fire, or does not hold what the model computes, on a probe pass.
    FileError
        If ``store`` cannot be used, or holds another comparison; the sentence names what differs.

    Examples
    --------
    >>> import kvdrift as kd
    >>> drift = kd.compare(kd.models.tiny("llama"), [1, 2, 3], max_new_tokens=4, floor=1, progress=False)
    >>> drift.values("resid_post").shape
    (1, 4, 4)
    """
    model = load(model, quiet=not progress)
    given, _ = as_prompts(prompts)
    encoded = [model.encode(prompt, chat) for prompt in given]
    forced = _forced(model, tokens, encoded)
    _check_numbers(max_new_tokens=max_new_tokens, every=every, kv_every=kv_every, floor=floor)
    if every > 1 and tokens == "b":
        raise InputError("tokens='b' needs every step of path b, so it cannot be combined with every > 1.")
    if every > 1 and self_drift:
        raise InputError("self_drift compares neighbouring steps, so it cannot be combined with every > 1.")
    lengths = [max_new_tokens] * len(encoded) if forced is None else [len(ids) for ids in forced]
    for ids, length in zip(encoded, lengths, strict=True):
        model.check_length(len(ids), length)

    a = CacheOn() if a is None else check_path(a, "a")
    b = CacheOff() if b is None else check_path(b, "b")
    longest = max(len(ids) + length for ids, length in zip(encoded, lengths, strict=True))
    for path in (a, b):
        check_room(path, model, longest - 1)
    job = Job.prepare(
        model,
        a,
        b,
        sites=sites,
        timing=(every, kv_every or every * -(-max(lengths) // (every * KEPT_STEPS))),
        seeds=tuple(range(seed, seed + floor)),
        local=local,
        self_drift=self_drift,
        tokens="given" if forced is not None else str(tokens),
        ignore_eos=ignore_eos,
        notes=(*template_notes(model, given, chat), *path_notes(model, (a, b), longest)),
    )
    if also_in is not None:
        job = replace(job, control=job.in_dtype(also_in, encoded[0]))
    settings = job.settings | {"prompts": encoded, "tokens_given": forced, "lengths": lengths}
    if store is not None:
        settings |= kept_with(*job.models)
    passes, also = (1, "") if also_in is None else (2, f", then in {str(also_in).removeprefix('torch.')}")
    drifts = []
    with (
        job,
        FinishedPrompts(store, settings) as kept,
        tqdm(total=passes * sum(lengths), desc="compare", unit="step", disable=not progress) as bar,
    ):
        for number, (ids, length) in enumerate(zip(encoded, lengths, strict=True)):
            bar.set_description(f"compare, prompt {number + 1} of {len(encoded)}{also}")
            drift = kept.load(number)
            if drift is None:
                prompt = model.label(given[number], ids)
                drift = job.run(prompt, None if forced is None else forced[number], length, bar.update)
                kept.save(number, drift)
            drifts.append(drift)
            bar.n = passes * sum(lengths[: number + 1])  # a prompt may end early, or have been kept from before
            bar.refresh()
    return concatenate(drifts)


def _check_numbers(**numbers: int | None) -> None:
    for name, number in numbers.items():
        least = 0 if name == "floor" else 1
        if number is not None and (not isinstance(number, Integral) or number < least):
            raise InputError(f"{name}={number}: give a whole number of at least {least}.")


def _forced(model: Model, tokens: Tokens, prompts: list[list[int]]) -> list[list[int]] | None:
    """The tokens to follow, one list per prompt, or None where a path chooses."""
    if isinstance(tokens, str):
        if tokens not in ("a", "b"):
            raise InputError(f"tokens={tokens!r}: choose 'a', 'b' or give token ids to follow.")
        return None
    lists, _ = as_prompts(tokens)
    if any(isinstance(ids, str) for ids in lists):
        raise InputError("tokens: give token ids, not text.")
    if len(lists) != len(prompts):
        raise InputError(f"tokens: give one list of token ids per prompt ({len(prompts)}), not {len(lists)}.")
    return [model.encode(ids) for ids in lists]
