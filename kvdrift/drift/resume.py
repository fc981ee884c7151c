"""Finished prompts of a comparison, kept so that an interrupted run can go on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvdrift.drift.result import Drift
from kvdrift.errors import FileError
from kvdrift.runs.store import Store


class FinishedPrompts:
    """Finished prompts, one file each, in a store that remembers what they were made with.

    Parameters
    ----------
    folder
        Where they are kept, or None to keep nothing.
    settings
        What decides the numbers. A folder made with other settings is refused.
    """

    def __init__(self, folder: str | Path | None, settings: Mapping[str, Any]) -> None:
        self._store = Store(folder, "comparison", settings)

    def load(self, number: int) -> Drift | None:
        """The drift of a prompt that was finished before.

        Raises
        ------
        FileError
            If its file is gone, or is not the one that was kept.
        """
        record = self._store.done.get(str(number))
        if record is None or self._store.folder is None:
            return None
        file = self._store.folder / str(record["file"])
        try:
            drift = Drift.load(file)
            if _digest(file) != record["sha256"]:
                raise FileError("It is not the file that was kept.")
            return drift
        except (FileError, OSError) as error:
            raise FileError(
                f"{file} cannot be used; delete {self._store.folder} to run its prompts again. {error}"
            ) from error

    def save(self, number: int, drift: Drift) -> None:
        """Keep a finished prompt."""
        if self._store.folder is not None:
            file = drift.save(self._store.folder / f"prompt-{number:05d}.safetensors")
            self._store.add(str(number), {"file": file.name, "sha256": _digest(file)})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.close()


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
