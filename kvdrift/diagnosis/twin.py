"""A tiny twin: the same architecture with a few layers and short windows, for lengths that cost too much."""

from __future__ import annotations

import copy
from typing import Any

import torch

from kvdrift.errors import ModelError
from kvdrift.models.model import Model
from kvdrift.models.rope import rope_parameters

WINDOW = 8
SWITCH = 16
VOCABULARY = 512


def twin(model: Model, seed: int = 0) -> Model:
    """A model of the same class with its own random weights, cheap at every length that matters.

    Heads, widths and kinds of layers are those of ``model``; of the layers the first few are kept, so that every
    kind is there; windows are cut to 8 positions, the length at which a rotary embedding switches to 16, and the
    vocabulary to 512 tokens.

    Raises
    ------
    ModelError
        If the class cannot be built from such a configuration.

    Examples
    --------
    >>> import kvdrift as kd
    >>> twin(kd.load(kd.models.tiny("gemma3"), quiet=True)).architecture.n_layers
    3
    """
    config = copy.deepcopy(model.hf.config)
    text = config.get_text_config()
    _shrink(text, _n_layers(model))
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.random.default_generator.manual_seed(seed)
            hf = type(model.hf)._from_config(config, dtype=model.dtype, attn_implementation=model.attn)
    except Exception as error:  # whatever a model's own constructor raises
        raise ModelError(f"No tiny twin of {model.name} could be built: {' '.join(str(error).split())}") from error
    hf = hf.to(model.device).eval().requires_grad_(False)
    return Model(hf, backend=model.backend.around_plain(hf))


def _n_layers(model: Model) -> int:
    """So many layers that each kind is among them, and two at least."""
    kinds = [(info.attention, info.window) for info in model.architecture.layers]
    return min(max(2, 1 + max(kinds.index(kind) for kind in set(kinds))), len(kinds))


def _shrink(config: Any, n_layers: int) -> None:
    before = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == before:
            setattr(config, name, value[:n_layers])
    config.num_hidden_layers = n_layers
    config.vocab_size = min(config.vocab_size, VOCABULARY)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)
    for name in ("sliding_window", "attention_chunk_size", "window_size"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, WINDOW)
    for rope in rope_parameters(config):
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = SWITCH
    if isinstance(getattr(config, "original_max_position_embeddings", None), int):
        config.original_max_position_embeddings = SWITCH
