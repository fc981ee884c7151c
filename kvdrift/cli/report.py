"""``kvdrift report``: one HTML file from saved results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvdrift.cli import console


def report(
    files: Annotated[list[Path], typer.Argument(help="Drifts saved by kvdrift.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("kvdrift-report.html"),
    title: Annotated[str | None, typer.Option(help="Title of the document.")] = None,
) -> None:
    """Write one self-contained HTML report from saved drifts; the models are not needed."""
    console.check_target(out)
    with console.working():
        from kvdrift.drift.result import Drift
        from kvdrift.report import write_report

        drifts = [Drift.load(file) for file in files]
        console.say(f"Wrote {write_report(out, *drifts, title=title)}")
