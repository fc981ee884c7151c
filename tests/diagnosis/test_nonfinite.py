"""NaN and infinity: first place, circumstance and advice are those of the case that gave them."""

from contextlib import contextmanager

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE
from transformers.models.mistral.modeling_mistral import MistralMLP

import kvdrift as kd
from kvdrift.diagnosis import cases
from kvdrift.errors import NonFiniteError

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]
NAN = float("nan")


def small(family="llama", **overrides):
    return kd.models.tiny(family, num_hidden_layers=2, **overrides)


def diagnose(model, prompts=PROMPT, **options):
    return kd.diagnose(model, prompts, max_new_tokens=3, progress=False, **options)


@contextmanager
def spoiled(module, when):
    """The output of a module becomes NaN in passes whose input it is true of."""
    handle = module.register_forward_hook(lambda _m, args, out: out * NAN if when(args[0]) else out)
    try:
        yield
    finally:
        handle.remove()


@pytest.fixture
def nan_in_hidden_rows(monkeypatch):
    """What some kernels return for rows that the mask hides whole."""
    before, native = dict(TABLE._local_mapping), TABLE["sdpa"]

    def attention(module, query, key, value, mask, **kwargs):
        out, weights = native(module, query, key, value, mask, **kwargs)
        return (out if mask is None else out.masked_fill(~mask.any(-1)[:, 0, :, None, None], NAN)), weights

    TABLE["sdpa"] = attention
    yield
    TABLE._local_mapping.clear()
    TABLE._local_mapping.update(before)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_padded_rows_are_named_with_the_padding_and_an_advice_that_fits(family, nan_in_hidden_rows):
    verdict = diagnose(small(family))
    assert verdict.kind == "nonfinite", str(verdict)
    assert (verdict.where.layer, verdict.where.site) == (0, "z")
    assert verdict.signature == ("with left padding",)
    assert "leaves the finite numbers at z of layer 0 in the rows of left padding" in verdict.reasons[0]
    assert "another dtype will not help" in verdict.suggestion
    assert "bfloat16" not in str(verdict)


def test_fed_tokens_are_read_again_one_by_one():
    model = small()
    with spoiled(model.model.layers[1].mlp, lambda x: x.shape[1] == 1):
        verdict = diagnose(model)
    assert verdict.reasons[0].startswith("Prompt, step 1 (13 tokens), cache-ON: tiny-llama in float32 leaves")
    assert (verdict.where.layer, verdict.where.site) == (1, "mlp_out")
    assert verdict.signature == ()


def test_the_cache_free_path_is_named():
    model = small()
    with spoiled(model.model.layers[0].mlp, lambda x: x.shape[1] == 14):
        verdict = diagnose(model)
    assert "Prompt, step 2 (14 tokens), cache-OFF: " in verdict.reasons[0]
    assert (verdict.where.layer, verdict.where.site) == (0, "mlp_out")


def test_a_manner_of_its_own():
    model = small()
    with spoiled(model.model.layers[0].mlp, lambda x: x.shape[1] == 5):
        verdict = diagnose(model)
    assert verdict.signature == ("at a chunk boundary",)
    assert (verdict.where.layer, verdict.where.site) == (0, "mlp_out")


def test_on_a_twin_it_is_the_twins(monkeypatch):
    monkeypatch.setitem(cases.COST_LIMIT, "cpu", 1)
    forward = MistralMLP.forward
    monkeypatch.setattr(MistralMLP, "forward", lambda self, x: forward(self, x) * (NAN if x.shape[1] > 20 else 1))
    verdict = diagnose(small("mistral", sliding_window=64), [1, 2, 3])
    assert verdict.kind == "nonfinite", str(verdict)
    assert ", on a tiny twin: " in verdict.reasons[0]
    assert (verdict.where.layer, verdict.where.site) == (0, "mlp_out")


@pytest.mark.parametrize(
    ("dtype", "factor", "advice"),
    [
        (torch.float16, 6e4, "Use dtype=bfloat16 or float32."),
        (torch.float32, 1e38, "Use dtype=float64."),
        (torch.bfloat16, 1e38, "Use dtype=float64."),
    ],
)
def test_overflow_asks_for_a_wider_dtype(dtype, factor, advice):
    model = small(dtype=dtype)
    model.model.layers[1].mlp.down_proj.weight.mul_(factor)
    verdict = diagnose(model)
    assert verdict.kind == "nonfinite"
    assert (verdict.where.layer, verdict.where.site) == (1, "mlp_out")
    assert verdict.suggestion == advice


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_a_product_inside_a_gated_mlp_overflows_though_no_site_is_large(family):
    model = small(family, dtype=torch.float16)
    mlp = model.model.layers[1].mlp
    mlp.up_proj.weight.mul_(1e3)
    mlp.gate_proj.weight.mul_(1e3)
    verdict = diagnose(model)
    assert (verdict.kind, verdict.where.layer) == ("nonfinite", 1)
    assert verdict.suggestion == "Use dtype=bfloat16 or float32."
    assert "_proj of layer 1" in verdict.reasons[0]
    with pytest.raises(NonFiniteError, match="use dtype=bfloat16 or float32"):
        kd.record(model, PROMPT, max_new_tokens=2, progress=False)


def test_other_verbs_read_the_tokens_along_the_path_too(nan_in_hidden_rows):
    model = small()
    with pytest.raises(NonFiniteError, match="z of layer 0 in the rows of left padding"):
        kd.record(model, PROMPT, path=kd.CacheOn(left_padding=2), max_new_tokens=2, progress=False)
    with (
        spoiled(model.model.layers[1].mlp, lambda x: x.shape[1] == 1),
        pytest.raises(NonFiniteError, match=r"mlp_out of layer 1.*another dtype will not help"),
    ):
        kd.compare(model, PROMPT, max_new_tokens=3, floor=0, progress=False)
