"""Manners of calling a model: what a pass is given, and that the default one is what it always was."""

import pytest
import torch

import kvdrift as kd
from kvdrift.errors import InputError
from kvdrift.models.tiny import tiny

IDS = torch.tensor([[5, 9, 100, 33]])


@pytest.mark.parametrize(
    ("call", "shown", "names"),
    [
        ("explicit", "model(ids, position_ids=…, logits_to_keep=1)", {"position_ids", "logits_to_keep"}),
        ("all-logits", "model(ids, position_ids=…)", {"position_ids"}),
        ("default", "model(ids)", set()),
        ("mask", "model(ids, attention_mask=…)", {"attention_mask"}),
    ],
)
def test_a_manner_passes_what_it_shows(call, shown, names):
    backend = kd.load(tiny("llama"), quiet=True).backend
    assert str(backend.manner(call)) == shown
    assert set(backend.arguments(IDS, 3, None, call=call)) - {"input_ids", "use_cache"} == names


def test_a_mask_covers_what_the_cache_holds():
    backend = kd.load(tiny("llama"), quiet=True).backend
    assert backend.arguments(IDS, 3, backend.new_cache(), call="mask")["attention_mask"].tolist() == [[1] * 7]


def test_what_a_model_does_not_take_is_not_shown():
    backend = kd.load(tiny("bloom"), quiet=True).backend
    assert [str(backend.manner(call)) for call in ("explicit", "default")] == [
        "model(ids, logits_to_keep=1)",
        "model(ids)",
    ]


@pytest.mark.parametrize("call", ["all-logits", "default", "mask"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mamba"])
def test_paths_call_a_clean_model_in_every_manner(family, call):
    model, steps = kd.load(tiny(family, num_hidden_layers=2, dtype=torch.float64), quiet=True), (None, 7, 8)
    expected = [kd.CacheOff().start(model, [1, 2, 3, *steps[1:n]]).step().logits for n in (1, 2, 3)]
    for path in (kd.CacheOn(call=call), kd.CacheOff(call=call)):
        run = path.start(model, [1, 2, 3])
        for token, logits in zip(steps, expected, strict=True):
            assert torch.allclose(run.step(token).logits, logits, rtol=0, atol=1e-3)


def test_an_unknown_manner_is_refused():
    for path in (kd.CacheOn, kd.CacheOff):
        with pytest.raises(InputError, match="call='plain': choose one of explicit, all-logits, default, mask"):
            path(call="plain")
