"""Saved results of any kind the report knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kvdrift.drift.result import Drift
from kvdrift.errors import FileError
from kvdrift.experiments.paper_architecture import PaperArchitecture
from kvdrift.experiments.paper_patching import PaperPatching
from kvdrift.report.kinds import KINDS


def load_result(path: str | Path) -> Any:
    """Read a saved result of any kind, whichever the file holds; or a folder that an
    experiment of the paper (`PaperPatching`, `PaperArchitecture`) saved.

    Raises
    ------
    FileError
        If the file is missing, truncated, edited, or of a kind that no report shows (such as a trace).

    Examples
    --------
    >>> import kvdrift as kd
    >>> drift = kd.compare(kd.load(kd.models.tiny("llama")), [1, 2, 3], max_new_tokens=4, progress=False)
    >>> load_result(drift.save("drift.safetensors"))  # doctest: +SKIP
    """
    path = Path(path)
    if path.is_dir():
        return PaperArchitecture.load(path) if (path / "original.safetensors").is_file() else PaperPatching.load(path)
    found = _kind(path)
    if found is None:
        return Drift.load(path)  # refuses the file, with the reason
    loaders = {kind.saved_as: kind.load for kind in KINDS if kind.saved_as is not None}
    if found not in loaders:
        raise FileError(f"{path} holds a {found}; a report is made from a {', '.join(list(loaders)[:-1])} or "
                        f"{list(loaders)[-1]}.")  # fmt: skip
    return loaders[found](path)


def _kind(path: Path) -> str | None:
    """The ``kind`` in a file's header; None if it has none that can be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return str(json.loads((file.metadata() or {})["kvdrift"])["kind"])
    except (SafetensorError, KeyError, ValueError, TypeError, OSError):
        return None
