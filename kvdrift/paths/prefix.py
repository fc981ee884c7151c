"""A prefix: tokens that were consumed before, and the cache that they left, to start a run from."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, cache_utils

from kvdrift.backends.cache_state import length
from kvdrift.errors import FileError, InputError
from kvdrift.files import load_tensors, save_tensors
from kvdrift.models.load import load as load_model
from kvdrift.models.model import Model
from kvdrift.paths.cache_values import moved, packed, state, unpacked
from kvdrift.paths.filled import check_fits, counts
from kvdrift.settings import settings_of

KIND = "prefix"


@dataclass(frozen=True, eq=False)
class Prefix:
    """The first tokens of prompts with the cache that a model left after them.

    Every run starts from a copy; the cache itself is never touched.

    Parameters
    ----------
    tokens
        The tokens that the cache holds; None for the first ones of whatever prompt is run.
    cache
        What a prefill over them left, in the model's own dtype. None computes it anew at every start, in a pass of its
        own.
    model, weights, dtype
        Name, fingerprint and dtype of the model that made it; None where that is not known.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> system = kd.Prefix.make(model, [10, 11, 12, 13])
    >>> kd.CacheOn(prefix=system).start(model, [10, 11, 12, 13, 60, 61]).step().position
    5
    """

    tokens: tuple[int, ...] | None
    cache: Cache | None
    model: str | None = None
    weights: str | None = None
    dtype: str | None = None
    _digest: list[Any] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.tokens is not None:
            tokens = self.tokens.flatten().tolist() if isinstance(self.tokens, Tensor) else self.tokens
            object.__setattr__(self, "tokens", tuple(int(token) for token in tokens))
        if self.tokens is None and self.cache is None:
            raise InputError("A prefix needs tokens, or a cache that holds some.")
        if self.cache is not None and not isinstance(self.cache, Cache):
            raise InputError(
                f"A prefix's cache is {type(self.cache).__name__}; give a cache of transformers that holds the tokens."
            )
        held = length(self.cache) if self.cache is not None and counts(self.cache) else len(self.tokens or ())
        if not held:
            raise InputError("This prefix holds no token; leave prefix= out.")
        if self.tokens is not None and held != len(self.tokens):
            raise InputError(
                f"This prefix has {len(self.tokens)} tokens and a cache that holds {held}; give those alone."
            )

    @classmethod
    def make(cls, model: Any, prompt: Any, chat: bool = False) -> Prefix:
        """Consume a prompt in one pass and keep what it leaves.

        Parameters
        ----------
        model
            Anything `kvdrift.load` takes.
        prompt
            Text, token ids or a tensor ``[n]``.
        chat
            Put a text into the chat template.
        """
        model = load_model(model, quiet=True)
        ids, cache = model.encode(prompt, chat), model.backend.new_cache()
        with model.evaluating():
            model.backend.forward(torch.tensor([ids], device=model.device), 0, cache)
        return cls(tuple(ids), cache, model.name, model.fingerprint, model.dtype_name)

    @classmethod
    def of(cls, given: Any) -> Prefix:
        """What ``prefix=`` was given: a prefix, a cache, or tokens with their cache.

        Raises
        ------
        InputError
            If it is none of these.
        """
        if isinstance(given, Prefix):
            return given
        if isinstance(given, Cache):
            return cls(None, given)
        if isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[1], Cache):
            return cls(*given)
        raise InputError(
            f"prefix={type(given).__name__}: give kd.Prefix.make(model, text), kd.Prefix.load(file), a cache that "
            "holds the first tokens, or those tokens and their cache."
        )

    def __len__(self) -> int:
        """How many tokens it holds."""
        return length(self.cache) if self.tokens is None and self.cache is not None else len(self.tokens or ())

    def anew(self, ids: Sequence[int] = ()) -> Prefix:
        """The same tokens without the cache, so that a run computes them in a pass of its own.

        ``ids`` is the prompt, whose first tokens they are where this prefix does not know its own.
        """
        tokens = self.tokens if self.tokens is not None else tuple(ids[: len(self)])
        return Prefix(tokens, None)

    def begins(self, ids: Sequence[int]) -> None:
        """Refuse a prompt that does not begin with this prefix and go on.

        Raises
        ------
        InputError
            With the first token that differs, or because no token is left.
        """
        if len(ids) <= len(self):
            raise InputError(
                f"The prefix holds {len(self)} tokens and the prompt has {len(ids)}: at least one must be left to "
                "consume."
            )
        first = next((n for n, (x, y) in enumerate(zip(self.tokens or (), ids, strict=False)) if x != y), None)
        if first is not None and self.tokens is not None:
            raise InputError(
                f"The prompt does not begin with the prefix: token {first} is {ids[first]}, not {self.tokens[first]}; "
                "give the whole prompt, prefix included, as token ids if its text is split otherwise."
            )

    def start(self, model: Model) -> Cache:
        """A copy of the cache for a run of ``model``.

        Raises
        ------
        InputError
            If another model made it, in another dtype or with entries of another shape.
        """
        assert self.cache is not None, "a prefix without a cache is computed anew"
        if self.weights is not None and self.weights != model.fingerprint:
            raise InputError(
                f"The prefix was made by another model ({self.model} in {self.dtype}, weights {self.weights}; this is "
                f"{model.name} in {model.dtype_name}, {model.fingerprint}); make it anew with kd.Prefix.make."
            )
        check_fits(model, self.cache)
        cache = copy.deepcopy(self.cache)  # down to the tensors of layers that write in place
        if model.device.type != "cpu":
            for layer in cache.layers:
                vars(layer).update({name: moved(value, model.device) for name, value in vars(layer).items()})
        return cache

    def verify(self, model: Any) -> Prefix:
        """Hold every bit of the cache against what a prefill in one pass gives now; returns the prefix itself.

        A prefix that was made in chunks, on another machine or by another version may differ by rounding;
        `kvdrift.diagnose` tells that from a fault.

        Raises
        ------
        InputError
            If a bit differs, with the first place.
        """
        if self.tokens is None or self.cache is None:
            raise InputError("This prefix does not know its tokens, or has no cache to verify.")
        fresh = Prefix.make(model, list(self.tokens))
        self.start(load_model(model, quiet=True))
        mine, theirs = state(self.cache), state(fresh.cache)
        for name in dict.fromkeys((*mine, *theirs)):
            x, y = mine.get(name), theirs.get(name)
            if settings_of(x) != settings_of(y) and name.partition(".")[2] != "device":
                layer, _, what = name.partition(".")
                raise InputError(
                    f"The prefix is not what a prefill over its {len(self)} tokens gives now: layer {layer} differs in "
                    f"its {what}; make it anew, or let kd.diagnose tell whether that is rounding."
                )
        return self

    def settings(self) -> dict[str, Any]:
        """What decides the numbers of runs that start from it, as plain values."""
        if not self._digest:
            self._digest.append(None if self.cache is None else settings_of(self.cache))
        return {"tokens": None if self.tokens is None else list(self.tokens), "cache": self._digest[0]}

    # --- files

    def save(self, path: str | FilePath) -> FilePath:
        """Write tokens and cache to one safetensors file, bit for bit.

        Raises
        ------
        InputError
            If the cache is of a kind that cannot be written.
        FileError
            If the file cannot be written.
        """
        if type(self.cache) is not DynamicCache:
            raise InputError(
                f"A prefix in a {type(self.cache).__name__} cannot be saved, only one in a DynamicCache; keep its "
                "tokens and make it anew."
            )
        tensors: dict[str, Tensor] = {}
        layers = []
        for number, layer in enumerate(self.cache.layers):
            kind = type(layer)
            if getattr(cache_utils, kind.__name__, None) is not kind:
                raise InputError(
                    f"Layer {number} of this prefix is a {kind.__name__} of another package and cannot be saved; keep "
                    "the tokens and make it anew."
                )
            values = {name: packed(f"{number}.{name}", value, tensors) for name, value in vars(layer).items()}
            layers.append({"kind": kind.__name__, "state": values})
        manifest = {
            "tokens": None if self.tokens is None else list(self.tokens), "layers": layers, "model": self.model,
            "weights": self.weights, "dtype": self.dtype,
        }  # fmt: skip
        return save_tensors(path, KIND, tensors, manifest)

    @classmethod
    def load(cls, path: str | FilePath) -> Prefix:
        """Read what `save` wrote.

        Raises
        ------
        FileError
            If the file is no whole prefix, or holds a kind of layer that this version of transformers lacks.
        """
        tensors, manifest = load_tensors(path, KIND)
        cache = DynamicCache()
        for number, told in enumerate(manifest["layers"]):
            kind = getattr(cache_utils, told["kind"], None)
            if kind is None:
                raise FileError(
                    f"{path} holds a {told['kind']} in layer {number}, which this version of transformers lacks; make "
                    "the prefix anew."
                )
            layer = kind.__new__(kind)
            vars(layer).update({name: unpacked(value, tensors) for name, value in told["state"].items()})
            cache.layers.append(layer)
        tokens = manifest["tokens"]
        names = ("model", "weights", "dtype")
        return cls(None if tokens is None else tuple(tokens), cache, *(manifest[name] for name in names))
