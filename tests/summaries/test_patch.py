"""What results of patching say: about patches that had nothing to write, and about re-rolled sums."""

import numpy as np
import pytest
import torch

import kvdrift as kd
from kvdrift.patching.recovery import Recovery, loses
from kvdrift.patching.spec import Patch, as_cell
from kvdrift.summaries import patch as words
from kvdrift.summaries.recovery import short

NAN = float("nan")


def with_moved(result, values):
    """The patched arms wrote values at this distance from the recipient's own, ``[step]``."""
    for cell in range(len(result.cells)):
        result.arrays["moved"][:, result.find("patched", cell)] = values
    return result


def only(step, value, n_steps=12):
    values = np.full(n_steps, np.nan)
    values[step] = value
    return values


# --- nothing to write


def test_a_patch_with_nothing_to_write_says_so_and_no_more(made):
    result = with_moved(made.patch_result(Patch("kv", schedule="one_shot(2)")), only(2, 0.0))
    assert result.wrote_nothing()
    sentence = "nothing was changed: at step 2 donor and recipient still held the same values there; patch a later step"
    assert words.reading(result) == [sentence]
    assert sentence in result.summary()
    assert sentence in result.to_dict()["reading"]


def test_one_value_that_differs_is_enough(made):
    result = with_moved(made.patch_result(Patch("kv", schedule="one_shot(2)")), only(2, 0.0))
    result.arrays["moved"][-1, result.find("patched")[0], 2] = 1e-30
    assert not result.wrote_nothing()
    assert not any("nothing was changed" in line for line in words.reading(result))
    assert not with_moved(made.patch_result(Patch("kv")), np.full(12, np.nan)).wrote_nothing()  # never written


def test_a_persistent_patch_has_no_later_step(made):
    result = with_moved(made.patch_result(Patch("kv")), 0.0)
    assert words.reading(result) == [
        "nothing was changed: at steps 1 to 11 donor and recipient still held the same values there"
    ]


def test_equal_logits_come_first(made):
    """Where there is nothing to recover, a patch with nothing to write is no surprise."""
    result = with_moved(made.patch_result(Patch("kv"), remains=NAN), 0.0)
    result.arrays["logit_l2"][:, result.find("unpatched")] = 0.0
    assert words.reading(result)[0].startswith("nothing to recover")


@pytest.mark.parametrize(
    ("zero", "told"),
    [
        ((), "2 cells change no bit of the logits\n"),
        ((0,), "2 cells change no bit of the logits: what 1 of them write is what the recipient has"),
        ((0, 1), "2 cells change no bit of the logits: what they write is what the recipient has"),
    ],
)
def test_silent_cells_of_a_sweep(zero, told, made):
    cells = (*map(as_cell, (Patch("k", layers=1), Patch("v", layers=1), Patch("kv", layers=1))),)
    sweep = made.sweep(cells, [1.0, 1.0, 0.5])
    for cell in (0, 1):
        sweep.arrays["unchanged"][:, sweep.find("patched", cell)] = 1.0
    for cell in zero:
        sweep.arrays["moved"][:, sweep.find("patched", cell)] = 0.0
    assert told in sweep.summary() + "\n"


@pytest.mark.parametrize("changed", [2, 3])
def test_patches_that_really_have_nothing_to_write(changed, tiny_model):
    """A donor whose MLP of one layer is another: keys and values up to that layer are the recipient's own."""
    recipient = tiny_model("llama", torch.float32)
    donor = kd.models.tiny("llama")
    with torch.no_grad():
        donor.model.layers[changed].mlp.down_proj.weight.mul_(1.5)
    result = kd.patch(
        recipient, [5, 9, 100, 33, 7], kd.Patch("kv", schedule="one_shot(2)"), recipient=kd.CacheOn(),
        donor=kd.CacheOn(model=kd.load(donor, quiet=True)), max_new_tokens=5, tokens=[3, 1, 4, 1, 5], placebos=1,
        checks=False, progress=False,
    )  # fmt: skip
    assert result.wrote_nothing() == (changed == 3)
    assert any("nothing was changed: at step 2" in line for line in words.reading(result)) == (changed == 3)


# --- re-rolled sums


def recovery(value, low=NAN, high=NAN):
    return Recovery(value, low, high, NAN, NAN, (), (NAN, NAN), "unpatched", 1)


@pytest.mark.parametrize(
    ("rerolled", "plain", "expected"),
    [
        (recovery(0.2), recovery(0.5), True),
        (recovery(0.2), recovery(0.5, 0.3, 0.7), True),
        (recovery(0.2), recovery(0.5, -0.1, 0.7), False),  # no recovery to speak of
        (recovery(0.0), recovery(0.02), False),
        (recovery(0.1), recovery(0.02), False),
        (recovery(0.6), recovery(0.5), False),
        (recovery(-0.5), recovery(-0.2), False),
        (recovery(NAN), recovery(0.5), False),
    ],
)
def test_what_re_rolled_sums_take_away(rerolled, plain, expected):
    assert loses(rerolled, plain) is expected


@pytest.mark.parametrize(("remains", "explained"), [(0.3, True), (0.99, False)])
def test_the_last_sentence_divides_a_recovery_only_where_there_is_one(remains, explained, made):
    sentence = words.reading(made.patch_result("kv", remains))[-1]
    assert sentence.startswith("with the recipient's sums re-rolled, the patch against no patch is ")
    assert ("kernels rounding alike" in sentence) == explained
    assert sentence[-1] not in ": "


# --- a patch that ends: where it is written, and after it


def other_mlp(family, layer, factor=1.5):
    """A donor that differs in the MLP of one layer."""
    donor = kd.models.tiny(family)
    with torch.no_grad():
        donor.model.layers[layer].mlp.down_proj.weight.mul_(factor)
    return kd.CacheOn(model=kd.load(donor, quiet=True))


def state_after(layer, schedule):
    """All that a pass hands on above one layer: its residual, and the K/V of the past."""
    return [Patch("resid_post", layers=layer, schedule=schedule), Patch("kv", schedule=schedule)]


@pytest.mark.parametrize(
    ("family", "layer", "patches", "follows"),
    [
        ("llama", 3, [Patch("mlp_out", layers=3, schedule="one_shot(2)")], 0.0),
        ("gemma3", 0, state_after(0, "one_shot(2)"), None),
        ("qwen3", 2, state_after(2, "window(2, 3)"), None),
    ],
)
def test_a_patch_that_ends_is_told_where_it_is_written_and_after_it(family, layer, patches, follows, tiny_model):
    result = kd.patch(
        tiny_model(family, torch.float32), [5, 9, 100, 33, 7], patches, recipient=kd.CacheOn(),
        donor=other_mlp(family, layer), max_new_tokens=6, tokens=[3, 1, 4, 1, 5, 9], placebos=1, checks=False,
        progress=False,
    )  # fmt: skip
    assert result.restored(steps="written") == 1.0
    after = result.recovery().value
    assert after < 0.9
    assert follows is None or result.recovery(against="unpatched").value == follows
    written, rest = (line for line in result.summary().splitlines() if "recovery" in line and "against" in line)
    assert written.startswith("at the written step")
    assert "recovery 1.00" in written
    assert "restored bit for bit at 100%" in written
    assert rest.startswith(f"over the steps that follow: recovery {after:.2f}")
    assert any("there passes through it" in line for line in words.reading(result))
    assert ("no bit of the logits is another than without the patch" in result.summary()) == (follows == 0.0)
    told = result.to_dict()
    assert (told["recovery_written"]["value"], told["recovery"]["value"]) == (1.0, after)
    assert told["arms"]["patched"]["written"]["restored"] == 1.0
    assert "restored bit for bit, at the written steps" in result._repr_html_()
    title = kd.views.recovery(result).layout.title.text
    assert "1.00 where it is written" in title.replace("<br>", " ").replace("</b> <b>", " ")


def test_the_last_residual_proves_nothing_where_it_is_written(made):
    result = made.patch_result(Patch("resid_post", layers=5, schedule="one_shot(3)"), 1.0)
    assert result.trivial(steps="written")
    assert not result.trivial()
    assert words.reading(result)[0] == (
        "at the written step 3 the donor's last residual is written: recovery there is 1 by construction and proves "
        "nothing"
    )
    assert made.patch_result(Patch("resid_post", layers=5, schedule="window(3, 11)")).trivial()


def test_a_last_step_that_is_patched_is_still_told(made):
    result = made.patch_result(Patch("kv", schedule="one_shot(11)"), 0.5)
    assert "at the written step 11: recovery " in result.summary()
    assert "o step follows the first write at step 11" in result.summary()


def test_a_sweep_names_the_best_of_either(made):
    cells = tuple(as_cell(Patch("kv", layers=i, schedule="one_shot(3)")) for i in range(5))
    sweep = made.sweep(cells, [0.5, 0.6, 0.7, 0.8, 1.0])
    for name, value in {"logit_l2": 0.0, "identical": 1.0}.items():
        sweep.arrays[name][:, sweep.find("patched", 4), 3] = value
    assert sweep.best()["cell"].item() == 0
    assert sweep.best(steps="written")["cell"].item() == 4
    lines = sweep.summary().splitlines()
    assert lines[2].startswith(f"{sweep.cells[0].label}: {short(sweep.recovery())} over the steps that follow")
    assert f"best where it is written: {cells[4].label}: 1.00" in sweep.summary()
    assert "at the written step 3, restored at 100%" in sweep.summary()
