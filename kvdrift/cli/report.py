"""``kvdrift report``: one HTML file from saved results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvdrift.cli import console


def report(
    files: Annotated[
        list[Path],
        typer.Argument(help="Results saved by kvdrift, of any kind.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("kvdrift-report.html"),
    title: Annotated[str | None, typer.Option(help="Title of the document.")] = None,
) -> None:
    """Write one self-contained HTML report from saved results; the models are not needed."""
    console.check_target(out)
    with console.working():
        from kvdrift.report import load_result, write_report

        results = [load_result(file) for file in files]
        written = write_report(out, *results, title=title)
    console.answer(f"Wrote {written}")
