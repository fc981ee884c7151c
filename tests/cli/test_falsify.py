import json

import kvdrift as kd
from kvdrift.cli import main
from kvdrift.ladder import falsify as verb

TEXT = "one plus two is three plus one of the many"
ARGUMENTS = ["--prompt", TEXT, "--max-new-tokens", "4", "--arms", "float32, fixed-shape"]


def printed(capsys):
    """stdout as JSON, and nothing but JSON."""
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


def test_it_prints_what_the_python_verb_gives(folder, capsys):
    assert main(["falsify", str(folder), *ARGUMENTS, "--dtype", "bfloat16", "--seed", "3", "--json"]) == 0
    model = kd.load(str(folder), dtype="bfloat16", quiet=True)
    expected = kd.falsify(model, [TEXT], arms=["float32", "fixed-shape"], max_new_tokens=4, seed=3, progress=False)
    found = printed(capsys)
    assert found == json.loads(json.dumps(expected.to_dict()))
    assert [row["arm"] for row in found["arms"]] == ["float32", "bfloat16", "fixed-shape"]


def test_saved_reported_and_summed_up(folder, capsys, tmp_path):
    saved, page = tmp_path / "l.safetensors", tmp_path / "l.html"
    assert main(["falsify", str(folder), *ARGUMENTS, "--save", str(saved), "--report", str(page)]) == 0
    captured = capsys.readouterr()
    result = kd.Ladder.load(saved)
    assert captured.out == f"{result.summary()}\n"
    assert "Wrote" in captured.err
    assert result.provenance["command"] == (
        f"kvdrift falsify tiny-llama --prompt '{TEXT}' --arms 'float32, fixed-shape' --max-new-tokens 4"
    )
    text = page.read_text(encoding="utf-8")
    assert "precision ladder of tiny-llama" in text
    assert str(folder.parent) not in text
    assert main(["report", str(saved), "--out", str(tmp_path / "again.html")]) == 0


def test_an_unknown_arm_is_refused_before_the_model_is_loaded(capsys):
    assert main(["falsify", "no-such-model", "--prompt", "x", "--arms", "float8"]) == 1
    assert "arms=['float8']: choose from float64" in "".join(capsys.readouterr().err)


def test_finished_prompts_can_be_kept(folder, tmp_path, monkeypatch, capsys):
    arguments = ["falsify", str(folder), *ARGUMENTS, "--results", str(tmp_path / "kept"), "--json"]
    assert main(arguments) == 0
    first = printed(capsys)
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"bfloat16", "float32", "fixed-shape"}
    monkeypatch.setattr("kvdrift.drift.lockstep.Lockstep.walk", None)
    assert main(arguments) == 0
    assert printed(capsys) == first


def test_ctrl_c_ends_in_a_sentence(folder, monkeypatch, capsys):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "compare", stop)
    assert main(["falsify", str(folder), *ARGUMENTS]) == 130
    assert "Stopped" in capsys.readouterr().err
