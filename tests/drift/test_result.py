"""The result object: accessors, statistics, its file."""

import json
from dataclasses import replace

import numpy as np
import pytest

import kvdrift as kd
from kvdrift.drift import profile
from kvdrift.drift.result import Drift
from kvdrift.errors import FileError, InputError, SiteError

PROMPTS = [[5, 9, 100, 33, 7], [8, 250]]


@pytest.fixture(scope="module")
def drift(tiny_model):
    return kd.compare(
        tiny_model("mistral"), PROMPTS, tokens=[[1, 2, 3, 4], [5, 6]], floor=2, self_drift=True, kv_every=2,
        also_in="float64", progress=False,
    )  # fmt: skip


def test_a_file_gives_back_every_bit(drift, tmp_path, same_bits):
    again = Drift.load(drift.save(tmp_path / "drift.safetensors"))
    for one, two in ((drift, again), (drift.control, again.control)):
        assert set(one.arrays) == set(two.arrays)
        for name, array in one.arrays.items():
            assert array.dtype == two.arrays[name].dtype
            assert same_bits(array, two.arrays[name]), name
        for field in ("a", "b", "architecture", "prompts", "token_texts", "notes"):
            assert getattr(one, field) == getattr(two, field), field
        assert two.provenance == json.loads(json.dumps(one.provenance))
    assert again.summary() == drift.summary()
    assert again.to_dict() == drift.to_dict()
    assert again.save(tmp_path / "again").read_bytes() == (tmp_path / "drift.safetensors").read_bytes()


def test_odd_values_texts_and_shared_arrays_survive(drift, tmp_path, same_bits):
    odd = drift.arrays["drift/resid_post/rel_l2"].copy()
    odd.flat[:5] = [np.nan, np.inf, -np.inf, -0.0, 5e-324]
    texts = {0: "\ud800", 1: "<script>", 2: "\0", 3: "日本", -1: ""}
    arrays = drift.arrays | {"drift/resid_post/rel_l2": odd, "x": odd, "y": odd[:1], "none": np.empty((2, 0), bool)}
    made = replace(drift, arrays=arrays, token_texts=texts)
    again = Drift.load(made.save(tmp_path / "x"))
    assert again.token_texts == texts
    assert all(same_bits(arrays[name], again.arrays[name]) for name in arrays)


def test_an_edit_anywhere_is_refused(drift, tmp_path):
    path = drift.save(tmp_path / "x")
    content = path.read_bytes()
    for place in range(9, len(content), len(content) // 40):
        changed = bytearray(content)
        changed[place] ^= 4
        path.write_bytes(changed)
        with pytest.raises(FileError):
            Drift.load(path)


def test_a_trace_is_no_drift(tiny_model, tmp_path):
    path = kd.record(tiny_model("llama"), [1], max_new_tokens=1, progress=False).save(tmp_path / "x")
    with pytest.raises(FileError, match="holds a trace, not a drift"):
        Drift.load(path)


def test_statistics_leave_out_step_0_and_what_was_not_measured(drift):
    values = drift.values("resid_post")
    assert drift.counted.tolist() == [[False, True, True, True], [False, True, False, False]]
    expected = [np.median(values[0, 1:4], axis=0), values[1, 1]]
    np.testing.assert_array_equal(drift.per_prompt("resid_post"), expected)
    floor = np.median(drift.values("resid_post", of="floor"), axis=0)
    np.testing.assert_array_equal(
        drift.per_prompt("resid_post", of="floor"), [np.median(floor[0, 1:4], axis=0), floor[1, 1]]
    )
    spoilt = drift.arrays | {"drift/resid_post/rel_l2": np.where(drift.counted[..., None], values, 1e9)}
    np.testing.assert_array_equal(replace(drift, arrays=spoilt).per_prompt("resid_post"), expected)


def test_growth_and_onset_are_worked_out_once_for_each_site_and_option(drift, monkeypatch):
    again, calls = replace(drift), []

    def counted(make):
        return lambda *arguments, **options: (calls.append(make.__name__), make(*arguments, **options))[1]

    for make in (profile.growth, profile.onset):
        monkeypatch.setattr(profile, make.__name__, counted(make))
    for _ in range(2):
        for name in ("growth", "onset"):
            ask = getattr(again, name)
            assert ask() is ask("resid_post") is not ask("attn_out")
            assert ask(seed=1) is ask(seed=1) is not ask()
    assert sorted(calls) == ["growth"] * 3 + ["onset"] * 3
    kd.views.growth(again)
    assert sorted(calls) == ["growth"] * 6 + ["onset"] * 3, "of the five sites shown, three are new; the onset is one"


def with_tops(drift, a, b, fed, measured=None):
    a, b, fed = (np.array([x]) for x in (a, b, fed))
    measured = np.ones_like(a, dtype=bool) if measured is None else np.array([measured])
    arrays = {"steps": np.arange(a.shape[1]), "measured": measured, "top1_a": a, "top1_b": b, "fed": fed}
    return replace(drift, arrays=arrays, prompts=drift.prompts[:1], control=None)


@pytest.mark.parametrize(
    ("a", "b", "fed", "first", "free"),
    [
        ([1, 2, 3], [1, 2, 3], [1, 2, 3], None, None),
        ([1, 2, 3], [1, 9, 3], [1, 2, 3], 1, 1),
        ([1, 2, 3], [9, 9, 9], [1, 2, 3], 0, 0),
        ([1, 2, 3], [1, 9, 3], [1, 9, 3], 1, 1),
        ([1, 2, 3], [1, 2, 9], [1, 7, 3], 2, None),
        ([1, 2, 3], [1, 9, 3], [7, 2, 3], 1, None),
        ([1, 2, 3], [9, 2, 3], [7, 2, 3], 0, 0),
    ],
)
def test_first_flip_and_free_divergence(drift, a, b, fed, first, free):
    """A flip counts as free divergence only while the tokens fed are path a's own choice up to there."""
    made = with_tops(drift, a, b, fed)
    assert made.first_flip == (first,)
    assert made.free_divergence == (free,)


def test_a_flip_at_a_step_that_was_not_measured_is_none(drift):
    made = with_tops(drift, [1, -1, 3], [1, -2, 3], [1, 2, 3], measured=[True, False, True])
    assert made.first_flip == (None,)


def test_no_local_drift_no_onset(tiny_model):
    drift = kd.compare(tiny_model("llama"), [1, 2], max_new_tokens=2, floor=0, local=False, progress=False)
    with pytest.raises(SiteError, match="local/resid_post"):
        drift.onset()


def test_tables_are_named(drift):
    for what in ("layers", "logits", "heads", "positions"):
        assert len(drift.to_dataframe(what)) > 0
    with pytest.raises(InputError, match="'nonsense'"):
        drift.to_dataframe("nonsense")
    assert repr(drift) == drift.summary()
    assert "<" in drift._repr_html_()


def test_it_is_plain_data(drift):
    with pytest.raises(AttributeError):
        drift.notes = ()
    assert all(isinstance(array, np.ndarray) for array in drift.arrays.values())
    assert {array.dtype.name for array in drift.arrays.values()} <= {"float64", "float32", "int64", "bool"}
