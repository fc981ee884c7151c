"""Rotary embeddings that depend on the length of the sequence, or reach beyond the declared context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

BY_LENGTH = ("dynamic", "longrope")
"""Types whose frequencies change for every position once a sequence is long enough."""
EXTENDING = (*BY_LENGTH, "yarn")
"""Types that are made to run beyond ``max_position_embeddings``."""


def rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The rotary parameters of a text config: one set, or one for each kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in given.values() if isinstance(value, dict) and "rope_type" in value]
    yield from nested or [given]


def rope_types(config: Any) -> tuple[str, ...]:
    """The types of rotary embeddings, sorted.

    Examples
    --------
    >>> import kvdrift as kd
    >>> rope_types(kd.models.tiny("gpt-oss").config)
    ('yarn',)
    """
    found = {str(rope.get("rope_type", "default")) for rope in rope_parameters(config.get_text_config()) if rope}
    return tuple(sorted(found))


def rope_switch(config: Any) -> int | None:
    """The sequence length beyond which the rotary embedding changes for all positions (dynamic NTK, LongRoPE).

    Sources: dynamic NTK, transformers #25104; LongRoPE (arXiv 2402.13753), transformers PR #33129.

    Examples
    --------
    >>> import kvdrift as kd
    >>> rope_switch(kd.models.tiny("llama").config) is None
    True
    """
    config = config.get_text_config()
    for rope in rope_parameters(config):
        if rope.get("rope_type") in BY_LENGTH:
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            dynamic = rope["rope_type"] == "dynamic"  # grows from the context on, whatever the original one
            return int(config.max_position_embeddings if dynamic else original or config.max_position_embeddings)
    return None


def changes_after(config: Any, first_pass: int, n_tokens: int) -> bool:
    """Whether keys that a first pass stores are other ones once the sequence has ``n_tokens``.

    LongRoPE switches once; dynamic NTK changes with every token from its switch on.
    """
    switch = rope_switch(config)
    if switch is None or n_tokens <= max(switch, first_pass):
        return False
    return first_pass <= switch or "dynamic" in rope_types(config)


def beyond(config: Any, limit: int | None, n_tokens: int) -> str | None:
    """What is to be said of a run over so many tokens; None where its length is nothing special."""
    switch, types = rope_switch(config), " and ".join(rope_types(config))
    if switch is not None and n_tokens > switch:
        return (
            f"{n_tokens} tokens go beyond {switch}, where the rotary embedding ({types}) changes for every position "
            "while cached keys keep the one that they were stored with: the two paths differ there by design"
        )
    if limit is not None and n_tokens > limit:
        return (
            f"{n_tokens} tokens go beyond the context of {limit} that the model declares; its rotary embedding "
            f"({types}) reaches there and is the same at every length, so the two paths still compute one function"
        )
    return None


def extends(config: Any) -> bool:
    """Whether a rotary embedding of the model is made to run beyond the declared context.

    Examples
    --------
    >>> import kvdrift as kd
    >>> extends(kd.models.tiny("llama").config), extends(kd.models.tiny("gpt-oss").config)
    (False, True)
    """
    return any(kind in EXTENDING for kind in rope_types(config))
