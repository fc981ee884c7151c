"""From results to one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from kvdrift.drift.result import Drift
from kvdrift.errors import InputError
from kvdrift.files import write_atomically
from kvdrift.report.figures import Figure, Missing, families_figure, templates_json
from kvdrift.report.kinds import Kind, kind_of
from kvdrift.report.packed import plotlyjs
from kvdrift.report.parts import subject, weights
from kvdrift.version import __version__


def write_report(path: str | Path, *results: Any, title: str | None = None, command: str | None = None) -> Path:
    """Write one self-contained HTML file: reading, figures, tables, provenance; no network is needed to see it.

    Parameters
    ----------
    path
        The file to write, atomically.
    results
        Any mix of what `kvdrift.compare`, `kvdrift.patch`, `kvdrift.sweep`, `kvdrift.factorial`, `kvdrift.falsify`,
        `kvdrift.evaluate` and the experiments of the paper return. A figure that the data do not support is replaced
        by the sentence that says why.
    title
        Title of the document; by default made from the models and dtypes.
    command
        What to type to get the results again; by default what the results' provenance holds.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    InputError
        If there is no result, or one of a kind that the report does not know.
    FileError
        If the file cannot be written.

    Examples
    --------
    >>> import kvdrift as kd
    >>> drift = kd.compare(kd.load(kd.models.tiny("llama")), [1, 2, 3], max_new_tokens=4, progress=False)
    >>> kd.write_report("report.html", drift)  # doctest: +SKIP
    PosixPath('report.html')
    """
    if not results:
        raise InputError("write_report was given no result; give at least one, such as a Drift.")
    kinds = [_known(result) for result in results]
    sections = []
    for number, (kind, result) in enumerate(zip(kinds, results, strict=True), start=1):
        section = kind.section(result, f"result-{number}")
        sections.append(
            replace(
                section,
                heading=f"{number}. {section.heading}",
                what=" · ".join((section.what, *weights(section))),
                command=command or section.command,
            )
        )
    drifts = [result for result in results if isinstance(result, Drift)]
    together = [families_figure(drifts)] if len(drifts) > 1 else []
    shared = [figure for figure in together if isinstance(figure, Figure)]
    page = (
        _environment()
        .get_template("template.html.j2")
        .render(
            title=title or _title(kinds, results),
            subtitle=sections[0].what if len(results) == 1 else f"{len(results)} results",
            sections=sections,
            shared=shared,
            shared_missing=[figure for figure in together if isinstance(figure, Missing)],
            figures=[figure for section in sections for figure in section.figures] + shared,
            templates=Markup(templates_json()),
            plotlyjs=plotlyjs(),
            glossary=dict(pair for kind in kinds for pair in kind.glossary).items(),
            version=__version__,
        )
    )
    return write_atomically(path, lambda temporary: _write(temporary, page))


def _write(path: Path, page: str) -> None:
    path.write_text(page, encoding="utf-8")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("kvdrift", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _known(result: Any) -> Kind:
    kind = kind_of(result)
    if kind is None:
        raise InputError(
            f"write_report was given a {type(result).__name__}; it takes what kvdrift.compare, patch, sweep, "
            "factorial, falsify, evaluate and the experiments of the paper return."
        )
    return kind


def _title(kinds: Sequence[Kind], results: Sequence[Any]) -> str:
    topics = " and ".join(dict.fromkeys(kind.topic for kind in kinds))
    subjects = dict.fromkeys(subject(kind.path(result)) for kind, result in zip(kinds, results, strict=True))
    return f"{topics[0].upper()}{topics[1:]} of {' and '.join(subjects)}"
