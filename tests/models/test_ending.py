"""A text that ends at once: every verb says so first, and ``ignore_eos`` goes on."""

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

import kvdrift as kd
from kvdrift.experiments import paper_architecture, paper_drift, paper_patching
from kvdrift.models.ending import UNUSED_TEMPLATE, after, template_notes, tokens_written
from kvdrift.summaries import drift as summary

PROMPT, STEPS = [1, 2, 3], 4
QUICK = {"max_new_tokens": STEPS, "progress": False}
VERBS = {
    "compare": lambda model, **options: kd.compare(model, PROMPT, floor=1, **QUICK, **options),
    "patch": lambda model, **options: kd.patch(model, PROMPT, "kv", placebos=1, checks=False, **QUICK, **options),
    "sweep": lambda model, **options: kd.sweep(model, PROMPT, sites=["k"], placebos=0, **QUICK, **options),
    "factorial": lambda model, **options: kd.factorial(model, PROMPT, **QUICK, **options),
    "falsify": lambda model, **options: kd.falsify(model, PROMPT, arms=["fixed-shape"], **QUICK, **options),
    "paper_drift": lambda model, **options: paper_drift(model, PROMPT, **QUICK, **options),
    "paper_patching": lambda model, **options: paper_patching(
        model, PROMPT, placebos=1, directions=["on_from_off"], **QUICK, **options
    ),
    "paper_architecture": lambda model, **options: paper_architecture(model, PROMPT, **QUICK, **options),
}


@torch.no_grad()
def ends_at_once(family="llama", prompt=PROMPT):
    """A model whose first token after the prompt ends the text."""
    hf = kd.models.tiny(family)
    hf.generation_config.eos_token_id = int(hf(torch.tensor([prompt])).logits[0, -1].argmax())
    return hf


@pytest.mark.parametrize("verb", VERBS)
def test_a_text_that_ends_at_once_is_said_first_and_only(verb):
    model = ends_at_once()
    lines = VERBS[verb](model).summary().splitlines()
    said = " ".join(" ".join(lines).split())
    assert "The model ended its text after 0 tokens: no step " in said
    assert "ignore_eos=True, --ignore-eos" in said
    assert "chat template" not in said  # it has none
    assert len(lines) <= 5
    for word in ("not known", "same text", "nothing to recover", "no drift", "undefined"):
        assert word not in said


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_goes_on_past_the_end(verb):
    result = VERBS[verb](ends_at_once(), ignore_eos=True)
    assert "ended its text" not in result.summary()
    for part in ("on_from_off", "original"):
        result = getattr(result, part, result)
    result = result.drifts[0] if verb == "paper_drift" else result
    assert result.arrays["n_steps"].tolist() == [STEPS]
    assert result.provenance["ends"] == []


def test_record_says_it_on_stderr_and_goes_on_if_asked(capsys):
    model = ends_at_once("gpt2")
    assert len(kd.record(model, PROMPT, sites=["logits"], max_new_tokens=STEPS).fed) == 1
    assert "The model ended its text after 0 tokens, so there is one step." in capsys.readouterr().err
    options = {"sites": ["logits"], "max_new_tokens": STEPS, "ignore_eos": True}
    assert len(kd.record(model, PROMPT, **options).fed) == STEPS
    assert "ended" not in capsys.readouterr().err


def test_evaluation_goes_on_past_the_end_and_a_store_knows_the_difference(tmp_path):
    model = kd.load(ends_at_once(), quiet=True)
    run = {"max_new_tokens": STEPS, "progress": False, "store": tmp_path}
    short = kd.evaluate(model, [PROMPT], **run)
    assert [len(t.a.tokens) for r in short.records for t in r.trials] == [1]
    with pytest.raises(kd.errors.FileError, match="ignore_eos: false there, true here"):
        kd.evaluate(model, [PROMPT], ignore_eos=True, **run)
    long = kd.evaluate(model, [PROMPT], ignore_eos=True, **run | {"store": None})
    assert [len(t.b.tokens) for r in long.records for t in r.trials] == [STEPS]


def test_prompts_that_ended_are_counted_apart_from_those_that_did_not():
    drift = kd.compare(ends_at_once(), [PROMPT, [9, 8]], floor=0, **QUICK)
    first, *others = summary.reading(drift)
    assert first == "In 1 of 2 prompts the model ended its text after 0 tokens: what follows is about the others."
    assert not any("ended its text" in sentence for sentence in others)


def test_too_few_tokens_asked_for_is_no_end_of_the_text():
    drift = kd.compare(kd.models.tiny("llama"), PROMPT, max_new_tokens=1, floor=0, progress=False)
    assert summary.reading(drift) == ["No step after step 0, the prefill, was measured: ask for more new tokens."]


def test_a_prefill_in_chunks_that_differs_is_not_passed_over():
    chunked = kd.CacheOn(prefill_chunk=1)
    drift = kd.compare(kd.models.tiny("gpt2"), [5, 7, 9, 11], a=chunked, max_new_tokens=1, floor=0, progress=False)
    assert drift.values("logits", "kl")[0, 0] > 0
    why, more = summary.reading(drift)
    assert why.startswith("No step after step 0")
    assert more.startswith("At step 0, the prefill, KL is ")
    assert "No flip in 1 step" in more


def test_given_tokens_never_end_a_text():
    model = ends_at_once()
    end = model.generation_config.eos_token_id
    drift = kd.compare(model, PROMPT, tokens=[end, end], floor=0, progress=False)
    assert drift.arrays["n_steps"].tolist() == [2]
    assert drift.provenance["ends"] == []


# --- the hint at the chat template


@pytest.fixture
def talking(tmp_path):
    """A model with a chat template, which ends its text at once."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(
        WordLevel({word: n for n, word in enumerate(("<unk>", "how", "many", "rolls"))}, unk_token="<unk>")
    )
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    return kd.load(ends_at_once(prompt=[1, 2, 3]), tokenizer=tokenizer, quiet=True)


def test_the_chat_template_is_hinted_at(talking, capsys):
    drift = kd.compare(talking, "how many rolls", floor=0, **QUICK)
    said = " ".join(drift.summary().split())
    assert "Put the prompt into the model's chat template (chat=True, --chat), go on past the end" in said
    assert UNUSED_TEMPLATE in drift.notes  # in words once, in JSON always
    assert UNUSED_TEMPLATE not in said
    going_on = kd.compare(talking, "how many rolls", floor=0, ignore_eos=True, **QUICK)
    assert f"! {UNUSED_TEMPLATE}" in " ".join(going_on.summary().split())
    kd.record(talking, "how many rolls", sites=["logits"], max_new_tokens=2, ignore_eos=True)
    assert f"kvdrift: {UNUSED_TEMPLATE}." in capsys.readouterr().err
    assert UNUSED_TEMPLATE in kd.patch(talking, "how many rolls", "kv", placebos=0, checks=False, **QUICK).notes
    assert UNUSED_TEMPLATE in kd.factorial(talking, "how many rolls", **QUICK).notes


@pytest.mark.parametrize(("prompts", "chat"), [(["how many"], True), ([[1, 2]], False)])
def test_no_hint_where_the_template_is_used_or_ids_are_given(talking, prompts, chat):
    assert template_notes(talking, prompts, chat) == ()


# --- counting


def test_tokens_before_the_end():
    assert tokens_written([], frozenset({1})) is None
    assert tokens_written([4, 1], frozenset({1})) == 1
    assert [after([0]), after([1, 1]), after([2, 5])] == ["after 0 tokens", "after 1 token", "after 2 to 5 tokens"]
    assert np.isscalar(tokens_written([1], frozenset({1})))
