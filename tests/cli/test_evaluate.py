"""``kvdrift evaluate``."""

import json
import os

import pandas as pd
import pytest

from kvdrift.cli import main
from kvdrift.evaluation import evaluate as evaluating
from kvdrift.evaluation.evaluate import ItemRunner
from kvdrift.evaluation.result import Evaluation

QUICK = ["--max-new-tokens", "3", "--dtype", "float32"]


@pytest.fixture
def data(tmp_path):
    """Three questions, with answers."""
    path = tmp_path / "questions.jsonl"
    rows = [{"prompt": f"how many is one plus {word} ?", "answer": "three"} for word in ("one", "two", "three")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def asked(folder, data):
    """The command up to its options."""
    return ["evaluate", str(folder), "--task", "prompts", "--data", str(data), *QUICK]


def test_the_folder_holds_store_result_report_and_table(asked, tmp_path, capsys):
    out = tmp_path / "out"
    strategies = ["--strategy", "greedy", "--strategy", "top-p 0.9 at 0.7"]
    assert main([*asked, *strategies, "--null", "1", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{Evaluation.load(out / 'evaluation.safetensors').summary()}\n"
    assert "3 items × 2 strategies, at most 3 tokens, 1 re-roll" in captured.out
    assert "Traceback" not in captured.err
    visible = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    assert visible == ["evaluation.safetensors", "records.jsonl", "report.html", "settings.json", "trials.parquet"]
    result = Evaluation.load(out / "evaluation.safetensors")
    assert result.strategies == ("greedy", "top-p 0.9 at 0.7")
    assert len(pd.read_parquet(out / "trials.parquet")) == 3 * 2 * 3
    report = (out / "report.html").read_text()
    assert "kvdrift evaluate tiny-llama" in report
    assert str(tmp_path) not in report
    assert result.provenance["command"] == (
        "kvdrift evaluate tiny-llama --task prompts --data questions.jsonl --strategy greedy "
        "--strategy 'top-p 0.9 at 0.7' --null 1 --max-new-tokens 3 --dtype float32"
    )


def test_json_is_one_object_on_stdout_and_the_saved_result(asked, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*asked, "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    values = json.loads(captured.out)
    assert values == json.loads(json.dumps(Evaluation.load(out / "evaluation.safetensors").to_dict()))
    assert (values["items"], values["task"], values["replicates"]) == (3, "questions", 0)
    assert values["conditions"][0]["strategy"] == "greedy"


def test_without_a_folder_nothing_is_written(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(asked) == 0
    assert sorted(tmp_path.rglob("*")) == before
    assert "greedy" in capsys.readouterr().out


def test_scorer_answer_key_and_stop_strings(folder, tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"prompt": "how many is one plus two ?", "right": "three"}) + "\n")
    asked = [
        "evaluate",
        str(folder),
        "--task",
        "prompts",
        "--data",
        str(file),
        *QUICK,
        "--answer-key",
        "right",
        "--json",
    ]
    assert main(asked) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["conditions"][0]["accuracy_a"]["n"] == 1
    assert "no answer of either path is right" in values["notes"][0]
    store = ["--store", str(tmp_path / "out")]
    assert main([*asked, *store, "--scorer", "contains", "--stop", "\\n", "--stop", "Question:"]) == 0
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert "contains" in json.dumps(settings)
    assert json.dumps(["\n", "Question:"]) in json.dumps(settings)
    capsys.readouterr()
    assert main([*asked, *store, "--scorer", "exact", "--stop", "\\n", "--stop", "Question:"]) == 1
    assert "contains there, exact here" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("option", [["--scorer", "exact"], ["--stop", "x"], ["--answer-key", "a"]])
def test_what_belongs_to_prompts_is_refused_for_gsm8k(folder, data, capsys, option):
    assert main(["evaluate", str(folder), "--data", str(data), *option]) == 1
    assert f"{option[0]} belongs to --task prompts" in " ".join(capsys.readouterr().err.split())


def test_gsm8k_from_a_file(folder, tmp_path, capsys):
    file = tmp_path / "test.jsonl"
    rows = [{"question": "How many is one plus two?", "answer": "one plus two is <<1+2=3>>3\n#### 3"}] * 2
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["evaluate", str(folder), "--data", str(file), *QUICK, "--extraction", "strict", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["task"].startswith("gsm8k")
    assert values["conditions"][0]["invalid_a"] == 2
    assert values["conditions"][0]["gold"] is not None


# --- going on


def interrupt(monkeypatch, after):
    """Ctrl-C before the item after so many."""
    real, left = ItemRunner.__call__, [after]

    def call(self, item):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(self, item)

    monkeypatch.setattr(ItemRunner, "__call__", call)


def test_ctrl_c_keeps_finished_items_and_the_same_command_goes_on(asked, tmp_path, monkeypatch, capsys):
    assert main([*asked, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        assert main([*asked, "--out", str(out), "--json"]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"2 finished items are kept in {out}: the same command goes on from there." in " ".join(captured.err.split())
    assert "Traceback" not in captured.err
    assert not (out / "evaluation.safetensors").exists()
    with monkeypatch.context() as patch:
        interrupt(patch, 1)  # one is left
        assert main([*asked, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == whole
    with monkeypatch.context() as patch:
        interrupt(patch, 0)  # none is left
        assert main([*asked, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == whole


@pytest.mark.parametrize("out", [True, False])
def test_ctrl_c_before_there_is_a_store(out, asked, tmp_path, monkeypatch, capsys):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluating, "_fitting", stop)
    assert main([*asked, *(["--out", str(tmp_path / "out")] if out else [])]) == 130
    said = capsys.readouterr().err
    assert ("0 finished items are kept" if out else "nothing was kept: with --store FOLDER") in said
    assert "Traceback" not in said


def test_another_command_is_refused_by_what_differs(asked, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out"), "--limit", "1"]
    assert main([*asked, *out]) == 0
    capsys.readouterr()
    assert main([*asked, *out, "--strategy", "top-k 5"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "strategies.0: greedy there, top-k 5 here" in said
    assert "Traceback" not in said


def test_options_reach_the_evaluation(asked, monkeypatch, capsys):
    seen = {}

    def spy(model, task, **options):
        seen.update(options, dtype=model.dtype_name, task=task)
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluating, "evaluate", spy)
    arguments = [
        "--strategy", "top-k 7", "--null", "2", "--limit", "2", "--seeds", "0,3-4", "--gold", "none", "--seed", "5",
        "--stop-at-divergence", "--ignore-eos", "--workers", "2", "--address", "auto", "--engine", "ray",
    ]  # fmt: skip
    assert main([*asked, *arguments]) == 130
    expected = {
        "null": 2, "limit": 2, "max_new_tokens": 3, "gold": False, "stop_at_divergence": True, "ignore_eos": True,
        "engine": "ray",
        "workers": 2, "address": "auto", "seed": 5, "store": None, "dtype": "float32",
    }  # fmt: skip
    assert {name: seen[name] for name in expected} == expected
    assert (list(seen["seeds"]), [each.label for each in seen["strategies"]]) == ([0, 3, 4], ["top-k 7"])
    assert len(seen["task"].items()) == 3


# --- one sentence and an exit code


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--strategy", "nucleus"], 1, "There is no strategy 'nucleus'"),
        (["--strategy", "greedy", "--strategy", "greedy"], 1, "each once"),
        (["--seeds", "0,0"], 1, "seeds"),
        (["--seeds", "x"], 1, "--seeds"),
        (["--limit", "0"], 2, "--limit"),
        (["--null", "-1"], 2, "--null"),
        (["--engine", "slurm"], 2, "--engine"),
        (["--task", "riddles"], 2, "--task"),
        (["--scorer", "rouge"], 2, "--scorer"),
        (["--scorer", "choice"], 1, "no letter from A to J"),
        (["--answer-key", "right"], 1, "there is no 'right'"),
        (["--workers", "2"], 1, "workers= and address= are for engine='ray'"),
        (["--max-new-tokens", "100000"], 1, "Item '0' of questions"),
        (["--chat"], 1, "has no chat template"),
        (["--data", "nowhere.jsonl"], 1, "nowhere.jsonl"),
        (["--dtype", "int8"], 1, "int8"),
    ],
)
def test_nonsense_gets_a_sentence(arguments, code, words, asked, capsys):
    assert main([*asked, *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in " ".join(captured.err.split())
    assert "Traceback" not in captured.err


def test_prompts_need_a_file(folder, capsys):
    assert main(["evaluate", str(folder), "--task", "prompts"]) == 1
    assert "--task prompts needs --data FILE" in capsys.readouterr().err


def test_a_bad_line_is_named(asked, data, capsys):
    data.write_text('{"prompt": "one"}\n{"prompt"\n')
    assert main(asked) == 1
    assert "questions.jsonl, line 2: not JSON" in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_is_a_file(asked, data, capsys):
    assert main([*asked, "--out", str(data)]) == 1
    said = capsys.readouterr().err
    assert "questions.jsonl" in said
    assert "Traceback" not in said


def test_a_folder_that_cannot_be_written(asked, tmp_path, monkeypatch, capsys):
    """Said before the model is loaded. Root may write everywhere, so the answer of the system is made up."""
    out = tmp_path / "out"
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(out))
    assert main([*asked, "--out", str(out)]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_a_folder_of_something_else(asked, tmp_path, capsys):
    (tmp_path / "settings.json").write_text("{}")
    assert main([*asked, "--out", str(tmp_path)]) == 1
    assert "is not of a store of results" in " ".join(capsys.readouterr().err.split())
