"""Where NaN or infinity began: the case runs again in its own manner, on the model and the tokens that gave it."""

from __future__ import annotations

from dataclasses import replace

from kvdrift.controls import Control
from kvdrift.diagnosis.evidence import NonFiniteFinding
from kvdrift.diagnosis.locate import place
from kvdrift.diagnosis.lockstep import Moment, alone
from kvdrift.models.model import Model
from kvdrift.paths.capabilities import left_padding
from kvdrift.paths.path import Path
from kvdrift.tracing.finite import NonFinite, broken_weight, watch_all


def explain(
    model: Model, moment: Moment, path: Path, controls: tuple[Control, ...] = (), twin: bool = False
) -> NonFiniteFinding:
    """Say where the logits of a step left the finite numbers.

    Parameters
    ----------
    model
        The model that ran, for a path that has none of its own.
    moment
        The step.
    path
        The path, in the manner of the case: the case's own a, or the reference.
    controls
        What was entered beside its own.
    twin
        Whether ``model`` is a tiny twin of the one under test.
    """
    model, case = path.model or model, moment.case
    manner = case.manner if path is case.a else None
    circumstance = f", {manner}" if manner else ""
    when = f"{str(moment)[0].upper()}{str(moment)[1:]}, {path.label}{circumstance}{', on a tiny twin' if twin else ''}"
    padding, found = left_padding(path), _first(model, moment, path, controls)
    where = None if found is None else place(model, found.layer, found.site)
    weight = broken_weight(model)
    if weight is not None:
        return NonFiniteFinding(f"{when}: {weight}", where, "Load the weights again.", manner)
    if found is None:
        what = f"{model.name} in {model.dtype_name} gives logits that are not finite although every block is finite."
        return NonFiniteFinding(f"{when}: {what}", None, "Look at the final norm and the LM head.", manner)
    advice = found.advice(model, padding)
    return NonFiniteFinding(
        f"{when}: {found.told(model, padding)}.", where, f"{advice[0].upper()}{advice[1:]}.", manner
    )


def _first(model: Model, moment: Moment, path: Path, controls: tuple[Control, ...]) -> NonFinite | None:
    """The first value that is not finite on the way to a step, whose pass or an earlier one gave it."""
    case = moment.case
    if path is not case.a:
        fed = moment.tokens[len(case.prompt) :]
        case, moment = replace(case, a=path, feed=fed, steps=len(fed), passes=()), replace(moment, step=len(fed))
    found, passes = None, 0
    with watch_all(model) as watch:
        for now in alone(model, case, controls):
            found = found or watch.first_nonfinite()
            if found is not None or now.step > moment.step:
                break
            passes += len(watch.passes)
            watch.clear()
        found = found or watch.first_nonfinite()
    return None if found is None else replace(found, number=found.number + passes)
