"""What a user may give as a prompt, and the token ids it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvdrift.errors import InputError

PromptLike = str | Sequence[int] | Tensor
_EMPTY = "The prompt is empty; give at least one token or one character of text."


def encode(prompt: PromptLike, tokenizer: Any, vocab_size: int, name: str, chat: bool = False) -> list[int]:
    """Token ids of one prompt; see `kvdrift.models.model.Model.encode`.

    Examples
    --------
    >>> encode(torch.tensor([[5, 7]]), None, 384, "a model")
    [5, 7]
    """
    ids = _text_ids(prompt, tokenizer, name, chat) if isinstance(prompt, str) else _ids(prompt)
    if not ids:
        raise InputError(_EMPTY)
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise InputError(
            f"Token id {outside[0]} is outside the vocabulary of {name} (0 to {vocab_size - 1}); "
            "were these ids made with another tokenizer?"
        )
    return ids


def _text_ids(text: str, tokenizer: Any, name: str, chat: bool) -> list[int]:
    if not text.strip():
        raise InputError(_EMPTY)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"The prompt holds half of a surrogate pair at character {error.start}, which is no text; mend what "
            "wrote it."
        ) from error
    if tokenizer is None:
        raise InputError(
            f"{name} has no tokenizer, so it cannot read text: give token ids, or kd.load(model, tokenizer=…)."
        )
    if not chat:
        return list(tokenizer(text)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{name} has no chat template; leave out chat=True.")
    turn = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _ids(prompt: Sequence[int] | Tensor) -> list[int]:
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"A prompt is text, a flat list of token ids or a tensor of them: {error}.") from error
    if ids.numel() == 0:
        return []
    if ids.ndim not in (1, 2) or (ids.ndim == 2 and ids.shape[0] != 1):
        raise InputError(f"One prompt has shape [n] or [1, n], not {list(ids.shape)}; give several as a list.")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InputError(f"Token ids are integers, not {ids.dtype}; convert them first.")
    return [int(token) for token in ids.flatten().tolist()]


def as_prompts(prompts: Any) -> tuple[list[PromptLike], bool]:
    """Split what a user gave into prompts.

    Returns
    -------
    prompts, many
        The prompts, and whether several were given (a list of prompts, even of one) rather than one.

    Raises
    ------
    InputError
        If nothing was given, or something that is no prompt.
    """
    if isinstance(prompts, str):
        return [prompts], False
    if isinstance(prompts, np.ndarray):
        prompts = torch.as_tensor(prompts)
    if isinstance(prompts, Tensor):
        if prompts.ndim == 1 or (prompts.ndim == 2 and prompts.shape[0] == 1):
            return [prompts], False
        raise InputError(
            f"A prompt tensor has shape [n] or [1, n], not {list(prompts.shape)}; give several prompts as a list: "
            "kvdrift never batches, since that changes the arithmetic."
        )
    if not isinstance(prompts, (list, tuple)):
        raise InputError(f"Prompts are text, token ids or a list of those, not {type(prompts).__name__}.")
    if not prompts:
        raise InputError(_EMPTY)
    if all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompts):
        return [list(prompts)], False
    if all(isinstance(prompt, (str, list, tuple, Tensor, np.ndarray)) for prompt in prompts):
        return list(prompts), True
    raise InputError("A list of prompts holds texts, lists of token ids or tensors; this one holds something else.")
