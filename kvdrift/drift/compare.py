"""`compare`: run two paths over prompts in lockstep and measure the drift between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path as FilePath
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvdrift import provenance
from kvdrift.controls.precision import cast_copy
from kvdrift.drift.assemble import concatenate, one_prompt
from kvdrift.drift.lockstep import Lockstep, Plan
from kvdrift.drift.result import Drift, PathInfo, Prompt
from kvdrift.errors import FileError, InputError, SiteError
from kvdrift.files import write_atomically
from kvdrift.models.load import DTYPES, load
from kvdrift.models.model import Model, as_prompts
from kvdrift.paths.cache_off import CacheOff
from kvdrift.paths.cache_on import CacheOn
from kvdrift.paths.path import Path
from kvdrift.paths.sampling import greedy
from kvdrift.tracing.sites import ALL_SITES, GLOBAL_SITES, LOGITS, PATTERN, parse_sites

Tokens = Literal["a", "b"] | Sequence[int] | Sequence[Sequence[int]] | Tensor
LOCAL_SITES = ("attn_out", "mlp_out", "resid_post")
KEPT_STEPS = 8
"""At most about so many steps keep K/V drift in full position resolution, unless ``kv_every`` says otherwise."""


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
    control: str | None = None,
    self_drift: bool = False,
    chat: bool = False,
    seed: int = 0,
    progress: bool = True,
    resume: str | FilePath | None = None,
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
    control
        Repeat on the same tokens with the same base weights cast to this dtype, in a named copy.
    self_drift
        Also compare each path's K/V with its own previous step.
    chat
        Put text prompts into the chat template.
    seed
        First seed of the re-rolls.
    progress
        Show a progress bar.
    resume
        A folder where finished prompts are kept; the same call continues from there.

    Returns
    -------
    Drift

    Raises
    ------
    InputError, SiteError, NonFiniteError, NotFaithfulError, FileError

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

    job = _Job.prepare(
        model,
        a or CacheOn(),
        b or CacheOff(),
        sites=sites,
        timing=(every, kv_every or every * -(-max(lengths) // (every * KEPT_STEPS))),
        seeds=tuple(range(seed, seed + floor)),
        local=local,
        self_drift=self_drift,
        tokens="given" if forced is not None else str(tokens),
    )
    if control is not None:
        job = replace(job, control=job.in_dtype(control))
    store = _Store(resume, job.settings() | {"prompts": encoded, "tokens_given": forced, "lengths": lengths})
    passes = 1 if control is None else 2
    drifts = []
    with job, tqdm(total=passes * sum(lengths), desc="compare", unit="step", disable=not progress) as bar:
        for number, (ids, length) in enumerate(zip(encoded, lengths, strict=True)):
            drift = store.load(number)
            if drift is None:
                prompt = model.label(given[number], ids)
                drift = job.run(prompt, None if forced is None else forced[number], length, bar.update)
                store.save(number, drift)
            drifts.append(drift)
            bar.n = passes * sum(lengths[: number + 1])  # a prompt may end early, or have been kept from before
            bar.refresh()
    return concatenate(drifts)


def _check_numbers(**numbers: int | None) -> None:
    for name, number in numbers.items():
        least = 0 if name == "floor" else 1
        if number is not None and number < least:
            raise InputError(f"{name}={number}: give at least {least}.")


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


@dataclass(frozen=True)
class _Job:
    """A comparison, ready to be run on one prompt after another."""

    model: Model
    a: Path
    b: Path
    plan: Plan
    tokens: str
    lockstep: Lockstep
    notes: tuple[str, ...]
    control: _Job | None = None

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
    ) -> _Job:
        """Find out what both models give and decide what is measured.

        Raises
        ------
        InputError
            If the two paths' models cannot be compared layer by layer.
        SiteError
            If a site was asked for that one of them lacks.
        """
        one, two = a.model or model, b.model or model
        notes = [note for m in dict.fromkeys((one, two)) for note in m.coverage.notes]
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
            notes.append(
                f"each {every}th step was measured: flips between them are not seen, so a first one may be late"
            )
        alike = _same_heads(one, two)
        if not alike:
            shared |= dict.fromkeys(("q", "k", "v", "z"), ())
            notes.append("q, k, v and z were not compared: the two models have other heads")
        if sites is None:
            chosen = tuple(site for site, layers in shared.items() if layers)
        else:
            wanted = parse_sites(sites)
            if PATTERN in wanted:
                raise SiteError("Patterns are not compared; use kd.record(..., sites=['pattern']) on each path.")
            chosen = tuple(site for site in wanted if site != LOGITS)
            for site in chosen:
                one.coverage.resolve(site, None)
                two.coverage.resolve(site, None)
        local_layers = shared["k"] if local else ()
        if local and not (local_layers and one.dtype == two.dtype):
            why = "the two paths run in different dtypes" if local_layers else "past K/V cannot be written"
            notes.append(f"local drift was not measured: {why}")
            local_layers = ()
        local_sites = tuple(s for s in LOCAL_SITES if set(local_layers) <= set(shared[s]))
        plan = Plan(chosen, *timing, seeds, local_sites, local_layers, self_drift)
        return cls(model, a, b, plan, tokens, Lockstep(a, b, model, plan), tuple(notes))

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.lockstep.close()
        if self.control is not None:
            self.control.lockstep.close()

    def in_dtype(self, name: str) -> _Job:
        """The same job on copies of the models cast to another dtype."""
        if name not in DTYPES:
            raise InputError(f"control={name!r} is no dtype; choose {', '.join(DTYPES)}.")
        if DTYPES[name] == self.model.dtype:
            raise InputError(f"control={name!r} is the model's own dtype; choose another one.")

        def cast(model: Model) -> Model:
            return Model(cast_copy(model.hf, DTYPES[name]), model.tokenizer, model.name)

        def with_copy(path: Path) -> Path:
            return path if path.model is None else replace(path, model=cast(path.model))  # type: ignore[type-var]

        model, a, b = cast(self.model), with_copy(self.a), with_copy(self.b)
        return replace(self, model=model, a=a, b=b, lockstep=Lockstep(a, b, model, self.plan))

    def run(self, prompt: Prompt, forced: list[int] | None, n_steps: int, tick: Callable[[], object]) -> Drift:
        """The drift over one prompt, with its control's on the same tokens."""

        def choose(logits_a: Tensor, logits_b: Tensor | None, step: int) -> int:
            if forced is not None:
                return forced[step]
            logits = logits_a if self.tokens == "a" else logits_b
            assert logits is not None, "tokens='b' runs path b at every step"
            return greedy(logits, step)

        stop = self.model.eos_ids if forced is None else frozenset()
        arrays = one_prompt(self.lockstep.walk(prompt.ids, choose, n_steps, stop, tick))
        one, two = self.a.model or self.model, self.b.model or self.model
        for site in self.plan.sites:
            if site not in GLOBAL_SITES:
                arrays[f"layers/{site}"] = _numbers(one, two, site)
        arrays["layers/local"] = np.array(self.plan.local_layers, dtype=np.int64)
        fed = [int(token) for token in arrays["fed"][0]]
        seen = {*prompt.ids, *fed, *arrays["top1_a"].flatten().tolist(), *arrays["top1_b"].flatten().tolist()}
        control = None if self.control is None else self.control.run(prompt, fed, len(fed), tick)
        return Drift(
            a=_info(self.a, one),
            b=_info(self.b, two),
            architecture=one.architecture,
            prompts=(prompt,),
            arrays=arrays,
            token_texts={int(token): self.model.token_text(int(token)) for token in sorted(seen)},
            control=control,
            provenance=provenance.collect(one, two) | {"dtypes": self.lockstep.dtypes, "settings": self.settings()},
            notes=self.notes,
        )

    def settings(self) -> dict[str, Any]:
        """Everything that decides the numbers, beside the prompts."""
        return {
            "a": asdict(_info(self.a, self.a.model or self.model)) | {"path": _describe(self.a)},
            "b": asdict(_info(self.b, self.b.model or self.model)) | {"path": _describe(self.b)},
            "weights": [m.fingerprint for m in (self.a.model or self.model, self.b.model or self.model)],
            "threads": torch.get_num_threads(),
            "plan": asdict(self.plan),
            "tokens": self.tokens,
            "control": None if self.control is None else self.control.model.dtype_name,
        }


def _same_heads(one: Model, two: Model) -> bool:
    heads = [[(x.n_kv_heads, x.head_dim) for x in m.architecture.layers] for m in (one, two)]
    return heads[0] == heads[1] and one.architecture.n_heads == two.architecture.n_heads


def _numbers(one: Model, two: Model, site: str) -> np.ndarray:
    return np.array([x for x in one.coverage.layers(site) if x in two.coverage.layers(site)], dtype=np.int64)


def _info(path: Path, model: Model) -> PathInfo:
    return PathInfo(
        label=path.label,
        model=model.name,
        dtype=model.dtype_name,
        attn=path.attn or model.attn,
        device=str(model.device),
        controls=tuple(control.label for control in path.controls),
    )


def _describe(path: Path) -> dict[str, Any]:
    """A path's own settings (a chunk size, …), by name; its model and controls are described elsewhere."""
    values = {
        name: value
        for name, value in getattr(path, "__dict__", {}).items()
        if isinstance(value, (int, str)) or value is None
    }
    return {"type": type(path).__name__} | values


class _Store:
    """Finished prompts, one file each, in a folder that remembers what they were made with.

    Parameters
    ----------
    folder
        Where they are kept, or None to keep nothing.
    settings
        What decides the numbers. A folder made with other settings is refused.
    """

    def __init__(self, folder: str | FilePath | None, settings: dict[str, Any]) -> None:
        self.folder = None if folder is None else FilePath(folder)
        if self.folder is None:
            return
        settings = json.loads(json.dumps(settings))
        record = self.folder / "settings.json"
        if record.is_file():
            try:
                before = dict(json.loads(record.read_text()))
            except (OSError, ValueError, TypeError) as error:
                raise FileError(f"{record} cannot be read ({error}); empty {self.folder} or choose another.") from error
            other = [name for name in settings if settings[name] != before.get(name)]
            if other:
                raise FileError(
                    f"{self.folder} holds prompts of another comparison (it differs in {', '.join(other)}); "
                    "choose another folder or empty this one."
                )
        write_atomically(record, lambda path: path.write_text(json.dumps(settings)))

    def load(self, number: int) -> Drift | None:
        """The drift of a prompt that was finished before."""
        if self.folder is None or not self._file(number).is_file():
            return None
        return Drift.load(self._file(number))

    def save(self, number: int, drift: Drift) -> None:
        """Keep a finished prompt."""
        if self.folder is not None:
            drift.save(self._file(number))

    def _file(self, number: int) -> FilePath:
        assert self.folder is not None, "nothing is kept without a folder"
        return self.folder / f"prompt-{number:05d}.safetensors"
