"""The command line as a whole: its verbs, and how it ends when something goes wrong."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kvdrift.cli import compare, demo, diagnose, evaluate, factorial, falsify, lab, models, patch, record, report, sweep
from kvdrift.cli.console import INTERRUPTED, NOTHING_WRITTEN, Interrupted, ReaderGone, complain
from kvdrift.errors import KvdriftError
from kvdrift.version import __version__

READER_GONE = 141
"""What a shell reports for a command ended by SIGPIPE."""

app = typer.Typer(
    name="kvdrift",
    help="Trace, measure and explain the drift between cached and cache-free decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo.demo)
app.command()(diagnose.diagnose)
app.command()(compare.compare)
app.command()(patch.patch)
app.command()(sweep.sweep)
app.command()(factorial.factorial)
app.command()(falsify.falsify)
app.command()(evaluate.evaluate)
app.command()(record.record)
app.command()(report.report)
app.command()(lab.lab)
app.add_typer(models.app, name="models")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _kvdrift(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Trace, measure and explain the drift between cached and cache-free decoding."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Parameters
    ----------
    arguments
        What follows ``kvdrift`` on the command line; None takes the process's own.

    Returns
    -------
    int
        0, or 1 for a refused input or a failed run, 2 for wrong usage, 130 after Ctrl-C, 141 where the reader of the
        output went away (``| head``). Every refusal is one sentence on stderr.

    Examples
    --------
    >>> from kvdrift.cli import main
    >>> main(["compare"])
    2
    """
    _replace_what_cannot_be_written()
    try:
        return int(app(args=arguments, prog_name="kvdrift", standalone_mode=False) or 0)
    except KvdriftError as error:
        complain(str(error))
        return 1
    except ReaderGone:
        return _reader_gone()
    except Interrupted as stop:
        complain(str(stop))
        return INTERRUPTED
    except (typer.Abort, KeyboardInterrupt):
        complain(NOTHING_WRITTEN)
        return INTERRUPTED
    except MemoryError:
        complain("There is not enough memory: take fewer prompts, fewer new tokens or a smaller model.")
        return 1
    except Exception as error:
        return _end(error)


def _replace_what_cannot_be_written() -> None:
    """Where output is not UTF-8 (a pipe on Windows), a sign that it lacks becomes a question mark, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _reader_gone() -> int:
    """End without a word: nobody reads, and Python's own flush at the end must find an open file."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            os.dup2(nowhere, stream.fileno())
        except (OSError, ValueError, AttributeError):  # it is no file, as in a notebook
            continue
    os.close(nowhere)
    return READER_GONE


def _end(error: Exception) -> int:
    """Wrong usage, a full disk and a full GPU in one sentence; any other fault keeps its traceback.

    The first and the last are told by their attributes: typer brings its own copy of click or not, depending on its
    version, and torch is not imported for a usage error.
    """
    if hasattr(error, "format_message"):
        if not error.format_message():  # no command was given: the help is the answer
            return 2
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "kvdrift"
        complain(f"{error.format_message().rstrip('.')}; {command} --help tells more.")
        return 2
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        complain("There is no space left where the output goes; make room or send it elsewhere.")
        return 1
    if type(error).__name__ == "OutOfMemoryError":
        complain("The GPU has not enough memory: take fewer new tokens, a smaller model or --device cpu.")
        return 1
    raise error
