"""Finished cells of a sweep, one JSON line each, so that an interrupted sweep can go on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from kvdrift.errors import FileError

Rows = dict[str, np.ndarray]


class Ledger:
    """An append-only file of finished work, which remembers what it was made with.

    The first line holds the settings; every other line one prompt's rows of one cell, or of the shared arms
    (cell -1). A last line that was cut off by an interruption is dropped.

    Parameters
    ----------
    path
        The file, or None to keep nothing.
    settings
        What decides the numbers. A file made with other settings is refused.

    Raises
    ------
    FileError
        If the file cannot be read or written, or was made with other settings.
    """

    def __init__(self, path: str | Path | None, settings: dict[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self._rows: dict[tuple[int, int], Rows] = {}
        if self.path is None:
            return
        settings = json.loads(json.dumps(settings))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._read(settings)
            if not self.path.exists() or self.path.stat().st_size == 0:
                self._append([{"kvdrift": "sweep", "settings": settings}])
        except OSError as error:
            if isinstance(error, FileError):
                raise
            raise FileError(f"Cannot use {self.path} for results: {error}; choose another file.") from error

    def get(self, prompt: int, cell: int) -> Rows | None:
        """The rows of a cell that was finished before, or None."""
        return self._rows.get((prompt, cell))

    def add(self, finished: dict[tuple[int, int], Rows]) -> None:
        """Keep finished rows, in memory and on disk.

        Raises
        ------
        FileError
            If the file cannot be written.
        """
        self._rows |= finished
        if self.path is None:
            return
        lines = [
            {"prompt": prompt, "cell": cell, "rows": {name: values.tolist() for name, values in rows.items()}}
            for (prompt, cell), rows in finished.items()
        ]
        try:
            self._append(lines)
        except OSError as error:
            raise FileError(f"Cannot write {self.path}: {error}; make room or choose another file.") from error

    def _append(self, lines: list[dict[str, Any]]) -> None:
        assert self.path is not None, "nothing is kept without a file"
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())

    def _read(self, settings: dict[str, Any]) -> None:
        assert self.path is not None, "there is a file to read"
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        lines = content[:whole].splitlines()
        try:
            head, *rest = [json.loads(line) for line in lines] or [None]
            before = {} if head is None else dict(head["settings"])
            found = {
                (line["prompt"], line["cell"]): {name: np.array(values) for name, values in line["rows"].items()}
                for line in rest
            }
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(f"{self.path} is not a results file of a sweep; choose another file.") from error
        if head is None and content:
            raise FileError(f"{self.path} is not a results file of a sweep; choose another file.")
        other = [name for name in settings if head is not None and settings[name] != before.get(name)]
        if other:
            raise FileError(
                f"{self.path} holds another sweep (it differs in {', '.join(other)}); choose another file or delete it."
            )
        if whole < len(content):
            os.truncate(self.path, whole)
        self._rows = found
