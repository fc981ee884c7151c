"""The model under study: the module itself, its tokenizer, and what kvdrift found out about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

import torch

from kvdrift import markup
from kvdrift.backends.backend import Backend
from kvdrift.backends.kinds import kind_of
from kvdrift.errors import InputError, ModelError
from kvdrift.fingerprint import fingerprint
from kvdrift.models.architecture import Architecture, describe
from kvdrift.models.coverage import Coverage
from kvdrift.models.labels import Prompt
from kvdrift.models.positions import default_positions
from kvdrift.models.prompts import PromptLike, encode
from kvdrift.models.rope import beyond, extends
from kvdrift.models.source import Source
from kvdrift.models.tree import BlockTree, find_blocks


class Model:
    """A decoder language model, wrapped and never changed; `kvdrift.load` makes it.

    Attributes
    ----------
    hf
        The wrapped module itself, not a copy.
    tokenizer
        Its tokenizer, or None (then prompts are token ids).
    name
        What figures and tables call it.
    backend
        How it is driven.
    tree
        Where its blocks, embedding, final norm and LM head are.
    source
        Where it was loaded from by name, or None.
    weights
        What a preset's weights are, in words, or None.
    probe
        What finds a model's coverage; `kvdrift.tracing` sets it, since finding it means watching the model run.
    """

    probe: ClassVar[Callable[[Model], Coverage] | None] = None
    source: Source | None = None
    weights: str | None = None

    def __init__(self, hf: Any, tokenizer: Any = None, name: str | None = None, backend: Backend | None = None) -> None:
        self.hf = hf
        self.tokenizer = tokenizer
        self.name: str = name or getattr(hf.config, "name_or_path", None) or hf.config.model_type
        self.backend: Backend = kind_of(hf)(hf) if backend is None else backend
        with self.backend.unwrapped() as stand_in:
            self.tree: BlockTree = find_blocks(hf).through(stand_in)

    def around(self, hf: Any, name: str | None = None, tokenizer: Any = None) -> Model:
        """A copy of the module, driven as this model is.

        Parameters
        ----------
        hf
            The copy (another dtype, other weights, …).
        name, tokenizer
            Of the new model; by default this one's.
        """
        other = Model(hf, tokenizer or self.tokenizer, name or self.name, backend=self.backend.around(hf))
        other.weights = self.weights
        return other

    def as_it_is(self) -> Model:
        """This model without any repair that `kvdrift.load` made around its calls; itself where there is none."""
        backend = self.backend.as_it_is()
        return self if backend is self.backend else Model(self.hf, self.tokenizer, self.name, backend=backend)

    @cached_property
    def architecture(self) -> Architecture:
        """Layers, heads, windows, soft-caps, positional scheme."""
        with self.backend.unwrapped():
            return describe(self.hf)

    @cached_property
    def coverage(self) -> Coverage:
        """Which sites this model gives, and why not the others; found by a probe pass on first use.

        Raises
        ------
        NotFaithfulError
            If tracing would change a bit of the model's logits.
        """
        if Model.probe is None:
            raise ModelError("Sites are found by kvdrift.tracing, which nothing has imported: use kvdrift.load.")
        return Model.probe(self)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.hf.get_input_embeddings().weight.dtype

    @property
    def dtype_name(self) -> str:
        """The dtype without its ``torch.`` prefix, as users type it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self.backend.input_device

    @property
    def attn(self) -> str:
        """The attention implementation in use."""
        return self.backend.attn

    @property
    def vocab_size(self) -> int:
        """How many token ids there are: the rows of the input embeddings."""
        return int(self.hf.get_input_embeddings().num_embeddings)

    @cached_property
    def layer_of(self) -> dict[int, int]:
        """Block number by the ``id`` of any module inside it."""
        return {id(m): layer for layer, block in enumerate(self.tree.blocks) for m in block.modules()}

    @cached_property
    def attention_layer_of(self) -> dict[int, int]:
        """Block number by the ``id`` of any module inside an attention over the tokens of the block."""
        return {
            id(part): layer
            for layer, (block, module) in enumerate(zip(self.tree.blocks, self.tree.attention_modules, strict=True))
            if module is not None
            for alike in block.modules()  # a block may hold two
            if type(alike) is type(module)
            for part in alike.modules()
        }

    @cached_property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Every module, the model itself first."""
        return tuple(self.hf.modules())

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a text: those of the generation config, else of the tokenizer."""
        found = getattr(getattr(self.hf, "generation_config", None), "eos_token_id", None)
        if found is None:
            found = getattr(self.tokenizer, "eos_token_id", None)
        if found is None:
            return frozenset()
        return frozenset(found if isinstance(found, (list, tuple)) else [found])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode for a while; modules that were training are put back."""
        training = [module for module in self.modules if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    # --- prompts and tokens

    def encode(self, prompt: PromptLike, chat: bool = False) -> list[int]:
        """Token ids of one prompt.

        Parameters
        ----------
        prompt
            Text (tokenized with its special tokens), a flat list of ids, or a tensor ``[n]`` or ``[1, n]``.
        chat
            Put text into the tokenizer's chat template as a user's turn.

        Raises
        ------
        InputError
            If the prompt is empty, is text without a tokenizer, or holds ids outside the vocabulary.
        """
        return encode(prompt, self.tokenizer, self.vocab_size, self.name, chat)

    def label(self, prompt: PromptLike, ids: Sequence[int]) -> Prompt:
        """A prompt with its ids and their texts, as results carry it."""
        texts = tuple(self.token_text(token) for token in ids)
        return Prompt(tuple(ids), texts, prompt if isinstance(prompt, str) else None)

    def token_text(self, token: int) -> str:
        """The text of one token id, or the id itself where there is no tokenizer."""
        return str(token) if self.tokenizer is None else str(self.tokenizer.decode([token]))

    def check_length(self, prompt_tokens: int, new_tokens: int) -> None:
        """Refuse a run that would leave the model's context, unless its rotary embedding is made to reach beyond it.

        Raises
        ------
        InputError
            If prompt and new tokens together exceed ``architecture.max_positions``.
        """
        limit = self.architecture.max_positions
        if limit is not None and prompt_tokens + new_tokens > limit and not extends(self.hf.config):
            raise InputError(
                f"{prompt_tokens} prompt tokens and {new_tokens} new ones exceed the context of {self.name} "
                f"({limit}); shorten the prompt or ask for at most {max(limit - prompt_tokens, 0)} new tokens."
            )

    @cached_property
    def default_positions(self) -> str | None:
        """A sentence on default positions other than those that kvdrift passes, None where they are the same.

        Found on first use by a few short passes.
        """
        with self.evaluating():
            return default_positions(self.backend, self.vocab_size)

    def beyond_context(self, n_tokens: int) -> str | None:
        """A sentence on sequences of so many tokens whose rotary embedding reaches beyond the declared context."""
        return beyond(self.hf.config, self.architecture.max_positions, n_tokens)

    # --- identity

    @property
    def fingerprint(self) -> str:
        """A short hash of the configuration and, for every weight as it is now, its dtype, a sample and a checksum."""
        return fingerprint(self.hf)

    def settings(self) -> dict[str, Any]:
        """What decides this model's numbers, as plain values: `kvdrift.settings.settings_of` asks for it."""
        config = self.hf.config
        hooked = {
            name or "the model": [getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks]
            for name, module in self.hf.named_modules()
            if (hooks := [*module._forward_pre_hooks.values(), *module._forward_hooks.values()])
        }
        return {
            "name": self.name,
            "weights": self.fingerprint,
            "dtype": self.dtype_name,
            "driver": self.backend.driver,
            "attn": self.attn,
            "experts": getattr(config, "_experts_implementation", None) if self.architecture.n_experts else None,
            "device": str(self.device),
            "ends": sorted(self.eos_ids),
            "hooks": hooked,
        }

    def __repr__(self) -> str:
        name = f"{self.name} ({self.weights})" if self.weights else self.name
        return f"{name} · {self.dtype_name} · {self.device} · attn {self.attn}\n{self.architecture}"

    def _repr_html_(self) -> str:
        return markup.block(repr(self).partition("\n")[0], self.architecture._repr_html_())
