"""What a backend is: how one model object is driven, and what in it stands in the place of transformers' own parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache

from kvdrift.backends.manner import Manner

Output = tuple[Tensor, Tensor | None]
"""``[batch, query, head, feature]`` and the pattern, as an attention function of transformers returns them."""
AttentionFunction = Callable[..., Output]
"""``(module, query, key, value, mask, **kwargs)`` → output: what transformers' attention table holds."""
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any], AttentionFunction], Output]
"""``(module, query, key, value, mask, kwargs, native)`` → output."""


class Backend(Protocol):
    """Drives one decoder language model of transformers, and answers for whatever has been put around or into it.

    `kvdrift.backends.hf.HFBackend` drives the plain model; another backend extends it and says only what is otherwise.
    What has a body here holds where all parts are transformers' own. Bits must equal those of the same model
    driven by transformers; where they cannot, `notes` says so.

    Attributes
    ----------
    module
        The model itself, used as it is and never copied: hooks, weights and controls are found there.
    takes_positions
        Whether its forward takes explicit position ids.
    cache_argument
        What its forward calls the cache.
    """

    module: Any
    takes_positions: bool
    cache_argument: str

    # --- running it

    @property
    def input_device(self) -> torch.device:
        """Where token ids go."""
        ...

    def new_cache(self) -> Cache:
        """An empty cache as ``generate`` gets it; `ModelError` where the model's own kind cannot be made without it."""
        ...

    def forward(
        self,
        ids: Int[Tensor, "1 new"],
        start: int,
        cache: Cache | None = None,
        left_padding: int = 0,
        call: str = "explicit",
        rows: int = 1,
    ) -> Float[Tensor, "*row vocab"]:
        """One forward pass over ``ids``, which sit at absolute positions ``start, start + 1, …``.

        Parameters
        ----------
        ids
            Token ids, ``[1, new]``.
        start
            Absolute position of the first of them.
        cache
            The cache to read and to extend, or None to run without one.
        left_padding
            How many tokens of padding stand before position 0, at ``-left_padding … -1``; the attention mask hides
            them.
        call
            The manner of calling the model: a name in `kvdrift.backends.manner.MANNERS`.
        rows
            How many of the last positions give logits.

        Returns
        -------
        Tensor
            Logits of the last position, ``[vocab]``, in the model's own dtype; of several ones ``[row, vocab]``.

        Raises
        ------
        ModelError
            If the model returns no logits.
        """
        ...

    def arguments(
        self,
        ids: Int[Tensor, "1 new"],
        start: int,
        cache: Cache | None = None,
        left_padding: int = 0,
        call: str = "explicit",
        rows: int = 1,
    ) -> dict[str, Any]:
        """The keyword arguments with which `forward` runs the model."""
        ...

    def manner(self, call: str) -> Manner:
        """A manner of calling this model, without the arguments that it does not take."""
        ...

    def call(self, arguments: dict[str, Any]) -> Any:
        """Run the model once on keyword arguments, and return what it returns."""
        ...

    def attention(self, name: str | None) -> AbstractContextManager[None]:
        """Run with another attention implementation for a while; `ModelError` or `InputError` where it cannot."""
        ...

    def refuse_switching(self, name: str) -> None:
        """Raise `InputError` for another attention implementation asked of a model that is loaded already."""
        ...

    # --- what it says of itself

    @property
    def driver(self) -> str:
        """What runs the model, with its version where it is not transformers: one of the settings of a result."""
        ...

    @property
    def attn(self) -> str:
        """The attention implementation in use."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Sentences on what is computed otherwise than by the model in transformers."""
        return ()

    def refuse_rewriting(self, name: str) -> None:
        """Raise `ModelError` where parts of the model cannot be rewritten, as an architecture counterfactual does."""
        return None

    # --- its copies

    def around(self, module: Any) -> Backend:
        """The backend of a copy of the model."""
        ...

    def around_plain(self, module: Any) -> Backend:
        """The backend of another model of the same class, fresh from transformers."""
        return self.around(module)

    def as_it_is(self) -> Backend:
        """The backend that runs the model with nothing of kvdrift's."""
        return self

    # --- its module tree

    @contextmanager
    def unwrapped(self) -> Iterator[Callable[[nn.Module], nn.Module]]:
        """The model's tree as transformers built it; yields what stands in for each of its modules."""
        yield lambda module: module

    def plain_name(self, name: str) -> str:
        """The name that transformers has for a module or weight."""
        return name

    def hook_points(
        self, blocks: tuple[nn.Module, ...], final_norm: nn.Module | None
    ) -> dict[tuple[str, int], nn.Module]:
        """Site and layer → the module that the model itself offers for reading it."""
        return {}

    # --- attention beside transformers' table, told from a module alone

    @staticmethod
    def attention_of(module: nn.Module) -> AttentionFunction | None:
        """The attention that a module computes by itself, as a function of what its kernel reads; else None."""
        return None

    @staticmethod
    def rerouted(model: nn.Module, attend: Attend) -> AbstractContextManager[None]:
        """Hand every attention computation that does not go through the table to ``attend`` for a while."""
        return nullcontext()
