"""What a long run has finished, one JSON line each, kept so that the run can be killed at any moment and go on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from filelock import FileLock, Timeout

from kvdrift.errors import FileError, InputError
from kvdrift.files import write_atomically
from kvdrift.runs.settings import differences
from kvdrift.settings import NAMING, untold

SCHEMA = 1
SETTINGS, RECORDS, LOCK = "settings.json", "records.jsonl", ".lock"
ELSEWHERE = "choose another folder"
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Store:
    """An append-only folder of finished work, which remembers what it was made with.

    ``settings.json`` holds the settings, ``records.jsonl`` one line per finished piece: its key and its record.
    A line is on the disk before `add` returns. A last line that was cut off by an interruption is dropped when
    the store is opened again. One process at a time may have it open. Records come back as JSON holds them:
    floats bit for bit, NaN and infinity as Python's ``json`` writes them, tuples as lists.

    Parameters
    ----------
    folder
        Where to keep the records, made if need be; None keeps nothing on the disk.
    kind
        What the records are of (``"sweep"``, ``"evaluation"``).
    settings
        What decides the numbers, as JSON can hold it. A store made with other settings is refused.

    Raises
    ------
    InputError
        If ``settings`` hold what cannot be told from another thing of its kind (`kvdrift.settings.settings_of`).
    FileError
        If the folder cannot be used, is open in another process, or holds something else: another schema, kind or
        settings (the sentence names what differs), a line that is no record, or one key twice.

    Examples
    --------
    >>> import tempfile
    >>> from kvdrift.runs.store import Store
    >>> folder = tempfile.mkdtemp()
    >>> with Store(folder, "demo", {"seed": 0}) as store:
    ...     store.add("item 1", {"loss": 0.1})
    >>> with Store(folder, "demo", {"seed": 0}) as store:
    ...     dict(store.done)
    {'item 1': {'loss': 0.1}}
    """

    def __init__(self, folder: str | Path | None, kind: str, settings: Mapping[str, Any]) -> None:
        self.folder = None if folder is None else Path(folder)
        self._done: dict[str, dict[str, Any]] = {}
        self._file: FileIO | None = None
        self._lock: FileLock | None = None
        if self.folder is None:
            return
        try:
            if (nameless := untold(dict(settings))) is not None:
                raise InputError(
                    f"{nameless}, which cannot be told from another one, so what it gives cannot be kept in "
                    f"{self.folder}: {NAMING}; or leave out store=."
                )
            self._open(self.folder, kind, json.loads(json.dumps(dict(settings))))
        except BaseException as error:
            self.close()
            if isinstance(error, FileError) or not isinstance(error, (OSError, NotImplementedError)):
                raise
            raise FileError(f"Cannot keep results in {self.folder}: {error}; {ELSEWHERE}.") from error

    @property
    def done(self) -> Mapping[str, dict[str, Any]]:
        """Every finished record by its key, in the order of finishing."""
        return MappingProxyType(self._done)

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Keep a finished record; once this returns, it survives the end of the process.

        Raises
        ------
        InputError
            If ``key`` is in the store already, the store is closed, or JSON cannot hold the record.
        FileError
            If the disk is full or the file cannot be written. What was kept before stays.
        """
        if key in self._done:
            raise InputError(f"{key!r} is in the store already, and a store keeps each key once.")
        try:
            line = json.dumps({"key": key, "record": dict(record)}).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise InputError(f"The record of {key!r} cannot be kept as JSON: {error}.") from error
        if self.folder is not None:
            self._append(line)
        self._done[key] = json.loads(line)["record"]

    def close(self) -> None:
        """Let go of the folder; another process may open it then."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def read(folder: str | Path, kind: str | None = None) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Settings and records of a store, which is neither locked nor changed: it may be open elsewhere.

        Parameters
        ----------
        folder
            Where the store is.
        kind
            What the records must be of; anything if left out.

        Raises
        ------
        FileError
            If there is no store, or it holds something else.
        """
        folder = Path(folder)
        try:
            settings = _settings(folder, kind)
            if settings is None:
                raise FileError(f"There are no results in {folder}; give a folder that a run has kept them in.")
            records = folder / RECORDS
            return settings, _records(records, records.read_bytes()) if records.exists() else {}
        except OSError as error:
            if isinstance(error, FileError):
                raise
            raise FileError(f"Cannot read results in {folder}: {error}.") from error

    def _open(self, folder: Path, kind: str, settings: dict[str, Any]) -> None:
        if folder.exists() and not folder.is_dir():
            raise FileError(f"{folder} is a file, and results are kept in a folder; {ELSEWHERE}.")
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise FileError(f"{folder} is in use by another run; wait for its end or {ELSEWHERE}.") from None
        before, records = _settings(folder, kind), folder / RECORDS
        if before is None:
            if records.exists():
                raise FileError(f"{folder} holds {RECORDS} without its {SETTINGS}; {ELSEWHERE}.")
            _write_settings(folder / SETTINGS, {"schema": SCHEMA, "kind": kind, "settings": settings})
        elif other := differences(before, settings):
            raise FileError(f"{folder} holds another {kind} (it differs in {other}); {ELSEWHERE} or delete it.")
        content = records.read_bytes() if records.exists() else b""
        self._done = _records(records, content)
        self._file = FileIO(records, "a")
        self._file.truncate(content.rfind(b"\n") + 1)
        os.fsync(self._file)
        _sync_folder(folder)

    def _append(self, line: bytes) -> None:
        if self._file is None:
            raise InputError(f"The store in {self.folder} is closed; open it again to add to it.")
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file)
        except BaseException as error:
            self.close()  # after half a line no other may follow; opening the store again cuts it off
            if not isinstance(error, OSError):
                raise
            raise FileError(
                f"Cannot write {self.folder}: {error}; make room, and the same call goes on from what is kept."
            ) from error


def _settings(folder: Path, kind: str | None) -> dict[str, Any] | None:
    """The settings in ``folder``, or None if there are none."""
    file = folder / SETTINGS
    if not file.exists():
        return None
    try:
        head = json.loads(file.read_bytes())
        schema, found, settings = int(head["schema"]), str(head["kind"]), dict(head["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f"{file} is not of a store of results; {ELSEWHERE}.") from error
    if schema != SCHEMA:
        raise FileError(
            f"{folder} holds results of schema {schema}, this version of kvdrift reads {SCHEMA}; {ELSEWHERE} or use "
            "the version that wrote it."
        )
    if kind is not None and found != kind:
        raise FileError(f"{folder} holds results of another kind ({found}, not {kind}); {ELSEWHERE}.")
    return settings


def _write_settings(file: Path, head: dict[str, Any]) -> None:
    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8") as stream:
            json.dump(head, stream)
            stream.flush()
            os.fsync(stream.fileno())

    write_atomically(file, write)


def _records(file: Path, content: bytes) -> dict[str, dict[str, Any]]:
    """The records of all whole lines."""
    found: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
            key, record = entry["key"], dict(entry["record"])
            if not isinstance(key, str):
                raise TypeError(f"the key is {key!r}, which is no text")
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(
                f"Line {number} of {file} is no record, so the file was changed; remove that line or {ELSEWHERE}."
            ) from error
        if key in found:
            raise FileError(f"Line {number} of {file} has the key {key!r} of an earlier line; remove one of the two.")
        found[key] = record
    return found


def _sync_folder(folder: Path) -> None:
    """Make sure that the names of new files are on the disk too, where the system can do that."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
