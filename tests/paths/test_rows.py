"""Passes of several rows: each row is the step of its token, in every verb that steps."""

from dataclasses import dataclass, field

import pytest
import torch

import kvdrift as kd
from kvdrift.controls.fixed_shape import FixedShape
from kvdrift.errors import InputError
from kvdrift.paths.path import Path, Step
from kvdrift.paths.rows import Rows
from kvdrift.paths.stepper import Stepper, started
from kvdrift.tracing.aside import aside
from kvdrift.tracing.tap import Tap

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]  # longer than the windows of 8
FED = [3, 1, 4, 1, 5, 9, 2, 6]
FIXED = (FixedShape(32),)
NOTHING = Rows()
SITES = ["embed", "resid_pre", "resid_post", "final_norm", "q", "k", "v", "z", "logits"]


@dataclass(frozen=True)
class Speculative(Path):
    """Drafts tokens with a cache of its own and checks them in one pass over another; wrong drafts are taken back."""

    model: object = None
    attn: object = None
    controls: tuple = ()
    drafts: tuple = (1, 4, 1)
    label: str = field(default="speculative", kw_only=True)

    @property
    def rows_per_pass(self):
        return len(self.drafts) + 1

    def start(self, model, ids, controls=None):
        controls = self.controls if controls is None else controls
        runs = [kd.CacheOn(controls=chosen).start(model, ids) for chosen in (controls, ())]
        for run in runs:
            run.keep_past()
        return SpeculativeRun(self, *runs)


class SpeculativeRun:
    def __init__(self, path, checked, drafting, rows=NOTHING):
        self.path, self.checked, self.drafting, self.rows = path, checked, drafting, rows
        self.model, self.attn, self.controls = checked.model, None, checked.controls
        self.n_passes = 0

    def step(self, token=None):
        if token is None:
            with aside(self.model):
                self.drafting.step()
            return self.checked.step()
        served = self.rows.serve(token)
        if served is None:
            if self.rows.left:
                self.checked.rewind(self.rows.left)
            with aside(self.model):  # what is drafted comes from the path's own list; the draft's passes are real
                self.drafting.step(token)
            tokens = (token, *self.path.drafts)
            served = Rows(tokens, self.checked.extend_rows(tokens)).serve(token)
            self.n_passes += 1
        step, self.rows = served
        return step

    def skip(self, token):
        self.step(token)

    def key_positions(self, layer, n_keys):
        return self.checked.key_positions(layer, n_keys)

    def fork(self, controls=None):
        runs = self.checked.fork(controls), self.drafting.fork()
        return SpeculativeRun(self.path, *runs, self.rows)

    def close(self):
        self.checked.close()
        self.drafting.close()


@pytest.mark.parametrize("run", [kd.CacheOn(controls=FIXED), kd.CacheOff(controls=FIXED)], ids=["on", "off"])
def test_rows_of_one_pass_are_the_steps_of_its_tokens(run, tiny_model, same_bits):
    model = tiny_model("gemma3")
    several, single = run.start(model, PROMPT), run.start(model, PROMPT)
    assert several.step().pass_number == single.step().pass_number == 0
    rows, steps = several.extend_rows(FED[:4], 3), [single.step(token) for token in FED[:4]]
    assert [(r.row, r.n_rows, r.rows_after, r.pass_number) for r in rows] == [(i, 3, 2 - i, 1) for i in range(3)]
    for one, other in zip(rows, steps[1:], strict=True):
        assert one.position == other.position
        assert same_bits(one.logits, other.logits)
    assert several.step(5).pass_number == 2
    with pytest.raises(InputError, match="rows"):
        several.extend_rows([1, 2], 3)


def test_one_row_asks_the_head_for_one_row(tiny_model, same_bits):
    model = tiny_model("llama")
    ids = torch.tensor([PROMPT])
    assert same_bits(model.backend.forward(ids, 0), model.backend.forward(ids, 0, rows=1))
    assert model.backend.arguments(ids, 0)["logits_to_keep"] == 1
    several = model.backend.forward(ids, 0, rows=3)
    assert several.shape == (3, model.vocab_size)
    whole = model.hf(ids, logits_to_keep=3).logits[0]
    assert same_bits(several, whole)


def test_a_step_of_logits_and_position_alone_is_one_row():
    assert Step(torch.zeros(3), 4).rows_after == 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("positions", ["current", "all"])
def test_a_checked_draft_records_what_single_tokens_do(family, positions, tiny_model):
    model = tiny_model(family)
    speculative, plain = (
        kd.record(model, PROMPT, path=path, tokens=FED, sites=SITES, positions=positions, progress=False)
        for path in (Speculative(controls=FIXED), kd.CacheOn(controls=FIXED))
    )
    for site in plain.sites:
        assert torch.equal(speculative.valid(site), plain.valid(site)), site
        one, two = speculative[site], plain[site]
        for layer in one if isinstance(one, dict) else [None]:
            x, y = (one, two) if layer is None else (one[layer], two[layer])
            assert torch.equal(x, y), site


@pytest.mark.parametrize("every", [1, 3])
def test_a_checked_draft_drifts_nowhere_from_single_tokens(every, tiny_model):
    model = tiny_model("mistral")
    drift = kd.compare(
        model, PROMPT, a=Speculative(controls=FIXED), b=kd.CacheOn(controls=FIXED), tokens=FED, floor=0, every=every,
        kv_every=every, self_drift=every == 1, progress=False,
    )  # fmt: skip
    for name, values in drift.arrays.items():
        if name.startswith("drift/") and name.endswith(("rel_l2", "kl", "max_abs")):
            assert (values == 0).all(), name
    assert any("local drift was not measured: speculative serves several rows" in note for note in drift.notes)
    natively = kd.compare(model, PROMPT, a=Speculative(), b=kd.CacheOff(), tokens=FED, floor=1, progress=False)
    assert 0 < natively.values("resid_post")[0, 1:].max() < 1e-4
    assert 0 < natively.values("k")[0, 1:].max() < 1e-4


def test_as_a_reference_it_lends_its_rows_to_local_drift(tiny_model):
    model = tiny_model("llama")
    drifts = [
        kd.compare(model, PROMPT, a=kd.CacheOn(), b=b, tokens=FED, floor=0, progress=False)
        for b in (Speculative(controls=FIXED), kd.CacheOn(controls=FIXED))
    ]
    for name, values in drifts[0].arrays.items():
        assert (values == drifts[1].arrays[name]).all() or (values != values).any(), name
    assert drifts[0].values("resid_post", of="local")[0, 1:].max() < 1e-4


def test_rows_are_served_without_a_pass_and_forks_carry_them(tiny_model, same_bits):
    model = tiny_model("llama")
    path, sites = Speculative(controls=FIXED), {"resid_post": None, "k": None}
    with Tap(model, sites, where=4, kv_where="all") as tap, started(path, model, PROMPT, tap) as stepper:
        stepper.step()
        first = stepper.step(FED[0])
        assert first.step.rows_after == 3
        with stepper.fork() as fork:
            forked = [fork.step(token) for token in FED[1:3]]
            wrong = fork.step(77)
        served = [stepper.step(token) for token in FED[1:3]]
        stepper.step(77, watch=False)
        skipped = stepper.step(FED[0])
        assert stepper.run.n_passes == 3
    for one, two in zip(forked, served, strict=True):
        assert one.step.pass_number == two.step.pass_number == first.step.pass_number
        assert same_bits(one.logits, two.logits)
        assert same_bits(one.values["resid_post"][2], two.values["resid_post"][2])
        assert same_bits(one.values["k"][2], two.values["k"][2])
        assert one.keys == two.keys
        assert one.values["k"][2].shape[2] == len(one.keys[2]) == one.position + 1
    assert wrong.step.row == 0
    assert skipped.position == len(PROMPT) + 4
    plain = Stepper(kd.CacheOn(controls=FIXED).start(model, PROMPT), PROMPT)
    for token in (None, *FED[:3], 77):
        logits = plain.step(token).logits
    assert same_bits(logits, wrong.logits)


def test_drafts_are_not_watched(tiny_model):
    model = tiny_model("llama")
    with Tap(model, {"resid_post": None}, where=4, keep=True) as tap:
        stepper = Stepper(Speculative().start(model, PROMPT), PROMPT, tap)
        assert len(stepper.step().passes) == len(stepper.step(FED[0]).passes) == 1


def test_texts_are_those_of_single_tokens(tiny_model):
    model = tiny_model("llama")
    texts = [
        kd.record(model, PROMPT, path=path, sites=["logits"], max_new_tokens=8, progress=False).fed
        for path in (Speculative(controls=FIXED), kd.CacheOn(controls=FIXED))
    ]
    assert texts[0] == texts[1]


def test_a_patch_takes_it_as_donor_and_refuses_it_as_recipient(tiny_model):
    model = tiny_model("llama")
    options = {"max_new_tokens": 5, "placebos": 0, "controls": False, "trajectories": False, "progress": False}
    paths = Speculative(controls=FIXED), kd.CacheOn(controls=FIXED)
    one, two = (kd.patch(model, PROMPT, "resid_post", donor=path, tokens=[FED[:5]], **options) for path in paths)
    assert (one.arrays["logit_l2"] == two.arrays["logit_l2"]).all()
    with pytest.raises(InputError, match="several rows of one pass"):
        kd.patch(model, PROMPT, "resid_post", recipient=paths[0], **options)
    with pytest.raises(InputError, match="several rows of one pass"):
        kd.factorial(model, PROMPT, b=paths[0], max_new_tokens=3, progress=False)
