"""Every run and fork that a verb begins is closed, also when a pass raises in the middle of it."""

from __future__ import annotations

import pytest

import kvdrift as kd
from kvdrift.backends.hf import HFBackend
from kvdrift.paths.cache_off import CacheOffRun
from kvdrift.paths.cache_on import CacheOnRun

PROMPT, QUIET = [5, 9, 100, 33, 7, 8], {"progress": False, "max_new_tokens": 4}


class Broken(Exception):
    """What a pass raises."""


@pytest.fixture
def open_runs(monkeypatch):
    """The runs that are open; each may be closed more than once."""
    alive = {}

    def watch(kind):
        begin, close = kind.__init__, kind.close

        def beginning(self, *args, **options):
            begin(self, *args, **options)
            alive[id(self)] = self

        def closing(self):
            close(self)
            alive.pop(id(self), None)

        monkeypatch.setattr(kind, "__init__", beginning)
        monkeypatch.setattr(kind, "close", closing)

    watch(CacheOnRun)
    watch(CacheOffRun)
    return alive


VERBS = {
    "record": lambda model: kd.record(model, PROMPT, sites=["k"], **QUIET),
    "compare": lambda model: kd.compare(model, PROMPT, floor=2, **QUIET),
    "patch": lambda model: kd.patch(model, PROMPT, kd.Patch("k", schedule="one_shot(2)"), **QUIET),
    "sweep": lambda model: kd.sweep(model, PROMPT, sites="v", layers=[0, 2], **QUIET),
    "factorial": lambda model: kd.factorial(model, PROMPT, **QUIET),
    "evaluate": lambda model: kd.evaluate(model, [PROMPT], strategies=["greedy", "top-k 5"], null=1, **QUIET),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_nothing_stays_open_whichever_pass_raises(verb, tiny_model, open_runs, monkeypatch, hooks):
    model, forward, calls = tiny_model("llama"), HFBackend.forward, [0]
    _ = model.coverage, model.default_positions  # what is found once per model, by passes of its own
    limit = 10**9

    def counted(self, *args, **options):
        calls[0] += 1
        if calls[0] == limit:
            raise Broken
        return forward(self, *args, **options)

    monkeypatch.setattr(HFBackend, "forward", counted)
    verb(model)
    assert not open_runs
    n_passes = calls[0]
    for limit in range(2, n_passes + 1, max(1, n_passes // 5)):
        calls[0] = 0
        with pytest.raises(Broken):
            verb(model)
        assert not open_runs, f"pass {limit} of {n_passes} raised, and runs stayed open"
    assert not hooks(model.hf)
