"""Drifts of a tiny model, with texts that would break a careless page."""

from dataclasses import replace

import pytest
import torch

from kvdrift.drift.compare import compare
from kvdrift.drift.result import Drift, Prompt
from kvdrift.models.load import load
from kvdrift.models.tiny import tiny

NASTY = "<script>alert(1)</script>"
CLOSING = "</script><img src=x onerror=alert(2)>"


def with_nasty_texts(drift: Drift) -> Drift:
    """Every token reads as markup, and so does the prompt."""
    control = None if drift.control is None else with_nasty_texts(drift.control)
    return replace(
        drift,
        prompts=tuple(Prompt(p.ids, (NASTY,) * len(p.ids), f"Say {NASTY}") for p in drift.prompts),
        token_texts=dict.fromkeys(drift.token_texts, CLOSING),
        control=control,
        notes=(f"A note about {NASTY}.",),
    )


@pytest.fixture(scope="session")
def drift() -> Drift:
    """Two prompts of a tiny bfloat16 model with floor, local drift and a float32 control."""
    model = load(tiny("llama", dtype=torch.bfloat16), quiet=True)
    prompts = [[1, 2, 3, 4, 5, 6], [9, 8, 7, 6]]
    found = compare(model, prompts, max_new_tokens=5, floor=1, also_in="float32", progress=False)
    return with_nasty_texts(found)


@pytest.fixture(scope="session")
def bare() -> Drift:
    """One prompt, residual stream and logits only: several figures have nothing to show."""
    model = load(tiny("llama"), quiet=True)
    return compare(model, [1, 2, 3], sites=["resid_post"], max_new_tokens=3, floor=0, local=False, progress=False)
