"""From results to one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from kvdrift.drift import summary
from kvdrift.drift.result import Drift
from kvdrift.errors import InputError
from kvdrift.files import write_atomically
from kvdrift.report import content
from kvdrift.report.figures import Figure, Missing, drift_figures, families_figure, templates_json


@dataclass(frozen=True)
class Section:
    """One result on the page."""

    id: str
    heading: str
    what: str
    tiles: list[content.Tile]
    reading: list[str]
    notes: list[str]
    figures: list[Figure]
    missing: list[Missing]
    tables: list[content.Table]
    provenance: list[content.Group]
    command: str | None


def write_report(path: str | Path, *results: Drift, title: str | None = None, command: str | None = None) -> Path:
    """Write one self-contained HTML file: reading, figures, tables, provenance; no network is needed to see it.

    Parameters
    ----------
    path
        The file to write, atomically.
    results
        One or several results of `kvdrift.compare`. A figure that the data do not support is replaced by the
        sentence that says why.
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
    from kvdrift import __version__  # this module is read while the package is still being imported

    if not results:
        raise InputError("write_report was given no result; give at least one, such as a Drift.")
    for result in results:
        if not isinstance(result, Drift):
            raise InputError(
                f"write_report was given a {type(result).__name__}; it takes what kvdrift.compare returns."
            )
    sections = [_section(result, number, command) for number, result in enumerate(results, start=1)]
    together = [families_figure(list(results))] if len(results) > 1 else []
    shared = [figure for figure in together if isinstance(figure, Figure)]
    page = (
        _environment()
        .get_template("template.html.j2")
        .render(
            title=title or _title(results),
            subtitle=summary.headline(results[0]) if len(results) == 1 else f"{len(results)} results",
            sections=sections,
            shared=shared,
            shared_missing=[figure for figure in together if isinstance(figure, Missing)],
            figures=[figure for section in sections for figure in section.figures] + shared,
            templates=Markup(templates_json()),
            plotlyjs=Markup(get_plotlyjs()),
            glossary=content.GLOSSARY,
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


def _title(drifts: Sequence[Drift]) -> str:
    return f"Cache drift of {' and '.join(dict.fromkeys(_name(drift) for drift in drifts))}"


def _name(drift: Drift) -> str:
    return f"{summary.model_name(drift.a.model)} in {drift.a.dtype}"


def _section(drift: Drift, number: int, command: str | None) -> Section:
    drawn, missing = drift_figures(drift, f"result-{number}")
    return Section(
        id=f"result-{number}",
        heading=f"{number}. {_name(drift)}",
        what=summary.headline(drift),
        tiles=content.tiles(drift),
        reading=summary.reading(drift),
        notes=list(drift.notes),
        figures=drawn,
        missing=missing,
        tables=content.tables(drift),
        provenance=content.provenance(drift),
        command=command or drift.provenance.get("command"),
    )
