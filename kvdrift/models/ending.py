"""Where texts end: the tokens that end one, and what is said where a text ended before anything was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvdrift.models.model import Model
from kvdrift.words.numbers import plural

UNUSED_TEMPLATE = (
    "the model has a chat template and the text prompts went in without it; chat=True (at a terminal --chat) uses it"
)
"""The note of a result whose prompts were put to an instruct model as they are."""
_GO_ON = "go on past the end (ignore_eos=True, --ignore-eos)"
_FOLLOW = " or give the tokens to follow (tokens=…)"
_CHAT = "put the prompt into the model's chat template (chat=True, --chat), "


def stops(model: Model, ignore_eos: bool) -> frozenset[int]:
    """The tokens that end a text which the model writes itself: none with ``ignore_eos``."""
    return frozenset() if ignore_eos else model.eos_ids


def template_notes(model: Model, prompts: Sequence[Any], chat: bool) -> tuple[str, ...]:
    """`UNUSED_TEMPLATE`, where it holds.

    Examples
    --------
    >>> import kvdrift as kd
    >>> template_notes(kd.load(kd.models.tiny("llama"), quiet=True), [[1, 2, 3]], chat=False)
    ()
    """
    written = any(isinstance(prompt, str) for prompt in prompts)
    return (UNUSED_TEMPLATE,) if written and not chat and getattr(model.tokenizer, "chat_template", None) else ()


def tokens_written(fed: Sequence[int], stop: frozenset[int]) -> int | None:
    """How many tokens a text has before the token that ended it; None if none did.

    Examples
    --------
    >>> tokens_written([5, 6, 2], frozenset({2})), tokens_written([2], frozenset({2})), tokens_written([5], frozenset())
    (2, 0, None)
    """
    return len(fed) - 1 if len(fed) and fed[-1] in stop else None


class Fed(Protocol):
    """What a result says of the texts that its paths were fed."""

    @property
    def fed(self) -> np.ndarray:
        """The token fed after each step, ``[prompt, step]``."""

    @property
    def n_steps(self) -> np.ndarray:
        """How many steps each prompt has, ``[prompt]``."""

    @property
    def provenance(self) -> dict[str, Any]:
        """Among others ``ends``, the tokens that end a text."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know."""


def ended(result: Fed) -> list[int | None]:
    """`tokens_written` of every prompt of a result, from the tokens that ended a text when it was made (results of
    older versions know none)."""
    stop = frozenset(result.provenance.get("ends") or ())
    return [tokens_written(row[:n].tolist(), stop) for row, n in zip(result.fed, result.n_steps, strict=True)]


def after(counts: Sequence[int]) -> str:
    """``"after 0 tokens"``, ``"after 0 to 3 tokens"``.

    Examples
    --------
    >>> after([0, 3]), after([1])
    ('after 0 to 3 tokens', 'after 1 token')
    """
    least, most = min(counts), max(counts)
    return f"after {least if least == most else f'{least} to {most}'} {plural(most, 'token')}"


def way_on(notes: Sequence[str], follow: bool = True) -> str:
    """What to do about a text that ended too early, as a sentence; the chat template only where it was left out.

    Parameters
    ----------
    notes
        Those of the result.
    follow
        Whether the verb takes tokens to follow.
    """
    said = f"{_CHAT if UNUSED_TEMPLATE in notes else ''}{_GO_ON}{_FOLLOW if follow else ''}."
    return said[0].upper() + said[1:]


def nothing_followed(result: Fed, what: str = "no step after step 0, the prefill, was measured") -> str:
    """Why a result has no step that counts, and the way on: the texts ended by themselves, or too few tokens were asked
    for.

    Parameters
    ----------
    result
        A result of any verb.
    what
        What is missing, as a clause.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> result = SimpleNamespace(fed=np.array([[2]]), n_steps=np.array([1]), provenance={"ends": [2]}, notes=())
    >>> nothing_followed(result).partition(".")[0]
    'The model ended its text after 0 tokens: no step after step 0, the prefill, was measured'
    >>> result.provenance = {}
    >>> nothing_followed(result)
    'No step after step 0, the prefill, was measured: ask for more new tokens.'
    """
    counts = ended(result)
    early = [count for count in counts if count is not None]
    if not early:
        return f"{what[0].upper()}{what[1:]}: ask for more new tokens."
    where = "" if len(early) == len(counts) else f" in {len(early)} of {len(counts)} prompts"
    return f"The model ended its text {after(early)}{where}: {what}. {way_on(result.notes)}"


def other_notes(notes: Sequence[str], followed: bool | np.bool_) -> list[str]:
    """The notes of a result, without the one that `way_on` has said already where no step followed."""
    return [note for note in notes if followed or note != UNUSED_TEMPLATE]
