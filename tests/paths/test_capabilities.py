"""What runs and paths can do beside stepping is asked for by name, through whatever stands around them."""

import pytest
import torch

import kvdrift as kd
from kvdrift.diagnosis.cases import default_cases, left_out
from kvdrift.errors import InputError
from kvdrift.paths.capabilities import (
    cache_of,
    extend,
    left_padding,
    overwritable,
    rewindable,
    stateless,
    unplaced,
    written,
)
from kvdrift.paths.own import check_path

PROMPT = [5, 9, 100, 33, 7, 8, 250]


class Recompute:
    """The least that a path can be."""

    def start(self, model, ids):
        run, tokens = type("Run", (), {})(), list(ids)

        def step(token=None):
            tokens.extend([] if token is None else [token])
            with torch.no_grad():
                return model.backend.forward(torch.tensor([tokens]), 0)

        run.step = step
        return run


class Wrapped:
    """kvdrift's own runs, with all that they can do, in a path of somebody else's."""

    def start(self, model, ids, controls=None):
        return kd.CacheOn().start(model, ids, controls)


def test_what_a_run_beneath_can_do_is_asked_for_through_the_wrapper(tiny_model):
    model = tiny_model()
    run, plain = (check_path(path, "a").start(model, PROMPT) for path in (Wrapped(), kd.CacheOn()))
    rewindable(run).keep_past()
    for each in (run, plain):
        each.step()
        assert extend(each, [4, 5, 6]).position == len(PROMPT) + 2
        rewindable(each).rewind(2)
        assert each.step(9).position == len(PROMPT) + 1
    assert overwritable(run).held(0) == overwritable(plain).held(0)
    assert not stateless(run)
    assert type(cache_of(run)) is type(cache_of(plain))
    assert (written(run), unplaced(run, {0: 3}), left_padding(run)) == (None, {}, 0)


def test_what_a_run_cannot_do_is_one_sentence(tiny_model):
    run = check_path(Recompute(), "a").start(tiny_model(), PROMPT)
    assert overwritable(run) is None
    assert cache_of(run) is None
    assert not stateless(run)
    assert stateless(kd.CacheOff().start(tiny_model(), PROMPT))
    for ask in (rewindable, lambda run: extend(run, [1, 2])):
        with pytest.raises(InputError, match=r"^Recompute: its runs have no .*: add it, or give a kd.CacheOn\(\)\.$"):
            ask(run)


class Scheme(Wrapped):
    """A path of somebody else's that can be padded, cut into chunks and called otherwise: what a case asks for."""

    label, call, prefill_chunk = "scheme", "explicit", None

    def __init__(self, **options):
        self.options = options
        vars(self).update(options)

    def start(self, model, ids, controls=None):
        return kd.CacheOn(**self.options).start(model, ids, controls)

    left_padding = 0

    def varied(self, **options):
        return Scheme(**self.options | options)

    def rewinds(self, model):
        return True


def test_a_path_of_ones_own_gets_the_cases_that_it_can_be_run_in(tiny_model):
    model = tiny_model()
    ours, theirs = (
        [case.name for case in default_cases(model, check_path(path, "a"))] for path in (kd.CacheOn(), Scheme())
    )
    assert ours == theirs
    assert left_out(model, check_path(Scheme(), "a")) == {}
    assert [case.name for case in default_cases(model, check_path(Wrapped(), "a"))] == ours[:3]
    assert kd.diagnose(tiny_model(num_hidden_layers=1), a=Scheme(), progress=False).kind == "rounding"
