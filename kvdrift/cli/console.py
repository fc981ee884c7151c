"""What a person sees: plain text on stderr, never taken for markup."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvdrift.errors import FileError, InputError

INTERRUPTED = 130
NOTHING_WRITTEN = "Stopped; nothing was written."
console = Console(stderr=True, highlight=False)


class Interrupted(Exception):
    """Ctrl-C, with a sentence about what is left."""


def say(text: str, style: str = "") -> None:
    """Print a line for a person; brackets in it are brackets."""
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


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
        If the path is a folder.
    FileError
        If its folder cannot be made or written.
    """
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file to write.")
    folder = path.absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"The folder {folder} cannot be made ({error.strerror}); choose another.") from error
    if not os.access(folder, os.W_OK):
        raise FileError(f"The folder {folder} cannot be written; choose another.")
