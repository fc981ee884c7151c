"""Rotary embeddings that remember the longest sequence they have seen (dynamic NTK)."""

from __future__ import annotations

from typing import Any

SEEN = "max_seq_len_cached"


def remembering(module: Any) -> list[Any]:
    """The rotary embeddings of a model whose frequencies depend on the longest sequence seen so far."""
    return [part for part in module.modules() if hasattr(part, "original_max_seq_len") and _kinds(part)]


def forget(rotary: Any) -> None:
    """Put frequencies back to what a fresh model has, so that the next pass makes them from its own length alone.

    transformers does so for shorter sequences only: a second long prompt would begin with the first one's frequencies.
    """
    for prefix in _kinds(rotary):
        if getattr(rotary, f"{prefix}{SEEN}", 0) > rotary.original_max_seq_len:
            now, original = getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}original_inv_freq")
            rotary.register_buffer(f"{prefix}inv_freq", original.to(now.device), persistent=False)
            setattr(rotary, f"{prefix}{SEEN}", rotary.original_max_seq_len)


def _kinds(rotary: Any) -> list[str]:
    """Prefixes of the attributes of each kind of layer whose embedding is dynamic; one empty one without kinds."""
    kinds = getattr(rotary, "rope_type", None)
    if isinstance(kinds, dict):
        return [f"{layer}_" for layer, kind in kinds.items() if "dynamic" in str(kind)]
    return [""] if "dynamic" in str(kinds) else []
