"""Recorded traces: labels, masks, files."""

import dataclasses
import json

import pytest
import torch

import kvdrift as kd
from kvdrift.errors import FileError, SiteError
from kvdrift.tracing.trace import Trace, free_memory

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]


@pytest.fixture(scope="module")
def trace(tiny_model):
    model = tiny_model("gemma3", torch.bfloat16, "eager")
    return kd.record(model, PROMPT, sites=model.coverage.sites, positions="all", max_new_tokens=3, progress=False)


def test_axes_name_every_dimension_in_order(trace):
    order = ["step", "layer", "head", "kv_head", "position", "key", "feature", "vocab"]
    for site in trace.sites:
        axes = trace.axes(site)
        assert list(axes) == sorted(axes, key=order.index)
        assert list(trace[site].shape) == [len(values) for values in axes.values()]
        assert trace.valid(site).shape == trace[site].shape[:-1]
        assert trace.valid(site).dtype == torch.bool
    assert trace.axes("k")["kv_head"] == (0, 1)
    assert trace.axes("k")["position"] == tuple(range(len(PROMPT) + 2))


def test_what_was_not_computed_is_zero_and_not_valid(trace):
    for site in trace.sites:
        assert not trace[site].isnan().any()
        assert (trace[site][~trace.valid(site)] == 0).all()


def test_a_site_that_was_not_recorded_is_refused(tiny_model):
    trace = kd.record(tiny_model("llama"), [1, 2], sites="k", max_new_tokens=1, progress=False)
    for ask in (trace.__getitem__, trace.axes, trace.valid):
        with pytest.raises(SiteError) as caught:
            ask("v")
        assert str(caught.value) == "This trace has no 'v'; it recorded k."


def test_a_file_gives_back_everything(trace, tmp_path, same_bits):
    again = Trace.load(trace.save(tmp_path / "deep" / "trace.safetensors"))
    for field in ("coordinates", "path", "prompt", "fed", "architecture"):
        assert getattr(again, field) == getattr(trace, field), field
    assert again.provenance == json.loads(json.dumps(trace.provenance))
    assert again.sites == trace.sites
    assert all(same_bits(again[s], trace[s]) and same_bits(again.valid(s), trace.valid(s)) for s in trace.sites)
    assert again.n_bytes == trace.n_bytes > 0
    assert repr(again) == repr(trace)


def test_layers_of_other_shapes_or_dtypes_come_as_a_dict(tiny_model, tmp_path, same_bits):
    trace = kd.record(
        tiny_model("mamba", torch.bfloat16), [1, 2, 3], sites="resid_pre", max_new_tokens=2, progress=False
    )
    assert isinstance(trace["resid_pre"], dict)
    assert {layer: x.dtype for layer, x in trace["resid_pre"].items()} == {
        0: torch.bfloat16,
        1: torch.float32,
        2: torch.float32,
        3: torch.float32,
    }
    again = Trace.load(trace.save(tmp_path / "t"))
    assert list(again["resid_pre"]) == [0, 1, 2, 3]
    assert all(same_bits(x, again["resid_pre"][layer]) for layer, x in trace["resid_pre"].items())


def test_nan_patterns_infinities_and_signed_zeros_survive_a_file(trace, tmp_path, same_bits):
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-45])
    bits = torch.tensor([0x7FC00001, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    values = torch.cat([odd, bits])[None]
    axes = {"step": (0,), "vocab": tuple(range(8))}
    made = dataclasses.replace(
        trace, tensors={"logits": values}, coordinates={"logits": axes}, masks={"logits": torch.tensor([True])}
    )
    assert same_bits(Trace.load(made.save(tmp_path / "t"))["logits"], values)


def test_a_drift_is_no_trace(tiny_model, tmp_path):
    drift = kd.compare(tiny_model("llama"), [1, 2], max_new_tokens=2, floor=0, progress=False)
    path = drift.save(tmp_path / "drift")
    with pytest.raises(FileError, match="holds a drift, not a trace"):
        Trace.load(path)
    with pytest.raises(FileError, match="no file"):
        Trace.load(tmp_path / "nothing")


def test_free_memory_is_a_plausible_number():
    assert 1e6 < free_memory(torch.device("cpu")) < 1e15
