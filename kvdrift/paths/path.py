"""The protocol of a path: one way to execute a model over tokens, one step at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from jaxtyping import Float
from torch import Tensor

from kvdrift.controls import Control
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
    """One path under way over one prompt.

    Only ``step`` is asked for; `kvdrift.paths.own.OwnRun` has defaults for the rest. Beside these a run may have
    ``stateless = True`` (it keeps nothing but tokens from one step to the next) and be `Overwritable`.
    """

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


class Overwritable(Protocol):
    """A run whose stored keys and values can be changed, as a patch with ``write="cache"`` does."""

    def held(self, layer: int) -> range:
        """Absolute positions of the entries that are stored in ``layer`` for the next pass to read."""
        ...

    def overwrite(self, layer: int, name: str, heads: Any, positions: Sequence[int], value: Tensor) -> None:
        """Put ``value [1, kv_head, position, feature]`` into ``name`` (``"k"`` or ``"v"``) at held positions."""
        ...


def overwritable(run: Run) -> Overwritable | None:
    """The run, if it has both members of `Overwritable`; anything else by one of these names is the user's own."""
    both = all(callable(getattr(run, name, None)) for name in ("held", "overwrite"))
    return cast(Overwritable, run) if both else None


def stateless(run: Run) -> bool:
    """Whether what is written during a step ends with it: the run says ``stateless = True``."""
    return getattr(run, "stateless", False) is True


class Path(Protocol):
    """One way to execute a model over tokens.

    Only ``start(model, ids)`` is asked for; `kvdrift.paths.own.OwnPath` has defaults for the rest.
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
