"""A planted cause is found: one layer's keys (or values, one head's, one position's) corrupted as one path reads them.

Under shape-invariant arithmetic the two paths agree in every bit, so whatever tells them apart was planted: exactly
the planted cell brings the recipient back, in every bit. Without it, a plant is found as far as it stands out of the
rounding that is there anyway.
"""

import copy
import functools
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from pairwise import params

import kvdrift as kd
from kvdrift.controls.fixed_shape import FixedShape, not_covered
from kvdrift.errors import SiteError
from kvdrift.models.tiny import FAMILIES
from kvdrift.tracing.seam import Order, seam

PROMPT = (5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 77, 21)  # beyond the windows of 8
LAYER, HEAD, POSITION = 1, 1, 10  # of a plant; the position is in every window that follows, 1 is in none
FIXED = (FixedShape(16),)

NO_KV = {
    "falcon": "its attention does not go through the attention table",
    "bloom": "its attention does not go through the attention table",
    "mamba": "it has no attention",
}
"""Families whose keys and values can be neither corrupted nor patched."""
ONE_PATH = {"lfm2": "its convolutions compute one token and many by other algorithms, which fixed shape excepts"}
"""Families where only a path and itself are promised to agree in every bit: donor and recipient are one path there."""
FOUND_IN = [family for family in FAMILIES if family not in NO_KV]

PATHS = {"ON": (kd.CacheOn, kd.CacheOff), "OFF": (kd.CacheOff, kd.CacheOn)}
"""Recipient → its kind of path, and the donor's."""
AMOUNT = {torch.float32: 1e-3, torch.bfloat16: 2**-5, torch.float16: 2**-7}
"""How far a plant moves each entry, relative to it: some ulps, and little beside the entry."""


@dataclass(frozen=True)
class Plant:
    """What is corrupted as the kernel reads it, from step ``first`` to ``last`` (None: from then on).

    Without a position: every one before the current that the kernel's query sees, and with ``current`` that one too.
    """

    site: str
    layer: int = LAYER
    head: int | None = None
    position: int | None = None
    amount: float = AMOUNT[torch.float32]
    first: int = 1
    last: int | None = None
    current: bool = False


class Corruption:
    """The link that corrupts reads. Put in place before a sweep puts its writer, it stands outside that writer."""

    def __init__(self, model, plant, n_prompt, order=Order.WRITE, decoding=None):
        self.model, self.plant, self.n_prompt = model, plant, n_prompt
        self.order, self.decoding = order, decoding
        self.position = -1
        self.acted = False

    def before_pass(self, module, args, kwargs):
        self.position = int(kwargs["position_ids"][0, -1])

    def __call__(self, call, proceed):
        plant, step = self.plant, self.position - self.n_prompt + 1
        active = plant.first <= step and (plant.last is None or step <= plant.last)
        if self.decoding is not None:  # the paths share a module and are told apart by their queries
            active &= self.decoding == (call.query.shape[2] == 1)
        if active and self.model.layer_of[id(call.module)] == plant.layer:
            name = {"k": "key", "v": "value"}[plant.site]
            setattr(call, name, self.corrupted(getattr(call, name)))
        return proceed(call)

    def corrupted(self, own):
        """``own [1, head, key, feature]`` with features moved to and fro by turns, which no softmax ignores."""
        plant, first_key = self.plant, self.position + 1 - own.shape[2]
        until = self.position + plant.current
        if plant.position is None:
            at = range(self.model.architecture.layers[plant.layer].first_seen(self.position), until)
        else:
            at = [plant.position] if first_key <= plant.position < until else []
        rows = [position - first_key for position in at]
        heads = slice(None) if plant.head is None else slice(plant.head, plant.head + 1)
        signs = torch.ones(own.shape[3])
        signs[1::2] = -1
        changed = own.clone()
        changed[:, heads, rows] = (own[:, heads, rows].float() * (1 + plant.amount * signs)).to(own.dtype)
        self.acted |= not torch.equal(changed, own)
        return changed


@contextmanager
def planted(model, *plants, **options):
    """Corrupt what ``model`` reads; its coverage must have been probed before."""
    links = [Corruption(model, plant, **options) for plant in plants]
    with ExitStack() as stack:
        for link in links:
            stack.callback(model.hf.register_forward_pre_hook(link.before_pass, with_kwargs=True).remove)
            stack.enter_context(seam(model.hf, link))
        yield
    assert all(link.acted for link in links), "a plant changed no bit of what was read"


@pytest.fixture(scope="module")
def twins(tiny_model):
    """``twins(family, dtype)``: a model, and a copy to plant into, so that the other path stays sound."""

    @functools.lru_cache(maxsize=4)
    def build(family, dtype=torch.float32):
        fewer = {} if family == "lfm2" else {"num_hidden_layers": 3}  # one below the plant, one above
        model = tiny_model(family, dtype, **fewer)
        return model, copied(model)

    return build


def copied(model):
    other = kd.load(copy.deepcopy(model.hf), quiet=True)
    assert other.coverage.layers("k") == model.coverage.layers("k")  # probes both, before anything is planted
    return other


def find(
    models, recipient, *plants, prompts=PROMPT, controls=FIXED, n_steps=4, one_path=False, order=Order.WRITE, **options
):
    """Sweep over keys and values as a recipient reads them, with ``plants`` in its model and none in the donor's."""
    model, other = models
    to, source = PATHS[recipient]
    donor = (to if one_path else source)(controls=controls)
    given = {"sites": ("k", "v"), "write": "read", "placebos": 0, "checks": "none"} | options
    decoding = recipient == "ON" if model is other else None
    n_prompt = len(prompts) if isinstance(prompts[0], int) else len(prompts[0])
    with planted(other, *plants, n_prompt=n_prompt, order=order, decoding=decoding):
        return kd.sweep(
            model, prompts, donor=donor, recipient=to(other, controls=controls), max_new_tokens=n_steps,
            progress=False, **given,
        )  # fmt: skip


def place(cell):
    """Site, layer, head and position (None: all) of a cell of one patch."""
    (patch,) = cell.patches
    named = (patch.layers, patch.heads, patch.positions)
    return (patch.site, *(numbers[0] if isinstance(numbers, tuple) else None for numbers in named))


def the_cell(sweep, plant):
    """The number of the one cell that is just where the plant is."""
    (number,) = (i for i, cell in enumerate(sweep.cells) if place(cell) == where(plant))
    return number


def where(plant):
    return plant.site, plant.layer, plant.head, plant.position


def restoring(sweep, steps="all"):
    """The cells whose recovery is 1 and which restore every bit; no cell may have but one of both."""
    counted = sweep.counted(steps="all")
    assert counted.any()
    assert not sweep.values("identical", "unpatched")[0][counted].any(), "the plant does not show at every step"
    found = []
    for number in range(len(sweep.cells)):
        value, restored = sweep.recovery(number, steps=steps).value, sweep.restored(number, steps=steps)
        assert (value == 1.0) == (restored == 1.0)
        assert value <= 1
        if value == 1.0:
            found.append(number)
    return found


def assert_found(sweep, plant):
    """Exactly the planted cell brings the recipient to the donor."""
    assert len(sweep.cells) > 1
    cell = the_cell(sweep, plant)
    assert restoring(sweep) == [cell]
    assert restoring(sweep, steps="after") == [cell]
    assert sweep.best()["cell"].item() == cell


def neighbours(model):
    """The planted layer and the next with keys."""
    return [LAYER, min(layer for layer in model.coverage.layers("k") if layer > LAYER)]


CASES = list(product(FOUND_IN, AMOUNT, PATHS, "kv", ("layer", "head", "position")))


def kind_of_plant(kind, model, site, dtype):
    """A plant, and what to sweep over to find it."""
    plant = Plant(site, amount=AMOUNT[dtype])
    if kind == "layer":
        return plant, {"over": "layer"}
    layers, heads = neighbours(model), model.architecture.layers[LAYER].n_kv_heads
    if kind == "head":
        head = min(HEAD, heads - 1)
        axes = {"over": ("layer", "head"), "layers": layers, "heads": sorted({0, head, heads - 1})}
        return replace(plant, head=head), axes
    positions = [1, POSITION, POSITION + 1]
    return replace(plant, position=POSITION), {"over": ("layer", "position"), "layers": layers, "positions": positions}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_left_out_have_a_reason(family, tiny_model):
    model = tiny_model(family)
    assert bool(not_covered(model)) == (family in NO_KV or family in ONE_PATH)
    if family in NO_KV:
        with pytest.raises(SiteError, match="does not give 'k'"):
            kd.sweep(model, PROMPT, sites="k", max_new_tokens=3, progress=False)


@pytest.mark.parametrize(("family", "dtype", "recipient", "site", "kind"), params(CASES, alone=[0]))
def test_exactly_the_planted_cell_recovers(family, dtype, recipient, site, kind, twins):
    models = twins(family, dtype)
    plant, axes = kind_of_plant(kind, models[0], site, dtype)
    n_steps = 4 if kind == "layer" else 3
    assert_found(find(models, recipient, plant, n_steps=n_steps, one_path=family in ONE_PATH, **axes), plant)


@pytest.mark.parametrize("recipient", PATHS)
def test_among_every_head_of_every_layer(recipient, twins):
    plant = Plant("v", layer=2, head=5)
    assert_found(find(twins("gpt-neox"), recipient, plant, n_steps=3, over=("layer", "head")), plant)


@pytest.mark.parametrize("recipient", PATHS)
def test_among_every_position_of_two_layers(recipient, twins):
    plant = Plant("k", layer=2, position=3, amount=2**-3)  # before the windows of the other layers
    models = twins("gemma3", torch.bfloat16)
    assert_found(find(models, recipient, plant, n_steps=3, over=("layer", "position"), layers=[1, 2]), plant)


@pytest.mark.parametrize("recipient", PATHS)
def test_a_cell_restores_if_and_only_if_it_covers_the_plant(recipient, twins):
    plant = Plant("v", head=1, position=POSITION)
    cells = [
        kd.Patch(site, layer, head, position, write="read")
        for site, layer, head, position in product(
            ("k", "v", "kv"), (0, LAYER), (None, 0, (0, 1)), (None, 9, (9, POSITION))
        )
    ]
    swept = find(twins("llama"), recipient, plant, n_steps=3, patches=cells)

    def covers(patch):
        return (
            "v" in patch.sites
            and LAYER in patch.layers
            and (patch.heads is None or 1 in patch.heads)
            and (patch.positions is None or POSITION in patch.positions)
        )

    assert restoring(swept) == [number for number, patch in enumerate(cells) if covers(patch)]


@pytest.mark.parametrize("recipient", PATHS)
def test_the_step_of_a_passing_fault_is_found(recipient, twins):
    """A fault at step 2 alone: patching its layer at that step alone leaves no trace, also in what is cached then."""
    plant = Plant("k", first=2, last=2)
    swept = find(twins("mistral"), recipient, plant, n_steps=5, sites="k", over=("layer", "step"), steps=[1, 2, 3])
    same = swept.values("identical", "unpatched")[0, 0]
    # a cache-ON recipient keeps what the layers above made of it, a cache-OFF one forgets
    assert same.tolist() == ([1, 1, 0, 0, 0] if recipient == "ON" else [1, 1, 0, 1, 1])
    whole = [
        (cell.patches[0].layers[0], cell.first)
        for number, cell in enumerate(swept.cells)
        if swept.restored(number, steps="all") == 1
    ]
    assert whole == [(LAYER, 2)]
    cell = [c.patches[0].layers[0] == LAYER and c.first == 2 for c in swept.cells].index(True)
    assert swept.recovery(cell, steps="all").value == 1
    others = [swept.recovery(number, steps="all").value for number in range(len(swept.cells)) if number != cell]
    assert max(others) < 1


@pytest.mark.parametrize("recipient", PATHS)
def test_a_fault_in_the_current_token_needs_a_patch_that_reaches_it(recipient, twins):
    plant = Plant("k", current=True)
    models = twins("llama")
    assert restoring(find(models, recipient, plant, n_steps=3)) == []
    assert_found(find(models, recipient, plant, n_steps=3, positions="all"), plant)


@pytest.mark.parametrize("recipient", PATHS)
def test_two_causes_are_found_together_and_neither_alone(recipient, twins):
    plants = Plant("k", layer=1), Plant("v", layer=2, head=0)
    one, other = (kd.Patch(plant.site, plant.layer, plant.head, write="read") for plant in plants)
    cells = [one, other, (one, other), (one, kd.Patch("v", 2, 1, write="read")), kd.Patch("kv", [1, 2], write="read")]
    swept = find(twins("qwen2"), recipient, *plants, n_steps=3, patches=cells)
    assert restoring(swept) == [2, 4]


@pytest.mark.parametrize("recipient", PATHS)
def test_a_fault_behind_the_read_is_pinned_on_no_cell(recipient, twins):
    """What happens to keys after a patch could write them is not in the keys: no cell may claim it."""
    swept = find(twins("llama"), recipient, Plant("k"), n_steps=3, order=Order.WRITE_OUTPUT)
    assert restoring(swept) == []


def test_a_fault_that_no_window_shows_is_pinned_on_no_cell(twins):
    """Cache-OFF's earlier queries still read what the current one does not see; a patch writes what that one sees."""
    plant = Plant("v", position=2)
    axes = {"over": ("layer", "position"), "layers": [LAYER, 2], "positions": [2, POSITION]}
    swept = find(twins("mistral"), "OFF", plant, n_steps=3, **axes)
    assert restoring(swept) == []
    assert swept.recovery(the_cell(swept, plant), steps="all").value == 0
    assert any("outside the window" in note for note in swept.notes)


@pytest.mark.parametrize("recipient", PATHS)
def test_donor_and_recipient_may_share_their_module(recipient, twins):
    model, _ = twins("qwen3")
    plant = Plant("v", head=0)
    axes = {"over": ("layer", "head"), "layers": neighbours(model)}
    assert_found(find((model, model), recipient, plant, n_steps=3, **axes), plant)


# --- without fixed shape

NATIVE = [
    ("llama", torch.float32, 10),
    ("llama", torch.bfloat16, 10),  # a hundred times the floor would be no small change of keys in bfloat16
    ("gemma3", torch.bfloat16, 10),
    ("llama", torch.float32, 100),
    ("lfm2", torch.float32, 100),
    ("gemma3", torch.float32, 10),
    ("gemma3", torch.float32, 100),
    ("lfm2", torch.float32, 10),
]
N_PROMPT, N_STEPS = 15, 5  # half precision drifts at few lengths, past 16 among them


def prompts(seed, n=3):
    return np.random.default_rng(seed).integers(0, 384, (n, N_PROMPT)).tolist()


def squares(sweep, role, cell=0):
    """Squared distance to the donor over the steps from 1 on: the sum of each prompt, ``[prompt]``."""
    return np.where(sweep.counted(steps="all"), sweep.values("logit_l2", role, cell)[0] ** 2, 0).sum(axis=1)


def sound(models, recipient, seed, patch, checks):
    """One cell's sweep with nothing planted; with ``checks="shared"`` a re-roll stands beside it: the floor."""
    to, source = PATHS[recipient]
    return kd.sweep(
        models[0], prompts(seed), patches=[patch], donor=source(), recipient=to(models[1]), max_new_tokens=N_STEPS,
        placebos=0, checks=checks, progress=False,
    )  # fmt: skip


FAST = {(NATIVE[0], "ON", "k"), (NATIVE[1], "OFF", "v"), (NATIVE[2], "ON", "k")}


def native_cases():
    """All of them; three are fast, with keys in one direction and values in the other."""
    found = []
    for case, recipient, site in product(NATIVE, PATHS, "kv"):
        family, dtype, times = case
        name = f"{family}-{str(dtype).removeprefix('torch.')}-{times}-{recipient}-{site}"
        marks = () if (case, recipient, site) in FAST else pytest.mark.slow
        found.append(pytest.param(*case, recipient, site, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("family", "dtype", "times", "recipient", "site"), native_cases())
def test_without_fixed_shape_a_plant_is_found_as_far_as_it_stands_out_of_the_floor(
    family, dtype, times, recipient, site, twins
):
    models, plant, patch = twins(family, dtype), Plant(site, amount=AMOUNT[dtype]), kd.Patch(site, LAYER, write="read")
    clean = sound(models, recipient, 0, patch, "shared")
    floor = squares(clean, "re-roll")
    options = {"prompts": prompts(0), "controls": (), "n_steps": N_STEPS}
    # planted drift grows with the amount, in bfloat16 nearly so: two corrections bring it where it is stated to be
    for _ in range(2):
        loud = squares(find(models, recipient, plant, patches=[patch], **options), "unpatched")
        plant = replace(plant, amount=plant.amount * times * np.sqrt(floor.sum() / loud.sum()))
    swept = find(models, recipient, plant, **options)
    loud = squares(swept, "unpatched")
    assert np.sqrt(loud.sum() / floor.sum()) == pytest.approx(times, rel=0.1)
    cell = the_cell(swept, plant)
    assert swept.best()["cell"].item() == cell
    if dtype == torch.float32:  # the two paths never agree in it, so neither does a patched one
        assert restoring(swept) == []

    # The patch takes the plant away without a trace: what is left is what a sound recipient keeps ...
    assert np.array_equal(swept.values("logit_l2", "patched", cell), clean.values("logit_l2", "patched"))
    # ... and that is no farther than twice the floor, whatever was planted.
    assert 1 - 4 * floor.sum() / loud.sum() <= swept.recovery(cell, steps="all").value
    others = [swept.recovery(number, steps="all").value for number in range(len(swept.cells)) if number != cell]
    assert max(others) < 0.5
    # against placebos it stands out in every prompt
    held = find(models, recipient, plant, patches=[patch], placebos=2, **options).recovery(steps="all")
    assert held.reference == "placebo"
    assert min(held.per_prompt) > max(0.9, *held.spread)


def test_without_fixed_shape_a_plant_far_below_the_floor_is_not_found(twins):
    """The honest limit. One head's one position moved by an ulp leaves the logits as far off as they are anyway: the
    planted cell recovers next to nothing, and is first among six hardly more often than by chance."""
    first = []
    for seed, (family, recipient, site) in enumerate(product(("llama", "gemma3"), PATHS, "kv")):
        models, plant = twins(family), Plant(site, head=0, position=N_PROMPT - 2, amount=1.2e-7)
        clean = sound(models, recipient, seed, kd.Patch(site, LAYER, write="read"), "none")
        swept = find(models, recipient, plant, prompts=prompts(seed), controls=(), n_steps=N_STEPS)
        loud, plain = squares(swept, "unpatched").sum(), squares(clean, "unpatched").sum()
        assert np.sqrt(loud / plain) == pytest.approx(1, rel=0.05)
        cell = the_cell(swept, replace(plant, head=None, position=None))
        assert abs(swept.recovery(cell, steps="all").value) < 0.1
        first.append(swept.best(steps="all")["cell"].item() == cell)
    assert sum(first) <= len(first) / 2, first


@pytest.mark.real
@pytest.mark.parametrize(("recipient", "site"), [("ON", "k"), ("OFF", "v")])
def test_one_head_of_a_real_model(recipient, site):
    model = kd.load("smollm2-135m", dtype="bfloat16", quiet=True)
    ids = tuple(model.encode("The capital of France is Paris, and the capital of Italy is"))
    plant = Plant(site, layer=12, head=1, position=len(ids) - 3, amount=0.01)
    swept = find(
        (model, copied(model)), recipient, plant, prompts=ids, controls=(FixedShape(32),), n_steps=6,
        over=("layer", "head"), layers=[11, 12, 13], sites=site,
    )  # fmt: skip
    plant = replace(plant, position=None)  # the sweep is over heads, whole ones
    assert_found(swept, plant)
