"""``kvdrift report`` over saved results of several kinds."""

import torch

import kvdrift as kd
from kvdrift.cli import main
from kvdrift.files import save_tensors
from kvdrift.patching.factorial import factorial
from kvdrift.patching.sweep import sweep


def test_any_mix_of_saved_results(tmp_path, tiny_model, capsys):
    model = tiny_model("llama", torch.bfloat16)
    drift = kd.compare(model, [1, 2, 3], max_new_tokens=3, floor=0, local=False, progress=False)
    found = sweep(model, [1, 2, 3], sites=["kv"], max_new_tokens=3, progress=False)
    crossed = factorial(model, [1, 2, 3], max_new_tokens=3, progress=False)
    files = [r.save(tmp_path / f"{n}.safetensors") for n, r in enumerate((drift, found, crossed))]
    page = tmp_path / "r.html"
    assert main(["report", *map(str, files), "--out", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    for name in ("result-1-growth", "result-2-recovery", "result-3-factorial"):
        assert f'id="{name}-data"' in text
    assert capsys.readouterr().out == f"Wrote {page}\n"


def test_a_trace_is_refused(tmp_path, capsys):
    trace = save_tensors(tmp_path / "t.safetensors", "trace", {}, {})
    assert main(["report", str(trace), "--out", str(tmp_path / "r.html")]) == 1
    assert "holds a trace" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "r.html").exists()
