"""Invariants 3 and 4 on every tiny family, dtype and direction: own values change nothing, all values are the donor."""

from itertools import product

import pytest
import torch
from pairwise import params

import kvdrift as kd
from kvdrift.models.sites import BLOCK_SITES, GLOBAL_SITES, HEAD_SITES
from kvdrift.models.tiny import FAMILIES
from kvdrift.patching.outcome import Arm
from kvdrift.patching.spec import Patch, as_cell
from kvdrift.patching.walk import Company, Walk
from kvdrift.paths.sampling import greedy

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]  # longer than the windows of 8
STEPS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIRECTIONS = {"on from off": (kd.CacheOn(), kd.CacheOff()), "off from on": (kd.CacheOff(), kd.CacheOn())}
CASES = list(product(FAMILIES, DTYPES, DIRECTIONS))
PATHS = {"on": kd.CacheOn(), "off": kd.CacheOff(), "chunk": kd.CacheOn(prefill_chunk=3)}
LAYERS_OF_FOUR = ("gemma3", "lfm2")  # whose kinds of layer do not all come among the first two
WINDOW = "window(1, 2)"
LAST, FIRST = as_cell(Patch("resid_post", layers=-1)), as_cell(Patch("resid_post", layers=0))


@pytest.fixture(scope="session")
def model_of(tiny_model):
    def build(family, dtype):
        return tiny_model(family, dtype, **({} if family in LAYERS_OF_FOUR else {"num_hidden_layers": 2}))

    return build


def given(model, sites):
    return [site for site in sites if site in model.coverage.sites]


def writes(model, path):
    """The ways in which K/V can be written: MLA stores something else than the keys that a kernel reads."""
    return ("cache", "read") if isinstance(path, kd.CacheOn) and "deepseek" not in model.name else ("read",)


def cells_of(model, path):
    """Three cells that write every site in every way: at once, at other positions, in some heads, in the cache."""
    residual, inside = given(model, (*GLOBAL_SITES, *BLOCK_SITES)), given(model, ("q", "z"))
    cells = [
        [Patch(site, schedule=WINDOW) for site in (*residual, *inside)],
        [Patch(site, positions="all", schedule=WINDOW) for site in (*residual, *inside)],
        [Patch(site, positions=[2, 5, 9, 11], schedule="one_shot(2)") for site in (*residual, *inside)],
    ]
    if inside:
        layer, write = model.coverage.attention_layers[-1], writes(model, path)[0]
        cells[0] += [Patch("kv", schedule=WINDOW, write=write)]
        cells[1] += [Patch("kv", positions="all", write="read")]
        cells[2] += [
            Patch("q", layer, [1, 3], "all"),
            Patch("z", layer, [0, 2], schedule="one_shot(1)"),
            Patch("k", layer, [0], [4, 9], "one_shot(1)", write),
            Patch("v", layer, [0], [8, 3, 10], write=write),
        ]
    return [as_cell(cell) for cell in cells]


def walked(model, recipient, donor, cells, *arms):
    """Arm → its rows."""
    walk = Walk(model, donor, recipient, Company(0, False, False, 0))
    arms = [Arm("unpatched"), *arms]
    try:
        walk.check(cells, len(PROMPT), STEPS)
        rows = walk.over(
            PROMPT, dict(enumerate(cells)), arms, lambda moment, _, step: greedy(moment.logits, step), STEPS
        )
    finally:
        walk.close()
    return {
        arm: {name: values[place] for name, values in rows.items() if values.ndim == 2}
        for place, arm in enumerate(arms)
    }


@pytest.mark.parametrize(("family", "dtype", "direction"), params(CASES))
def test_own_values_change_no_bit_and_the_whole_residual_gives_the_donors_logits(
    family, dtype, direction, model_of, hooks
):
    """The whole residual: at every layer and the final norm; on the CPU the last layer's output alone too."""
    model, (recipient, donor) = model_of(family, dtype), DIRECTIONS[direction]
    arms = [Arm("full patch"), Arm("patched", 0), Arm("patched", 1), *(Arm("self-patch", 2 + n) for n in range(3))]
    found = walked(model, recipient, donor, [LAST, FIRST, *cells_of(model, recipient)], *arms)
    assert not hooks(model.hf)
    for arm, rows in found.items():
        if arm.role == "self-patch":
            assert rows["unchanged"].tolist() == [1] * STEPS, f"cell {arm.cell - 2}"
            assert rows["moved"][1 if arm.cell < 4 or "q" in model.coverage.sites else 2] == 0, "nothing was written"
    for arm in (Arm("full patch"), Arm("patched", 0)):
        assert found[arm]["identical"].tolist() == [1] * STEPS, arm
        assert found[arm]["logit_l2"].tolist() == found[arm]["kl"].tolist() == [0] * STEPS
    if model.dtype == torch.float32:
        assert (found[Arm("unpatched")]["logit_l2"][1:] > 0).all(), "there is something to recover"
        assert (found[Arm("patched", 1)]["logit_l2"][1:] > 0).any(), "and the first layer alone does not recover it"


@pytest.mark.parametrize(("family", "dtype", "name"), params(list(product(FAMILIES, DTYPES, PATHS)), 1))
def test_a_donor_that_is_the_recipient_changes_no_bit(family, dtype, name, model_of):
    model, path = model_of(family, dtype), PATHS[name]
    cells = cells_of(model, path)
    for arm, rows in walked(model, path, path, cells, *(Arm("patched", n) for n in range(len(cells)))).items():
        assert rows["unchanged"].tolist() == rows["identical"].tolist() == [1] * STEPS, arm
        assert arm.role == "unpatched" or (rows["moved"] == 0).any(), "nothing was written"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype", "direction"), CASES)
def test_ones_own_values_site_by_site(family, dtype, direction, model_of):
    """Every site alone, in every way it can be written."""
    model, (recipient, donor) = model_of(family, dtype), DIRECTIONS[direction]
    cells = []
    for site in given(model, (*GLOBAL_SITES, *BLOCK_SITES, *HEAD_SITES)):
        for positions in (None, "all", [2, 5, 9, 11]):
            ways = writes(model, recipient) if site in ("k", "v") else (None,)
            for write in ways if positions != "all" else ways[-1:]:
                for heads in (None, [0]) if site in HEAD_SITES else (None,):
                    for schedule in ("persistent", "one_shot(2)"):
                        cells.append(as_cell(Patch(site, None, heads, positions, schedule, write)))
    arms = [Arm("self-patch", cell) for cell in range(len(cells))]
    for arm, rows in walked(model, recipient, donor, cells, *arms).items():
        assert rows["unchanged"].tolist() == [1] * STEPS, arm.cell is not None and cells[arm.cell].label
