"""Evaluations made by hand, where every answer is known: fixtures for the rooms that read one."""

import pytest

from kvdrift.evaluation.records import Answer, Compared, Gold, ItemRecord, Trial
from kvdrift.evaluation.result import Evaluation
from kvdrift.models.labels import PathInfo
from kvdrift.models.load import load
from kvdrift.models.tiny import tiny
from kvdrift.statistics import resampling


@pytest.fixture
def quick_statistics(monkeypatch):
    """Intervals of few resamples, where no test reads them."""
    monkeypatch.setattr(resampling, "N_BOOTSTRAP", 99)


def _compared(correct, step=None, unequal=None, stop="length", answer=None, margins=None):
    """A text of 12 tokens 7, another one from ``step`` on."""
    tokens = tuple(7 if step is None or i < step else 8 for i in range(12))
    answer = ("right" if correct else "wrong") if answer is None and correct is not None else answer
    margins = margins if margins is not None or step is None else (0.25, 0.5)
    unequal = step if unequal is None else unequal
    return Compared(tokens, "some text", answer, correct, stop, step, unequal, margins)


def _first(correct, stop="length", answer=None):
    """Path a's text: 12 tokens 7."""
    answer = ("right" if correct else "wrong") if answer is None and correct is not None else answer
    return Answer((7,) * 12, "some text", answer, correct, stop)


@pytest.fixture(scope="session")
def text():
    """``text(correct, step, …)``: a made-up text of path b or a re-roll, which leaves path a's at ``step``."""
    return _compared


@pytest.fixture(scope="session")
def first_text():
    """``first_text(correct, stop, answer)``: a made-up text of path a."""
    return _first


@pytest.fixture(scope="session")
def result():
    """``result({strategy: [[(a, b, [re-roll, …]), … per seed], … per item]}, gold=…)``: an `Evaluation` made by hand.

    ``gold``: per item ``(a, b, [re-roll, …])``.
    """

    def build(trials, gold=None, prompts=None, seeds=(0,), model="made-up"):
        n_items = len(next(iter(trials.values())))
        replicates = len(next(iter(trials.values()))[0][0][2])
        records = [
            ItemRecord(
                item=f"q{i}",
                prompt=f"Question {i}" if prompts is None else prompts[i],
                prompt_hash=f"hash {i}",
                n_prompt=3,
                reference="right",
                gold=None if gold is None else Gold(2, gold[i][0], gold[i][1], tuple(gold[i][2])),
                trials=tuple(
                    Trial(strategy, seed, a, b, tuple(null))
                    for strategy, rows in trials.items()
                    for seed, (a, b, null) in zip(seeds, rows[i], strict=True)
                ),
            )
            for i in range(n_items)
        ]
        return Evaluation(
            a=PathInfo("cache-ON", model, "bfloat16", "sdpa", "cpu"),
            b=PathInfo("cache-OFF", model, "bfloat16", "sdpa", "cpu", ("a control",)),
            architecture=load(tiny("llama", num_hidden_layers=1), quiet=True).architecture,
            task="made-up questions",
            strategies=tuple(trials),
            seeds=tuple(seeds),
            max_new_tokens=12,
            replicates=replicates,
            records=tuple(records),
            token_texts={7: " <b>", 8: "&"},
            settings={"seed": 0},
            provenance={"command": "kvdrift evaluate made-up"},
            notes=("A note about <u>markup</u>.",),
        )

    return build


@pytest.fixture(scope="session")
def rights(result):
    """``rights("only a" count, "only b", both, neither)``: an `Evaluation` with such answers, without a null."""

    def build(only_a, only_b, both=0, neither=0, strategies=("greedy",)):
        pairs = [(True, False)] * only_a + [(False, True)] * only_b + [(True, True)] * both + [(False, False)] * neither
        return result({name: [[(_first(a), _compared(b), [])] for a, b in pairs] for name in strategies})

    return build
