"""What `patch`, `sweep` and `factorial` have in common: reading their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

import torch

from kvdrift import provenance
from kvdrift.errors import InputError
from kvdrift.models.ending import stops, template_notes
from kvdrift.models.labels import PathInfo, Prompt
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.models.prompts import as_prompts
from kvdrift.paths.cache_off import CacheOff
from kvdrift.paths.cache_on import CacheOn
from kvdrift.paths.capabilities import stateless
from kvdrift.paths.own import check_path
from kvdrift.paths.path import Path, path_info, path_settings
from kvdrift.paths.path_capabilities import check_room, path_notes, refuse_rows
from kvdrift.settings import settings_of
from kvdrift.tracing.trace import Trace


@dataclass(frozen=True)
class Setup:
    """Prompts, tokens and paths, read and checked.

    Attributes
    ----------
    model
        The model given to the verb.
    prompts
        One per run.
    follow
        The tokens that all consume, one list per prompt; None where the donor chooses.
    lengths
        Steps per prompt at most.
    donor, recipient
        The paths. With recorded donors, ``donor`` stands for the path that a float32 donor would take.
    traces
        Recorded donors, one per prompt, or None.
    ignore_eos
        Whether a text goes on past its end.
    notes
        Sentences a reader should see, whatever is patched.
    """

    model: Model
    prompts: tuple[Prompt, ...]
    follow: tuple[list[int], ...] | None
    lengths: tuple[int, ...]
    donor: Path
    recipient: Path
    traces: tuple[Trace, ...] | None
    ignore_eos: bool
    notes: tuple[str, ...]

    @property
    def stop(self) -> frozenset[int]:
        """Tokens that end a run: none where the tokens were given."""
        return stops(self.model, self.ignore_eos) if self.follow is None else frozenset()

    def trace(self, number: int) -> Trace | None:
        """The recorded donor of a prompt, or None for a live one."""
        return None if self.traces is None else self.traces[number]

    @property
    def models(self) -> tuple[Model, Model]:
        """What the recipient and the donor run."""
        return self.recipient.model or self.model, self.donor.model or self.model

    @property
    def donor_info(self) -> PathInfo:
        """How the donor was executed."""
        return path_info(self.donor, self.models[1]) if self.traces is None else self.traces[0].path

    @property
    def recipient_info(self) -> PathInfo:
        """How the recipient was executed."""
        return path_info(self.recipient, self.models[0])

    def provenance(self, **settings: Any) -> dict[str, Any]:
        """Versions, device, threads and settings."""
        return provenance.collect(*self.models) | {"settings": self.settings | settings, "ends": sorted(self.stop)}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the numbers, beside the patches."""
        models = dict.fromkeys(self.models)
        return {
            "recipient": path_settings(self.recipient, self.model),
            "donor": path_settings(self.donor, self.model) if self.traces is None else settings_of(self.traces),
            "weights": [model.fingerprint for model in models],
            "driver": [model.backend.driver for model in models],
            "prompts": [prompt.ids for prompt in self.prompts],
            "tokens": self.follow,
            "ignore_eos": self.ignore_eos,
            "lengths": self.lengths,
            "threads": torch.get_num_threads(),
            "software": provenance.collect()["software"],
        }

    def token_texts(self, *ids: int) -> dict[int, str]:
        """The text of every token id among the prompts and ``ids``."""
        seen = {int(token) for token in ids} | {token for prompt in self.prompts for token in prompt.ids}
        return {token: self.model.token_text(token) for token in sorted(seen) if token >= 0}


def read(
    model: Any,
    prompts: Any,
    *,
    donor: Path | Trace | Sequence[Trace] | None,
    recipient: Path | None,
    max_new_tokens: int,
    tokens: Any,
    chat: bool,
    ignore_eos: bool,
    progress: bool,
) -> Setup:
    """Read the arguments that all verbs of patching share.

    Raises
    ------
    InputError
        If one of them cannot be used.
    """
    model = load(model, quiet=not progress)
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 2:
        raise InputError(
            f"max_new_tokens={max_new_tokens}: give 2 or more; a patch is written at step 1 at the earliest."
        )
    given, _ = as_prompts(prompts)
    encoded = [model.encode(prompt, chat) for prompt in given]
    labelled = tuple(model.label(prompt, ids) for prompt, ids in zip(given, encoded, strict=True))
    recipient = CacheOn() if recipient is None else check_path(recipient, "recipient")
    refuse_rows(recipient, "recipient")
    traces = _traces(donor, len(labelled))
    path: Path
    if traces is not None:
        path = _stand_in(traces[0], recipient)
    elif donor is None:
        path = CacheOn() if stateless(recipient) else CacheOff()
    else:
        path = check_path(donor, "donor")
    given_by, taken_by = (each.model or model for each in (path, recipient))
    if given_by.vocab_size != taken_by.vocab_size:
        raise InputError(
            f"The donor's model has {given_by.vocab_size} tokens, the recipient's {taken_by.vocab_size}; use models of "
            "one vocabulary."
        )
    follow = _follow(model, tokens, traces, len(labelled))
    lengths = [max_new_tokens] * len(labelled)
    if traces is not None:
        lengths = [min(max_new_tokens, len(trace.fed)) for trace in traces]
    elif follow is not None:
        lengths = [len(ids) for ids in follow]
    for ids, length in zip(encoded, lengths, strict=True):
        model.check_length(len(ids), length)
    ran = (recipient,) if traces is not None else (recipient, path)
    longest = max(len(ids) + length for ids, length in zip(encoded, lengths, strict=True))
    for each in ran:
        check_room(each, model, longest - 1)
    notes = (*template_notes(model, given, chat), *path_notes(model, ran, longest))
    return Setup(model, labelled, follow, tuple(lengths), path, recipient, traces, ignore_eos, notes)


def _traces(donor: Any, n: int) -> tuple[Trace, ...] | None:
    if isinstance(donor, Trace):
        donor = [donor]
    if not isinstance(donor, (list, tuple)):
        return None
    if len(donor) != n or not all(isinstance(trace, Trace) for trace in donor):
        raise InputError(f"donor: give one kd.Trace per prompt ({n}), not {len(donor)} of something else or too many.")
    return tuple(donor)


def _stand_in(trace: Trace, recipient: Path) -> Path:
    """The path that a float32 donor takes beside a recorded one: of the same kind, where its settings tell."""
    ran: Any = trace.provenance.get("settings", {}).get("path", {}).get("path", {})
    for kind in (CacheOn, CacheOff):
        if ran.get("type") == settings_of(kind())["type"]:
            return kind(model=recipient.model, attn=trace.path.attn)
    return recipient


def _follow(model: Model, tokens: Any, traces: tuple[Trace, ...] | None, n: int) -> tuple[list[int], ...] | None:
    if traces is not None:
        if tokens is not None:
            raise InputError("tokens: a recorded donor brings its own; leave them out.")
        return tuple(list(trace.fed) for trace in traces)
    if tokens is None:
        return None
    lists, _ = as_prompts(tokens)
    if len(lists) != n or any(isinstance(ids, str) for ids in lists):
        raise InputError(f"tokens: give one list of token ids per prompt ({n}), or leave them to the donor.")
    return tuple(model.encode(ids) for ids in lists)
