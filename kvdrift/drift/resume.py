"""Finished prompts of a comparison, kept so that an interrupted run can go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvdrift.drift.result import Drift
from kvdrift.errors import FileError
from kvdrift.files import write_atomically


class FinishedPrompts:
    """Finished prompts, one file each, in a folder that remembers what they were made with.

    Parameters
    ----------
    folder
        Where they are kept, or None to keep nothing.
    settings
        What decides the numbers. A folder made with other settings is refused.
    """

    def __init__(self, folder: str | Path | None, settings: dict[str, Any]) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is None:
            return
        settings = json.loads(json.dumps(settings))
        record = self.folder / "settings.json"
        if record.is_file():
            try:
                before = dict(json.loads(record.read_text()))
            except (OSError, ValueError, TypeError) as error:
                raise FileError(f"{record} cannot be read ({error}); empty {self.folder} or choose another.") from error
            other = [name for name in settings if settings[name] != before.get(name)]
            if other:
                raise FileError(
                    f"{self.folder} holds prompts of another comparison (it differs in {', '.join(other)}); "
                    "choose another folder or empty this one."
                )
        write_atomically(record, lambda path: path.write_text(json.dumps(settings)))

    def load(self, number: int) -> Drift | None:
        """The drift of a prompt that was finished before."""
        if self.folder is None or not self._file(number).is_file():
            return None
        try:
            return Drift.load(self._file(number))
        except FileError as error:
            raise FileError(
                f"{self._file(number)} cannot be used; delete it to run that prompt again. {error}"
            ) from error

    def save(self, number: int, drift: Drift) -> None:
        """Keep a finished prompt."""
        if self.folder is not None:
            drift.save(self._file(number))

    def _file(self, number: int) -> Path:
        assert self.folder is not None, "nothing is kept without a folder"
        return self.folder / f"prompt-{number:05d}.safetensors"
