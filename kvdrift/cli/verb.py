"""What the verbs do alike: read the model, choose the paths, hand the result over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvdrift.cli import console
from kvdrift.errors import InputError

if TYPE_CHECKING:
    from kvdrift.models.model import Model
    from kvdrift.paths.path import Path as ModelPath


def check_targets(**targets: Path | None) -> None:
    """Refuse output files that could not be written, by option name, before a long run rather than after it.

    Raises
    ------
    InputError
        If two options name one file, or one of them a folder.
    FileError
        If a folder cannot be made or written.
    """
    seen: dict[Path, str] = {}
    for option, path in targets.items():
        if path is None:
            continue
        if path in seen:
            raise InputError(f"--{seen[path]} and --{option} both name {path}; give two files.")
        seen[path] = option
        console.check_target(path)


def check_folder(path: Path | None) -> None:
    """Refuse a folder for finished work that could not be used, before the model is loaded.

    Raises
    ------
    InputError
        If the path is a file.
    FileError
        If the folder around it cannot be made or written.
    """
    if path is not None and path.is_file():
        raise InputError(f"{path} is a file; give the name of a folder to keep finished work in.")
    if path is not None and not path.is_dir():
        console.check_target(path)


def open_model(name: str, dtype: str, device: str, attn: str, threads: int | None) -> Model:
    """Load a model as the options say.

    Raises
    ------
    ModelError, WeightsError, InputError
        If it cannot be loaded so.
    """
    import torch

    from kvdrift.models.load import load

    if threads is not None:
        torch.set_num_threads(threads)
    return load(name, dtype=dtype, device=device, attn=attn)


def donor_and_recipient(recipient: Literal["on", "off"], prefill_chunk: int | None) -> tuple[ModelPath, ModelPath]:
    """The path that gives and the path that is patched."""
    from kvdrift.paths.cache_off import CacheOff
    from kvdrift.paths.cache_on import CacheOn

    on, off = CacheOn(prefill_chunk=prefill_chunk), CacheOff()
    return (off, on) if recipient == "on" else (on, off)


def deliver(result: Any, *, as_json: bool, save: Path | None, report: Path | None) -> None:
    """Save a result, report it, and print it to stdout: its summary, or with ``--json`` one object.

    Raises
    ------
    FileError
        If a file cannot be written.
    """
    with console.working():
        if save is not None:
            console.say(f"Saved {result.save(save)}")
        if report is not None:
            from kvdrift.report import write_report

            console.say(f"Wrote {write_report(report, result)}")
    if as_json:
        console.answer_json(result.to_dict())
    else:
        console.answer(result.summary())
