"""Outcomes, patch results, sweeps and factorials as plain data, against numbers counted by hand."""

import json
import math

import numpy as np
import pytest

from kvdrift.drift.stacking import pad_stack
from kvdrift.errors import FileError, InputError
from kvdrift.models.architecture import Architecture, LayerInfo
from kvdrift.models.labels import PathInfo, Prompt
from kvdrift.patching.factorial_result import PAIRS, Factorial
from kvdrift.patching.outcome import Arm, Outcomes
from kvdrift.patching.result import PatchResult, Sweep
from kvdrift.patching.spec import Patch, as_cell

NAN = math.nan
ON = PathInfo("cache-ON", "tiny", "bfloat16", "sdpa", "cpu")
OFF = PathInfo("cache-OFF", "tiny", "bfloat16", "eager", "cpu", ("re-roll 1",))
ARCHITECTURE = Architecture(
    model_type="llama", n_layers=2, d_model=8, n_heads=2, n_kv_heads=1, head_dim=4, vocab_size=9, max_positions=64,
    positional="rope", qk_norm=False, attn_softcap=None, final_softcap=None, tied_embeddings=False,
    layers=tuple(LayerInfo(i, "full", None, 1, 4) for i in range(2)),
)  # fmt: skip
PROMPTS = (Prompt((1, 2), ("one", "two"), "one two"), Prompt((3,), ("three",), None))
CELLS = (as_cell(Patch("kv", schedule="one_shot(1)")), as_cell(Patch("resid_post", layers=1, schedule="window(2, 3)")))
ARMS = (
    Arm("unpatched"),
    Arm("patched", 0), Arm("placebo", 0, 7), Arm("placebo", 0, 8),
    Arm("patched", 1),
)  # fmt: skip
# Two prompts: five steps, and three. [prompt, arm, step]
DISTANCE = np.array(
    [
        [[0, 2, 2, 4, 4], [0, 1, 1, 2, 3], [0, 2, 2, 2, 2], [0, 4, 4, 4, 4], [0, 2, 0, 0, 1]],
        [[0, 2, 2, NAN, NAN], [0, 0, 0, NAN, NAN], [0, 2, 6, NAN, NAN], [0, 2, 2, NAN, NAN], [0, 2, 1, NAN, NAN]],
    ],
    dtype=float,
)
RAN = np.isfinite(DISTANCE)
# The donor's text is its own tokens; the unpatched arm leaves it at step 3 and 1, the patched one at 4 and never.
DONOR = np.array([[4, 5, 6, 7, 8], [4, 5, 6, -1, -1]])
TOP1 = np.where(RAN, DONOR[:, None], -1)
for place in [(0, 0, 3), (0, 0, 4), (1, 0, 1), (0, 1, 4), (0, 2, 2), (1, 2, 2), (0, 3, 0)]:
    TOP1[place] = 0
FLIP = np.where(RAN, DONOR[:, None] != TOP1, NAN)
ARRAYS = {
    "logit_l2": DISTANCE,
    "kl": DISTANCE**2 / 10,
    "flip": FLIP,
    "identical": np.where(RAN, DISTANCE == 0, NAN),
    "unchanged": np.where(RAN, 0.0, NAN),
    "moved": np.where(RAN, 0.5, NAN),
    "signature": np.full(RAN.shape, NAN),
    "top1": TOP1,
    "fed": DONOR,
    "donor_top1": DONOR,
    "n_steps": np.array([5, 3]),
}


def make(kind=Outcomes, arrays=None, **fields):
    given = {
        "donor": OFF, "recipient": ON, "architecture": ARCHITECTURE, "prompts": PROMPTS, "cells": CELLS, "arms": ARMS,
        "arrays": ARRAYS | (arrays or {}), "token_texts": {1: "one", 2: " two", 3: "three"}, "notes": ("A note.",),
        "provenance": {"versions": {"torch": "x"}}, "extra": {},
    }  # fmt: skip
    return kind(**(given | fields))


def test_steps_and_ran():
    made = make()
    assert made.steps.tolist() == [0, 1, 2, 3, 4]
    assert made.ran.tolist() == [[True] * 5, [True] * 3 + [False] * 2]


def test_counted():
    made, T, F = make(), True, False
    assert made.counted(0).tolist() == [[F, F, T, T, T], [F, F, T, F, F]]
    assert made.counted(0, "written").tolist() == [[F, T, F, F, F], [F, T, F, F, F]]
    assert made.counted(0, "all").tolist() == [[F, T, T, T, T], [F, T, T, F, F]]
    assert made.counted(1).tolist() == [[F, F, F, T, T], [F] * 5]
    assert made.counted(1, "written").tolist() == [[F, F, T, T, F], [F, F, T, F, F]]
    with pytest.raises(InputError, match="'after', 'written' or 'all'"):
        made.counted(0, "before")


def test_find_and_values():
    made = make()
    assert made.find("unpatched") == made.find("unpatched", 1) == [0]
    assert (made.find("placebo"), made.find("placebo", 1), made.find("patched", 1)) == ([2, 3], [], [4])
    assert made.find("no such role") == []
    assert made.values("logit_l2", "placebo").tolist()[0][0] == [0, 2, 2, 2, 2]
    assert made.values("logit_l2", "placebo").shape == (2, 2, 5)
    for metric, role, cell in (("logit_l2", "re-roll", 0), ("nothing", "patched", 0), ("fed", "patched", 0)):
        with pytest.raises(InputError, match=f"no '{metric}' of '{role}'"):
            made.values(metric, role, cell)


def test_distance():
    made = make()
    assert made.distance("patched").tolist() == [[2.0, 0.0]]
    assert made.distance("placebo").tolist() == [[2.0, 6.0], [4.0, 2.0]]
    assert made.distance("patched", steps="written").tolist() == [[1.0, 0.0]]
    unfinished = made.distance("patched", 1)
    assert unfinished[0, 0] == 0.5
    assert np.isnan(unfinished[0, 1])
    assert made.distance("patched", metric="kl").tolist() == [[pytest.approx(1.4 / 3), 0.0]]


def test_recovery_by_hand():
    made = make()
    # after step 1: patched 1+4+9 and 0; placebos (4+4+4, 16·3) → mean 30, and (36, 4) → mean 20
    found = made.recovery()
    assert found.value == pytest.approx(1 - 14 / 50)
    assert found.per_prompt == pytest.approx((1 - 14 / 30, 1.0))
    assert found.spread == pytest.approx((1 - 52 / 50, 1 - 48 / 50))
    assert found.reference == "placebo"
    assert made.recovery(against="unpatched").value == pytest.approx(1 - 14 / (4 + 16 + 16 + 4))
    assert made.recovery(metric="kl").value == pytest.approx(1 - 14 / 50), "KL is a squared distance already"
    assert made.recovery(steps="written").value == pytest.approx(1 - 1 / (10 + 4))
    assert made.recovery(role="unpatched").value == pytest.approx(1 - 40 / 50)
    alone = made.recovery(1)
    assert (alone.reference, made.reference(1)) == ("unpatched", "unpatched")
    assert alone.value == pytest.approx(1 - 1 / 32)
    assert alone.n == 1
    with pytest.raises(InputError, match="logit_l2 or kl"):
        made.recovery(metric="flip")


def test_restored_and_flips():
    made = make()
    assert made.restored() == 1 / 4
    assert made.restored(steps="written") == 1 / 2
    assert made.restored(1) == 1 / 2
    assert made.restored(role="placebo") == 0
    assert (made.flips(), made.flips(role="unpatched"), made.flips(role="placebo")) == (1, 2, 2)
    assert made.flips(steps="all", role="unpatched") == 3
    late = make(cells=(as_cell(Patch("kv", schedule="one_shot(4)")), CELLS[1]))
    assert math.isnan(late.restored())
    assert late.flips() == 0


def test_signature_is_the_mean_over_what_was_computed():
    cosines = np.full(RAN.shape, NAN)
    cosines[0, 1] = [9, 9, 0.5, NAN, 1.0]  # steps 0 and 1 come before the outcome
    cosines[1, 1, 2] = 0.0
    made = make(arrays={"signature": cosines})
    assert made.signature() == (0.5 + 1.0 + 0.0) / 3
    assert math.isnan(made.signature("unpatched"))


def test_followed_and_free_recovery():
    made = make()
    assert made.followed("unpatched").tolist() == [[3, 1]]
    assert made.followed("patched").tolist() == [[4, 3]]
    assert made.followed("placebo").tolist() == [[2, 2], [0, 3]]
    # lost: patched 1 and 0; placebos (3, 1) and (5, 0) → means 4 and 0.5
    free = made.free_recovery()
    assert free.value == pytest.approx(1 - 1 / 4.5)
    assert free.per_prompt == pytest.approx((1 - 1 / 4, 1.0))
    assert made.free_recovery(against="unpatched").value == pytest.approx(1 - 1 / (2 + 2))
    assert math.isnan(made.free_recovery(role="patched", against="patched").per_prompt[1]), "nothing is lost there"


def test_there_is_no_free_outcome_on_tokens_that_are_not_the_donors():
    fed = DONOR.copy()
    fed[0, 2] = 1
    made = make(arrays={"fed": fed})
    assert np.isnan(made.followed("patched")[0, 0])
    assert made.followed("patched")[0, 1] == 3
    found = made.free_recovery()
    assert found.n == 1
    assert math.isnan(found.per_prompt[0])
    both = fed.copy()
    both[1, 0] = 1
    assert math.isnan(make(arrays={"fed": both}).free_recovery().value)


def test_tables_say_what_the_methods_say():
    made = make()
    table = made.to_dataframe()
    assert len(table) == 2
    for number, row in table.iterrows():
        found = made.recovery(number)
        assert (row["recovery"], row["reference"], row["n"]) == (found.value, found.reference, found.n)
        assert row["restored"] == made.restored(number)
        assert row["flips"] == made.flips(number)
        assert row["recovery_kl"] == made.recovery(number, "kl").value
        assert row["free_recovery"] == made.free_recovery(number).value
        assert row["followed"] == made.followed("patched", number).mean()
        assert row["trivial"] == made.trivial(number)
        assert row["recovery_written"] == made.recovery(number, steps="written").value
        assert row["restored_written"] == made.restored(number, "written")
        assert row["trivial_written"] == made.trivial(number, "written")
    assert table["site"].tolist() == ["kv", "resid_post"]
    assert table["schedule"].tolist() == ["one-shot", "window"]
    assert table["step"].tolist()[0] == 1
    steps = made.to_dataframe("steps")
    assert len(steps) == (5 + 3) * 5
    for _, row in steps.iterrows():
        place = made.find(row["role"], max(row["cell"], 0))
        seeds = [made.arms[i].seed for i in place]
        chosen = place[seeds.index(None if np.isnan(row["seed"]) else row["seed"])]
        assert row["logit_l2"] == DISTANCE[row["prompt"], chosen, row["step"]]
        assert row["top1"] == TOP1[row["prompt"], chosen, row["step"]]
    with pytest.raises(InputError, match="cells, steps"):
        made.to_dataframe("rows")


def test_pad():
    padded = pad_stack([np.ones((2, 3)), np.zeros((2, 1))])
    assert padded.shape == (2, 2, 3)
    assert np.isnan(padded[1, :, 1:]).all()
    assert (padded[0] == 1).all()


def a_factorial():
    rng = np.random.default_rng(0)
    n, ran = np.array([4, 2]), np.arange(4) < np.array([4, 2])[:, None]
    arrays = {"n_steps": n, "fed": np.where(ran, 3, -1)}
    for pair in PAIRS:
        distance = np.where(ran, rng.exponential(size=(2, 4)), NAN)
        distance[:, 0] = 0
        arrays |= {
            f"logit_l2/{pair}": distance,
            f"kl/{pair}": distance**2,
            f"identical/{pair}": np.where(ran, distance == 0, NAN),
        }
    return Factorial(OFF, ON, ARCHITECTURE, PROMPTS, arrays, {3: "three"}, ("A note.",), {"versions": {"x": "1"}})


RESULTS = {
    "outcomes": lambda: make(),
    "patch": lambda: make(PatchResult, cells=CELLS[:1], extra={"trajectories": [{"donor": [1, 2], "patched": [1]}]}),
    "sweep": lambda: make(Sweep, extra={"over": ("layer", "head")}),
    "factorial": a_factorial,
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_file_gives_back_every_bit(kind, tmp_path, same_bits):
    made = RESULTS[kind]()
    loaded = type(made).load(made.save(tmp_path / "result.safetensors"))
    assert sorted(loaded.arrays) == sorted(made.arrays)
    for name, array in made.arrays.items():
        assert loaded.arrays[name].dtype == array.dtype, name
        assert same_bits(loaded.arrays[name], array), name
    for name in ("architecture", "prompts", "token_texts", "notes", "provenance"):
        assert getattr(loaded, name) == getattr(made, name), name
    if kind == "factorial":
        assert (loaded.on, loaded.off) == (made.on, made.off)
    else:
        for name in ("donor", "recipient", "cells", "arms"):
            assert getattr(loaded, name) == getattr(made, name), name
        assert loaded.extra == json.loads(json.dumps(made.extra))
        assert loaded.to_dataframe().equals(made.to_dataframe())
    if kind != "outcomes":
        assert repr(loaded) == repr(made)
        assert loaded.to_dict() == made.to_dict()


@pytest.mark.parametrize("kind", ["patch", "sweep", "factorial"])
def test_a_file_of_another_kind_is_refused(kind, tmp_path):
    path = RESULTS[kind]().save(tmp_path / "result.safetensors")
    for other in ("patch", "sweep", "factorial"):
        if other != kind:
            with pytest.raises(FileError, match=f"holds a {kind}, not a {other}"):
                type(RESULTS[other]()).load(path)


@pytest.mark.parametrize("kind", ["patch", "sweep", "factorial"])
def test_an_edited_or_truncated_file_is_refused(kind, tmp_path):
    path = RESULTS[kind]().save(tmp_path / "result.safetensors")
    whole = path.read_bytes()
    edited = bytearray(whole)
    edited[-1] ^= 1
    for content, words in ((bytes(edited), "changed after it was saved"), (whole[:-9], "not a whole kvdrift file")):
        path.write_bytes(content)
        with pytest.raises(FileError, match=words):
            type(RESULTS[kind]()).load(path)


def test_trajectories_and_axes_survive_as_tuples(tmp_path):
    result = RESULTS["patch"]()
    assert result.trajectories == ({"donor": (1, 2), "patched": (1,)},)
    assert PatchResult.load(result.save(tmp_path / "p")).trajectories == result.trajectories
    assert make(PatchResult, cells=CELLS[:1]).trajectories == ()
    assert Sweep.load(RESULTS["sweep"]().save(tmp_path / "s")).over == ("layer", "head")


def test_machine_readable_results_are_json():
    for made in (RESULTS["patch"](), RESULTS["sweep"](), a_factorial()):
        text = json.dumps(made.to_dict(), allow_nan=False)
        assert json.loads(text)["model"] == "tiny"


def test_best_leaves_out_what_is_one_by_construction():
    cells = (*CELLS, as_cell("final_norm"))
    arms = (*ARMS, Arm("patched", 2))
    arrays = {
        name: np.concatenate([x, x[:, :1] * (0 if name in ("logit_l2", "kl", "flip") else 1)], axis=1)
        for name, x in ARRAYS.items()
        if x.ndim == 3
    }
    sweep = make(Sweep, arrays, cells=cells, arms=arms)
    assert sweep.recovery(2).value == 1
    assert sweep.best(5)["cell"].tolist() == [1, 0]
    assert sweep.best()["recovery"].tolist() == [sweep.recovery(1).value]
    assert sweep.trivial(1, "written"), "the last residual at steps 2 and 3, where it is written"
    assert not sweep.trivial(1)
    written = sweep.best(2, steps="written")
    assert written["cell"].tolist() == [0]
    for column, value in {
        "recovery": sweep.recovery(steps="written").value,
        "restored": sweep.restored(steps="written"),
        "logit_l2": sweep.distance("patched", steps="written").mean(),
        "flips": sweep.flips(steps="written"),
    }.items():
        assert written[column].tolist() == [value], column


def test_factorial_numbers():
    found = a_factorial()
    assert found.counted.tolist() == [[False, True, True, True], [False, True, False, False]]
    values = found.values("y10-y00")
    assert found.per_prompt("y10-y00").tolist() == [values[0, 1:].mean(), values[1, 1]]
    assert len(found.to_dataframe()) == 6 * len(PAIRS)
    with pytest.raises(InputError, match="no 'kl' of 'y00-y11'"):
        found.values("y00-y11", "kl")
