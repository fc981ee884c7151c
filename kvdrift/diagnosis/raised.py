"""Whose an error is: a path runs its case again with nothing of kvdrift's watching it, and raises again or does not."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from pathlib import Path as FilePath

import torch
from torch import nn

from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.evidence import Finding
from kvdrift.diagnosis.locate import Where
from kvdrift.diagnosis.lockstep import Moment, alone
from kvdrift.diagnosis.pinpoint import layer_of
from kvdrift.errors import InternalError, KvdriftError, one_line
from kvdrift.models.model import Model
from kvdrift.paths.path import Path

ROOT = FilePath(__file__).parents[1]
NO_MEMORY = (MemoryError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Raised:
    """An error that a path raised by itself.

    Attributes
    ----------
    error
        What was raised.
    moment
        In which step.
    """

    error: Exception
    moment: Moment

    @property
    def declared(self) -> bool:
        """Whether it is a refusal: the path says that it cannot do this (a crop, so long a context)."""
        return isinstance(self.error, KvdriftError)


def cause(model: Model, case: Case, b: Path, error: Exception) -> Finding | str:
    """What an error in a case means.

    Both paths run the case again, natively and with no observer. What is raised then is raised by the model, the
    cache or whatever else was handed in; what is not is kvdrift's own.

    Returns
    -------
    Finding or str
        A crash of one of the paths, or why the case cannot be examined: neither can run it, a path declares that it
        cannot, or memory does not suffice.

    Raises
    ------
    InternalError
        If neither path raises by itself, or what is raised comes from kvdrift's own code.
    """
    if out_of_memory(error):
        return "memory does not suffice"
    b = case.reference(b)
    raised, fed = run_alone(model, case)
    other, _ = run_alone(model, replace(case, a=b, feed=tuple(fed), steps=len(fed), passes=()))
    found = [(case.a, raised), (b, other)]
    fallen = [(path, one) for path, one in found if one is not None]
    if any(out_of_memory(one.error) for _, one in fallen):
        return "memory does not suffice"
    for path, one in fallen:
        if one.declared:
            return f"{path.label} cannot run it: {one_line(one.error)}"
        if raised_by_kvdrift(one.error):
            raise InternalError.of(one.error, f"while {path.label} ran {case.name}") from one.error
    if not fallen:
        if isinstance(error, KvdriftError):
            return one_line(error)
        raise InternalError.of(error, f"while it observed {case.name}, which both paths run by themselves") from error
    if len(fallen) == 2:
        return f"both paths fail in it ({said(fallen[0][1].error)})"
    path, one = fallen[0]
    runs = b if path is case.a else case.a
    what = f"raises {said(one.error)}, where {runs.label} runs"
    return Finding("crash", path.label, what, one.moment, raising_module(path.model or model, one.error))


def run_alone(model: Model, case: Case) -> tuple[Raised | None, list[int]]:
    """Run path a of a case with nothing watching it.

    Returns
    -------
    Raised or None
        The error that ended it.
    fed
        The tokens that it had consumed after the prompt, less those taken back; the last one may be what it fell over.
    """
    moment = Moment(case, 0, len(case.prompt) - 1, case.prompt)
    try:
        for moment in alone(model, case):  # noqa: B007 # the latest one is asked for after an error
            pass
    except Exception as error:  # whatever a model, a cache or a path of somebody's own raises
        return Raised(thrown(error), moment), list(moment.tokens[len(case.prompt) :])
    return None, list(moment.tokens[len(case.prompt) :])


def thrown(error: Exception) -> Exception:
    """What a model threw: a StopIteration that leaves a generator, such as a path's steps, becomes a RuntimeError."""
    return error.__cause__ if isinstance(error.__cause__, StopIteration) else error


def out_of_memory(error: Exception) -> bool:
    """Whether an error is a lack of memory; PyTorch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, NO_MEMORY) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error).lower()
    )


def raised_by_kvdrift(error: Exception) -> bool:
    """Whether an error was raised by a line of kvdrift's own, rather than by what kvdrift runs."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and FilePath(frames[-1]).is_relative_to(ROOT)


def raising_module(model: Model, error: Exception) -> Where | None:
    """The innermost module of the model that was running when the error was raised; None if none was."""
    names = {id(module): name for name, module in model.hf.named_modules()}
    running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [names[id(module)] for module in running if isinstance(module, nn.Module) and names.get(id(module))]
    return None if not inside else Where(layer_of(model, inside[-1]), model.backend.plain_name(inside[-1]), "")


def said(error: Exception) -> str:
    """An error's kind and what it says."""
    words = one_line(error)
    return f"{type(error).__name__} ({words})" if words else type(error).__name__
