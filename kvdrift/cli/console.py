"""What a person sees: what was found on stdout, everything else on stderr, and never taken for markup."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdrift.errors import FileError, InputError
from kvdrift.words.layout import columns

INTERRUPTED = 130
NOTHING_WRITTEN = "Stopped; nothing was written."
console = Console(stderr=True, highlight=False)
results = Console(highlight=False)


class Interrupted(Exception):
    """Ctrl-C, with a sentence about what is left."""


class ReaderGone(Exception):
    """Whatever read stdout went away, as ``head`` does."""


def say(text: str) -> None:
    """Tell a person on stderr what is going on; brackets in it are brackets."""
    console.print(Text(text), soft_wrap=not console.is_terminal)


def answer(text: str) -> None:
    """Print what a verb found to stdout: fitted to a terminal, and into a file or a pipe as it is.

    Called outside of `working`, which keeps stdout clean.
    """
    if results.is_terminal:
        results.print(Text(text))
    else:
        _echo(text)


def answer_json(value: Any) -> None:
    """Print one JSON object, on one line of stdout."""
    _echo(json.dumps(value, allow_nan=False))


def answer_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table to stdout: fitted to a terminal, and into a file or a pipe with no line broken or cut."""
    if results.is_terminal:
        table = Table(*header, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*map(Text, row))
        results.print(table)
        return
    for line in columns((header, *rows)):
        _echo(line)


def _echo(text: str) -> None:
    try:
        typer.echo(text)  # which flushes
    except BrokenPipeError:
        raise ReaderGone from None


def complain(text: str) -> None:
    """Print the one sentence of a refusal."""
    console.print(Text.assemble(("kvdrift: ", "bold red"), text), soft_wrap=not console.is_terminal)


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Around the work of a verb: stdout stays clean, and Ctrl-C ends in a sentence.

    Whatever is printed on the way goes to stderr, so that stdout holds one JSON object or nothing.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except Interrupted:
        raise
    except Exception as error:
        if _was_interrupted(error):
            raise Interrupted(NOTHING_WRITTEN) from None
        raise
    except KeyboardInterrupt:
        raise Interrupted(NOTHING_WRITTEN) from None


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether this is Ctrl-C in disguise: transformers makes an import error of it while it is being imported."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def check_target(path: Path | None) -> None:
    """Refuse a file that could not be written, before a long run rather than after it.

    Raises
    ------
    InputError
        If the path is a folder, or a device or pipe.
    FileError
        If its folder cannot be made or written.
    """
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file to write.")
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is no ordinary file; give the name of a file to write.")
    folder = path.absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"The folder {folder} cannot be made ({error.strerror}); choose another.") from error
    if not os.access(folder, os.W_OK):
        raise FileError(f"The folder {folder} cannot be written; choose another.")
