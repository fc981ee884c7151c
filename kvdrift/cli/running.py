"""A comparison from the terminal: finished prompts are kept, so that Ctrl-C costs one prompt at most."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdrift.cli.console import Interrupted
from kvdrift.errors import WeightsError

if TYPE_CHECKING:
    from kvdrift.drift.result import Drift
    from kvdrift.models.model import Model


def resumable(model: Model, prompts: list[Any], command: str, compare: Callable[..., Drift]) -> Drift:
    """Compare, keeping each finished prompt in the cache folder until all are done.

    Parameters
    ----------
    model
        The loaded model.
    prompts
        Texts or lists of token ids. A single one is not worth keeping.
    command
        The command that is running: together with the model's weights and the prompts it names the folder,
        and it goes into the result's provenance.
    compare
        Called with ``resume=FOLDER`` or ``resume=None``.

    Raises
    ------
    Interrupted
        On Ctrl-C, with a sentence about what was kept.
    """
    folder = _folder(model, prompts, command) if len(prompts) > 1 else None
    try:
        drift = compare(resume=folder)
    except KeyboardInterrupt:
        raise Interrupted(_tidy(folder, len(prompts))) from None
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return replace(drift, provenance={**drift.provenance, "command": command})


def _folder(model: Model, prompts: list[Any], command: str) -> Path | None:
    import torch
    import transformers

    from kvdrift.models.presets import cache_folder

    settings = [
        command, model.name, model.fingerprint, model.dtype_name, model.attn, str(model.device), prompts,
        torch.__version__, transformers.__version__, torch.get_num_threads(),
    ]  # fmt: skip
    name = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    try:
        return cache_folder() / "unfinished" / name
    except WeightsError:
        return None  # nowhere to keep finished prompts; the comparison itself needs no cache folder


def _tidy(folder: Path | None, prompts: int) -> str:
    """Say what an interrupted run leaves behind; a folder without a finished prompt is removed."""
    kept = [] if folder is None else list(folder.glob("*.safetensors"))
    if not kept:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return "Stopped before the first prompt was finished; nothing was kept and nothing was written."
    return f"Stopped; {len(kept)} of {prompts} prompts are finished and kept: the same command goes on from there."
