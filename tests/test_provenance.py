import getpass
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvdrift import provenance
from kvdrift.controls.precision import cast_copy
from kvdrift.drift.compare import compare
from kvdrift.models import presets
from kvdrift.models.load import load
from kvdrift.models.tiny import tiny
from kvdrift.report import write_report


def test_everything_is_json_and_names_no_person_and_no_folder():
    text = json.dumps(provenance.collect(load(tiny("llama"), quiet=True)), allow_nan=False)
    for private in (str(Path.home()), str(Path.cwd()), socket.gethostname(), "/tmp", "/usr/", "/opt/"):
        assert private not in text
    if getpass.getuser() not in ("root", "user"):
        assert getpass.getuser() not in text


def test_what_is_needed_is_there():
    found = provenance.collect()
    assert found["software"]["torch"] == torch.__version__
    assert found["hardware"]["cpu"]
    assert found["arithmetic"]["math_libraries"]
    assert found["models"] == []


def test_flags_are_read_at_the_time_of_the_call(monkeypatch):
    before = torch.get_float32_matmul_precision()
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    try:
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True)
        found = provenance.collect()["arithmetic"]
    finally:
        torch.set_float32_matmul_precision(before)
        torch.use_deterministic_algorithms(False)
    assert found["float32_matmul_precision"] == "medium"
    assert found["deterministic_algorithms"] is True
    assert found["environment"]["MKL_CBWR"] == "COMPATIBLE"
    after = provenance.collect()["arithmetic"]
    assert after["deterministic_algorithms"] is False


def test_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert provenance.collect()["threads"]["intra_op"] == 7


def test_model_entry():
    model = load(tiny("llama", dtype=torch.bfloat16), quiet=True)
    (entry,) = provenance.collect(model)["models"]
    assert entry["weight_dtypes"] == ["bfloat16"]
    assert entry["attention"] == model.attn
    assert entry["parameters"] == sum(p.numel() for p in model.hf.parameters())
    assert entry["devices"] == ["cpu"]


def test_looking_changes_nothing():
    state = torch.get_rng_state()
    provenance.collect()
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("other", [[1, 2], [12], [1, 2, 4], [2, 1, 3], [123]])
def test_prompt_hash(other):
    assert provenance.prompt_hash([1, 2, 3]) == provenance.prompt_hash(torch.tensor([1, 2, 3]))
    assert provenance.prompt_hash([1, 2, 3]) != provenance.prompt_hash(other)


def test_precision_set_by_the_newer_flags_is_collected():
    """Their mixture with the older ones makes PyTorch's older getters raise."""
    code = (
        "import torch; torch.backends.fp32_precision = 'ieee'; torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "from kvdrift import provenance; print(provenance.collect()['arithmetic']['tf32_cudnn'])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() in ("False", "ieee")


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("smollm2-135m", "SmolLM2-135M-Instruct, dequantised from Q4_1"),
        ("gemma3-270m", "Gemma 3 270M base, dequantised from Q4_K_M"),
    ],
)
def test_what_a_presets_weights_are_is_told_wherever_it_is_named(preset, words, tmp_path, monkeypatch):
    tiny("llama").save_pretrained(tmp_path / "weights")
    monkeypatch.setattr(presets, "resolve", lambda name, progress: tmp_path / "weights")
    model = load(preset, dtype="float32", quiet=True)
    assert repr(model).startswith(f"{preset} ({words}) · float32")
    assert words in presets.PRESETS[preset].description
    assert provenance.collect(model)["models"][0]["weights"] == words
    copy = model.around(cast_copy(model.hf, torch.bfloat16))
    assert provenance.collect(copy)["models"][0]["weights"] == words
    drift = compare(model, [1, 2, 3], max_new_tokens=2, floor=0, local=False, progress=False)
    assert f" · {words}" in write_report(tmp_path / "r.html", drift).read_text(encoding="utf-8")


def test_other_models_have_no_such_entry():
    assert "weights" not in provenance.collect(load(tiny("llama"), quiet=True))["models"][0]
