"""What paths can do beside starting a run, and what they say of it: each asked for by one function.

A path of somebody else's may have any of it, by the name of the method or attribute (see `kvdrift.paths.capabilities`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from transformers import Cache, QuantizedCache

from kvdrift.backends.cache_state import refuse_full
from kvdrift.errors import InputError
from kvdrift.models.model import Model
from kvdrift.paths.capabilities import left_padding, told
from kvdrift.paths.loss import Declared, Dropped, Rounded, as_losses
from kvdrift.paths.own import check_path
from kvdrift.paths.path import Path


def prefill_chunk(path: Path) -> int | Sequence[int] | None:
    """In chunks of how many tokens the path consumes a prompt; None for all at once."""
    return told(path, "prefill_chunk")


def manner(path: Path) -> str | None:
    """The manner in which the path calls the model; None if it cannot be varied: its passes are no plain calls."""
    call = told(path, "call")
    return call if isinstance(call, str) and path.varied(call=call) is not None else None


def begins_filled(path: Path) -> bool:
    """Whether the path's runs begin with tokens in their cache."""
    return bool(told(path, "begins_filled"))


def begins_saved(path: Path) -> bool:
    """Whether these tokens come from a cache that was filled before, rather than being computed by each run."""
    return bool(told(path, "begins_saved"))


def rows_per_pass(*paths: Path) -> int:
    """How many rows of one pass the runs of these paths may serve as steps of their own; 1 if they say nothing."""
    return max((told(path, "rows_per_pass") or 1 for path in paths), default=1)


def refuse_rows(path: Path, name: str) -> None:
    """Refuse a path whose runs serve several rows of one pass, where each step is to be written into alone.

    Raises
    ------
    InputError
        If it is one.
    """
    if rows_per_pass(path) > 1:
        raise InputError(
            f"{name}={path.label}: its runs serve several rows of one pass, and what is written at one step would "
            "change them all; give a path with a pass for each step, such as kd.CacheOn()."
        )


def holds(path: Path, ids: Sequence[int] = ()) -> tuple[int, ...]:
    """The tokens that a path's cache holds when a run over ``ids`` begins."""
    own = told(path, "holds")
    return own(ids) if callable(own) else ()


def anew(path: Path, tokens: Sequence[int]) -> Path:
    """The path for another model or dtype: what its runs begin with, ``tokens``, is computed by each."""
    own = told(path, "anew")
    return check_path(own(tokens), path.label) if callable(own) and tokens else path


def has_cache(path: Path) -> bool:
    """Whether the path's runs fill a cache of transformers: it makes one by ``new_cache(model)``."""
    return callable(told(path, "new_cache"))


def own_cache(path: Path) -> Callable[[], Cache] | None:
    """What makes a cache of the path's own; None if it runs with the model's, or without one of transformers."""
    return told(path, "cache") if has_cache(path) else None


def check_room(path: Path, model: Model, n_tokens: int) -> None:
    """Refuse a run over ``n_tokens`` that the cache of a path could not hold, before it begins.

    Raises
    ------
    InputError
        If the cache is too short, cannot be made, or offloads to the device on which the model is.
    """
    if own_cache(path) is not None:
        refuse_full(told(path, "new_cache")(path.model or model), n_tokens + left_padding(path))


def drafts(path: Path) -> bool:
    """Whether the path's runs can consume several tokens in a pass after the prompt."""
    return callable(told(path, "rewinds"))


def rewinds(path: Path, model: Model) -> bool:
    """Whether the path's runs on a model can also take tokens back."""
    return drafts(path) and bool(told(path, "rewinds")(model))


def declared_loss(path: Path) -> Declared | None:
    """What a path declares to give up: its ``lossy``, or a quantised cache, which is taken for a sentence.

    Examples
    --------
    >>> import kvdrift as kd
    >>> declared_loss(kd.CacheOn(lossy="keys in float16")), declared_loss(kd.CacheOn())
    ('keys in float16', None)
    """
    declared = told(path, "lossy")
    if declared:
        known = isinstance(declared, (str, tuple, Dropped, Rounded))
        return as_losses(declared) if known else str(declared)  # somebody's own attribute of that name
    make = own_cache(path)
    return "the cache is quantised" if make is not None and isinstance(make(), QuantizedCache) else None


def path_notes(model: Model, paths: Iterable[Path], n_tokens: int) -> tuple[str, ...]:
    """What is to be known about numbers of these paths over sequences of so many tokens, each sentence once."""
    found: list[str | None] = []
    for path in paths:
        used = path.model or model
        if manner(path) == "explicit":
            found.append(used.default_positions)
        found.append(used.beyond_context(n_tokens))
    return tuple(dict.fromkeys(note for note in found if note is not None))
