"""Left padding and taking decoded tokens back: the two other manners in which caches are used."""

import pytest
import torch
from pairwise import params

import kvdrift as kd
from kvdrift.controls.fixed_shape import FixedShape
from kvdrift.errors import InputError

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44, 17, 61]  # longer than the windows of 8
FAMILIES = ("llama", "mistral", "gemma3", "gpt2", "gpt-oss", "deepseek-v3")


@pytest.mark.parametrize(("family", "chunk"), params([(f, chunk) for f in FAMILIES for chunk in (None, 4)], 1))
def test_a_padded_prompt_gives_the_bits_of_the_plain_one_in_shape_invariant_arithmetic(family, chunk, tiny_model):
    model, fixed = tiny_model(family), (FixedShape(32),)
    padded = kd.CacheOn(left_padding=3, prefill_chunk=chunk, controls=fixed)
    drift = kd.compare(
        model, PROMPT, a=padded, b=kd.CacheOff(controls=fixed), max_new_tokens=4, floor=0, local=False, progress=False
    )
    assert float(drift.values("logits", "logit_max").max()) == 0
    assert float(drift.values("k", "max_abs").max()) == 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_padding_is_what_a_batch_passes(family, tiny_model):
    """The same pass written by hand: zeros in the mask, positions from the first real token."""
    model = tiny_model(family)
    run = kd.CacheOn(left_padding=2).start(model, PROMPT)
    step = run.step()
    n = len(PROMPT)
    by_hand = model.hf(
        torch.tensor([[0, 0, *PROMPT]]),
        attention_mask=torch.tensor([[0, 0] + [1] * n]),
        position_ids=torch.tensor([[0, 0, *range(n)]]),
        use_cache=True,
        logits_to_keep=1,
    )
    assert torch.equal(step.logits, by_hand.logits[0, -1])
    assert step.position == n - 1
    assert list(run.key_positions(0, n + 2)) == list(range(-2, n))


def test_recorded_keys_leave_padding_out(tiny_model):
    model = tiny_model("llama")
    path = kd.CacheOn(left_padding=3)
    padded = kd.record(model, PROMPT, path=path, sites=["k"], positions="all", max_new_tokens=2, progress=False)
    plain = kd.record(model, PROMPT, sites=["k"], positions="all", max_new_tokens=2, progress=False)
    assert padded["k"].shape == plain["k"].shape
    torch.testing.assert_close(padded["k"], plain["k"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_crop_the_run_continues_as_if_it_had_never_been_there(family, tiny_model):
    model, fixed = tiny_model(family), (FixedShape(32),)
    run = kd.CacheOn(controls=fixed).start(model, PROMPT)
    run.keep_past()
    run.step()
    for token in (1, 2, 3, 4):
        run.step(token)
    run.crop(3)
    step = run.step(9)
    plain = kd.CacheOff(controls=fixed).start(model, [*PROMPT, 1, 9]).step()
    assert step.position == len(PROMPT) + 1
    assert torch.equal(step.logits, plain.logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_tokens_in_a_pass_are_those_tokens_one_by_one(family, tiny_model):
    model, fixed = tiny_model(family), (FixedShape(32),)
    run = kd.CacheOn(left_padding=2, controls=fixed).start(model, PROMPT)
    run.keep_past()
    run.step()
    assert run.extend([1, 2, 3, 4]).position == len(PROMPT) + 3
    run.crop(3)
    step = run.extend([9, 8])
    plain = kd.CacheOff(controls=fixed).start(model, [*PROMPT, 1, 9, 8]).step()
    assert step.position == len(PROMPT) + 2
    assert torch.equal(step.logits, plain.logits)
    assert torch.equal(
        run.extend([7]).logits, kd.CacheOff(controls=fixed).start(model, [*PROMPT, 1, 9, 8, 7]).step().logits
    )


def test_tokens_in_one_pass_follow_a_prompt(tiny_model):
    run = kd.CacheOn().start(tiny_model("llama"), PROMPT)
    with pytest.raises(InputError, match="after the first step"):
        run.extend([1, 2])
    run.step()
    with pytest.raises(InputError, match="at least one token"):
        run.extend([])


def test_what_cannot_be_taken_back_is_refused(tiny_model):
    run = kd.CacheOn().start(tiny_model("llama"), PROMPT)
    run.step()
    run.step(1)
    for n in (0, 2, -1):
        with pytest.raises(InputError, match="1 tokens were consumed after the prompt"):
            run.crop(n)
    windowed = kd.CacheOn().start(tiny_model("mistral"), PROMPT)
    windowed.step()
    windowed.step(1)
    with pytest.raises(InputError, match="cannot be cropped"):
        windowed.crop(1)
    with pytest.raises(InputError, match="left_padding"):
        kd.CacheOn(left_padding=-1)


def test_keys_of_a_layer_without_a_cache_of_its_own_end_with_the_pass(tiny_model):
    """Layers that share another layer's entries, as Gemma 3n's last ones do."""
    run = kd.CacheOn(left_padding=2).start(tiny_model("mistral"), PROMPT)
    run.step()
    assert list(run.key_positions(99, len(PROMPT) + 2)) == list(range(-2, len(PROMPT)))
    run.step(1)
    assert list(run.key_positions(99, 8)) == list(run.key_positions(0, 8)) == list(range(5, 13))
    assert list(run.key_positions(99, 64)) == list(range(-2, 62))  # the slots of a static cache


def test_padding_is_not_counted_again_where_no_layer_keeps_tokens(tiny_model):
    model = tiny_model("mamba")
    options = {"sites": ["logits"], "tokens": [1, 2, 3, 4, 5], "progress": False}
    padded = kd.record(model, PROMPT, path=kd.CacheOn(left_padding=3), **options)["logits"]
    torch.testing.assert_close(padded, kd.record(model, PROMPT, **options)["logits"], rtol=1e-4, atol=1e-4)
