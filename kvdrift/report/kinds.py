"""The kinds of results that a report knows: add one here, with its section in a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdrift.drift.result import Drift
from kvdrift.evaluation.result import Evaluation
from kvdrift.experiments.paper_architecture import PaperArchitecture
from kvdrift.experiments.paper_patching import PaperPatching
from kvdrift.ladder.result import Ladder
from kvdrift.models.labels import PathInfo
from kvdrift.patching.factorial_result import Factorial
from kvdrift.patching.result import PatchResult, Sweep
from kvdrift.report import (
    drift_section,
    evaluation_section,
    factorial_section,
    glossary,
    ladder_section,
    paper_architecture_section,
    paper_patching_section,
    patching_section,
)
from kvdrift.report.parts import Section


@dataclass(frozen=True)
class Kind:
    """One kind of result.

    Attributes
    ----------
    type
        Its class.
    topic
        What a page about it is about, for the title.
    path
        The path whose model and dtype the title names.
    section
        Makes its section from the result and the section's id.
    glossary
        The words it uses, with their meaning.
    saved_as
        The ``kind`` in the header of its file; None if it is no single file.
    load
        Reads what ``save`` wrote.
    """

    type: type
    topic: str
    path: Callable[[Any], PathInfo]
    section: Callable[[Any, str], Section]
    glossary: tuple[tuple[str, str], ...]
    saved_as: str | None
    load: Callable[[str | Path], Any]


KINDS = (
    Kind(Drift, "cache drift", lambda drift: drift.a, drift_section.section, glossary.DRIFT, "drift", Drift.load),
    Kind(
        PatchResult, "patching", lambda result: result.recipient, patching_section.patch_section, glossary.PATCHING,
        PatchResult.saved_as, PatchResult.load,
    ),
    Kind(
        Sweep, "patching", lambda sweep: sweep.recipient, patching_section.sweep_section, glossary.PATCHING,
        Sweep.saved_as, Sweep.load,
    ),
    Kind(
        Factorial, "patching", lambda result: result.on, factorial_section.section, glossary.PATCHING,
        "factorial", Factorial.load,
    ),
    Kind(
        Ladder, "the precision ladder", lambda ladder: ladder.model, ladder_section.section, glossary.LADDER, "ladder",
        Ladder.load,
    ),
    Kind(
        PaperPatching, "patching", lambda result: next(iter(result.sweeps.values())).recipient,
        paper_patching_section.section, glossary.PATCHING, None, PaperPatching.load,
    ),
    Kind(
        PaperArchitecture, "the architecture experiment", lambda result: result.original.a,
        paper_architecture_section.section, glossary.ARCHITECTURE, None, PaperArchitecture.load,
    ),
    Kind(
        Evaluation, "answers and texts", lambda evaluation: evaluation.a, evaluation_section.section,
        glossary.EVALUATION, "evaluation", Evaluation.load,
    ),
)  # fmt: skip


def kind_of(result: Any) -> Kind | None:
    """The kind of a result; None if the report does not know it."""
    return next((kind for kind in KINDS if isinstance(result, kind.type)), None)
