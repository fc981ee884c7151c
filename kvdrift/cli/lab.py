"""``kvdrift lab``: JupyterLab, opened at the notebooks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvdrift.errors import FileError, InputError

FOLDERS = ("notebooks", "tutorials")


def lab(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Where the notebooks are; by default this folder, else the checkout kvdrift runs from."),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser, or print the address.")
    ] = True,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", min=1, max=65535)] = None,
) -> None:
    """Open JupyterLab at the notebooks (free exploration) and tutorials (lessons)."""
    root = find(folder)
    if importlib.util.find_spec("jupyterlab") is None:
        raise InputError("JupyterLab is not installed; install it with: pip install 'kvdrift[notebook]'.")
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={root}"]
    command += [] if browser else ["--no-browser"]
    command += ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # in a container
    command += [] if port is None else [f"--port={port}"]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def find(folder: Path | None) -> Path:
    """The folder to open: the one given, or the first of this one and the checkout that holds notebooks.

    Raises
    ------
    FileError
        If there are no notebooks.
    """
    if folder is not None:
        if not folder.is_dir():
            raise FileError(f"{folder} is no folder; give the one that holds the notebooks.")
        if not any(folder.glob("*.ipynb")) and not _has_notebooks(folder):
            raise FileError(f"There are no notebooks in {folder}; give the folder that holds them.")
        return folder.resolve()
    for root in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if _has_notebooks(root):
            return root
    raise FileError(
        "There are no notebooks here: they come with a clone of the repository, not with the installed package. Run "
        "kvdrift lab in the clone, or give the folder that holds them."
    )


def _has_notebooks(root: Path) -> bool:
    return any(any((root / name).glob("*.ipynb")) for name in FOLDERS)
