"""The protocol of a path: one way to execute a model over tokens, one step at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from jaxtyping import Float
from torch import Tensor

from kvdrift.controls import Control
from kvdrift.errors import InputError
from kvdrift.models.labels import PathInfo
from kvdrift.settings import settings_of

if TYPE_CHECKING:
    from kvdrift.models.model import Model


@dataclass(frozen=True)
class Step:
    """What one step returned.

    Attributes
    ----------
    logits
        Next-token logits ``[vocab]`` at the current position, in the model's dtype.
    position
        The current position: the absolute index of the last token consumed.
    """

    logits: Float[Tensor, " vocab"]
    position: int


class Run(Protocol):
    """One path under way over one prompt."""

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
    """One way to execute a model over tokens. A third path is a small file with these members."""

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


def check_path(path: Any, name: str) -> Path:
    """Return ``path``, which was given as argument ``name``.

    Raises
    ------
    InputError
        If it is no path.
    """
    if isinstance(path, type) or not callable(getattr(path, "start", None)):
        shown = path.__name__ if isinstance(path, type) else repr(path)
        raise InputError(f"{name}={shown} is no path; give an object, such as kd.CacheOn() or kd.CacheOff().")
    if missing := [member for member in ("label", "model", "attn", "controls") if not hasattr(path, member)]:
        raise InputError(
            f"{name}={type(path).__name__} is no whole path: it lacks {', '.join(missing)}; see "
            "kvdrift.paths.path.Path."
        )
    return path


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


def path_notes(model: Model, paths: Iterable[Path], n_tokens: int) -> tuple[str, ...]:
    """What is to be known about numbers of these paths over sequences of so many tokens, each sentence once."""
    found: list[str | None] = []
    for path in paths:
        used = path.model or model
        if getattr(path, "call", None) == "explicit":
            found.append(used.default_positions)
        found.append(used.beyond_context(n_tokens))
    return tuple(dict.fromkeys(note for note in found if note is not None))


def path_settings(path: Path, model: Model) -> dict[str, Any]:
    """Everything that decides a path's numbers beside the prompt, as JSON holds it."""
    used = path.model or model
    return asdict(path_info(path, used)) | {"path": dict(settings_of(path)) | {"model": used.settings()}}
