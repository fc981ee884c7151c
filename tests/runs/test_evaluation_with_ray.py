"""An evaluation over the workers of a Ray cluster: the records of one process, whatever the number of workers."""

import pytest
import torch

import kvdrift as kd
from kvdrift.errors import InputError
from kvdrift.evaluation.evaluate import evaluate

PROMPTS = [[i, 2, 3, 4, 5] for i in range(4, 8)]
SHAPE = {"tie_word_embeddings": False, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def models():
    """A model in bfloat16, and its weights in float32 for the other path."""
    return [kd.load(kd.models.tiny("llama", dtype=d, **SHAPE), quiet=True) for d in (torch.bfloat16, torch.float32)]


def run(models, prompts=PROMPTS, **changes):
    model, other = models
    usual = {"strategies": ("greedy", "top-k 20"), "null": 1, "max_new_tokens": 6, "threads": 1, "progress": False}
    return evaluate(model, prompts, b=kd.CacheOff(model=other), **{**usual, **changes})


@pytest.fixture(scope="module")
def here(models):
    return run(models)


def test_a_store_that_was_begun_here_goes_on_with_two_workers_and_the_records_are_the_same(
    models, here, cluster, tmp_path
):
    run(models, limit=2, store=tmp_path)
    spread = run(models, engine="ray", workers=2, store=tmp_path)
    assert spread.records == here.records
    assert spread.settings == here.settings
    assert spread == here
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert len(lines) == len(PROMPTS)


def test_a_cluster_that_does_not_answer_is_one_sentence_and_finished_items_stay(models, here, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr("kvdrift.runs.ray_engine.ANSWER_SECONDS", 2)
    run(models, limit=2, store=tmp_path)
    with pytest.raises(InputError, match=r"127\.0\.0\.1:1") as caught:
        run(models, engine="ray", address="127.0.0.1:1", store=tmp_path)
    assert "\n" not in str(caught.value)
    assert run(models, store=tmp_path) == here
