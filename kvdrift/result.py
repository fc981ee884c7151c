"""What every result has: a file that gives back each bit, and words that are asked for elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvdrift.errors import InputError
from kvdrift.files import load_tensors, save_tensors
from kvdrift.plain import fields_from_plain, to_plain
from kvdrift.shapes import Shaped, check_shapes

T = TypeVar("T")


SUMMARIES = {
    "Drift": "drift",
    "Evaluation": "evaluation",
    "Factorial": "factorial",
    "Ladder": "ladder",
    "PaperArchitecture": "paper_architecture",
    "PaperDrift": "paper_drift",
    "PaperPatching": "paper_patching",
    "PatchResult": "patch",
    "Sweep": "sweep",
    "Verdict": "verdict",
}
"""Class of a result → the file of `kvdrift.summaries` that says it, loaded when a result is first asked: no result
imports its words."""


def say(result: Any, how: str) -> Any:
    """What the result's file of `kvdrift.summaries` says: its ``summary``, ``html``, ``as_dict`` or ``reading``."""
    name = next(SUMMARIES[base.__name__] for base in type(result).__mro__ if base.__name__ in SUMMARIES)
    return getattr(import_module(f"kvdrift.summaries.{name}"), how)(result)


class Result:
    """Base of the results that are frozen dataclasses: their words, and what is worked out once and kept.

    Make subclasses with ``repr=False``: a result prints its summary.
    """

    def summary(self) -> str:
        """What was measured, in plain sentences."""
        return say(self, "summary")

    def to_dict(self) -> dict[str, Any]:
        """The machine-readable summary that the command line prints with ``--json``."""
        return say(self, "as_dict")

    def __repr__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return say(self, "html")

    # --- kept beside the fields, and no part of the result

    @cached_property
    def _kept(self) -> dict[Any, Any]:
        return {}

    def _once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What ``make`` gives, worked out once for each key (each time for one that cannot be hashed)."""
        try:
            hash(key)
        except TypeError:
            return make()
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


class Saved:
    """Base of frozen dataclasses that are kept as one file: safetensors, with a JSON manifest in its header."""

    saved_as: ClassVar[str]
    """The ``kind`` in the header; a file of another kind is refused."""
    in_tensors: ClassVar[tuple[str, ...]] = ("arrays",)
    """The fields that are no part of the manifest."""

    def __post_init__(self) -> None:
        check_shapes(self._shapes(), self._lengths())

    def _shapes(self) -> Iterator[Shaped]:
        """Every array with its axes, to be checked."""
        raise NotImplementedError

    def _lengths(self) -> dict[str, int]:
        """Axes whose length the other fields say."""
        return {}

    def save(self, path: str | Path) -> Path:
        """Write everything to one safetensors file with a JSON manifest in its header, atomically; see `load`.

        Raises
        ------
        FileError
            If it cannot be written.
        """
        return save_tensors(path, self.saved_as, *self._to_parts())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote, equal in every bit, dtype and name.

        Raises
        ------
        FileError
            If the file is missing, truncated, edited or of another kind.
        """
        return cls._from_parts(*load_tensors(path, cls.saved_as))

    def _to_parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by name, and the manifest."""
        kept = [field.name for field in fields(self) if field.init and field.name not in self.in_tensors]  # type: ignore[arg-type]
        return self._to_tensors(), {name: to_plain(getattr(self, name)) for name in kept}

    @classmethod
    def _from_parts(cls, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> Self:
        values = fields_from_plain(cls, manifest, without=cls.in_tensors)
        return cls(**cls._from_tensors(tensors, manifest), **values)

    def _to_tensors(self) -> dict[str, Tensor]:
        """The fields of `in_tensors` as named tensors."""
        arrays: Mapping[str, np.ndarray] = getattr(self, "arrays")  # noqa: B009
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `in_tensors` again."""
        return {"arrays": {name: tensor.numpy() for name, tensor in tensors.items()}}


class Steps(Saved):
    """Base of saved results whose arrays go over prompts and over the steps from 0 on."""

    axes: ClassVar[tuple[str, ...]] = ("prompt", "step")
    """Of every metric."""
    arrays: dict[str, np.ndarray]
    prompts: tuple[Any, ...]

    def _shapes(self) -> Iterator[Shaped]:
        once = {"fed": ("prompt", "step"), "donor_top1": ("prompt", "step"), "n_steps": ("prompt",)}
        return ((name, array.shape, once.get(name, self.axes)) for name, array in self.arrays.items())

    def _lengths(self) -> dict[str, int]:
        return {"prompt": len(self.prompts)}

    @property
    def fed(self) -> NDArray[np.int64]:
        """The token that all paths were fed after each step, ``[prompt, step]``; -1 beyond a prompt's last step."""
        return self.arrays["fed"]

    @property
    def n_steps(self) -> NDArray[np.int64]:
        """How many steps each prompt has, ``[prompt]``."""
        return self.arrays["n_steps"]

    @property
    def steps(self) -> NDArray[np.int64]:
        """Step numbers ``[step]``, from 0."""
        return np.arange(self.fed.shape[1])

    @property
    def ran(self) -> NDArray[np.bool_]:
        """Which steps each prompt has, ``[prompt, step]``."""
        return self.steps < self.n_steps[:, None]


def table_maker(what: str, makers: Mapping[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """The function behind ``to_dataframe(what)``.

    Raises
    ------
    InputError
        If there is no such table.
    """
    if what not in makers:
        raise InputError(f"to_dataframe({what!r}): choose one of {', '.join(makers)}.")
    return makers[what]


def makers_in(module: str, *names: str) -> dict[str, Callable[[Any], Any]]:
    """Functions by name, of a module that imports the result whose tables they make: loaded when one is asked for."""
    return {name: getattr(import_module(f"kvdrift.{module}"), name) for name in names}
