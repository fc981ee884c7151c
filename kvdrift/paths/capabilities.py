"""What runs, and paths, can do beside stepping: each asked for by one function, with a sentence if it is missing.

One of somebody else's has a capability if it has the members by name, methods callable. What only paths can do is in
`kvdrift.paths.path_capabilities`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from transformers import Cache

from kvdrift.errors import InputError
from kvdrift.paths.path import Run, Step
from kvdrift.paths.written import Written


class Wrapper:
    """Stands around a path or a run of somebody else's.

    Attributes
    ----------
    beneath
        What it stands around.
    """

    beneath: Any


def told(thing: object, name: str) -> Any:
    """An attribute of a path or a run, or of the one that it stands around; None if it has none of that name."""
    return getattr(thing.beneath if isinstance(thing, Wrapper) else thing, name, None)


def offered(thing: object, kind: Any) -> Any:
    """A path or a run as one of ``kind``, a protocol below; None if it lacks one of its methods.

    Of a wrapper, what it stands around decides, which is given back unless the wrapper has the methods, too.

    Examples
    --------
    >>> import kvdrift as kd
    >>> run = kd.CacheOn().start(kd.load(kd.models.tiny("llama"), quiet=True), [1, 2])
    >>> offered(run, Rewindable) is run, offered(kd.CacheOff(), Rewindable)
    (True, None)
    """
    if isinstance(thing, Wrapper):
        found = offered(thing.beneath, kind)
        return thing if found is not None and _has(thing, kind) else found
    return thing if _has(thing, kind) else None


def _has(thing: object, kind: Any) -> bool:
    return all(callable(getattr(thing, name, None)) for name in vars(kind) if not name.startswith("_"))


class Overwritable(Protocol):
    """A run whose stored keys and values can be changed, as a patch with ``write="cache"`` does."""

    def held(self, layer: int) -> range:
        """Absolute positions of the entries that are stored in ``layer`` for the next pass to read."""
        ...

    def overwrite(self, layer: int, name: str, heads: Any, positions: Sequence[int], value: Tensor) -> None:
        """Put ``value [1, kv_head, position, feature]`` into ``name`` (``"k"`` or ``"v"``) at held positions."""
        ...


class Extendable(Protocol):
    """A run that can consume several tokens in one pass, after the one over the prompt."""

    def extend(self, tokens: Sequence[int]) -> Step:
        """Consume the tokens and predict the next."""
        ...


class Rewindable(Protocol):
    """A run that can forget its latest tokens, as drafted ones are that were rejected."""

    def rewind(self, n_tokens: int) -> None:
        """Forget the last ``n_tokens`` consumed after the prompt."""
        ...

    def keep_past(self) -> None:
        """From the start on, keep what `rewind` will need."""
        ...


def stateless(thing: object) -> bool:
    """Whether a path's runs, or a run, keep nothing but tokens from one step to the next: it says so."""
    return told(thing, "stateless") is True


def left_padding(thing: object) -> int:
    """Tokens of left padding that stand before the prompt of a path's runs, or of a run."""
    return int(told(thing, "left_padding") or 0)


def written(run: Run) -> Written | None:
    """What the run handed to its cache, where that may lose some; None if it loses nothing, or does not say."""
    found = told(run, "written")
    return found if isinstance(found, Written) else None


def cache_of(run: Run) -> Cache | None:
    """The cache of transformers that a run holds, or None."""
    found = told(run, "cache")
    return found if isinstance(found, Cache) else None


def unplaced(run: Run, n_keys: Mapping[int, int]) -> dict[int, str]:
    """Of layers that read so many keys in the latest pass, those whose positions cannot be told → why.

    A run whose cache evicts says it by ``evicted(layer, n_keys)``: a sentence, or None where they can.
    """
    evicted = told(run, "evicted")
    reasons = {layer: evicted(layer, n) for layer, n in n_keys.items()} if callable(evicted) else {}
    return {layer: why for layer, why in reasons.items() if isinstance(why, str)}


def overwritable(run: Run) -> Overwritable | None:
    """The run as one whose stored keys and values can be changed; None if they cannot."""
    found: Overwritable | None = offered(run, Overwritable)
    return found


def extend(run: Run, tokens: Sequence[int]) -> Step:
    """Consume several tokens in one pass.

    Raises
    ------
    InputError
        If the run cannot.
    """
    found: Extendable | None = offered(run, Extendable)
    if found is None:
        raise _lacks(run, "extend(tokens)", "several tokens in one pass, which continued chats and drafted tokens need")
    return found.extend(tokens)


def rewindable(run: Run) -> Rewindable:
    """The run as one that can forget its latest tokens.

    Raises
    ------
    InputError
        If it cannot.
    """
    found: Rewindable | None = offered(run, Rewindable)
    if found is None:
        raise _lacks(run, "rewind(n_tokens) and keep_past()", "tokens taken back, which rejected drafts need")
    return found


def _lacks(run: Run, members: str, use: str) -> InputError:
    return InputError(f"{run.path.label}: its runs have no {members} for {use}: add it, or give a kd.CacheOn().")
