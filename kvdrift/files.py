"""Tensors and a JSON manifest in one safetensors file, written atomically and checked when read."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvdrift.errors import FileError

SCHEMA = 1


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Let ``write`` fill a temporary sibling of ``path``, then rename it into place.

    Parameters
    ----------
    path
        Where the finished file goes. Its folder is created.
    write
        Called with the temporary path. Whatever it raises, nothing is left behind.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    FileError
        If the folder or the file cannot be written, or ``path`` is a device or pipe, which a file would replace.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise FileError(f"{path} is no ordinary file, and writing would put one in its place; choose another name.")
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise FileError(
            f"Cannot write {path}: {error}. Choose a folder that exists, can be written and has room."
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return path


def _content_hash(tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        if tensor.numel():
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_tensors(path: str | Path, kind: str, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> Path:
    """Write tensors and their manifest to one safetensors file.

    Parameters
    ----------
    path
        The file to write.
    kind
        What the file holds (``"trace"``, ``"drift"``); a reader of another kind refuses it.
    tensors
        CPU or device tensors of any dtype, saved bit for bit.
    manifest
        Anything JSON can hold.
    """
    on_cpu: dict[str, Tensor] = {}
    stored: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        on_cpu[name] = tensor.clone() if address in stored else tensor  # safetensors refuses shared memory
        stored.add(address)
    manifest = json.loads(json.dumps(manifest))
    header = {
        "kvdrift": json.dumps(
            {"schema": SCHEMA, "kind": kind, "sha256": _content_hash(on_cpu, manifest), "manifest": manifest}
        )
    }
    return write_atomically(path, lambda temporary: save_file(on_cpu, temporary, metadata=header))


def load_tensors(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote, checking that not a bit has changed.

    Returns
    -------
    tensors, manifest
        The tensors by name (on the CPU) and the manifest.

    Raises
    ------
    FileError
        If the file is missing, truncated, edited, of another kind or of a newer schema.
    """
    path = Path(path)
    if not path.is_file():
        raise FileError(f"There is no file {path}; give the path of a file saved by kvdrift.")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["kvdrift"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        found, schema, manifest, digest = (header[key] for key in ("kind", "schema", "manifest", "sha256"))
    except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise FileError(
            f"{path} is not a whole kvdrift file (truncated, or written by something else): save it again."
        ) from error
    if schema != SCHEMA:
        raise FileError(f"{path} has schema {schema}, this version of kvdrift reads {SCHEMA}: upgrade kvdrift.")
    if found != kind:
        raise FileError(f"{path} holds a {found}, not a {kind}: load it with the class that saved it.")
    if _content_hash(tensors, manifest) != digest:
        raise FileError(f"{path} was changed after it was saved (its content hash differs): save it again.")
    return tensors, manifest
