"""The paper's drift experiment: the layer profile by family, beside the rounding floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from kvdrift.drift import findings
from kvdrift.drift.compare import compare
from kvdrift.drift.result import Drift
from kvdrift.errors import InputError
from kvdrift.experiments.experiment import Experiment
from kvdrift.renamed import renamed


@dataclass(frozen=True, repr=False)
class PaperDrift(Experiment):
    """One `Drift` per model, on the same prompts; made by `paper_drift`."""

    drifts: tuple[Drift, ...]

    def to_dataframe(self) -> Any:
        """One row per model: how its heads are grouped, where drift starts, how it grows, how it stands to the floor.

        ``first_layer_share`` and ``first_quarter_share`` are shares of the last layer's drift (see
        `kvdrift.drift.profile.Growth`), which the paper's two claims are about: that GQA models jump at the first
        layer (a first-layer share near 1), and that Gemma drifts evenly (a share near 1 / layers).
        """
        import pandas as pd

        return pd.DataFrame([profile_row(drift) for drift in self.drifts])


@renamed(resume="store")
def paper_drift(
    models: Any | Sequence[Any] | Mapping[str, Any],
    prompts: Any,
    *,
    max_new_tokens: int = 32,
    floor: int = 1,
    chat: bool = False,
    ignore_eos: bool = False,
    seed: int = 0,
    progress: bool = True,
    store: str | FilePath | None = None,
) -> PaperDrift:
    """Measure the layer profile of drift in several models on the same prompts.

    The paper finds that models with grouped queries (GQA) jump at the first layer while Gemma, with its sliding
    windows and larger head dimension, drifts evenly from layer to layer.

    Parameters
    ----------
    models
        One or several of what `kvdrift.load` takes, or a mapping whose keys name them.
    prompts
        As `kvdrift.compare` takes them; text, so that every model reads its own tokens.
    max_new_tokens, floor, chat, ignore_eos, seed, progress
        As in `kvdrift.compare`.
    store
        A folder that keeps finished prompts, one subfolder per model.

    Raises
    ------
    InputError
        If there is no model.

    Examples
    --------
    >>> import kvdrift as kd
    >>> models = [kd.models.tiny("llama"), kd.models.tiny("gemma3")]
    >>> found = kd.experiments.paper_drift(models, [[1, 2, 3]], max_new_tokens=3, progress=False)
    >>> list(found.to_dataframe()["grouping"])
    ['GQA 8:2', 'GQA 8:2']
    """
    if isinstance(models, Mapping):
        named = dict(models)
    else:
        listed = list(models) if isinstance(models, (list, tuple)) else [models]
        named = {str(place): model for place, model in enumerate(listed)}
    if not named:
        raise InputError("There is no model; give one or several of what kvdrift.load takes.")
    drifts = []
    for name, model in named.items():
        drift = compare(
            model,
            prompts,
            max_new_tokens=max_new_tokens,
            floor=floor,
            chat=chat,
            ignore_eos=ignore_eos,
            seed=seed,
            progress=progress,
            store=None if store is None else FilePath(store) / name,
        )
        drifts.append(drift)
    return PaperDrift(tuple(drifts))


def profile_row(drift: Drift) -> dict[str, Any]:
    """One row of `PaperDrift.to_dataframe`."""
    growth, start, architecture = drift.growth(), findings.onset(drift), drift.architecture
    heads = f"{architecture.n_heads}:{architecture.n_kv_heads}"
    row: dict[str, Any] = {
        "model": drift.a.model,
        "dtype": drift.a.dtype,
        "grouping": architecture.grouping if architecture.grouping == "MHA" else f"{architecture.grouping} {heads}",
        "sliding_layers": sum(info.window is not None for info in architecture.layers),
        "layers": architecture.n_layers,
        "prompts": len(drift.prompts),
        "onset": None if start is None else start.source_layer,
    }
    for name in ("first_layer_share", "first_quarter_share", "plateau_layer", "plateau", "plateau_over_floor"):
        estimate = getattr(growth, name)
        low, high = (None, None) if estimate is None or estimate.interval is None else estimate.interval
        row |= {name: None if estimate is None else estimate.value, f"{name}_low": low, f"{name}_high": high}
    return row
