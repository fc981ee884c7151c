"""Long runs from the terminal: what is finished is kept, so that Ctrl-C costs one prompt or one group of cells."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdrift.cli.console import Interrupted
from kvdrift.errors import FileError, WeightsError

if TYPE_CHECKING:
    from kvdrift.models.model import Model


def resumable(
    model: Model, prompts: list[Any], command: str, store: Path | None, run: Callable[..., Any], *, cells: bool = False
) -> Any:
    """Run, keeping each finished prompt or cell in a folder, or in the cache folder until all are done.

    Parameters
    ----------
    model
        The loaded model.
    prompts
        Texts or lists of token ids. A single one is not worth keeping, its cells are.
    command
        The command that is running: together with the model's weights and the prompts it names the folder,
        and it goes into the result's provenance.
    store
        The folder to keep work in, which stays; None takes one in the cache folder, which goes when all is done.
    run
        Called with ``store=FOLDER`` or ``store=None``.
    cells
        Whether it is a sweep's cells that are kept.

    Raises
    ------
    Interrupted
        On Ctrl-C, with a sentence about what was kept.
    """
    folder = _folder(model, prompts, command) if store is None and (cells or len(prompts) > 1) else None
    kept = store if folder is None else folder
    try:
        result = run(store=kept)
    except KeyboardInterrupt:
        raise Interrupted(_tidy(folder, kept, len(prompts), cells)) from None
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return made_by(result, command)


def made_by(result: Any, command: str) -> Any:
    """The same result, whose provenance names the command that made it."""
    return replace(result, provenance={**result.provenance, "command": command})


def _folder(model: Model, prompts: list[Any], command: str) -> Path | None:
    from kvdrift.models.presets import cache_folder
    from kvdrift.runs.comparable import comparable

    settings = [command, model.settings(), prompts, comparable(model.device.type == "cuda")]
    name = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    try:
        return cache_folder() / "unfinished" / name
    except WeightsError:
        return None  # nowhere to keep finished prompts; the comparison itself needs no cache folder


def _tidy(folder: Path | None, kept: Path | None, prompts: int, cells: bool) -> str:
    """Say what an interrupted run leaves behind; a folder of ours with nothing finished in it is removed."""
    finished = finished_cells(kept) if cells else len(_finished(kept, "comparison"))
    if finished and cells:
        return f"Stopped; {finished} finished cells are kept in {kept}: the same command goes on from there."
    if finished:
        return f"Stopped; {finished} of {prompts} prompts are finished and kept: the same command goes on from there."
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    if cells:
        return "Stopped before the first cells were finished; no cell was kept and no result was written."
    return "Stopped before the first prompt was finished; nothing was kept and nothing was written."


def finished_cells(folder: Path | None) -> int:
    """How many cells a folder of results holds, over all prompts; the arms that all cells share are none."""
    return sum(not key.endswith("/shared") for key in _finished(folder, "sweep"))


def _finished(folder: Path | None, kind: str) -> list[str]:
    """The keys in a store; none where there is no store yet."""
    from kvdrift.runs.store import Store

    try:
        return [] if folder is None else list(Store.read(folder, kind)[1])
    except FileError:
        return []
