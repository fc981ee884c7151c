"""What all results share: files and pickles of 0.1.0 load, an edit is refused, what is worked out once is kept."""

import hashlib
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from kvdrift.drift.result import Drift
from kvdrift.errors import FileError, InputError
from kvdrift.evaluation.result import Evaluation
from kvdrift.experiments.paper_architecture import PaperArchitecture
from kvdrift.experiments.paper_patching import PaperPatching
from kvdrift.files import load_tensors, save_tensors
from kvdrift.ladder.result import Ladder
from kvdrift.patching.factorial_result import Factorial
from kvdrift.patching.result import PatchResult, Sweep
from kvdrift.tracing.trace import Trace

OLD = Path(__file__).parent / "version_0_1_0"
SAID = json.loads((OLD / "said.json").read_text())
"""What version 0.1.0 said of its files: the summary, and a digest of the arrays."""
FILES = {
    "trace": Trace, "drift": Drift, "patch": PatchResult, "sweep": Sweep, "factorial": Factorial, "ladder": Ladder,
    "evaluation": Evaluation,
}  # fmt: skip
FOLDERS = {"paper_architecture": PaperArchitecture, "paper_patching": PaperPatching}


def old(kind):
    return FILES[kind].load(OLD / f"{kind}.safetensors")


def digest(arrays):
    taken = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name].numpy() if hasattr(arrays[name], "numpy") else arrays[name]
        taken.update(f"{name}{array.dtype}{array.shape}".encode() + array.tobytes())
    return taken.hexdigest()[:16]


@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_0_1_0_loads_with_equal_numbers_and_is_written_alike(kind, tmp_path):
    result = old(kind)
    assert repr(result) == SAID[kind]["summary"]
    if "arrays" in SAID[kind]:
        assert digest(result.tensors if kind == "trace" else result.arrays) == SAID[kind]["arrays"]
    else:
        assert [list(t.a.tokens) for record in result.records for t in record.trials] == SAID[kind]["tokens"]
    assert content(result.save(tmp_path / "again")) == content(OLD / f"{kind}.safetensors")


def content(file):
    """Kind, schema, manifest and the hash over everything."""
    with safe_open(file, framework="pt") as opened:
        return json.loads(opened.metadata()["kvdrift"])


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_of_0_1_0_loads(kind, tmp_path):
    result = FOLDERS[kind].load(OLD / kind)
    assert result.summary() == repr(result) == SAID[kind]["summary"]
    for file in sorted((OLD / kind).iterdir()):
        assert content(result.save(tmp_path) / file.name) == content(file)
    with pytest.raises(FileError, match="holds no saved"):
        FOLDERS[kind].load(tmp_path / "nothing")


def test_pickles_of_0_1_0_load():
    results = pickle.loads((OLD / "results.pickle").read_bytes())
    for kind, result in zip(("drift", "patch", "factorial", "ladder", "evaluation"), results, strict=False):
        assert type(result) is FILES[kind]
        if kind != "drift":  # pickled without its control
            assert result.summary() == SAID[kind]["summary"]
    assert results[0].growth().final.value == old("drift").growth().final.value
    assert results[-1].kind == "rounding"


@pytest.mark.parametrize("kind", FILES)
def test_a_truncated_or_edited_file_is_refused(kind, tmp_path):
    whole = (OLD / f"{kind}.safetensors").read_bytes()
    for place in (*range(9, len(whole), len(whole) // 5), len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 4
        (tmp_path / "x").write_bytes(changed)
        with pytest.raises(FileError):
            FILES[kind].load(tmp_path / "x")
    (tmp_path / "x").write_bytes(whole[:-1])
    with pytest.raises(FileError, match="not a whole kvdrift file"):
        FILES[kind].load(tmp_path / "x")


@pytest.mark.parametrize(("change", "word"), [({"base": None}, "base"), ({"later": 1}, "later")])
def test_a_field_that_is_missing_or_unknown_is_refused(change, word, tmp_path):
    tensors, manifest = load_tensors(OLD / "ladder.safetensors", "ladder")
    manifest = {name: value for name, value in (manifest | change).items() if value is not None}
    file = save_tensors(tmp_path / "x", "ladder", tensors, manifest)
    with pytest.raises(FileError, match=f"not a Ladder as this version of kvdrift writes it: {word} is"):
        Ladder.load(file)


def test_a_table_is_asked_for_by_name():
    with pytest.raises(InputError, match=r"to_dataframe\('rows'\): choose one of cells, steps\."):
        old("sweep").to_dataframe("rows")


def test_what_is_worked_out_once_is_kept_and_no_part_of_the_result(tmp_path):
    ladder, made = old("ladder"), []
    for key in ("x", "x", ["no hash"], ["no hash"]):
        ladder._once((key,), lambda: made.append(0))
    assert len(made) == 3
    again = pickle.loads(pickle.dumps(ladder))
    assert again._kept == replace(ladder)._kept == {}
    assert content(ladder.save(tmp_path / "x")) == content(OLD / "ladder.safetensors")
    assert repr(again) == repr(ladder)


@pytest.mark.parametrize(
    ("kind", "name", "sentence"),
    [
        ("drift", "top1_a", "'top1_a' has the shape .*, but .prompt 1, step "),
        ("drift", "drift/resid_post/rel_l2", "'drift/resid_post/rel_l2' has .* step [0-9]+, layer of resid_post "),
        ("patch", "kl", "'kl' has .*prompt 1, arm [0-9]+, step "),
        ("sweep", "kl", "'kl' has .*prompt 1, arm [0-9]+, step "),
        ("factorial", "kl/y10-y00", "'kl/y10-y00' has .*prompt 1, step "),
        ("ladder", "kl", "'kl' has .*arm [0-9]+, prompt 1, step "),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(kind, name, sentence):
    result = old(kind)
    array = result.arrays[name]
    for wrong in (array[:, :-1], array[..., None], array[:0]):
        with pytest.raises(InputError, match=sentence.replace("prompt 1", f"prompt {len(result.prompts)}")):
            replace(result, arrays=result.arrays | {name: wrong})


def test_a_trace_or_an_evaluation_that_does_not_fit_together_is_refused():
    trace, evaluation = old("trace"), old("evaluation")
    site = next(iter(trace.tensors))
    with pytest.raises(InputError, match=f"'{site}' has the shape .*, but .step of {site} "):
        replace(trace, tensors=trace.tensors | {site: trace.tensors[site][1:]})
    with pytest.raises(InputError, match=f"'valid/{site}' has the shape "):
        replace(trace, masks=trace.masks | {site: trace.masks[site][..., :-1]})
    with pytest.raises(InputError, match=f"'null of .*replicate {evaluation.replicates + 1}"):
        replace(evaluation, replicates=evaluation.replicates + 1)
