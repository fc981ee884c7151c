import json

import pytest

import kvdrift as kd
from kvdrift.cli import main
from kvdrift.cli.running import finished_cells
from kvdrift.patching import factorial as crossing
from kvdrift.patching import patch as patching
from kvdrift.patching import sweep as sweeping

PROMPT = ["--prompt", "one plus two is three plus one of the many"]
QUICK = [*PROMPT, "--max-new-tokens", "5"]
VERBS = ("patch", "sweep", "factorial")


def printed(capsys):
    """stdout as JSON, and nothing but JSON."""
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


def plain(result):
    """What a reader of the JSON gets of a result."""
    return json.loads(json.dumps(result.to_dict(), allow_nan=False))


@pytest.fixture
def drifting(folder):
    """Its two paths differ at several steps, so that there is something to patch."""
    return kd.load(str(folder), dtype="float16", quiet=True)


HALF = ["--dtype", "float16"]
TEXT = PROMPT[1]


# --- the same numbers as in Python


def test_patch_prints_what_the_python_verb_gives(folder, drifting, capsys):
    arguments = [
        "patch", str(folder), *QUICK, *HALF, "--site", "kv", "--layers", "0-2", "--heads", "1", "--positions", "2-6",
        "--schedule", "window(1,3)", "--write", "read", "--recipient", "off", "--placebos", "2", "--seed", "4",
        "--prefill-chunk", "3", "--json",
    ]  # fmt: skip
    assert main(arguments) == 0
    patch = kd.Patch("kv", range(3), 1, range(2, 7), kd.Schedule.window(1, 3), "read")
    expected = kd.patch(
        drifting, [TEXT], patch, donor=kd.CacheOn(prefill_chunk=3), recipient=kd.CacheOff(), max_new_tokens=5,
        placebos=2, seed=4, progress=False,
    )  # fmt: skip
    assert printed(capsys) == plain(expected)
    assert expected.distance("unpatched").max() > 0, "the two paths agree, so nothing was compared"


def test_sweep_prints_what_the_python_verb_gives(folder, drifting, capsys):
    arguments = [
        "sweep", str(folder), *QUICK, *HALF, "--sites", "k,v", "--over", "layer,head", "--layers", "1,3",
        "--schedule", "persistent", "--schedule", "one_shot(1)", "--positions", "past", "--write", "cache",
        "--placebos", "2", "--checks", "none", "--seed", "4", "--json",
    ]  # fmt: skip
    assert main(arguments) == 0
    expected = kd.sweep(
        drifting, [TEXT], sites=["k", "v"], over=["layer", "head"], layers=[1, 3], positions="past", write="cache",
        schedule=["persistent", "one_shot(1)"], max_new_tokens=5, placebos=2, checks="none", seed=4, progress=False,
    )  # fmt: skip
    assert printed(capsys) == plain(expected)
    assert len(expected.cells) == 16
    assert expected.distance("unpatched").max() > 0, "the two paths agree, so nothing was compared"


def test_sweep_over_steps_and_positions(folder, capsys):
    arguments = ["sweep", str(folder), *QUICK, "--sites", "v", "--over", "position,step", "--json"]
    assert main([*arguments, "--positions", "0,2-3", "--steps", "1-2", "--recipient", "off"]) == 0
    values = printed(capsys)
    assert [(cell["position"], cell["step"]) for cell in values["cells"]] == [
        (position, step) for step in (1, 2) for position in (0, 2, 3)
    ]
    assert (values["recipient"], values["donor"]) == ("cache-OFF", "cache-ON")


def test_factorial_prints_what_the_python_verb_gives(folder, drifting, capsys):
    assert main(["factorial", str(folder), *QUICK, *HALF, "--prefill-chunk", "3", "--seed", "4", "--json"]) == 0
    expected = kd.factorial(drifting, [TEXT], a=kd.CacheOn(prefill_chunk=3), max_new_tokens=5, seed=4, progress=False)
    assert printed(capsys) == plain(expected)
    assert expected.per_prompt("y11-y00").max() > 0, "the two paths agree, so nothing was compared"


def test_sites_given_together_are_written_together(folder, tmp_path):
    """And ``--write`` is for the K/V among them."""
    saved = tmp_path / "p.safetensors"
    arguments = ["patch", str(folder), *QUICK, "--site", "resid_post", "--site", "kv", "--write", "read"]
    assert main([*arguments, "--placebos", "0", "--no-checks", "--save", str(saved)]) == 0
    (cell,) = kd.PatchResult.load(saved).cells
    assert cell.patches == (kd.Patch("resid_post"), kd.Patch("kv", write="read"))
    assert {arm.role for arm in kd.PatchResult.load(saved).arms} == {"unpatched", "patched"}


def test_a_patch_is_kv_persistent_everywhere_unless_told_otherwise(folder, monkeypatch):
    seen = []

    def spy(model, prompts, patches, **options):
        seen.extend(patches)
        raise KeyboardInterrupt

    monkeypatch.setattr(patching, "patch", spy)
    assert main(["patch", str(folder), *QUICK]) == 130
    assert seen == [kd.Patch("kv")]


# --- what goes where


@pytest.mark.parametrize(
    ("verb", "kind"), [("patch", kd.PatchResult), ("sweep", kd.Sweep), ("factorial", kd.Factorial)]
)
def test_summary_save_and_report(folder, tmp_path, capsys, verb, kind):
    saved, page = tmp_path / "r.safetensors", tmp_path / "r.html"
    arguments = [verb, str(folder), *QUICK, "--threads", "1", "--save", str(saved), "--report", str(page)]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    result = kind.load(saved)
    assert captured.out == f"{result.summary()}\n"
    assert "Wrote" in captured.err
    command = result.provenance["command"]
    assert command == f"kvdrift {verb} tiny-llama --prompt '{TEXT}' --max-new-tokens 5 --threads 1"
    text = page.read_text(encoding="utf-8")
    assert f"kvdrift {verb} tiny-llama" in text
    assert str(folder.parent) not in text

    page.unlink()
    assert main([*arguments, "--json"]) == 0
    assert printed(capsys) == plain(kind.load(saved))
    assert page.exists()


def test_the_command_names_every_option_that_decides_the_numbers(folder, tmp_path):
    file, saved = tmp_path / "p.jsonl", tmp_path / "r.safetensors"
    file.write_text('"one two"\n"how many"\n', encoding="utf-8")
    arguments = [
        "sweep", str(folder), "--prompts", str(file), "--sites", "v", "--schedule", "one_shot(1)", "--schedule",
        "persistent", "--layers", "0", "--recipient", "off", "--max-new-tokens", "3", "--placebos", "0",
        "--checks", "none", "--seed", "2",
    ]  # fmt: skip
    assert main([*arguments, "--save", str(saved), "--results", str(tmp_path / "cells"), "--json"]) == 0
    assert kd.Sweep.load(saved).provenance["command"] == (
        "kvdrift sweep tiny-llama --prompts p.jsonl --sites v --schedule 'one_shot(1)' --schedule persistent "
        "--layers 0 --recipient off --max-new-tokens 3 --placebos 0 --checks none --seed 2"
    )
    result = tmp_path / "p.safetensors"
    assert main(["patch", str(folder), *QUICK, "--no-checks", "--save", str(result)]) == 0
    assert kd.PatchResult.load(result).provenance["command"].endswith("--max-new-tokens 5 --no-checks")


# --- Ctrl-C and going on

CELLS = ["--prompt", "one plus two is", "--prompt", "how many", "--max-new-tokens", "4", "--sites", "k,v"]


def stop_after(monkeypatch, groups):
    """Ctrl-C once so many groups of two cells have run; each has four steps."""
    real, left = patching.greedy, [4 * groups]

    def greedy(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(patching, "greedy", greedy)
    monkeypatch.setattr(sweeping, "TOGETHER", 2)


def test_ctrl_c_keeps_finished_cells_and_the_same_command_goes_on(folder, cache, monkeypatch, capsys):
    arguments = ["sweep", str(folder), *CELLS, "--json"]
    assert main(arguments) == 0
    whole = printed(capsys)
    assert list(cache.rglob("*.jsonl")) == []

    with monkeypatch.context() as patch:
        stop_after(patch, 5)  # all four groups of the first prompt, one of the second
        assert main(arguments) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    (file,) = cache.rglob("*.jsonl")
    assert finished_cells(file.parent) == 10
    said = "".join(captured.err.split())
    assert f"10finishedcellsarekeptin{file.parent}:thesamecommandgoesonfromthere." in said

    with monkeypatch.context() as patch:
        stop_after(patch, 3)  # enough for what is left, not for all
        assert main(arguments) == 0
    assert printed(capsys) == whole
    assert list(cache.rglob("*.jsonl")) == []


def test_a_results_folder_of_ones_own_stays(folder, cache, tmp_path, monkeypatch, capsys):
    kept = tmp_path / "new" / "cells"
    arguments = ["sweep", str(folder), *CELLS, "--results", str(kept), "--json"]
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert main(arguments) == 130
    assert str(kept) in "".join(capsys.readouterr().err.split())
    assert finished_cells(kept) == 2
    assert main(arguments) == 0
    first = printed(capsys)
    assert finished_cells(kept) == 16
    with monkeypatch.context() as patch:
        stop_after(patch, 0)  # nothing is left to run
        assert main(arguments) == 0
    assert printed(capsys) == first
    assert not list(cache.rglob("*.jsonl"))


def test_where_a_sweep_runs_is_asked_for_and_is_no_part_of_what_it_is(folder, cache, tmp_path, monkeypatch):
    native, asked, saved = sweeping.engine_of, {}, tmp_path / "r.safetensors"

    def local(name, **options):
        asked.update(options, name=name)
        return native(threads=options["threads"])

    monkeypatch.setattr(sweeping, "engine_of", local)
    where = ["--engine", "ray", "--workers", "3", "--address", "node:6379", "--threads", "1"]
    assert main(["sweep", str(folder), *CELLS, *where, "--save", str(saved)]) == 0
    assert asked == {"name": "ray", "workers": 3, "threads": 1, "address": "node:6379", "gpus": 0}
    command = kd.Sweep.load(saved).provenance["command"]
    assert "--threads 1" in command
    assert not any(word in command for word in ("ray", "--workers", "node"))


def test_another_sweep_takes_nothing_of_what_was_kept(folder, cache, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert main(["sweep", str(folder), *CELLS]) == 130
    assert main(["sweep", str(folder), *CELLS, "--seed", "1"]) == 0
    assert len(list(cache.rglob("*.jsonl"))) == 1

    kept = tmp_path / "cells"
    assert main(["sweep", str(folder), *CELLS, "--results", str(kept)]) == 0
    capsys.readouterr()
    assert main(["sweep", str(folder), *CELLS, "--results", str(kept), "--seed", "1"]) == 1
    captured = capsys.readouterr()
    assert "holds another sweep (it differs in seed: 0 there, 1 here)" in captured.err.replace("\n", " ")
    assert captured.out == ""


def test_ctrl_c_before_the_first_cells_are_done(folder, cache, monkeypatch, capsys):
    stop_after(monkeypatch, 0)
    assert main(["sweep", str(folder), *CELLS]) == 130
    assert "no cell was kept" in capsys.readouterr().err
    assert [path for path in cache.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("verb", "module"), [("patch", patching), ("factorial", crossing)])
def test_ctrl_c_writes_nothing(folder, tmp_path, monkeypatch, capsys, verb, module):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "greedy", stop)
    assert main([verb, str(folder), *QUICK, "--save", str(tmp_path / "r"), "--report", str(tmp_path / "h")]) == 130
    captured = capsys.readouterr()
    assert "nothing was written" in captured.err
    assert captured.out == ""
    assert not list(tmp_path.glob("[rh]"))


def test_a_sweep_needs_no_cache_folder(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVDRIFT_CACHE", str(tmp_path / "file" / "cache"))
    assert main(["sweep", str(folder), *CELLS, "--json"]) == 0
    assert len(printed(capsys)["cells"]) == 8
    stop_after(monkeypatch, 1)
    assert main(["sweep", str(folder), *CELLS]) == 130
    assert "no cell was kept" in capsys.readouterr().err


# --- one sentence and an exit code

EVERY_VERB = [
    ([], 1, "There is no prompt"),
    (["--prompt", "  "], 1, "Prompt 1 is empty"),
    (["--prompt", "a", "--max-new-tokens", "0"], 2, "--max-new-tokens"),
    (["--prompt", "a", "--max-new-tokens", "1"], 1, "give 2 or more"),
    (["--prompt", "a", "--max-new-tokens", "100000"], 1, "context"),
    (["--prompt", "a", "--dtype", "int8"], 1, "int8"),
    (["--prompt", "a", "--device", "cuda"], 1, "CUDA"),
    (["--prompt", "a", "--attn", "nonsense"], 1, "nonsense"),
    (["--prompt", "a", "--chat"], 1, "chat template"),
    (["--prompt", "a", "--prefill-chunk", "0"], 2, "--prefill-chunk"),
    (["--prompt", "a", "--nonsense"], 2, "--nonsense"),
    (["--prompts", "nowhere.jsonl"], 1, "nowhere.jsonl"),
]
PATCH = [
    (["--layers", "99"], 1, "no layer 99"),
    (["--layers", "5-2"], 1, "--layers takes"),
    (["--layers", "0-99999999999"], 1, "--layers takes"),
    (["--layers", "1,1"], 1, "each once"),
    (["--heads", "2"], 1, "KV heads 0 to 1"),
    (["--heads", "x"], 1, "--heads takes"),
    (["--site", "q", "--heads", "8"], 1, "heads 0 to 7"),
    (["--positions", "77"], 1, "no position"),
    (["--positions", "nowhere"], 1, "--positions takes current, past, all"),
    (["--positions", "current"], 1, "at 'kv' choose"),
    (["--site", "nonsense"], 1, "'nonsense' cannot be patched"),
    (["--site", "logits"], 1, "'logits' cannot be patched"),
    (["--site", "resid_post", "--heads", "0"], 1, "has no heads"),
    (["--site", "resid_post", "--write", "read"], 1, "is for k, v and kv"),
    (["--write", "sideways"], 2, "--write"),
    (["--schedule", "sometimes"], 1, "schedule='sometimes'"),
    (["--schedule", "one_shot(0)"], 1, "steps start from 1"),
    (["--schedule", "one_shot(5)"], 1, "steps 0 to 4"),
    (["--schedule", "window(3,2)"], 1, "empty"),
    (["--recipient", "sideways"], 2, "--recipient"),
    (["--placebos", "-1"], 2, "--placebos"),
]
SWEEP = [
    (["--layers", "99"], 1, "no layer 99"),
    (["--over", "head", "--sites", "k", "--heads", "2"], 1, "KV heads 0 to 1"),
    (["--over", "head"], 1, "'resid_post' has no heads"),
    (["--over", "position", "--sites", "k", "--positions", "77"], 1, "no position"),
    (["--over", "position", "--sites", "k", "--positions", "past"], 1, "absolute positions"),
    (["--over", "step", "--steps", "0"], 1, "steps start from 1"),
    (["--over", "step", "--steps", "5"], 1, "steps 0 to 4"),
    (["--over", "nonsense"], 1, "choose one or several of layer, head, position, step"),
    (["--over", ""], 1, "choose one or several of layer, head, position, step"),
    (["--steps", "1"], 1, "over='step'"),
    (["--steps", "x"], 1, "--steps takes"),
    (["--sites", "nonsense"], 1, "'nonsense' cannot be patched"),
    (["--sites", ""], 1, "no cell to sweep over"),
    (["--schedule", "sometimes"], 1, "schedule='sometimes'"),
    (["--checks", "some"], 2, "--checks"),
    (["--recipient", "sideways"], 2, "--recipient"),
    (["--engine", "slurm"], 2, "--engine"),
    (["--workers", "2"], 1, "are for engine='ray'"),
]


@pytest.mark.parametrize(
    ("verb", "arguments", "code", "words"),
    [(verb, *case) for verb in VERBS for case in EVERY_VERB]
    + [("patch", [*QUICK, *extra], code, words) for extra, code, words in PATCH]
    + [("sweep", [*QUICK, *extra], code, words) for extra, code, words in SWEEP],
)
def test_nonsense_gets_a_sentence(folder, cache, capsys, monkeypatch, verb, arguments, code, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "10000")
    assert main([verb, str(folder), *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert not list(cache.rglob("*.jsonl")), "a refused sweep keeps nothing"


@pytest.mark.parametrize("verb", VERBS)
def test_unknown_model(verb, capsys):
    assert main([verb, "smolm2-135m", *QUICK]) == 1
    assert "did you mean 'smollm2-135m'" in capsys.readouterr().err


@pytest.mark.parametrize(("verb", "option"), [(verb, option) for verb in VERBS for option in ("--save", "--report")])
def test_a_target_that_cannot_be_written_is_refused_before_the_model_is_loaded(verb, option, tmp_path, capsys):
    assert main([verb, "no-such-model", *QUICK, option, str(tmp_path)]) == 1
    assert "is a folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([verb, "no-such-model", *QUICK, option, str(tmp_path / "file" / "r")]) == 1
    assert "cannot be made" in capsys.readouterr().err


def test_two_targets_of_one_name(tmp_path, capsys):
    file = str(tmp_path / "r")
    assert main(["sweep", "no-such-model", *QUICK, "--save", file, "--report", file]) == 1
    error = capsys.readouterr().err
    assert "both name" in error
    assert "--save" in error
    assert "--report" in error


@pytest.mark.parametrize("content", ["hello\n", '{"ids": [1, 2]}\n'])
def test_results_go_into_a_folder_not_a_file(tmp_path, capsys, content):
    file = tmp_path / "cells.jsonl"
    file.write_text(content, encoding="utf-8")
    assert main(["sweep", "no-such-model", *QUICK, "--results", str(file)]) == 1
    assert "is a file; give the name of a folder" in capsys.readouterr().err.replace("\n", " ")
    assert main(["sweep", "no-such-model", *QUICK, "--results", str(file / "r")]) == 1
    assert "cannot be made" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == content
