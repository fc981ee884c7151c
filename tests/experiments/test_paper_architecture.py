"""The paper's architecture experiment: same tokens, paired differences, and sentences that follow the numbers."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

import kvdrift as kd
from kvdrift.drift.result import Drift
from kvdrift.errors import FileError, InputError, ModelError
from kvdrift.experiments.course import change, course, layer_changes, same_numbers
from kvdrift.experiments.paper_architecture import ARMS, PaperArchitecture, paper_architecture
from kvdrift.models.tiny import tiny
from kvdrift.statistics.paired import N_PERMUTATIONS

module = import_module("kvdrift.experiments.paper_architecture")  # the function has the same name
PROMPTS = [[5, 9, 100, 33, 7], [8, 250, 301, 12]]


@pytest.fixture(scope="module")
def found(tiny_model):
    return paper_architecture(tiny_model("gemma3", torch.float32), PROMPTS, max_new_tokens=3, progress=False)


def many(drift, n=6):
    """The same drift over n prompts that differ a little."""
    spread = 1 + 0.01 * np.arange(n)
    arrays = {}
    for name, x in drift.arrays.items():
        if name.startswith(("layers/", "steps", "positions/steps")):
            arrays[name] = x
            continue
        axis = 1 if name.startswith(("floor/", "local_floor/")) else 0
        arrays[name] = np.concatenate([np.take(x, [0], axis=axis)] * n, axis=axis)
        if name.endswith("rel_l2") and axis == 0:
            arrays[name] = arrays[name] * spread.reshape(n, *[1] * (x.ndim - 1))
    return replace(drift, prompts=(drift.prompts[0],) * n, arrays=arrays)


def with_first_layer(drift, share):
    """Accumulated drift whose first layer holds this share of the last layer's."""
    name = "drift/resid_post/rel_l2"
    values = drift.arrays[name].copy()
    values[..., :-1] = 0.9 * values[..., -1:]
    values[..., 0] = share * values[..., -1]
    return replace(drift, arrays={**drift.arrays, name: values})


def grouped(drift, share_a, share_b):
    original = with_first_layer(many(drift), share_a)
    copy = replace(original, architecture=replace(original.architecture, n_kv_heads=8))
    return PaperArchitecture(original, with_first_layer(copy, share_b))


def test_every_arm_is_the_comparison_itself_on_the_originals_tokens(found, tiny_model):
    model = tiny_model("gemma3", torch.float32)
    assert list(found.arms) == list(ARMS.values())
    for drift in found.arms.values():
        assert np.array_equal(drift.arrays["fed"], found.original.arrays["fed"])
        assert drift.prompts == found.original.prompts
    again = kd.compare(
        kd.counterfactual.expand_kv_heads(model), PROMPTS, max_new_tokens=3, sites=["resid_post"], floor=1,
        tokens=[row.tolist() for row in found.original.arrays["fed"]], progress=False,
    )  # fmt: skip
    assert np.array_equal(again.values("resid_post"), found.kv_heads.values("resid_post"), equal_nan=True)
    assert [d.architecture.grouping for d in found.arms.values()] == ["GQA", "MHA", "GQA", "MHA"]
    assert [d.architecture.layers[0].window for d in found.arms.values()] == [8, 8, 256, 256]


def test_the_tables_say_what_the_drifts_say(found):
    arms, layers = found.to_dataframe(), found.to_dataframe("layers")
    assert len(arms) == 8
    assert len(layers) == 4 * 2 * 4
    accumulated = found.kv_heads.per_prompt("resid_post")
    local = np.stack([x[keep].mean(axis=0) for x, keep in zip(
        found.kv_heads.values("resid_post", of="local"), found.kv_heads.counted, strict=True)])  # fmt: skip
    for of, rows in (("drift", accumulated), ("local", local)):
        arm = arms[(arms["arm"] == "KV heads expanded") & (arms["of"] == of)].iloc[0]
        drawn = layers[(layers["arm"] == "KV heads expanded") & (layers["of"] == of)]
        assert np.allclose(drawn["value"], rows.mean(axis=0), rtol=1e-14)
        assert arm["first"] == pytest.approx(rows[:, 0].mean(), rel=1e-14)
        whole = rows[:, -1] if of == "drift" else rows.sum(axis=1)
        assert arm["first_share"] == pytest.approx((rows[:, 0] / whole).mean(), rel=1e-12)
    with pytest.raises(InputError, match="choose one of arms, layers"):
        found.to_dataframe("heads")


def test_where_the_weights_lie_makes_no_difference():
    """Weights off a 64-byte boundary, as those of a memory-mapped checkpoint are, can change float32 products."""
    options = {"max_new_tokens": 4, "floor": 0, "progress": False}
    aligned, shifted = tiny("llama"), tiny("llama")
    for weight in shifted.parameters():
        memory = torch.empty(weight.numel() + 2)
        memory[2:] = weight.flatten()
        weight.data = memory[2:].view_as(weight)
    assert {weight.data_ptr() % 64 for weight in shifted.parameters()} == {8}
    one, two = (paper_architecture(hf, PROMPTS, **options) for hf in (aligned, shifted))
    assert same_numbers(one.original, two.original)
    assert any("fresh copy of the weights" in note for note in two.notes)


def test_windows_that_do_nothing_are_reported_as_that(found):
    assert same_numbers(found.original, found.windows)
    (sentence,) = [s for s in found.reading() if "window" in s and "(texts of" in s]
    assert "changes no bit of any drift" in sentence
    assert "texts of up to 8 positions, window 8" in sentence
    changed = replace(found.windows, arrays={n: 2 * x if n.endswith("rel_l2") else x
                                             for n, x in found.windows.arrays.items()})  # fmt: skip
    (sentence,) = [s for s in replace(found, windows=changed).reading() if "window" in s and "(texts of" in s]
    assert "The layer that adds most holds" in sentence


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((0.1, 0.2), "Grouping makes no first-layer jump"),
        ((0.8, 0.7), "The first-layer jump stays without grouping, which therefore does not make it"),
        ((0.8, 0.1), "The first-layer jump goes with the grouping, which therefore makes it"),
        ((0.1, 0.8), "A first-layer jump comes only when grouping is taken away"),
    ],
)
def test_the_reading_follows_the_shares(found, shares, words):
    result = grouped(found.original, *shares)
    assert f"{words}: the first layer holds {100 * shares[0]:.0f} % of the final drift" in result.summary()
    assert result.headline().startswith(words)


def test_equal_numbers_acquit_the_grouping(found):
    one = with_first_layer(many(found.original), 0.8)
    copy = replace(one, architecture=replace(one.architecture, n_kv_heads=8))
    sentence = "Grouping does not shape this drift: with 8 KV heads instead of 2 no bit of it changes"
    assert sentence in PaperArchitecture(one, copy).summary()


def test_few_prompts_give_no_verdict_on_a_smaller_jump(found):
    drop = grouped(found.original, 0.8, 0.1)
    two = PaperArchitecture(*(_first(drift, 2) for drift in (drop.original, drop.kv_heads)))
    assert "smaller without grouping, but not with confidence" in two.summary()
    assert "there are no intervals" in two.summary()


def _first(drift, n):
    arrays = {
        name: x if name.startswith(("layers/", "steps")) else x[:, :n] if "floor/" in name else x[:n]
        for name, x in drift.arrays.items()
    }
    return replace(drift, prompts=drift.prompts[:n], arrays=arrays)


def test_a_change_of_one_layer_is_found_and_corrected_for_their_number(found):
    original = many(found.original, 12)
    name = "drift/resid_post/rel_l2"
    values = original.arrays[name].copy()
    values[..., 2] *= 3
    copy = replace(original, arrays={**original.arrays, name: values})
    changes, adjusted = layer_changes(course(copy, "drift"), course(original, "drift"))
    assert [found.higher for found in changes] == [0, 0, 12, 0]
    assert adjusted[2] == pytest.approx(4 * 2 / 2**12)
    assert "layers 2 change (Holm over 4 layers)" in PaperArchitecture(original, copy).summary()


def test_the_sign_flip_test_is_the_exact_one():
    assert change(np.array([1.0, 2.0, 4.0]), np.zeros(3)).p == 2 / 8
    assert change(np.array([1.0, -1.0]), np.zeros(2)).p == 1.0
    assert change(np.zeros(4), np.zeros(4)).p == 1.0
    rng = np.random.default_rng(0)
    flat = [change(rng.standard_normal(8), np.zeros(8)).p for _ in range(400)]
    assert 0.02 < np.mean(np.array(flat) <= 0.05) < 0.08
    assert change(rng.standard_normal(40) + 1, np.zeros(40)).p == 2 / (1 + N_PERMUTATIONS)
    assert change(np.array([1.0, np.inf]), np.zeros(2)).p == 1.0
    assert change(np.array([np.nan, 3.0]), np.zeros(2)).n == 1
    assert np.isnan(change(np.full(2, np.nan), np.zeros(2)).mean)


def test_drift_of_zero_has_no_shares(found):
    still = replace(found.original, arrays={n: 0 * x if n.endswith("rel_l2") else x
                                            for n, x in found.original.arrays.items()})  # fmt: skip
    text = PaperArchitecture(still, replace(found.kv_heads, arrays=still.arrays)).summary()
    assert "no drift at the last layer, so there is no course through the layers" in text
    assert "nothing can be said about grouping" in text


def test_saved_and_loaded_results_are_equal(found, tmp_path):
    again = PaperArchitecture.load(found.save(tmp_path / "folder"))
    assert again.summary() == found.summary()
    assert all(same_numbers(one, two) for one, two in zip(again.arms.values(), found.arms.values(), strict=True))
    assert kd.experiments.PaperArchitecture.load(tmp_path / "folder").to_dict() == found.to_dict()
    with pytest.raises(FileError, match="no saved architecture experiment"):
        PaperArchitecture.load(tmp_path)
    assert isinstance(found.original, Drift)


def test_texts_beyond_the_window_leave_the_windows_out(tiny_model):
    result = paper_architecture(
        tiny_model("gemma3", torch.float32), [PROMPTS[0]], max_new_tokens=4, floor=0, progress=False
    )
    assert list(result.arms) == ["original", "KV heads expanded"]
    assert any("the longest text reaches 9 positions, and beyond the window of 8" in note for note in result.notes)
    assert result.notes[0] in result.summary()


def test_nothing_to_change_is_refused(tiny_model):
    with pytest.raises(InputError, match="has no counterfactual: its heads are not grouped"):
        paper_architecture(tiny_model("gpt2", torch.float32), PROMPTS, max_new_tokens=2, progress=False)


def test_a_refused_copy_is_named(tiny_model, monkeypatch):
    def refuse(model):
        raise ModelError("cannot be expanded.")

    monkeypatch.setattr(module, "expand_kv_heads", refuse)
    result = paper_architecture(
        tiny_model("gemma3", torch.float32), [[1, 2]], max_new_tokens=2, floor=0, progress=False
    )
    assert list(result.arms) == ["original", "windows widened"]
    assert "The arm “KV heads expanded” is missing: cannot be expanded." in result.notes
    with pytest.raises(ModelError, match=r"No counterfactual of tiny-llama could be made\. .* cannot be expanded"):
        paper_architecture(tiny_model("llama", torch.float32), [[1, 2]], max_new_tokens=2, floor=0, progress=False)


def test_layers_without_attention_have_no_local_drift(tiny_model):
    result = paper_architecture(tiny_model("lfm2", torch.float32), [[1, 2, 3]], max_new_tokens=3, progress=False)
    layers = result.to_dataframe("layers")
    missing = layers[(layers["of"] == "local") & layers["value"].isna()]
    assert set(missing["layer"]) == {0, 2}
    assert "Made by the first layer alone" not in result.summary()


def test_finished_prompts_are_kept(tiny_model, tmp_path, monkeypatch):
    options = {"max_new_tokens": 2, "floor": 0, "progress": False, "store": tmp_path}
    model = tiny_model("llama", torch.float32)
    first = paper_architecture(model, PROMPTS, **options)
    assert {folder.name for folder in tmp_path.iterdir()} == {"original", "kv_heads"}
    monkeypatch.setattr("kvdrift.drift.lockstep.Lockstep.walk", None)  # nothing runs again
    assert paper_architecture(model, PROMPTS, **options).summary() == first.summary()


def test_a_jump_is_the_largest_step_and_no_even_share(found):
    jumps = {share: course(with_first_layer(found.original, share), "drift").jumps for share in (0.1, 0.44, 0.8)}
    assert jumps == {0.1: False, 0.44: False, 0.8: True}  # at 0.44 the second layer adds 0.46
    even = found.original.arrays["drift/resid_post/rel_l2"] * 0 + np.array([1.0, 2.0, 3.0, 4.0])
    arrays = {**found.original.arrays, "drift/resid_post/rel_l2": even}
    assert not course(replace(found.original, arrays=arrays), "drift").jumps
