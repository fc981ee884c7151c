"""``kvdrift diagnose``."""

import json

import pytest

from kvdrift.cli import main
from kvdrift.diagnosis.verdict import Verdict


def test_the_verdict_is_on_stdout_in_words_or_as_json(folder, capsys):
    options = ["--prompt", "how many is one plus two", "--max-new-tokens", "2"]
    assert main(["diagnose", str(folder), *options, "--json"]) == 0
    out, _ = capsys.readouterr()
    result = json.loads(out)
    assert result["kind"] in ("rounding", "exact")  # the folder's model may show no drift over so few steps
    assert result["reasons"]
    assert main(["diagnose", str(folder), *options]) == 0
    out, err = capsys.readouterr()
    assert out.count(result["kind"].upper()) == 1
    assert result["kind"].upper() not in err


@pytest.mark.parametrize(("kind", "code"), [("bug", 1), ("nonfinite", 1), ("lossy", 0), ("inconclusive", 2)])
def test_exit_codes(kind, code, folder, monkeypatch, capsys):
    import kvdrift.diagnosis.diagnose as module

    monkeypatch.setattr(module, "diagnose", lambda *args, **kwargs: Verdict(kind, "m", "a", "b", ("because",)))
    assert main(["diagnose", str(folder)]) == code
    assert "because" in capsys.readouterr().out


def test_what_cannot_be_used_is_one_sentence_and_exit_code_two(tmp_path, capsys):
    assert main(["diagnose", str(tmp_path / "nowhere")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvdrift: ")
    assert "Traceback" not in err
