"""The weights' hash: taken once in a job, and anew between two jobs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import kvdrift as kd
from kvdrift import fingerprint as room
from kvdrift.fingerprint import fingerprint, one_job
from kvdrift.models.tiny import tiny

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8]]


@pytest.fixture
def read(monkeypatch):
    """How often each module's weights were read."""
    counts: Counter[int] = Counter()
    original = room._taken

    def counted(module):
        counts[id(module)] += 1
        return original(module)

    monkeypatch.setattr(room, "_taken", counted)
    return counts


@pytest.mark.parametrize(
    "verb",
    [
        lambda model, folder: kd.compare(
            model, PROMPTS, max_new_tokens=2, floor=0, local=False, progress=False, store=folder
        ),
        lambda model, folder: kd.record(model, PROMPTS, sites=["k"], max_new_tokens=2, progress=False),
        lambda model, folder: kd.patch(model, PROMPTS, "k", max_new_tokens=2, progress=False),
        lambda model, folder: kd.sweep(
            model, PROMPTS, sites="k", layers=[0], max_new_tokens=2, placebos=0, checks="none", progress=False,
            store=folder, recipient=kd.CacheOn(model=model),
        ),
        lambda model, folder: kd.factorial(model, PROMPTS, max_new_tokens=2, progress=False),
        lambda model, folder: kd.evaluate(model, PROMPTS, max_new_tokens=2, progress=False, store=folder),
        lambda model, folder: kd.falsify(
            model, PROMPTS, arms=["float32", "fixed-shape"], max_new_tokens=2, progress=False, store=folder
        ),
    ],
    ids=["compare", "record", "patch", "sweep", "factorial", "evaluate", "falsify"],
)  # fmt: skip
def test_each_models_weights_are_read_once_in_a_job(verb, read, tmp_path):
    verb(kd.load(tiny("llama"), quiet=True), tmp_path)
    assert set(read.values()) == {1}


@pytest.mark.parametrize(
    "change", [lambda w: w.mul_(1.5), lambda w: w.data.mul_(1.5), lambda w: w.view(-1)[5:6].zero_()]
)
def test_a_change_between_two_jobs_is_noticed(change):
    module = tiny("llama")
    before = fingerprint(module)
    with one_job():
        assert fingerprint(module) == before
    with torch.no_grad():
        change(module.model.layers[1].mlp.down_proj.weight)
    with one_job():
        assert fingerprint(module) != before


def test_a_job_inside_a_job_belongs_to_it_and_an_error_ends_it(read):
    module = tiny("llama")

    @one_job()
    def job():
        with one_job():
            fingerprint(module)
        return fingerprint(module) / 2

    with pytest.raises(TypeError):
        job()
    fingerprint(module)
    assert read[id(module)] == 2
