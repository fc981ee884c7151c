"""What the paper's experiments share: results in a folder, and a reading in sentences."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

from kvdrift import markup
from kvdrift.errors import FileError
from kvdrift.result import Result, Saved, say
from kvdrift.words.json import json_safe, not_finite


class Experiment(Result):
    """Base of the paper's experiments."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be measured, and why."""
        return ()

    def to_dataframe(self) -> Any:
        """The experiment's table, a `pandas.DataFrame`."""
        raise NotImplementedError

    def reading(self) -> list[str]:
        """What the table says about the paper's claims, in sentences."""
        return say(self, "reading")

    def summary(self) -> str:
        """The reading and the notes as one text."""
        return "\n".join([*self.reading(), *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """The table and the reading as plain data."""
        rows = self.to_dataframe().to_dict(orient="records")
        return {"table": json_safe(rows, not_finite), "reading": self.reading()}

    def _repr_html_(self) -> str:
        return markup.listing(self.summary().splitlines())


class Folder:
    """Base of frozen dataclasses whose fields are results, or None: a folder keeps them, one file each."""

    part: ClassVar[type[Saved]]
    """What each file holds."""
    topic: ClassVar[str]
    """What a folder that is none of this kind is said not to hold."""

    def save(self, folder: str | Path) -> Path:
        """Write every part into a folder, one file each.

        Raises
        ------
        FileError
            If one cannot be written.
        """
        for name, file in self._files(folder).items():
            if (part := getattr(self, name)) is not None:
                part.save(file)
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what `save` wrote.

        Raises
        ------
        FileError
            If the folder does not hold such an experiment, or a file is truncated or edited.
        """
        files = {name: file for name, file in cls._files(folder).items() if file.is_file()}
        if not files.keys() & cls._needed():
            raise FileError(f"{folder} holds no saved {cls.topic}; give the folder that `save` wrote.")
        return cls(**{name: cls.part.load(file) for name, file in files.items()})

    @classmethod
    def _files(cls, folder: str | Path) -> dict[str, Path]:
        return {field.name: Path(folder) / f"{field.name}.safetensors" for field in fields(cls)}  # type: ignore[arg-type]

    @classmethod
    def _needed(cls) -> set[str]:
        """The parts of which one must be there: those without a default, or any if all have one."""
        every = fields(cls)  # type: ignore[arg-type]
        return {field.name for field in every if field.default is not None} or {field.name for field in every}
