"""Several prompts side by side."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdrift as kd
from kvdrift.drift.stacking import concatenate

PROMPTS = [[5, 9, 100, 33, 7], [8, 250], [301, 12, 44, 17, 61, 3, 2]]
SEED_FIRST = ("floor/", "local_floor/")


def run(model, prompts, tokens):
    return kd.compare(model, prompts, tokens=tokens, floor=2, self_drift=True, kv_every=1, progress=False)


@pytest.fixture(scope="module")
def singles(tiny_model):
    """Drifts of one prompt each by number of steps: 1, 2 and 4."""
    model = tiny_model("llama")
    return {n: [run(model, prompt, [7, 3, 9, 4][:n]) for prompt in PROMPTS] for n in (1, 2, 4)}


def prompt_axis(name, array):
    return np.moveaxis(array, 1, 0) if name.startswith(SEED_FIRST) else array


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
def test_every_prompt_keeps_its_numbers_and_the_rest_is_empty(singles, lengths):
    """Whatever the lengths, also where a prompt of one step has no local drift to give."""
    parts = [singles[n][i] for i, n in enumerate(lengths)]
    whole = concatenate(parts)
    assert whole.prompts == tuple(part.prompts[0] for part in parts)
    assert whole.measured.tolist() == [[i < n for i in range(max(lengths))] for n in lengths]
    assert whole.arrays["n_steps"].tolist() == lengths
    assert set(whole.arrays) == {name for part in parts for name in part.arrays}
    for name, array in whole.arrays.items():
        if name in ("steps", "positions/steps") or name.startswith("layers/"):
            continue
        rows = prompt_axis(name, array)
        assert len(rows) == len(parts), name
        for row, part in zip(rows, parts, strict=True):
            rest = np.ones(row.shape, dtype=bool)
            if name in part.arrays:
                own = prompt_axis(name, part.arrays[name])[0]
                inside = tuple(slice(size) for size in own.shape)
                np.testing.assert_array_equal(row[inside], own, err_msg=name)
                rest[inside] = False
            empty = row[rest]
            if row.dtype.kind == "f":
                assert np.isnan(empty).all()
            else:
                assert (empty == (False if row.dtype.kind == "b" else -1)).all()
    if max(lengths) > 1:
        assert whole.onset().source_layer is not None
        assert whole.per_prompt("resid_post").shape == (len(parts), 4)
    assert whole.summary()


@pytest.mark.parametrize("tokens", [[[7, 3, 9], [4]], [[4], [7, 3, 9]]], ids=["long-first", "short-first"])
def test_a_run_over_prompts_of_different_lengths_is_its_parts(tokens, tiny_model):
    model = tiny_model("llama")
    whole = run(model, PROMPTS[:2], tokens)
    parts = [run(model, prompt, ids) for prompt, ids in zip(PROMPTS, tokens, strict=False)]
    for name, array in concatenate(parts).arrays.items():
        np.testing.assert_array_equal(whole.arrays[name], array, err_msg=name)
    assert whole.to_dataframe("layers") is not None
    assert whole.to_dataframe("positions") is not None


def test_controls_are_joined_too(tiny_model):
    drift = kd.compare(tiny_model("llama"), PROMPTS[:2], max_new_tokens=2, floor=0, also_in="float64", progress=False)
    assert drift.control.prompts == drift.prompts
    assert drift.control.a.dtype == "float64"
    assert drift.control.values("resid_post").shape == drift.values("resid_post").shape
