"""Which cases are run, and the tiny twin for those that cost too much."""

from dataclasses import replace

import pytest

import kvdrift as kd
from kvdrift.diagnosis.cases import CROP_AND_CONTINUE, default_cases, fits, prompt_cases, too_costly
from kvdrift.diagnosis.lockstep import lockstep
from kvdrift.diagnosis.twin import twin


def names(cases):
    return [case.name for case in cases]


def test_default_cases_reach_every_length_that_matters(tiny_model):
    cases = default_cases(tiny_model("mistral"), kd.CacheOn())
    short = cases[0]
    assert {n % 16 for n in range(len(short.prompt), short.n_tokens + 1)} == set(range(16))
    lengths = {case.name: (len(case.prompt), case.n_tokens) for case in cases}
    start, end = lengths["on reaching the window of 8"]
    assert {7, 8, 9} <= set(range(start, end + 1))
    assert lengths["beyond the window of 8"][0] == 16
    assert len({case.prompt for case in cases}) == len(cases) - 5  # the manners share one, and two at the window


def test_manners_are_made_of_the_path_under_test(tiny_model):
    path = kd.CacheOn(attn="eager")
    cases = {case.name: case for case in default_cases(tiny_model("llama"), path)}
    assert cases["chunked prefill"].a == replace(path, prefill_chunk=5)
    assert cases["left padding"].a == replace(path, left_padding=3)
    assert cases["crop and continue"].passes == CROP_AND_CONTINUE
    assert "chunked prefill" not in names(default_cases(tiny_model("llama"), kd.CacheOff()))


def test_passes_of_several_tokens_go_over_tiles_and_take_back_one_to_all(tiny_model):
    cases = {case.name: case for case in default_cases(tiny_model("mistral"), kd.CacheOn())}
    drafts = [one for one in cases["drafted tokens taken back"].passes if one.n_tokens > 1]
    assert {one.n_tokens for one in drafts} == {2, 3, 4, 5}
    assert {one.taken_back for one in drafts} == {1, 2, 3, 5}
    assert any(one.n_tokens == one.taken_back for one in drafts)
    chat = cases["several tokens in a pass"]
    assert chat.n_tokens - len(chat.prompt) >= 16
    assert not chat.crops
    at_window = cases["drafted tokens taken back at the window of 8"]
    assert len(at_window.prompt) < 8 < at_window.n_tokens
    assert at_window.passes[0].taken_back < at_window.passes[0].n_tokens


def test_cases_that_go_through_a_switch_know_it():
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16,
        "factor": 4.0, "original_max_position_embeddings": 30,
    }  # fmt: skip
    model = kd.load(kd.models.tiny("llama", rope_parameters=rope, max_position_embeddings=160), quiet=True)
    marked = {case.name for case in default_cases(model, kd.CacheOn()) if case.switch == 30}
    assert marked == {"several tokens in a pass", "drafted tokens taken back", "around the RoPE switch"}


def test_own_prompts_come_first_and_keep_their_manners(tiny_model):
    cases = prompt_cases(tiny_model("llama"), kd.CacheOn(), [[1, 2, 3], [4, 5]], steps=3)
    assert names(cases) == [
        "prompt 0", "prompt 1", "chunked prefill", "left padding", "several tokens in a pass", "crop and continue",
        "drafted tokens taken back",
    ]  # fmt: skip
    assert cases[0].feed is None
    assert all(case.prompt == (1, 2, 3) for case in cases[2:])


def test_recurrent_models_are_not_padded_nor_cropped(tiny_model):
    assert names(default_cases(tiny_model("mamba"), kd.CacheOn()))[-2:] == [
        "chunked prefill",
        "several tokens in a pass",
    ]


def test_cost_and_context(tiny_model):
    model = tiny_model("llama")
    case = default_cases(model, kd.CacheOn())[0]
    assert fits(model, case)
    assert not fits(model, replace(case, steps=300))
    assert not too_costly(model, case)
    assert too_costly(model, replace(case, steps=10**6))
    assert too_costly(model, case, share=1e-6)


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "mistral", "gpt2", "mixtral"])
def test_a_twin_has_every_kind_of_layer(family):
    model = kd.load(
        kd.models.tiny(family, **({"sliding_window": 64} if family in ("mistral", "gemma3") else {})), quiet=True
    )
    small = twin(model)
    kinds = {info.attention for info in model.architecture.layers}
    assert {info.attention for info in small.architecture.layers} == kinds
    assert type(small.hf) is type(model.hf)
    assert all(info.window in (None, 8) for info in small.architecture.layers)
    assert small.dtype == model.dtype
    assert model.architecture.layers[0].window in (None, 8, 64)  # the model's own config is left alone


def test_lockstep_steps_both_paths_on_the_same_tokens(tiny_model):
    model = tiny_model("llama")
    for case in default_cases(model, kd.CacheOn())[:6]:
        steps = [(moment.step, x.position, y.position) for moment, x, y in lockstep(model, case, kd.CacheOff(), ())]
        assert all(x == y for _, x, y in steps)
        first = 5 if case.crops else 0
        assert [step for step, _, _ in steps] == list(range(first, len(case.schedule) + 1))
        last = len(case.prompt) - 1 + sum(one.n_tokens - one.taken_back for one in case.schedule)
        assert steps[-1][1] == last
