"""Cache-OFF: the whole prefix at every step."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvdrift as kd
from kvdrift.errors import InputError, ModelError
from kvdrift.models.tiny import FAMILIES

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_ones_own_loop(family, tiny_model, same_bits):
    model = tiny_model(family)
    run, tokens = kd.CacheOff().start(model, PROMPT), list(PROMPT)
    for number in range(4):
        step = run.step(tokens[-1] if number else None)
        own = model.hf(torch.tensor([tokens]), use_cache=False, **({} if family == "mamba" else {"logits_to_keep": 1}))
        if family != "mamba":
            assert same_bits(step.logits, own.logits[0, -1])
        assert step.position == len(tokens) - 1
        tokens.append(int(step.logits.argmax()))


def test_keys_of_every_position_by_hand(tiny_model):
    model = tiny_model("llama")
    trace = kd.record(
        model,
        PROMPT,
        path=kd.CacheOff(),
        sites=["k", "v", "resid_pre"],
        positions="all",
        max_new_tokens=3,
        progress=False,
    )
    for step in range(3):
        n = len(PROMPT) + step
        rotary = model.hf.model.rotary_emb(torch.zeros(1), torch.arange(n)[None])
        for layer, block in enumerate(model.hf.model.layers):
            x = block.input_layernorm(trace["resid_pre"][step, layer, :n][None])
            k = block.self_attn.k_proj(x).view(1, n, 2, 32).transpose(1, 2)
            v = block.self_attn.v_proj(x).view(1, n, 2, 32).transpose(1, 2)
            k, _ = apply_rotary_pos_emb(k, k, *rotary)
            assert torch.equal(trace["k"][step, layer, :, :n], k[0])
            assert torch.equal(trace["v"][step, layer, :, :n], v[0])
            assert trace.valid("k")[step, layer].sum() == 2 * n


def test_skipping_computes_nothing_and_changes_nothing_later(tiny_model, monkeypatch):
    model = tiny_model("llama")
    walked, skipped = kd.CacheOff().start(model, PROMPT), kd.CacheOff().start(model, PROMPT)
    walked.step()
    skipped.step()
    walked.step(3)
    with monkeypatch.context() as patch:
        patch.setattr(model.hf, "forward", None)
        skipped.skip(3)
    assert torch.equal(walked.step(4).logits, skipped.step(4).logits)


def test_a_fork_goes_its_own_way(tiny_model):
    model = tiny_model("llama")
    run = kd.CacheOff().start(model, PROMPT)
    run.step()
    fork = run.fork()
    other = fork.step(7).logits
    mine = run.step(9)
    assert not torch.equal(other, mine.logits)
    assert torch.equal(run.fork().step(1).logits, run.step(1).logits)
    assert fork.step(2).position == mine.position + 1


def test_the_first_step_takes_no_token_and_later_ones_do(tiny_model):
    for path in (kd.CacheOff(), kd.CacheOn()):
        run = path.start(tiny_model("llama"), PROMPT)
        with pytest.raises(InputError, match="first step takes no token"):
            run.step(1)
        run.step()
        with pytest.raises(InputError, match="first step takes no token"):
            run.step()
        run.close()


def test_the_callers_prompt_is_not_changed(tiny_model):
    prompt = list(PROMPT)
    run = kd.CacheOff().start(tiny_model("llama"), prompt)
    run.step()
    run.step(4)
    assert prompt == PROMPT


def test_another_attention_for_the_path_and_back(tiny_model):
    model = tiny_model("llama", torch.bfloat16)
    eager = kd.load(kd.models.tiny("llama", dtype=torch.bfloat16, attn="eager"), quiet=True)
    for path in (kd.CacheOff, kd.CacheOn):
        switched = kd.record(model, PROMPT, path=path(attn="eager"), sites="logits", max_new_tokens=3, progress=False)
        native = kd.record(eager, PROMPT, path=path(), sites="logits", max_new_tokens=3, progress=False)
        assert torch.equal(switched["logits"], native["logits"])
        assert switched.path.attn == "eager"
        assert model.attn == "sdpa"


def test_an_attention_that_does_not_exist_is_refused_and_the_old_one_stays(tiny_model):
    model = tiny_model("llama")
    with pytest.raises(ModelError, match="cannot run attn='nonsense'"):
        kd.CacheOff(attn="nonsense").start(model, PROMPT).step()
    assert model.attn == "sdpa"
    with pytest.raises(ModelError, match="sdpa"):
        kd.CacheOff(attn="sdpa").start(tiny_model("gemma2"), PROMPT).step()


def test_attention_is_restored_after_an_exception():
    hf = kd.models.tiny("llama")
    model = kd.load(hf, quiet=True)

    def fail(*_):
        raise RuntimeError("in a block")

    handle = hf.model.layers[1].register_forward_hook(fail)
    hf.train()
    for path in (kd.CacheOff(attn="eager"), kd.CacheOn(attn="eager")):
        with pytest.raises(RuntimeError, match="in a block"):
            path.start(model, PROMPT).step()
        assert model.attn == "sdpa"
        assert all(module.training for module in hf.modules())
    handle.remove()
