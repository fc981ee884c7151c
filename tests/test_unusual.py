"""Models whose layers skip tokens of a pass, or hand on several streams: read, compared, patched and diagnosed."""

import pytest
import torch
from torch import nn
from unusual import unusual

import kvdrift as kd
from kvdrift.models.coverage import Place
from kvdrift.models.tiny import tiny

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 77, 21, 200, 5, 6, 7, 9, 3]


@pytest.mark.parametrize(
    ("name", "attn"),
    [pytest.param("gemma4_text", "eager", marks=pytest.mark.slow), ("gemma4_text", "sdpa"), ("gemma3n_text", "sdpa")],
)
def test_clean_models_are_rounding(name, attn):
    verdict = kd.diagnose(unusual(name, attn), PROMPT, generate=False, max_new_tokens=3, progress=False)
    assert verdict.kind == "rounding", verdict


@pytest.mark.parametrize(("name", "width"), [("gemma4_text", 64), ("gemma3n_text", 256), ("deepseek_v4", 256)])
def test_every_stream_is_read_and_written(name, width):
    model = unusual(name)
    trace = kd.record(model, PROMPT, sites=["resid_post"], max_new_tokens=2, progress=False)
    assert trace.tensors["resid_post"].shape[-1] == width
    drift = kd.compare(model, PROMPT, max_new_tokens=3, floor=1, progress=False)
    assert 0 < drift.values("resid_post", "rel_l2").max() < 1e-3
    patched = kd.patch(model, PROMPT, "resid_post", max_new_tokens=3, placebos=0, progress=False)
    assert patched.restored(role="full patch") == 1.0


def test_rows_are_put_at_the_positions_that_were_computed():
    """The last two layers run the last token of each chunk alone."""
    path = kd.CacheOn(prefill_chunk=5)
    trace = kd.record(
        unusual("gemma4_text"),
        PROMPT,
        sites=["resid_post"],
        positions="all",
        max_new_tokens=2,
        path=path,
        progress=False,
    )
    mask = trace.masks["resid_post"][0]
    assert mask[:4, : len(PROMPT)].all()
    assert mask[4:].nonzero()[:, 1].unique().tolist() == [4, 9, 14, 17]


def test_rows_that_were_not_computed_are_not_written():
    off, patch = kd.CacheOff(), kd.Patch("resid_post", layers=[5], positions=[3, 19])
    result = kd.patch(
        unusual("gemma4_text"), PROMPT, patch, donor=off, recipient=off, max_new_tokens=4, placebos=0, progress=False
    )
    assert "not computed by the recipient" in str(result)


def test_queries_of_the_last_tokens_alone_keep_their_positions_in_fixed_shape():
    """Under sdpa the short calls are given no mask, so that what they see follows from their positions."""
    model, fixed = unusual("gemma4_text", "sdpa"), (kd.FixedShape(32),)
    on, off = (path(controls=fixed) for path in (kd.CacheOn, kd.CacheOff))
    drift = kd.compare(model, PROMPT, a=on, b=off, max_new_tokens=4, floor=0, local=False, progress=False)
    assert drift.values("logits", "logit_max").max() == 0
    run = kd.CacheOn(controls=fixed).start(model, PROMPT)
    held, plain = run.step().logits, kd.CacheOn().start(model, PROMPT).step().logits
    run.close()
    torch.testing.assert_close(held, plain, rtol=1e-3, atol=1e-3)


class Pooled(nn.Module):
    """A block that hands on one vector for all tokens beside the tokens themselves, first."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, hidden_states, *args, **kwargs):
        if isinstance(hidden_states, tuple):
            hidden_states = hidden_states[1]
        return hidden_states.mean(1), self.block(hidden_states, *args, **kwargs)


def test_values_without_an_axis_of_tokens_are_left_out_with_a_sentence():
    hf = tiny("llama", num_hidden_layers=2)
    hf.model.layers[1] = Pooled(hf.model.layers[1])
    hf.model.norm.register_forward_pre_hook(lambda _, args: (args[0][1],) if isinstance(args[0], tuple) else None)
    model = kd.load(hf, quiet=True)
    assert 1 not in model.coverage.layers("resid_post")
    assert "no axis of it is that of the tokens" in model.coverage.reasons["resid_post"]
    assert kd.diagnose(model, PROMPT, generate=False, max_new_tokens=3, progress=False).kind == "rounding"


@pytest.mark.parametrize(("shape", "axes"), [((1, 5, 8), (0, 1)), ((1, 5, 2, 4), (0, 1)), ((3, 1, 5, 4), (1, 2))])
def test_rows_and_back(shape, axes):
    place, value = Place(nn.Identity(), "output", axes=axes), torch.randn(shape)
    rows = place.rows(value)
    assert rows.shape == (1, 5, value.numel() // 5)
    assert torch.equal(place.unrows(rows, value), value)
