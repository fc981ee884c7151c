"""Paths of somebody else's: start and step are enough; what else a verb needs is said in one sentence."""

import dataclasses

import pytest
import torch

import kvdrift as kd
from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.float64 import in_float64
from kvdrift.errors import InputError
from kvdrift.paths.own import OwnPath, check_path
from kvdrift.paths.path import Step
from kvdrift.settings import settings_of

PROMPT = [5, 9, 100, 33, 7, 8, 250]
SHORT = {"max_new_tokens": 3, "progress": False}


class Recompute:
    """The least that a path can be: its runs recompute the prefix and give the logits."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def start(self, model, ids):
        return RecomputeRun(model, ids, self.scale)


class RecomputeRun:
    held = "mine"  # somebody's own attributes by the names of kvdrift's
    overwrite = None
    crop = 3

    def __init__(self, model, ids, scale):
        self.own, self.ids, self.scale = model, list(ids), scale

    @torch.no_grad()
    def step(self, token=None):
        self.ids += [] if token is None else [token]
        return self.own.backend.forward(torch.tensor([self.ids]), 0) * self.scale


class WithFork(Recompute):
    label = "with fork"
    lossy = 7

    def start(self, model, ids, controls=None):
        run = ForkingRun(model, ids, self.scale)
        run.inner = kd.CacheOff().start(model, ids, controls)
        return run


class ForkingRun(RecomputeRun):
    def step(self, token=None):
        return Step(*vars(self.inner.step(token)).values())

    def fork(self, controls=None):
        other = ForkingRun(self.own, self.ids, self.scale)
        other.inner = self.inner.fork(controls)
        return other


def test_start_and_step_are_enough_to_record_and_to_compare(tiny_model, same_bits):
    model = tiny_model()
    ours, own = (kd.record(model, PROMPT, path=path, **SHORT) for path in (kd.CacheOff(), Recompute()))
    for site in ours.sites:
        assert same_bits(ours[site], own[site]), site
    assert own.path.label == "Recompute"
    drift = kd.compare(model, PROMPT, a=Recompute(), b=kd.CacheOff(), floor=0, local=False, **SHORT)
    assert drift.values("resid_post").max() == 0
    assert kd.compare(model, PROMPT, b=Recompute(), floor=0, **SHORT).b.label == "Recompute"


def test_keys_are_placed_at_the_end_of_the_pass(tiny_model, same_bits):
    options = {"sites": ["k"], "positions": "all", **SHORT}
    ours, own = (kd.record(tiny_model("mistral"), PROMPT, path=p, **options) for p in (kd.CacheOff(), Recompute()))
    assert same_bits(ours["k"], own["k"])
    assert same_bits(ours.valid("k"), own.valid("k"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: kd.compare(m, PROMPT, a=Recompute(), floor=1, local=False, **SHORT), "takes no controls"),
        (lambda m: kd.compare(m, PROMPT, a=Recompute(), floor=0, **SHORT), r"no fork\(controls=None\)"),
        (lambda m: kd.patch(m, PROMPT, kd.Patch("v"), recipient=Recompute(), **SHORT), r"fork|controls"),
        (lambda m: kd.sweep(m, PROMPT, sites="v", recipient=Recompute(), **SHORT), r"fork|controls"),
        (lambda m: kd.factorial(m, PROMPT, a=Recompute(), **SHORT), r"fork|controls"),
        (lambda m: kd.evaluate(m, [PROMPT], a=Recompute(), **SHORT), r"fork|controls"),
        (lambda m: kd.diagnose(m, PROMPT, a=Recompute(), **SHORT), "takes no controls"),
    ],
    ids=["floor", "local", "patch", "sweep", "factorial", "evaluate", "diagnose"],
)
def test_what_a_verb_needs_beside_is_one_sentence(call, words, tiny_model):
    with pytest.raises(InputError, match=words) as raised:
        call(tiny_model())
    assert "\n" not in str(raised.value)


class Declares:
    """Says that it runs under a control, and does not."""

    controls = (kd.ReRoll(1),)

    def start(self, model, ids, controls=None):
        return kd.CacheOff().start(model, ids)


class ForksPlainly(Recompute):
    def start(self, model, ids, controls=None):
        class Run:
            def __init__(self, inner):
                self.inner, self.step = inner, inner.step

            def fork(self):
                return Run(self.inner.fork())

        return Run(kd.CacheOff().start(model, ids, controls))


def test_controls_that_a_path_declares_are_in_place_or_are_missed(tiny_model):
    with pytest.raises(InputError, match="its first step ran outside ReRoll"):
        kd.record(tiny_model(), PROMPT, path=Declares(), **SHORT)


def test_a_fork_that_takes_no_controls_is_one_sentence(tiny_model):
    with pytest.raises(InputError, match=r"fork\(\) takes no controls, .* use local=False"):
        kd.compare(tiny_model(), PROMPT, a=ForksPlainly(), floor=1, **SHORT)


def test_with_fork_and_controls_every_verb_runs(tiny_model):
    model, path = tiny_model(), WithFork()
    drift = kd.compare(model, PROMPT, a=path, b=kd.CacheOff(), floor=1, **SHORT)
    assert drift.a.label == "with fork"
    assert drift.values("resid_post").max() == 0
    assert drift.values("resid_post", of="floor").max() > 0
    result = kd.patch(model, PROMPT, kd.Patch("v", schedule="persistent"), recipient=path, donor=kd.CacheOn(), **SHORT)
    assert result.recovery().value == pytest.approx(result.recovery().value)
    assert kd.diagnose(model, PROMPT, a=path, **SHORT).kind == "exact"


class Shape(Recompute):
    def start(self, model, ids):
        run = super().start(model, ids)
        run.step = lambda token=None: torch.zeros(1, 3)
        return run


class Nothing(Recompute):
    def start(self, model, ids):
        return object()


@pytest.mark.parametrize(("path", "words"), [(Shape(), r"step\(\) gives \[1, 3\]"), (Nothing(), "has no step")])
def test_what_is_no_run_is_refused(path, words, tiny_model):
    with pytest.raises(InputError, match=words):
        kd.record(tiny_model(), PROMPT, path=path, **SHORT)


def test_settings_are_those_of_the_path_beneath():
    assert settings_of(check_path(Recompute(2.0), "a")) == settings_of(Recompute(2.0))
    assert settings_of(check_path(Recompute(2.0), "a")) != settings_of(OwnPath(Recompute(3.0)))


class Deaf(WithFork):
    """Takes controls and runs without them."""

    def start(self, model, ids, controls=None):
        return super().start(model, ids)


class DeafFork(WithFork):
    """Its forks take controls and run without them."""

    def start(self, model, ids, controls=None):
        run = super().start(model, ids, controls)
        run.fork = lambda controls=None: ForkingRun.fork(run)
        return run


@pytest.mark.parametrize(
    "call",
    [
        lambda m, path: kd.diagnose(m, PROMPT, a=path, **SHORT),
        lambda m, path: kd.compare(m, PROMPT, a=path, floor=1, local=False, **SHORT),
    ],
    ids=["diagnose", "floor"],
)
def test_controls_that_are_taken_and_not_entered_are_said_and_no_bug(call, tiny_model):
    with pytest.raises(InputError, match=r"Deaf: .* takes controls, and its first step ran outside \w+\(") as raised:
        call(tiny_model(), type("Deaf", (Deaf,), {"label": "Deaf"})())
    assert "\n" not in str(raised.value)


def test_a_fork_that_drops_its_controls_is_said(tiny_model):
    run = check_path(DeafFork(), "a").start(tiny_model(), PROMPT, (kd.ReRoll(0),))
    run.step()
    fork = run.fork((kd.ReRoll(1),))
    with pytest.raises(InputError, match=r"ran outside ReRoll\(seed=1\)"):
        fork.step(5)


@dataclasses.dataclass(frozen=True)
class Frozen(WithFork):
    scale: float = 1.0
    model: object = None


class Plain(WithFork):
    model = None


class Told(Plain):
    def with_model(self, model):
        other = Told(self.scale)
        other.model, other.told = model, True
        return other


class Fixed(WithFork):
    __slots__ = ()
    model = property(lambda self: None)


PATHS = (Frozen(), Plain(), Told(), kd.CacheOn(), kd.CacheOff(label="x"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: type(path).__name__)
def test_the_same_path_on_another_model(path, tiny_model):
    model, whole = tiny_model(), check_path(path, "a")
    other = whole.with_model(model)
    assert (whole.model, other.model) == (None, model)
    assert other.label == whole.label
    assert not isinstance(path, Told) or other.beneath.told
    assert whole.with_model(model).settings() != whole.settings()


def test_the_float64_witness_runs_a_copy_of_a_path_of_ones_own(tiny_model):
    path, model = Plain(), tiny_model()
    path.model = model
    case, b = in_float64(Case("short", (1, 2), None, 1, check_path(path, "a")), kd.CacheOff())
    assert (case.a.model.dtype, case.a.beneath.model.dtype, b.model) == (torch.float64, torch.float64, None)
    assert path.model is model


def test_a_path_that_cannot_be_put_on_another_model_says_what_to_add(tiny_model):
    with pytest.raises(InputError, match=r"with fork cannot be put on another model .*: give it with_model\(model\)"):
        check_path(Fixed(), "a").with_model(tiny_model())


def test_a_path_of_ones_own_runs_its_own_model(tiny_model):
    one, two = tiny_model(), tiny_model("mistral")
    path = Plain()
    path.model = two
    logits = check_path(path, "a").start(one, PROMPT).step().logits
    assert torch.equal(logits, kd.CacheOff().start(two, PROMPT).step().logits)
