import pytest

from kvdrift.cli import main
from kvdrift.tracing.trace import Trace


def test_one_prompt_one_file(folder, tmp_path, capsys):
    file = tmp_path / "run.safetensors"
    arguments = [
        "record", str(folder), "--prompt", "one two three", "--out", str(file), "--sites", "resid_post,k",
        "--layers", "0,2-3", "--max-new-tokens", "3",
    ]  # fmt: skip
    assert main(arguments) == 0
    trace = Trace.load(file)
    assert trace["resid_post"].shape[:2] == (3, 3)  # steps, layers
    with pytest.raises(Exception, match="v"):
        trace["v"]
    captured = capsys.readouterr()
    assert captured.out == f"Saved {file}\n"
    assert "run.safetensors" not in captured.err


def test_several_prompts_are_numbered(folder, tmp_path):
    arguments = [
        "record",
        str(folder),
        "--prompt",
        "one",
        "--prompt",
        "two",
        "--out",
        str(tmp_path / "run.safetensors"),
    ]
    assert main([*arguments, "--sites", "resid_post", "--max-new-tokens", "2", "--path", "off"]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["run-1.safetensors", "run-2.safetensors"]


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        (["--sites", "nonsense"], 1, "nonsense"),
        (["--layers", "99"], 1, "99"),
        (["--layers", "x"], 1, "--layers"),
        (["--positions", "nowhere"], 1, "--positions"),
        (["--path", "sideways"], 2, "--path"),
        (["--path", "off", "--prefill-chunk", "2"], 1, "--prefill-chunk"),
        (["--max-new-tokens", "0"], 2, "--max-new-tokens"),
        (["--memory-gb", "0.000001", "--positions", "all"], 1, "memory"),
    ],
)
def test_nonsense_gets_a_sentence_and_no_file(folder, tmp_path, capsys, extra, code, words):
    file = tmp_path / "run.safetensors"
    assert main(["record", str(folder), "--prompt", "one two", "--out", str(file), *extra]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert not file.exists()
