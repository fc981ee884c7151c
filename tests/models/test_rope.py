"""Rotary embeddings beyond the declared context: run where they are made for it, refused elsewhere."""

import pytest

import kvdrift as kd
from kvdrift.errors import InputError
from kvdrift.models.rope import changes_after, extends, rope_switch, rope_types
from kvdrift.models.tiny import tiny

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 12}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "factor": 2.0,
    "original_max_position_embeddings": 12,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
PROMPT = list(range(3, 23))


def small(rope, family="llama"):
    return tiny(family, num_hidden_layers=1, max_position_embeddings=24, rope_parameters=rope, initializer_range=0.08)


@pytest.mark.parametrize(
    ("rope", "kind", "family"),
    [(DYNAMIC, "by_design", "llama"), (YARN, "rounding", "qwen2"), (LONG, "rounding", "llama")],
)
def test_a_prompt_that_outgrows_the_context_is_diagnosed(rope, kind, family):
    verdict = kd.diagnose(small(rope, family), PROMPT, max_new_tokens=8, progress=False)
    assert verdict.kind in (kind, "by_design"), str(verdict)
    assert not any("prompt exceeds" in one for one in verdict.not_examined)


def test_a_prompt_wholly_beyond_the_switch_of_dynamic_ntk_is_by_design():
    model = small(DYNAMIC)
    verdict = kd.diagnose(model, PROMPT * 2, max_new_tokens=4, progress=False)
    assert verdict.kind == "by_design", str(verdict)
    assert verdict.signature == ("at a length switch",)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (DYNAMIC, "28 tokens go beyond 24, where the rotary embedding (dynamic) changes"),
        (LONG, "28 tokens go beyond 12, where the rotary embedding (longrope) changes"),
        (YARN, "28 tokens go beyond the context of 24 that the model declares; its rotary embedding (yarn)"),
    ],
)
def test_a_comparison_beyond_the_context_runs_with_a_note(rope, said):
    drift = kd.compare(small(rope), PROMPT, max_new_tokens=8, floor=0, local=False, progress=False)
    assert [note for note in drift.notes if note.startswith(said)]
    short = kd.compare(small(rope), PROMPT[:4], max_new_tokens=2, floor=0, local=False, progress=False)
    assert not any("go beyond" in note for note in short.notes)


def test_what_does_not_reach_beyond_is_refused():
    for model in (
        small(LINEAR),
        small({"rope_type": "default", "rope_theta": 1e4}),
        tiny("gpt2", max_position_embeddings=24),
    ):
        with pytest.raises(InputError, match=r"exceed the context of .* \(24\)"):
            kd.compare(model, PROMPT, max_new_tokens=8, progress=False)
        with pytest.raises(InputError, match="exceed the context"):
            kd.diagnose(model, PROMPT, max_new_tokens=8, progress=False)


def test_longrope_is_one_function_on_either_side_of_its_switch():
    config = small(LONG).config
    assert [changes_after(config, first, n) for first, n in ((5, 12), (5, 13), (13, 20))] == [False, True, False]
    config = small(DYNAMIC).config
    assert [changes_after(config, first, n) for first, n in ((5, 24), (5, 25), (30, 31), (30, 30))] == [
        False, True, True, False,
    ]  # fmt: skip


def test_types_of_every_kind_of_layer():
    assert rope_types(tiny("gpt-oss").config) == ("yarn",)
    assert extends(tiny("gpt-oss").config)
    assert not extends(tiny("bloom").config)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 256),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, None),
        ({"rope_type": "default", "rope_theta": 1e4}, None),
    ],
)
def test_rope_switch(rope, expected):
    assert rope_switch(tiny("llama", rope_parameters=rope).config) == expected


def test_a_long_prompt_leaves_nothing_behind_for_the_next_one(same_bits):
    model = kd.load(small(DYNAMIC), quiet=True)

    def logits(path, prompt):
        run = path.start(model, prompt)
        return [run.step().logits, run.step(7).logits]

    for path in (kd.CacheOn(), kd.CacheOff()):
        first = logits(path, PROMPT + PROMPT[:6])
        logits(path, PROMPT * 3)
        again = logits(path, PROMPT + PROMPT[:6])
        assert all(same_bits(x, y) for x, y in zip(first, again, strict=True))
