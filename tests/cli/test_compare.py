import json

import pytest

from kvdrift.cli import main
from kvdrift.drift import compare as comparing
from kvdrift.drift import job
from kvdrift.drift.result import Drift

QUICK = ["--floor", "0", "--no-local", "--max-new-tokens", "4"]
THREE = ["--prompt", "one plus two is", "--prompt", "how many", "--prompt", "the two of a"]


def numbers(captured):
    """stdout as JSON, and nothing but JSON."""
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


def test_json_is_all_there_is_on_stdout(folder, capsys):
    assert main(["compare", str(folder), *THREE, *QUICK, "--control", "bfloat16", "--dtype", "float32", "--json"]) == 0
    captured = capsys.readouterr()
    values = numbers(captured)
    assert {
        "model", "dtype", "prompts", "steps", "kl_mean", "kl_max", "kl_float32_head_mean", "flips",
        "free_divergence", "layers", "onset_layer", "growth", "control",
    } <= set(values)  # fmt: skip
    assert (values["dtype"], values["prompts"], values["steps"]) == ("float32", 3, 12)
    assert len(values["free_divergence"]) == 3
    assert [row["layer"] for row in values["layers"]] == list(range(len(values["layers"])))
    assert set(values["control"]) == set(values)
    assert values["control"]["dtype"] == "bfloat16"
    assert "tiny-llama" in captured.err


def test_without_json_the_reading_is_all_there_is_on_stdout(folder, tmp_path, capsys):
    saved = tmp_path / "d.safetensors"
    assert main(["compare", str(folder), "--prompt", "one two", *QUICK, "--save", str(saved)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{Drift.load(saved).summary()}\n"
    assert "there is no rounding floor" in " ".join(captured.out.split())
    assert str(saved) in captured.err
    assert "rounding floor" not in captured.err


def test_json_equals_the_saved_drift(folder, tmp_path, capsys):
    saved = tmp_path / "d.safetensors"
    arguments = ["compare", str(folder), "--prompt", "one two", "--floor", "1", "--max-new-tokens", "4", "--json"]
    assert main([*arguments, "--save", str(saved)]) == 0
    drift = Drift.load(saved)
    assert numbers(capsys.readouterr()) == drift.to_dict()
    command = drift.provenance["command"]
    assert command == "kvdrift compare tiny-llama --prompt 'one two' --max-new-tokens 4 --floor 1"
    assert str(tmp_path) not in command


def test_options_reach_the_comparison(folder, monkeypatch, capsys):
    seen = {}

    def spy(model, prompts, **options):
        seen.update(options, prompts=prompts, dtype=model.dtype_name)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "compare", spy)
    arguments = [
        "compare", str(folder), "--prompt", "one", "--max-new-tokens", "7", "--dtype", "float32",
        "--also-in", "bfloat16", "--floor", "2", "--no-local", "--every", "3", "--tokens", "b",
        "--prefill-chunk", "2", "--seed", "5", "--ignore-eos",
    ]  # fmt: skip
    assert main(arguments) == 130
    assert seen["prompts"] == ["one"]
    assert seen["a"].prefill_chunk == 2
    expected = {
        "max_new_tokens": 7, "dtype": "float32", "also_in": "bfloat16", "floor": 2, "local": False, "every": 3,
        "tokens": "b", "seed": 5, "ignore_eos": True,
    }  # fmt: skip
    assert {name: seen[name] for name in expected} == expected


def test_report_is_written_and_tells_how_to_run_it_again(folder, tmp_path, capsys):
    path = tmp_path / "r.html"
    assert main(["compare", str(folder), "--prompt", "one two", *QUICK, "--report", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert "kvdrift compare tiny-llama" in text
    assert str(folder.parent) not in text


# --- prompts from a file


def test_every_kind_of_line(folder, tmp_path, capsys):
    file = tmp_path / "p.jsonl"
    file.write_text(
        '"one two"\n{"question": "how many"}\n\n{"text": "a of"}\n{"prompt": "b"}\n{"ids": [1, 2, 3]}\n',
        encoding="utf-8",
    )
    assert main(["compare", str(folder), "--prompts", str(file), *QUICK, "--json"]) == 0
    assert numbers(capsys.readouterr())["prompts"] == 5


# --- Ctrl-C and going on


def stop_after(monkeypatch, steps):
    """Ctrl-C at a step of the decoding loop."""
    real, left = job.greedy, [steps]

    def greedy(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(job, "greedy", greedy)


def test_ctrl_c_keeps_finished_prompts_and_the_same_command_goes_on(folder, cache, monkeypatch, capsys):
    arguments = ["compare", str(folder), *THREE, *QUICK, "--json"]
    assert main(arguments) == 0
    whole = numbers(capsys.readouterr())

    with monkeypatch.context() as patch:
        stop_after(patch, 6)  # four steps of the first prompt, two of the second
        assert main(arguments) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "1 of 3 prompts are finished and kept" in captured.err
    assert "Traceback" not in captured.err
    assert len(list(cache.rglob("prompt-*"))) == 1

    with monkeypatch.context() as patch:
        stop_after(patch, 8)  # enough for the two that are left, not for all three
        assert main(arguments) == 0
    assert numbers(capsys.readouterr()) == whole
    assert list(cache.rglob("prompt-*")) == []


def test_another_command_does_not_take_what_was_kept(folder, cache, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        assert main(["compare", str(folder), *THREE, *QUICK]) == 130
    assert main(["compare", str(folder), *THREE, *QUICK, "--seed", "1"]) == 0
    assert len(list(cache.rglob("prompt-*"))) == 1


def test_ctrl_c_before_the_first_prompt_is_done(folder, cache, tmp_path, monkeypatch, capsys):
    stop_after(monkeypatch, 2)
    saved = tmp_path / "d.safetensors"
    assert main(["compare", str(folder), *THREE, *QUICK, "--save", str(saved)]) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert not saved.exists()
    assert [path for path in cache.rglob("*") if path.is_file()] == []


# --- one sentence and an exit code


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 1, "There is no prompt"),
        (["--prompt", "  "], 1, "Prompt 1 is empty"),
        (["--prompt", "a", "--max-new-tokens", "0"], 2, "--max-new-tokens"),
        (["--prompt", "a", "--floor", "-1"], 2, "--floor"),
        (["--prompt", "a", "--every", "0"], 2, "--every"),
        (["--prompt", "a", "--tokens", "c"], 2, "--tokens"),
        (["--prompt", "a", "--nonsense"], 2, "--nonsense"),
        (["--prompt", "a", "--dtype", "int8"], 1, "int8"),
        (["--prompt", "a", "--control", "int8"], 1, "int8"),
        (["--prompt", "a", "--device", "cuda"], 1, "CUDA"),
        (["--prompt", "a", "--attn", "nonsense"], 1, "nonsense"),
        (["--prompt", "a", "--max-new-tokens", "100000"], 1, "context"),
        (["--prompt", "a", "--chat"], 1, "chat template"),
        (["--prompts", "nowhere.jsonl"], 1, "nowhere.jsonl"),
    ],
)
def test_nonsense_gets_a_sentence(folder, capsys, monkeypatch, arguments, code, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["compare", str(folder), *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("model", ["smolm2-135m", "no-such-model"])
def test_unknown_model(model, capsys):
    assert main(["compare", model, "--prompt", "a"]) == 1
    error = capsys.readouterr().err
    assert repr(model) in error
    assert ("did you mean 'smollm2-135m'" in error) == model.startswith("smol")


def test_a_folder_that_is_no_model(tmp_path, capsys):
    assert main(["compare", str(tmp_path), "--prompt", "a"]) == 1
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--save", "--report"])
def test_a_target_that_is_a_folder_is_refused_before_the_model_is_loaded(option, tmp_path, capsys):
    assert main(["compare", "no-such-model", "--prompt", "a", option, str(tmp_path)]) == 1
    assert "is a folder" in capsys.readouterr().err


def test_a_cache_folder_that_cannot_be_made(folder, tmp_path, monkeypatch, capsys):
    """A preset cannot do without it; a local model only loses the chance to resume."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVDRIFT_CACHE", str(tmp_path / "file" / "cache"))
    assert main(["compare", str(folder), *THREE, *QUICK]) == 0
    capsys.readouterr()
    assert main(["compare", "smollm2-135m", *THREE, *QUICK]) == 1
    assert "cache folder" in capsys.readouterr().err


def test_brackets_in_a_message_are_brackets(capsys):
    assert main(["compare", "[red]x[/red]", "--prompt", "a"]) == 1
    assert "[red]x[/red]" in capsys.readouterr().err
