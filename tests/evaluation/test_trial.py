"""One item: texts, the places where they part, and the gold text's log-probability, against loops written by hand."""

import numpy as np
import pytest
import torch

import kvdrift as kd
from kvdrift.controls.reroll import ReRoll
from kvdrift.errors import NonFiniteError
from kvdrift.evaluation.records import ItemRecord
from kvdrift.evaluation.task import Item, Scored
from kvdrift.evaluation.trial import Design, ItemRunner
from kvdrift.paths.text import write
from kvdrift.plain import from_plain

PROMPT = "w011 w002 w003 w004 w005 w301 w042 w017 w123 w200 w077"  # longer than the windows of 8
IDS = [int(word[1:]) for word in PROMPT.split()]
SAMPLED = kd.TopK(20)


class Echo:
    """A task that keeps the text it is asked to score."""

    name = "echo"

    def __init__(self, stop=()):
        self.stop = stop

    def items(self):
        return []

    def score(self, text, item):
        return Scored(text, item.answer is not None and item.answer in text)

    def settings(self):
        return {}


def design(**changes):
    usual = {
        "task": Echo(), "a": kd.CacheOn(), "b": kd.CacheOff(), "strategies": (kd.Greedy(),), "seeds": (0,), "null": (),
        "max_new_tokens": 12, "gold": True, "stop_at_divergence": False,
    }  # fmt: skip
    return Design(**{**usual, **changes})


def record(model, item=None, **changes):
    item = Item("q", PROMPT) if item is None else item
    return from_plain(ItemRecord, ItemRunner(model, design(**changes))(item))


def by_hand(model, path, ids, strategy, steps, seed=0, item="q", controls=None):
    """A fresh run without forks: tokens, logits and top-2 gaps of what decided."""
    run, choose = path.start(model, ids, controls), strategy.sampler(seed, item)
    tokens, logits, gaps = [], [], []
    try:
        for number in range(steps):
            found = run.step(tokens[-1] if number else None).logits
            scores = found.float().double().numpy()
            if hasattr(choose, "processors"):
                scores = choose.processors(None, found.float()[None])[0].double().numpy() + choose.noise(number, 384)
            second, best = np.sort(scores)[-2:]
            tokens.append(int(np.argmax(scores)))
            logits.append(found)
            gaps.append(None if np.isneginf(second) else float(best - second))
    finally:
        run.close()
    return tokens, logits, gaps


# --- forks


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32), ("gemma3", torch.float32), ("mistral", torch.bfloat16), ("gpt2", torch.bfloat16),
        ("lfm2", torch.float32),
    ],
)  # fmt: skip
def test_a_shared_prefill_gives_the_bits_of_runs_that_share_nothing(family, dtype, tiny_model, monkeypatch, same_bits):
    model = tiny_model(family, dtype, tie_word_embeddings=False)
    seen = []

    def noting(*arguments, **options):
        for shown, token in write(*arguments, **options):
            seen.append(shown.logits.clone())
            yield shown, token

    monkeypatch.setattr("kvdrift.evaluation.trial.write", noting)
    strategies, steps = (kd.Greedy(), SAMPLED), 6
    found = record(model, Item("q", IDS), strategies=strategies, null=(4,), max_new_tokens=steps)
    arms = [
        (kd.CacheOn(), None, lambda trial: trial.a),
        (kd.CacheOff(), None, lambda trial: trial.b),
        (kd.CacheOn(), (ReRoll(4),), lambda trial: trial.null[0]),
    ]
    fresh = []
    for path, controls, arm in arms:
        for strategy, trial in zip(strategies, found.trials, strict=True):
            tokens, logits, _ = by_hand(model, path, IDS, strategy, steps, controls=controls)
            assert arm(trial).tokens == tuple(tokens)
            fresh += logits
    assert len(seen) == len(fresh) == 3 * 2 * steps
    assert all(same_bits(x, y) for x, y in zip(seen, fresh, strict=True))


def test_seeds_and_strategies_are_crossed_in_order(half):
    found = record(half, strategies=(kd.Greedy(), SAMPLED), seeds=(3, 1), max_new_tokens=4)
    assert [(trial.strategy, trial.seed) for trial in found.trials] == [
        ("greedy", 3), ("greedy", 1), ("top-k 20", 3), ("top-k 20", 1),
    ]  # fmt: skip
    assert found.trials[0].a == found.trials[1].a
    assert found.trials[2].a != found.trials[3].a
    assert found.trials[3].a.tokens == tuple(by_hand(half, kd.CacheOn(), IDS, SAMPLED, 4, seed=1)[0])


# --- equal to generate


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_greedy_tokens_are_those_of_generate(family, tiny_model):
    model = tiny_model(family, torch.bfloat16, tie_word_embeddings=False)
    trial = record(model, Item("q", IDS)).trials[0]
    for answer, use_cache in ((trial.a, True), (trial.b, False)):
        out = model.hf.generate(torch.tensor([IDS]), max_new_tokens=12, do_sample=False, use_cache=use_cache)
        assert answer.tokens == tuple(out[0, len(IDS) :].tolist())


# --- where texts part


@pytest.fixture(scope="module")
def parting(half, single):
    """Paths that part: the same weights in two dtypes. Per strategy the trial and both loops by hand, several items."""
    found = []
    for start in range(4, 8):
        ids = [start, 2, 3, 4, 5]
        b = kd.CacheOff(model=single)
        one = record(half, Item(str(start), ids), b=b, strategies=(kd.Greedy(), SAMPLED))
        for strategy, trial in zip((kd.Greedy(), SAMPLED), one.trials, strict=True):
            loops = [by_hand(half, path, ids, strategy, 12, item=str(start)) for path in (kd.CacheOn(), b)]
            found.append((trial, *loops))
    return found


def test_divergence_is_the_first_other_token(parting):
    expected = []
    for trial, (a, _, _), (b, _, _) in parting:
        assert (trial.a.tokens, trial.b.tokens) == (tuple(a), tuple(b))
        expected.append(next((i for i in range(12) if a[i] != b[i]), None))
    assert [trial.b.divergence for trial, _, _ in parting] == expected
    assert len(set(expected)) > 2  # some part, at several places


def test_margins_are_the_top_two_gaps_of_what_decided_there(parting):
    for trial, (_, _, a), (_, _, b) in parting:
        step = trial.b.divergence
        assert trial.b.margins == (None if step is None else (a[step], b[step]))


def test_the_first_step_with_other_bits(half, same_bits):
    """On against off part later than at the first step, on other places than the tokens do."""
    prompts, seen = [[i, 2, 3, 4, 5] for i in range(3)], []
    for ids in prompts:
        found = record(half, Item("q", ids), null=(0, 7), max_new_tokens=14)
        a, b, *nulls = (
            by_hand(half, path, ids, kd.Greedy(), 14, controls=controls)
            for path, controls in (
                (kd.CacheOn(), None), (kd.CacheOff(), None), (kd.CacheOn(), (ReRoll(0),)), (kd.CacheOn(), (ReRoll(7),)),
            )
        )  # fmt: skip
        for answer, (tokens, logits, _) in zip((found.trials[0].b, *found.trials[0].null), (b, *nulls), strict=True):
            shared = 0
            while shared < 14 and a[0][:shared] == tokens[:shared]:
                shared += 1
            assert answer.unequal == next((i for i in range(shared) if not same_bits(a[1][i], logits[i])), None)
            seen.append(answer.unequal)
    assert len(set(seen)) > 1


def test_bits_that_differ_after_the_texts_parted_do_not_count(half):
    """A path with path a's logits up to one step, at which it flips the choice."""

    class Flipped(kd.CacheOn):
        def start(self, model, ids, controls=None):
            run = super().start(model, ids, controls)
            return Forced(run, 0)

    class Forced:
        def __init__(self, run, steps):
            self.run, self.steps, self.model, self.attn = run, steps, run.model, run.attn

        def step(self, token=None):
            found = self.run.step(token)
            self.steps += 1
            if self.steps != 4:
                return found
            logits = found.logits.clone()
            logits[99] = 200.0
            return type(found)(logits, found.position)

        def fork(self, controls=None):
            return Forced(self.run.fork(controls), self.steps)

        def close(self):
            self.run.close()

    answer = record(half, b=Flipped()).trials[0].b
    assert (answer.divergence, answer.unequal) == (3, 3)
    assert answer.tokens[3] == 99
    gap = by_hand(half, kd.CacheOn(), IDS, kd.Greedy(), 4)[2][3]
    best = by_hand(half, kd.CacheOn(), IDS, kd.Greedy(), 4)[1][3].max().float()
    assert answer.margins == (gap, float(200 - best))


def test_no_margin_where_no_second_token_was_allowed(half, single):
    """With k = 1 a second token is allowed only where two logits tie, as bfloat16's often do and float32's do not."""
    b, margins = kd.CacheOff(model=single), []
    for start in range(4, 8):
        ids = [start, 2, 3, 4, 5]
        answer = record(half, Item(str(start), ids), b=b, strategies=(kd.TopK(1),)).trials[0].b
        if answer.divergence is not None:
            gaps = [by_hand(half, path, ids, kd.TopK(1), 12, item=str(start))[2] for path in (kd.CacheOn(), b)]
            assert answer.margins == tuple(gap[answer.divergence] for gap in gaps)
            margins.append(answer.margins)
    assert margins
    assert {right for _, right in margins} == {None}


def test_a_path_against_itself_never_parts(half):
    answer = record(half, b=kd.CacheOn(label="again"), strategies=(kd.Greedy(), SAMPLED)).trials
    assert [(t.b.divergence, t.b.unequal, t.b.margins) for t in answer] == [(None, None, None)] * 2
    assert all(t.a.tokens == t.b.tokens for t in answer)


# --- the gold text


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox"])  # true float64: no norm in float32
def test_gold_log_probability_is_that_of_one_whole_pass(family, word_model):
    model = word_model(torch.float64, family=family)
    gold = " w050 w051 w350 w007"
    gold_ids = [50, 51, 350, 7]
    found = record(model, Item("q", PROMPT, gold=gold), null=(2,), max_new_tokens=1).gold
    with torch.no_grad():
        logits = model.hf(torch.tensor([IDS + gold_ids])).logits[0].numpy()
    assert logits.dtype == np.float64
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = sum(log_p[len(IDS) - 1 + i, token] for i, token in enumerate(gold_ids))
    assert found.n_tokens == 4
    for value in (found.a, found.b, *found.null):
        assert value == pytest.approx(expected, rel=0, abs=1e-10)
    assert len(found.null) == 1


def test_gold_is_summed_in_float64_whatever_the_dtype(half):
    found = record(half, Item("q", PROMPT, gold=" w050 w051"), max_new_tokens=1).gold
    for value, path in ((found.a, kd.CacheOn()), (found.b, kd.CacheOff())):
        run = path.start(half, IDS)
        first, second = run.step().logits, run.step(50).logits
        run.close()
        expected = first.double().log_softmax(-1)[50] + second.double().log_softmax(-1)[51]
        assert value == float(expected)


@pytest.mark.parametrize(
    ("item", "asked"), [(Item("q", PROMPT), True), (Item("q", PROMPT, gold=" w001"), False), (Item("q", IDS), True)]
)
def test_no_gold_where_there_is_none_or_it_is_not_asked_for(item, asked, half):
    assert record(half, item, gold=asked, max_new_tokens=1).gold is None


def test_gold_tokens_continue_the_prompt(half):
    runner = ItemRunner(half, design())
    assert runner.gold_ids(Item("q", "w001 w002", gold=" w003"), [1, 2]) == [3]
    # "w002w003" is one unknown word: together they are other tokens, so the gold text is read by itself
    assert runner.gold_ids(Item("q", "w001 w002", gold="w003"), [1, 2]) == [3]


# --- where texts end


@pytest.fixture(scope="module")
def plain(half):
    return record(half).trials[0].a


def test_length(plain):
    assert (plain.stop, len(plain.tokens)) == ("length", 12)
    assert plain.text == " ".join(f"w{token:03}" for token in plain.tokens)


@pytest.mark.parametrize("place", [0, 5, 11])
def test_the_end_token_ends_a_text_and_stays_in_it(place, plain, word_model):
    model = word_model(torch.bfloat16)
    end = plain.tokens[place]
    model.hf.generation_config.eos_token_id = [end, 383]
    first = plain.tokens.index(end)
    answer = record(model).trials[0].a
    assert (answer.stop, answer.tokens) == ("eos", plain.tokens[: first + 1])


@pytest.mark.parametrize("place", [0, 5, 11])
def test_a_stop_string_ends_a_text_and_is_cut_off(place, plain, half):
    words = [f"w{token:03}" for token in plain.tokens]
    first = words.index(words[place])
    answer = record(half, task=Echo(("nowhere", words[place]))).trials[0].a
    assert (answer.stop, answer.tokens) == ("stop string", plain.tokens[: first + 1])
    assert answer.text == "".join(f"{word} " for word in words[:first])
    assert answer.answer == answer.text  # the scorer sees what is left


def test_the_first_of_several_stop_strings_cuts(plain, half):
    words = [f"w{token:03}" for token in plain.tokens]
    both = f"{words[1]} {words[2]}"
    assert record(half, task=Echo((words[2], both))).trials[0].a.text == f"{words[0]} "


def test_stop_strings_need_a_tokenizer_and_ids_are_its_words_otherwise(tiny_model):
    model = tiny_model("llama", torch.bfloat16, tie_word_embeddings=False)
    answer = record(model, Item("q", IDS), task=Echo((" ",)), max_new_tokens=3).trials[0].a
    assert (answer.stop, answer.text) == ("length", " ".join(map(str, answer.tokens)))


def test_stopping_at_the_divergence(half, single):
    options = {"b": kd.CacheOff(model=single), "strategies": (kd.Greedy(), SAMPLED), "null": (0,)}
    parted = 0
    for start in (4, 6, 7):
        item = Item(str(start), [start, 2, 3, 4, 5], answer="w")
        whole, short = (record(half, item, stop_at_divergence=stop, **options) for stop in (False, True))
        for one, other in zip(whole.trials, short.trials, strict=True):
            assert other.a == one.a
            for long, cut in zip((one.b, *one.null), (other.b, *other.null), strict=True):
                assert (cut.divergence, cut.unequal, cut.margins) == (long.divergence, long.unequal, long.margins)
                end = len(long.tokens) if long.divergence is None else long.divergence + 1
                assert cut.tokens == long.tokens[:end]
                assert cut.stop == (long.stop if long.divergence is None else "diverged")
                assert (cut.answer, cut.correct) == (None, None)  # no accuracy of those that happened not to part
                parted += cut.stop == "diverged"
    assert parted


# --- bad weights


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_raise(value, word_model, hooks):
    model = word_model()
    with torch.no_grad():
        model.hf.model.norm.weight[3] = value
    with pytest.raises(NonFiniteError):
        record(model)
    assert not hooks(model.hf)


@pytest.mark.parametrize("scaled", ["mlp.down_proj", "self_attn.o_proj"])
def test_an_overflow_of_float16_names_its_layer(scaled, word_model, hooks):
    """As Gemma 3 does it: every weight is finite, the residual stream of one layer is not."""
    model = word_model(torch.float16, family="gemma3")
    layer = model.hf.model.layers[1]
    with torch.no_grad():
        for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
            norm.weight.fill_(60000.0)
        weight = layer.get_submodule(scaled).weight
        weight.copy_(weight.float() * (60000 / weight.float().abs().max()))
    with pytest.raises(NonFiniteError, match=r"of layer 1: the largest finite value .*6\.55e\+04"):
        record(model)
    with pytest.raises(NonFiniteError, match="of layer 1"):
        kd.record(model, IDS, max_new_tokens=2, progress=False)
    assert not hooks(model.hf)


def test_tokens_that_the_model_rules_out_are_no_fault(word_model):
    """Logits of minus infinity: some models mask part of their vocabulary."""
    model = word_model()
    handle = model.hf.lm_head.register_forward_hook(
        lambda module, args, out: out.index_fill(-1, torch.tensor([5]), -torch.inf)
    )
    try:
        found = record(model, strategies=(kd.Greedy(), SAMPLED), max_new_tokens=3)
    finally:
        handle.remove()
    assert all(len(trial.a.tokens) == 3 and 5 not in trial.a.tokens for trial in found.trials)


# --- the record


def test_a_record_says_what_was_asked(half):
    found = record(half, Item("q7", PROMPT, answer="w001"), max_new_tokens=1)
    assert (found.item, found.prompt, found.n_prompt, found.reference) == ("q7", PROMPT, len(IDS), "w001")
    assert found.prompt_hash == kd.provenance.prompt_hash(IDS)
    by_ids = record(half, Item("q7", IDS), max_new_tokens=1)
    assert (by_ids.prompt, by_ids.prompt_hash) == (None, found.prompt_hash)
    assert by_ids.trials[0].a.tokens == found.trials[0].a.tokens
