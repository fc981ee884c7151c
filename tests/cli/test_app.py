import json
import os
import shlex
import subprocess
import sys

import pytest

from kvdrift.cli import main
from kvdrift.cli.command import command_line
from kvdrift.drift import compare as comparing
from kvdrift.drift.result import Drift


@pytest.mark.parametrize("module", ["kvdrift", "kvdrift.cli"])
def test_the_package_runs_as_a_module(module):
    done = subprocess.run(
        [sys.executable, "-m", module, "models", "list"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "smollm2-135m" in done.stdout


def test_a_reader_that_goes_away_gets_no_traceback():
    """As ``| head``: the pipe is closed before a word is written."""
    code = "import sys; from kvdrift.cli import main; sys.exit(main(['models', 'list']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        started.stdout.close()
        said = started.stderr.read().decode()
        assert (started.wait(timeout=120), said) == (141, "")


def test_output_that_lacks_a_sign_gets_another():
    """As a pipe on Windows."""
    code = "from kvdrift.cli import main, console; main(['models', 'list']); console.answer('3 ≥ 2')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"PYTHONIOENCODING": "cp1252"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("3 ? 2\n")


def test_help_needs_no_torch():
    code = "import sys; from kvdrift.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for verb in ("demo", "models", "record", "compare", "report", "patch", "sweep", "factorial"):
        assert verb in done.stdout


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["--version"], 0), ([], 2), (["nonsense"], 2)])
def test_exit_codes(arguments, code, capsys):
    assert main(arguments) == code
    assert "Traceback" not in capsys.readouterr().err


def test_a_fault_of_kvdrift_keeps_its_traceback(folder, monkeypatch):
    def broken(*arguments, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(comparing, "compare", broken)
    with pytest.raises(ZeroDivisionError):
        main(["compare", str(folder), "--prompt", "a"])


@pytest.mark.parametrize("error", [MemoryError(), type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory")])
def test_no_memory_is_a_sentence(folder, monkeypatch, capsys, error):
    def full(*arguments, **options):
        raise error

    monkeypatch.setattr(comparing, "compare", full)
    assert main(["compare", str(folder), "--prompt", "a"]) == 1
    assert "enough memory" in capsys.readouterr().err


def test_command_line_quotes_and_hides_folders(tmp_path):
    line = command_line(
        "compare", [tmp_path / "model"], {"--prompt": ["it's", "$HOME"], "--prompts": tmp_path / "p.jsonl"}
    )
    assert line == """kvdrift compare model --prompt 'it'"'"'s' --prompt '$HOME' --prompts p.jsonl"""


# --- models


def test_models_list(capsys):
    assert main(["models", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} >= {"smollm2-135m", "gemma3-270m", "llama-2-7b"}
    assert rows[0]["cached"] is False  # the cache folder is this test's own
    assert main(["models", "list"]) == 0
    captured = capsys.readouterr()
    header, *lines = captured.out.splitlines()
    assert header.split() == ["name", "source", "cached", "what", "it", "is"]
    assert [line.split()[0] for line in lines] == [row["name"] for row in rows]  # one line each, however long
    assert all(line.endswith(f"({row['licence']})") for line, row in zip(lines, rows, strict=True))
    assert captured.err == ""


def test_models_show(folder, capsys):
    assert main(["models", "show", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model_type"] == "llama"
    assert main(["models", "show", str(folder)]) == 0
    captured = capsys.readouterr()
    assert "GQA" in captured.out
    assert "resid_post" in captured.out
    assert captured.err == ""


def test_models_pull_suggests(capsys):
    assert main(["models", "pull", "smolm2-135m"]) == 1
    assert "did you mean 'smollm2-135m'" in capsys.readouterr().err


# --- report and demo


def test_report_from_saved_drifts(folder, tmp_path, capsys):
    saved, page = tmp_path / "d.safetensors", tmp_path / "r.html"
    arguments = ["compare", str(folder), "--prompt", "one", "--floor", "0", "--max-new-tokens", "2"]
    assert main([*arguments, "--save", str(saved)]) == 0
    assert main(["report", str(saved), str(saved), "--out", str(page), "--title", "Mine"]) == 0
    text = page.read_text(encoding="utf-8")
    assert "<title>Mine</title>" in text
    assert "kvdrift compare tiny-llama" in text
    assert capsys.readouterr().out.endswith(f"Wrote {page}\n")


@pytest.mark.parametrize("content", [None, b"", b"something else"])
def test_report_of_what_is_no_drift(tmp_path, capsys, content):
    file = tmp_path / "d.safetensors"
    if content is not None:
        file.write_bytes(content)
    assert main(["report", str(file), "--out", str(tmp_path / "r.html")]) == 1
    assert "d.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_demo(folder, tmp_path, capsys):
    page = tmp_path / "demo.html"
    assert main(["demo", "--model", str(folder), "--quick", "--out", str(page)]) == 0
    captured = capsys.readouterr()
    assert "demo.html" in captured.out
    assert "In float32, on the same tokens" in captured.out
    assert "Wrote" not in captured.err
    wrote, following = captured.out.splitlines()[-2:]
    assert wrote == f"Wrote {page}: open it in a browser (--open does)"
    assert following.startswith(f"Next, on a text of your own: kvdrift compare {folder} --prompt ")
    assert "kvdrift demo --model tiny-llama --quick" in page.read_text(encoding="utf-8")


def test_demo_opens_its_report_and_its_next_command_runs(folder, tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--model", str(folder), "--quick", "--open"]) == 0
    assert opened == [(tmp_path / "kvdrift-report.html").as_uri()]
    following = capsys.readouterr().out.splitlines()[-1].partition("kvdrift ")[2]
    assert main([*shlex.split(following), "--max-new-tokens", "2", "--floor", "0"]) == 0
    assert (tmp_path / "mine.html").is_file()


def test_a_saved_drift_can_be_read_again(folder, tmp_path):
    saved = tmp_path / "d.safetensors"
    arguments = ["compare", str(folder), "--prompt", "one", "--floor", "0", "--max-new-tokens", "2"]
    assert main([*arguments, "--save", str(saved)]) == 0
    assert Drift.load(saved).prompts[0].text == "one"
