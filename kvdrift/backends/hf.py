"""How a Hugging Face causal language model is driven: one forward pass, with or without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from kvdrift.backends.backend import Backend
from kvdrift.backends.manner import MANNERS, Manner
from kvdrift.backends.own_cache import own_cache, takes_dynamic_cache
from kvdrift.backends.rotary import forget, remembering
from kvdrift.backends.signature import CACHE_ARGUMENTS, beneath, execution_device, forward_parameters
from kvdrift.errors import InputError, ModelError


class HFBackend(Backend):
    """Drives one `transformers` causal LM and nothing else about it.

    By default every pass asks for the logits of the last position only (as `generate` does: the LM head at another
    row count gives other bits) and passes explicit position ids where the model takes them; other manners of
    calling it have a name, see `kvdrift.backends.manner`.

    Attributes
    ----------
    takes_positions, takes_mask, takes_logits_to_keep
        Whether the model's forward has these arguments.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        parameters = forward_parameters(module)
        self.takes_positions = "position_ids" in parameters
        self.takes_mask = "attention_mask" in parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters
        names = [name for name in CACHE_ARGUMENTS if name in parameters]
        if not names:
            raise ModelError(
                f"{type(module).__name__}.forward takes no cache, so there is no cache-ON path to study; "
                "give a decoder language model of transformers."
            )
        self.cache_argument = names[0]
        self._own_cache: Callable[[], Cache] | None = None

    @property
    def input_device(self) -> torch.device:
        """Where token ids go: the device of the input embeddings, or the one to which their weights are brought."""
        embedding = self.module.get_input_embeddings()
        if embedding.weight.device.type != "meta":
            return embedding.weight.device
        return execution_device(embedding) or execution_device(self.module) or embedding.weight.device

    @cached_property
    def _remembering(self) -> list[Any]:
        return remembering(self.module)

    @cached_property
    def masks_past(self) -> bool:
        """Whether an attention mask covers what the cache holds, too: not where no layer keeps tokens (Mamba)."""
        cache = self.new_cache()
        if not cache.layers:  # made while the model runs
            ids = torch.zeros((1, 1), dtype=torch.long, device=self.input_device)
            with torch.no_grad():
                self.module(input_ids=ids, use_cache=True, **{self.cache_argument: cache})
        return any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)

    def new_cache(self) -> Cache:
        """An empty cache as ``generate`` gets it, whose layers follow the config (sliding ones keep their window).

        Models that make a cache of a class of their own are asked for it once; see `own_cache`.
        """
        inner = beneath(self.module)
        if inner is None or takes_dynamic_cache(inner):
            return DynamicCache(config=self.module.config)
        if self._own_cache is None:
            self._own_cache = own_cache(inner, self.module)
        return self._own_cache()

    @torch.no_grad()
    def forward(
        self,
        ids: Int[Tensor, "1 new"],
        start: int,
        cache: Cache | None = None,
        left_padding: int = 0,
        call: str = "explicit",
        rows: int = 1,
    ) -> Float[Tensor, "*row vocab"]:
        """One forward pass; see `Backend.forward`."""
        for rotary in self._remembering:
            forget(rotary)
        output = self.call(self.arguments(ids, start, cache, left_padding, call, rows))
        if not hasattr(output, "logits"):
            raise ModelError(
                f"{type(self.module).__name__} returns no logits: it has no language-model head; give the causal LM "
                "that it is the body of."
            )
        return output.logits[0, -1] if rows == 1 else output.logits[0, -rows:]

    def arguments(
        self,
        ids: Int[Tensor, "1 new"],
        start: int,
        cache: Cache | None = None,
        left_padding: int = 0,
        call: str = "explicit",
        rows: int = 1,
    ) -> dict[str, Any]:
        """The keyword arguments of one forward pass; see `Backend.forward`."""
        manner = self.manner(call)
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None}
        if cache is not None:
            arguments[self.cache_argument] = cache
        end = start + ids.shape[1]
        if manner.positions:
            arguments["position_ids"] = torch.arange(start, end, device=ids.device).clamp(min=0).unsqueeze(0)
        if left_padding or manner.mask:
            seen = -left_padding if self.masks_past else start
            arguments["attention_mask"] = (torch.arange(seen, end, device=ids.device) >= 0).long().unsqueeze(0)
        if manner.one_row:
            arguments["logits_to_keep"] = rows
        return arguments

    def manner(self, call: str) -> Manner:
        """A manner of calling this model, without the arguments that it does not take."""
        manner = MANNERS[call]
        return Manner(
            positions=manner.positions and self.takes_positions,
            mask=manner.mask and self.takes_mask,
            one_row=manner.one_row and self.takes_logits_to_keep,
        )

    def call(self, arguments: dict[str, Any]) -> Any:
        """Run the model once, and return what it returns."""
        return self.module(**arguments)

    @property
    def driver(self) -> str:
        """What runs the model."""
        return "transformers"

    @property
    def attn(self) -> str:
        """The attention implementation in use."""
        return str(self.module.config._attn_implementation)

    def around(self, module: Any) -> HFBackend:
        """The backend of a copy of the model."""
        return HFBackend(module)

    def refuse_switching(self, name: str) -> None:
        """Refuse: a user's copy stays as it is."""
        raise InputError(
            f"This model is loaded with attn={self.attn!r} and kvdrift does not switch your copy; call "
            f"model.set_attn_implementation({name!r}) first, or compare CacheOn(attn={name!r}) paths."
        )

    @contextmanager
    def attention(self, name: str | None) -> Iterator[None]:
        """Run with another attention implementation, and go back afterwards.

        Raises
        ------
        ModelError
            If the model cannot run it.
        """
        before = self.module.config._attn_implementation
        if name is None or name == before:
            yield
            return
        try:
            self.module.set_attn_implementation(name)
        except (ValueError, ImportError) as error:
            raise ModelError(f"This model cannot run attn={name!r}: {error}") from error
        try:
            yield
        finally:
            self.module.set_attn_implementation(before)
