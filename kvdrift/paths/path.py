"""The protocol of a path: one way to execute a model over tokens, one step at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Protocol

from kvdrift.controls import Control
from kvdrift.errors import InputError
from kvdrift.models.labels import PathInfo
from kvdrift.models.model import Model
from kvdrift.settings import attributes_of, settings_of
from kvdrift.shapes import Logits


@dataclass(frozen=True)
class Step:
    """What one step returned.

    Attributes
    ----------
    logits
        Next-token logits ``[vocab]`` at the current position, in the model's dtype.
    position
        The current position: the absolute index of the last token consumed.
    row, n_rows
        Which row it is of those that its pass gave logits for, counted from 0, and how many these are.
    pass_number
        Which pass of its run gave it, counted from 0.
    """

    logits: Logits
    position: int
    row: int = 0
    n_rows: int = 1
    pass_number: int = 0

    @property
    def rows_after(self) -> int:
        """How many rows of the same pass come after this one."""
        return self.n_rows - 1 - self.row


class Run(Protocol):
    """One path under way over one prompt.

    Only ``step`` is asked for; `kvdrift.paths.own.OwnRun` has defaults for the rest. What a run can do beside these
    stands in `kvdrift.paths.capabilities`.
    """

    @property
    def path(self) -> Path:
        """The path that it is a run of."""
        ...

    model: Model
    attn: str | None
    controls: tuple[Control, ...]

    def step(self, token: int | None = None) -> Step:
        """Consume a token (at step 0: none, the prompt is consumed) and predict the next."""
        ...

    def skip(self, token: int) -> None:
        """Consume a token without needing the prediction; a path may do less work for it."""
        ...

    def key_positions(self, layer: int, n_keys: int) -> Sequence[int]:
        """Absolute positions of the ``n_keys`` keys that the kernel of ``layer`` reads in the latest pass.

        A patch that writes keys asks *during* the pass, before the kernel of ``layer`` is called.

        The mask hides those beyond the current one (free slots of a static cache) and below 0 (left padding).
        """
        ...

    def fork(self, controls: tuple[Control, ...] | None = None) -> Run:
        """An independent continuation from here, with other controls if given; this run is not touched."""
        ...

    def close(self) -> None:
        """Let go of caches and controls."""
        ...


class Path(Protocol):
    """One way to execute a model over tokens.

    Only ``start(model, ids)`` is asked for; `kvdrift.paths.own.OwnPath` has defaults for the rest. A class that
    inherits from this one promises all of it. In which other manners a path can be run stands in
    `kvdrift.paths.path_capabilities`.
    """

    @property
    def label(self) -> str:
        """What tables and figures call it."""
        ...

    @property
    def model(self) -> Model | None:
        """A model of its own, or None to run the one given to the verb."""
        ...

    @property
    def attn(self) -> str | None:
        """An attention implementation, or None for the model's own."""
        ...

    @property
    def controls(self) -> tuple[Control, ...]:
        """Changes of arithmetic."""
        ...

    def start(self, model: Model, ids: Sequence[int], controls: tuple[Control, ...] | None = None) -> Run:
        """Begin a run over a prompt; ``controls`` replaces the path's own where given."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """The plain values that decide its numbers: its class and attributes."""
        return attributes_of(self)

    def with_model(self, model: Model) -> Path:
        """The same path on another model."""
        return with_attribute(self, model)

    def varied(self, **options: Any) -> Path | None:
        """The same path with other options, such as ``left_padding=3``; None if it has none by that name."""
        if not is_dataclass(self) or not {field.name for field in fields(self)}.issuperset(options):
            return None
        return changed(self, **options)


def changed(path: Any, **options: Any) -> Any:
    """A copy of a path with other options, which keeps what a subclass has beside the fields."""
    other = copy.copy(path)
    for name, value in options.items():
        object.__setattr__(other, name, value)  # frozen dataclasses, too
    if is_dataclass(other) and hasattr(other, "__post_init__"):
        other.__post_init__()
    return other


def with_attribute(path: Any, model: Model) -> Any:
    """A copy of a path whose attribute ``model`` is another one.

    Raises
    ------
    InputError
        If there is no way to make one.
    """
    try:
        return changed(path, model=model)
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{getattr(path, 'label', type(path).__name__)} cannot be put on another model ({error}): give it "
            "with_model(model), the same path on that model."
        ) from error


def on_copy(path: Path, copied: Callable[[Model], Model]) -> Path:
    """The path with a copy of the model that it has of its own; itself if it has none."""
    if path.model is None or (other := copied(path.model)) is path.model:
        return path
    return path.with_model(other)


def path_info(path: Path, model: Model) -> PathInfo:
    """What results say about a path that ran ``model``."""
    return PathInfo(
        label=path.label,
        model=model.name,
        dtype=model.dtype_name,
        attn=path.attn or model.attn,
        device=str(model.device),
        controls=tuple(control.label for control in path.controls),
    )


def path_settings(path: Path, model: Model) -> dict[str, Any]:
    """Everything that decides a path's numbers beside the prompt, as JSON holds it."""
    used = path.model or model
    return asdict(path_info(path, used)) | {"path": dict(settings_of(path)) | {"model": used.settings()}}
