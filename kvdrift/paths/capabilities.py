"""What runs can do beside stepping: small protocols, each asked for by one function, with a sentence if it is missing.

A run of somebody else's has a capability if it has its members by name, methods callable; anything else by one of these
names is its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from transformers import Cache

from kvdrift.errors import InputError
from kvdrift.paths.written import Written

if TYPE_CHECKING:
    from kvdrift.paths.path import Run, Step


class Wrapper(ABC):
    """Stands around a path or a run of somebody else's."""

    @abstractmethod
    def offers(self, kind: Any) -> Any:
        """What is of ``kind``, a protocol: this object, or the one that it stands around; None if neither is."""


def offered(thing: object, kind: Any) -> Any:
    """``thing``, or what it stands around, if that is of ``kind``, a protocol; None if not.

    Examples
    --------
    >>> import kvdrift as kd
    >>> run = kd.CacheOff().start(kd.load(kd.models.tiny("llama"), quiet=True), [1, 2])
    >>> offered(run, Stateless) is run, offered(run, Rewindable)
    (True, None)
    """
    if isinstance(thing, Wrapper):
        return thing.offers(kind)
    return thing if is_one(thing, kind) else None


def is_one(thing: object, kind: Any) -> bool:
    """Whether an object has all members of ``kind``, methods callable; no property is asked for its value."""
    methods = [name for name in vars(kind) if not name.startswith("_")]
    return all(callable(getattr(thing, name, None)) for name in methods) and all(
        getattr_static(thing, name, None) is not None or hasattr(thing, name) for name in kind.__annotations__
    )


class Stateless(Protocol):
    """Keeps nothing but tokens from one step to the next: what is written during a step ends with it."""

    stateless: bool


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


class Placed(Protocol):
    """A run that knows which positions its kernels read, or why that cannot be told."""

    def evicted(self, layer: int, n_keys: int) -> str | None:
        """Why the positions of the keys that ``layer`` reads in the latest pass cannot be told; None if they can."""
        ...


class Noting(Protocol):
    """A run that notes what it hands to its cache, where that may lose some."""

    written: Written | None


class Caching(Protocol):
    """A run that holds a cache of transformers."""

    cache: Cache


class Padded(Protocol):
    """A path, or a run, with tokens of left padding before the prompt."""

    left_padding: int


def stateless(thing: object) -> bool:
    """Whether a path's runs, or a run, keep nothing but tokens from one step to the next: it says so."""
    found: Stateless | None = offered(thing, Stateless)
    return found is not None and found.stateless is True


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


def unplaced(run: Run, n_keys: Mapping[int, int]) -> dict[int, str]:
    """Of layers that read so many keys in the latest pass, those where these have no known position → why."""
    found: Placed | None = offered(run, Placed)
    reasons = {} if found is None else {layer: found.evicted(layer, n) for layer, n in n_keys.items()}
    return {layer: why for layer, why in reasons.items() if isinstance(why, str)}


def written(run: Run) -> Written | None:
    """What the run handed to its cache, where that may lose some; None if it loses nothing, or does not say."""
    found: Noting | None = offered(run, Noting)
    return found.written if found is not None and isinstance(found.written, Written) else None


def cache_of(run: Run) -> Cache | None:
    """The cache of transformers that a run holds, or None."""
    found: Caching | None = offered(run, Caching)
    return found.cache if found is not None and isinstance(found.cache, Cache) else None


def left_padding(thing: object) -> int:
    """Tokens of left padding that stand before the prompt of a path's runs, or of a run."""
    found: Padded | None = offered(thing, Padded)
    return 0 if found is None else int(found.left_padding)


def _lacks(run: Run, members: str, use: str) -> InputError:
    return InputError(f"{run.path.label}: its runs have no {members} for {use}: add it, or give a kd.CacheOn().")
