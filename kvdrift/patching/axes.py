"""The cells of a sweep: every combination of site, schedule and the values of its axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from kvdrift.errors import InputError
from kvdrift.models.model import Model
from kvdrift.models.sites import GLOBAL_SITES, HEAD_SITES
from kvdrift.patching.blocks import layers_of
from kvdrift.patching.schedule import Schedule
from kvdrift.patching.setup import Setup
from kvdrift.patching.spec import KV, Cell, Patch, Write, as_cell

AXES = ("layer", "head", "position", "step")


def cells_over(
    setup: Setup,
    sites: Sequence[str],
    axes: tuple[str, ...],
    schedules: Sequence[str | Schedule],
    chosen: dict[str, Any],
    write: Write | None,
) -> list[Cell]:
    """Every combination of site, schedule and the values of the axes.

    Parameters
    ----------
    setup
        Prompts and model.
    sites, schedules, write
        As `kvdrift.sweep` takes them.
    axes
        Some of `AXES`.
    chosen
        Axis → its values, or what every cell is restricted to; None for all.

    Raises
    ------
    InputError, SiteError
        If they do not go together, or the model does not give a site.
    """
    if not axes or len(set(axes)) < len(axes) or not set(axes) <= set(AXES):
        raise InputError(f"over={list(axes)}: choose one or several of {', '.join(AXES)}, each once.")
    if write is not None and not any(site in ("k", "v", KV) for site in sites):
        raise InputError(f"write={write!r} is for k, v and kv, and the sweep has none of them; leave it out.")
    model = setup.recipient.model or setup.model
    cells = []
    for schedule, site in product(_schedules(setup, axes, schedules, chosen["step"]), sites):
        kv = site in ("k", "v", KV)
        whole = Patch(site, None if site in GLOBAL_SITES else _listed(chosen["layer"]), schedule=schedule)
        layers = _layers(model, whole) if "layer" in axes and site not in GLOBAL_SITES else [whole.layers]
        for layer in layers:
            heads = _heads(model, whole, layer, chosen["head"]) if "head" in axes else [chosen["head"]]
            positions = _positions(setup, chosen["position"]) if "position" in axes else [chosen["position"]]
            for head, position in product(heads, positions):
                patch = Patch(site, layer, head, position, schedule, write if kv else None)
                cells.append(as_cell(patch))
    return cells


def _schedules(
    setup: Setup, axes: tuple[str, ...], schedules: Sequence[str | Schedule], steps: Iterable[int] | None
) -> list[Schedule]:
    if "step" not in axes:
        if steps is not None:
            raise InputError("steps= is for over='step'; otherwise give schedule=.")
        return [Schedule.parse(schedule) for schedule in schedules]
    if [str(schedule) for schedule in schedules] != ["persistent"]:
        raise InputError("over='step' patches once at each step, so it cannot be combined with schedule=.")
    chosen = list(range(1, min(setup.lengths) - 1) if steps is None else steps)
    if not chosen:
        raise InputError("over='step' finds no step with one after it; ask for 3 new tokens or more.")
    return [Schedule.one_shot(step) for step in chosen]


def _listed(numbers: Iterable[int] | int | None) -> list[int] | int | None:
    return numbers if numbers is None or isinstance(numbers, int) else list(numbers)


def _layers(model: Model, patch: Patch) -> list[int]:
    """The layers that have all sites of a patch."""
    first, *others = [layers_of(model, patch, site) for site in patch.sites]
    return [layer for layer in first if all(layer in other for other in others)]


def _heads(model: Model, patch: Patch, layer: Any, given: Iterable[int] | int | None) -> Iterable[int]:
    if patch.site not in (*HEAD_SITES, KV):
        raise InputError(f"over='head': {patch.site!r} has no heads; sweep over q, k, v, z or kv.")
    if given is not None:
        return [given] if isinstance(given, int) else list(given)
    if patch.site in ("q", "z"):
        return range(model.architecture.n_heads)
    of = layer if isinstance(layer, int) else _layers(model, patch)[0]
    return range(model.architecture.layers[of].n_kv_heads)


def _positions(setup: Setup, given: Any) -> Iterable[int]:
    if given is None:
        return range(min(len(prompt.ids) for prompt in setup.prompts))
    if isinstance(given, str):
        raise InputError(f"positions={given!r}: over='position' goes through absolute positions.")
    return [given] if isinstance(given, int) else list(given)
