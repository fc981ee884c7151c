"""The verb: the same records however a run came to its end, a store that mixes nothing, one sentence for bad input."""

import json
import re
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvdrift as kd
from kvdrift.errors import FileError, InputError, NonFiniteError
from kvdrift.evaluation.evaluate import evaluate
from kvdrift.evaluation.task import Item, Scored

pytestmark = pytest.mark.usefixtures("quick_statistics")
STRATEGIES = ("greedy", "top-k 20")


class Sums:
    """Five questions; scores a text by its first word, and may be interrupted at one of them."""

    name = "sums"
    stop = ()

    def __init__(self, interrupt_at=None, error=KeyboardInterrupt, version=1):
        self.interrupt_at, self.error, self.version = interrupt_at, error, version

    def items(self):
        return [Item(f"q{i}", f"w{i + 4:03} w002 w003 w004 w005", f"w{i:03}", f" w{i + 50:03}") for i in range(5)]

    def score(self, text, item):
        if item.id == self.interrupt_at:
            raise self.error("stop here")
        return Scored(text.split()[0], ord(text[3]) % 2 == 0)

    def settings(self):
        return {"version": self.version}


def run(model, task=None, **changes):
    usual = {"strategies": STRATEGIES, "max_new_tokens": 6, "null": 1, "limit": 4, "progress": False}
    return evaluate(model, Sums() if task is None else task, **{**usual, **changes})


@pytest.fixture(scope="module")
def whole(half):
    return run(half)


def kept(folder):
    return [json.loads(line)["key"] for line in (folder / "records.jsonl").read_text().splitlines()]


# --- however it came to its end


def test_one_record_per_item_in_order(whole):
    assert [record.item for record in whole.records] == ["q0", "q1", "q2", "q3"]
    assert all([t.strategy for t in record.trials] == list(STRATEGIES) for record in whole.records)
    assert all(len(trial.null) == 1 for record in whole.records for trial in record.trials)
    assert len({record.trials[1].a.tokens for record in whole.records}) == 4
    assert {token for record in whole.records for token in record.trials[1].a.tokens} <= set(whole.token_texts)


def test_interrupted_and_resumed_is_the_same(half, whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(half, Sums("q2"), store=tmp_path)
    assert kept(tmp_path) == ["q0", "q1"]
    resumed = run(half, store=tmp_path)
    assert kept(tmp_path) == ["q0", "q1", "q2", "q3"]
    assert resumed.records == whole.records
    assert resumed == whole


def test_an_error_leaves_what_is_finished(half, whole, tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(half, Sums("q1", ZeroDivisionError), store=tmp_path)
    assert kept(tmp_path) == ["q0"]
    assert run(half, store=tmp_path).records == whole.records


def test_two_items_then_four_then_two(half, whole, tmp_path):
    assert run(half, limit=2, store=tmp_path).records == whole.records[:2]
    assert run(half, limit=4, store=tmp_path).records == whole.records
    assert run(half, limit=2, store=tmp_path).records == whole.records[:2]
    assert kept(tmp_path) == ["q0", "q1", "q2", "q3"]


def test_what_is_finished_is_not_run_again(half, whole, tmp_path):
    run(half, store=tmp_path)
    again = run(half, Sums("q2", AssertionError), store=tmp_path)
    assert again.records == whole.records


def test_more_items_than_there_are_is_all_of_them(half, whole):
    found = run(half, limit=99, strategies="greedy", null=0)
    assert len(found.records) == 5
    assert [record.trials[0].a for record in found.records[:4]] == [record.trials[0].a for record in whole.records]


def test_an_item_does_not_depend_on_what_else_is_run(half, whole):
    """Neither other items nor other strategies, seeds or re-rolls change a record's part."""
    alone = run(half, strategies="top-k 20", seeds=(5, 0), null=0, limit=3)
    for record, other in zip(alone.records, whole.records, strict=False):
        assert record.gold.a == other.gold.a
        assert (record.trials[1].a, record.trials[1].b) == (other.trials[1].a, other.trials[1].b)


def test_the_model_is_left_as_it_was(word_model, hooks):
    model = word_model(torch.bfloat16)
    before = model.fingerprint
    threads = torch.get_num_threads()
    run(model, limit=1)
    assert (model.fingerprint, torch.get_num_threads()) == (before, threads)
    assert not hooks(model.hf)


# --- a store mixes nothing


OTHERS = {
    "strategy": ({"strategies": "greedy"}, "strategies: 2 entries there, 1 here"),
    "seed": ({"seeds": (1,)}, "seeds.0: 0 there, 1 here"),
    "seed of the re-rolls": ({"seed": 3}, "null.0: 0 there, 3 here"),
    "re-rolls": ({"null": 0}, "null: 1 entries there, 0 here"),
    "tokens": ({"max_new_tokens": 7}, "max_new_tokens: 6 there, 7 here"),
    "gold": ({"gold": False}, "gold: true there, false here"),
    "stop": ({"stop_at_divergence": True}, "stop_at_divergence: false there, true here"),
    "task": ({"task": Sums(version=2)}, "task.version: 1 there, 2 here"),
    "path": ({"b": kd.CacheOff(attn="eager")}, "b.attn: sdpa there, eager here"),
    "threads": ({"threads": 2}, "threads: 1 there, 2 here"),
}


@pytest.fixture(scope="module")
def store(half, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    run(half, limit=1, store=folder)
    return folder


@pytest.mark.parametrize(("changes", "words"), OTHERS.values(), ids=OTHERS)
def test_a_store_of_other_settings_is_refused_by_name(changes, words, half, store):
    before = (store / "records.jsonl").read_bytes()
    with pytest.raises(FileError, match=re.escape(words)):
        run(half, **{"limit": 1, "store": store, **changes})
    assert (store / "records.jsonl").read_bytes() == before


def test_a_store_of_another_model_is_refused(word_model, single, store):
    weights = word_model(torch.bfloat16)
    with torch.no_grad():
        weights.hf.model.norm.weight[5] += 1
    with pytest.raises(FileError, match=r"model\.weights\.0: [0-9a-f]+ there, [0-9a-f]+ here"):
        run(weights, limit=1, store=store)
    with pytest.raises(FileError, match=r"a\.dtype: bfloat16 there, float32 here"):
        run(single, limit=1, store=store)


def test_other_software_is_refused(half, store, monkeypatch):
    real = kd.provenance.collect

    def other(*models):
        found = real(*models)
        return found | {"software": found["software"] | {"torch": "1.0"}}

    monkeypatch.setattr(kd.provenance, "collect", other)
    with pytest.raises(FileError, match=r"software\.torch: .* there, 1\.0 here"):
        run(half, limit=1, store=store)


# --- tasks in few words


def test_prompts_are_a_task(half, tmp_path):
    ids = [4, 2, 3]
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "w004 w002 w003"}\n{"prompt": [4, 2, 3]}\n')
    usual = {"max_new_tokens": 2, "progress": False}
    ways = [
        ["w004 w002 w003"], [ids], ids, [torch.tensor([ids])], [np.array(ids)], [{"prompt": ids}], (ids,), file,
    ]  # fmt: skip
    found = [evaluate(half, way, **usual) for way in ways]
    assert {one.records[0].trials[0].a.tokens for one in found} == {found[0].records[0].trials[0].a.tokens}
    assert {one.records[0].prompt_hash for one in found} == {kd.provenance.prompt_hash(ids)}
    assert (found[-1].task, len(found[-1].records)) == ("mine", 2)
    assert found[0].conditions[0].accuracy_a.n == 0


def test_answers_are_scored(half):
    usual = {"null": 0, "max_new_tokens": 1, "strategies": "greedy", "limit": None}
    first = run(half, ["w004 w002"], **usual).records[0].trials[0].a.text
    rows = [{"prompt": "w004 w002", "answer": first}, {"prompt": "w004 w002", "answer": "w000"}]
    found = run(half, rows, **usual)
    assert [record.trials[0].a.correct for record in found.records] == [True, False]
    assert (found.conditions[0].accuracy_a.events, found.conditions[0].accuracy_a.n) == (1, 2)


def test_texts_of_which_none_is_right_are_a_note_with_an_example(half):
    usual = {"null": 0, "max_new_tokens": 3, "strategies": "greedy", "limit": None}
    text = run(half, ["w004 w002"], **usual).records[0].trials[0].a.text
    row = {"prompt": "w004 w002", "answer": text.split()[0]}
    found = run(half, [row], **usual)
    assert len(found.notes) == 1
    note = found.notes[0]
    assert note.startswith("no answer of either path is right in 2 texts, so nothing is known about a direction: ")
    assert f"the first text is {text!r}, " in note
    assert f"where the answer is {row['answer']!r}, held against it by the scorer 'normalised'" in note
    assert "--scorer" in note
    assert f"! {note[:40]}" in found.summary()
    assert run(half, kd.JsonlTask([row], scorer="contains"), **usual).notes == ()
    assert run(half, kd.JsonlTask([row], stop=[" "]), **usual).notes == ()
    assert run(half, [row["prompt"]], **usual).notes == ()  # nothing was to be right
    own = run(half, kd.JsonlTask([row], scorer=equals), **usual).notes[0]
    assert "--scorer" not in own


def test_texts_that_are_all_empty_are_the_only_note(word_model):
    model = word_model()
    first = model.hf(torch.tensor([model.encode("w004 w002")])).logits[0, -1].argmax()
    model.hf.generation_config.eos_token_id = int(first)
    found = run(model, [{"prompt": "w004 w002", "answer": "w007"}], null=0, strategies="greedy", limit=None)
    assert found.notes == (
        "the model ended every text after 0 tokens. Go on past the end (ignore_eos=True, --ignore-eos).",
    )


# --- the null


def test_re_rolls_that_change_no_bit_are_refused(tiny_model):
    """A model with weights of one value each: every order of summation gives the same sums."""
    model = kd.load(kd.models.tiny("gpt2", num_hidden_layers=1), quiet=True)
    with torch.no_grad():
        for parameter in model.hf.parameters():
            parameter.zero_()
    found = evaluate(model, [[1, 2, 3]], null=2, max_new_tokens=3, progress=False)
    null = found.conditions[0].null
    assert "changed no bit" in null.refused
    assert np.isnan([null.p_divergence, null.p_difference, null.p_gold]).all()
    assert any("the null is refused" in sentence for sentence in found.reading())
    assert any("without a null nothing says" in sentence for sentence in found.reading())
    assert "refused" in found.summary()


def test_re_rolls_that_change_bits_are_not_refused(whole):
    assert [condition.null.refused for condition in whole.conditions] == [None, None]


# --- divergence alone


def test_stopping_at_the_divergence_keeps_the_divergence_numbers_and_gives_no_accuracy(half, single):
    usual = {"b": kd.CacheOff(model=single), "max_new_tokens": 12, "null": 0}
    full, short = (run(half, stop_at_divergence=stop, **usual) for stop in (False, True))
    assert sum(condition.divergence.events for condition in full.conditions) > 0
    for one, other in zip(full.conditions, short.conditions, strict=True):
        assert (other.divergence, other.incidence) == (one.divergence, one.incidence)
        assert one.accuracy_b.n == 4
        assert other.accuracy_b.n == 0
        assert np.isnan([other.difference.value, other.p, other.p_holm]).all()
        assert (other.only_a, other.only_b, other.enough, other.detectable) == (0, 0, False, None)
    assert not any("right" in sentence for sentence in short.reading())
    assert any("right" in sentence for sentence in full.reading())
    tokens = [sum(len(t.b.tokens) for r in each.records for t in r.trials) for each in (full, short)]
    assert tokens[1] < tokens[0]
    json.dumps(short.to_dict(), allow_nan=False)


def test_a_model_that_never_stops_is_cut_off_and_counted(half):
    found = run(half, null=0, strategies="greedy", limit=2)
    assert [record.trials[0].a.stop for record in found.records] == ["length", "length"]
    assert (found.conditions[0].truncated_a, found.conditions[0].truncated_b) == (2, 2)
    assert all(len(record.trials[0].a.tokens) == 6 for record in found.records)


# --- one sentence


class NoItems(Sums):
    """Nothing to ask."""

    def items(self):
        return []


class Twice(Sums):
    """One id twice."""

    def items(self):
        return [Item("q", "w001"), Item("q", "w002")]


class TooLong(Sums):
    """The second prompt fills the context of 256."""

    def items(self):
        return [Item("short", "w001"), Item("long", "w001 " * 251)]


BAD = {
    "no such task": ("gsm9k", {}, InputError, "There is no task 'gsm9k'"),
    "a prompt for a task": ("How many?", {}, InputError, "give 'gsm8k', a file of JSON lines, prompts or a task"),
    "no task at all": (7, {}, InputError, "int is no task: it lacks name"),
    "no items": (NoItems(), {}, InputError, "sums has no items"),
    "an empty list": ([], {}, InputError, "empty"),
    "an id twice": (Twice(), {}, InputError, "several items with the id 'q'"),
    "an empty prompt": (["w001", " "], {}, InputError, "item 1: 'prompt' must be a text that is not empty"),
    "empty ids": ([[1], []], {}, InputError, "Item '1' of prompts: The prompt is empty"),
    "ids outside": ([[1], [384]], {}, InputError, "Item '1' of prompts: Token id 384"),
    "ids outside in rows": ([{"prompt": [384]}], {}, InputError, "Item '0' of prompts: Token id 384"),
    "no ids": ([[1.5]], {}, InputError, "Item '0' of prompts: Token ids are integers"),
    "too long": (TooLong(), {"limit": None}, InputError, "Item 'long' of sums: 251 prompt tokens and 6 new ones"),
    "a missing file": ("nowhere.jsonl", {}, FileError, "Cannot read nowhere.jsonl"),
    "a strategy in words": (None, {"strategies": "nucleus"}, InputError, "There is no strategy 'nucleus'"),
    "a strategy's class": (None, {"strategies": [kd.Greedy]}, InputError, "is no strategy; give objects"),
    "a strategy twice": (None, {"strategies": ["greedy", kd.Greedy()]}, InputError, "each once, not greedy, greedy"),
    "no strategy": (None, {"strategies": []}, InputError, "give at least one"),
    "an engine": (None, {"engine": "slurm"}, InputError, "engine='slurm': choose 'local' or 'ray'"),
    "workers here": (None, {"workers": 2}, InputError, "workers= and address= are for engine='ray'"),
    "limit": (None, {"limit": 0}, InputError, "limit=0: give a whole number of at least 1"),
    "tokens": (None, {"max_new_tokens": 0}, InputError, "max_new_tokens=0"),
    "null": (None, {"null": -1}, InputError, "null=-1: give a whole number of at least 0"),
    "seeds twice": (None, {"seeds": (0, 0)}, InputError, r"seeds=\(0, 0\): give whole numbers, each once"),
    "no seeds": (None, {"seeds": ()}, InputError, r"seeds=\(\)"),
    "half a seed": (None, {"seeds": (0.5,)}, InputError, "seeds="),
    "a path's class": (None, {"a": kd.CacheOn}, InputError, "a=CacheOn is no path"),
}


@pytest.mark.parametrize(("task", "changes", "error", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence_and_leaves_no_store(task, changes, error, words, half, tmp_path):
    folder = tmp_path / "store"
    with pytest.raises(error, match=words) as caught:
        run(half, task, store=folder, **changes)
    assert "\n" not in str(caught.value)
    assert not folder.exists()


def test_a_line_that_is_no_json_is_named(half, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "w001"}\n\n{"prompt": \n')
    with pytest.raises(FileError, match=r"bad\.jsonl, line 3: not JSON"):
        run(half, str(file))


def test_text_without_a_tokenizer(tiny_model):
    with pytest.raises(InputError, match="Item 'q0' of sums: tiny-llama has no tokenizer"):
        run(tiny_model("llama", torch.bfloat16))


def test_logits_that_are_not_finite_leave_what_is_finished(word_model, tmp_path):
    """Overflow in one item alone: its first token's embedding."""
    model = word_model(torch.bfloat16)
    with torch.no_grad():
        model.hf.model.embed_tokens.weight[6] = float("nan")  # the first word of q2
    with pytest.raises(NonFiniteError):
        run(model, store=tmp_path, null=0, strategies="greedy")
    assert kept(tmp_path) == ["q0", "q1"]


# --- what a person sees


def test_the_cost_is_said_beforehand_and_nothing_else_is_printed(half, tmp_path, capfd):
    run(half, limit=2, store=tmp_path, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    # 2 items × 3 paths × (2 strategies × 6 tokens + 1 gold token)
    assert "2 items, at most 78 tokens on all paths, at most about" in err
    run(half, limit=2, store=tmp_path, progress=True)
    assert "items, at most" not in capfd.readouterr().err
    run(half, limit=1)
    assert capfd.readouterr() == ("", "")


# --- records changed by hand, settings that must not mix


def _without(record):
    del record["gold"]


def _other_item(record):
    record["item"] = "q9"


def _no_trials(record):
    record["trials"] = []


def _no_null(record):
    record["trials"][0]["null"] = []


def _words_for_tokens(record):
    record["trials"][0]["a"]["tokens"] = ["x"]


@pytest.mark.parametrize("change", [_without, _other_item, _no_trials, _no_null, _words_for_tokens])
def test_a_record_changed_by_hand_is_one_sentence(change, half, tmp_path):
    run(half, limit=2, store=tmp_path)
    file = tmp_path / "records.jsonl"
    first, *rest = file.read_text().splitlines(keepends=True)
    entry = json.loads(first)
    change(entry["record"])
    file.write_text("".join([json.dumps(entry) + "\n", *rest]))
    with pytest.raises(FileError, match=r"The record of item 'q0' in .* is not as an evaluation writes it"):
        run(half, limit=3, store=tmp_path)
    assert len(kept(tmp_path)) == 2, "nothing ran before it was found"


class Scaled(kd.CacheOff):
    """A path with a number of its own."""

    def __init__(self, scale):
        super().__init__()
        object.__setattr__(self, "scale", scale)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"b": Scaled(0.1)}, {"b": Scaled(0.2)}, r"b\.path\.scale: 0\.1 there, 0\.2 here"),
        (
            {"a": kd.CacheOn(cache=DynamicCache)},
            {"a": kd.CacheOn(cache=partial(DynamicCache, config=None))},
            r"a\.path\.cache: transformers\.cache_utils\.DynamicCache there",
        ),
    ],
)
def test_paths_that_differ_in_a_number_or_a_function_do_not_mix(one, other, words, half, tmp_path):
    run(half, limit=1, store=tmp_path, **one)
    with pytest.raises(FileError, match=words):
        run(half, limit=1, store=tmp_path, **other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"b": Scaled}, "b=Scaled is no path; give an object"),
        ({"seeds": np.arange(2)}, "seeds=.*: give whole numbers"),
        ({"seeds": [[1]]}, "seeds=.*: give whole numbers"),
        ({"seeds": [True]}, "seeds=.*: give whole numbers"),
        ({"null": 1, "seed": "x"}, "seed='x': give a whole number"),
        ({"task": kd.GSM8K}, "GSM8K is a class; give a task made with it"),
    ],
)
def test_unlucky_arguments_are_one_sentence(changes, words, half):
    with pytest.raises(InputError, match=words):
        run(half, **changes)


def test_a_tensor_of_ids_is_a_prompt_and_a_path_object_a_file(half, tmp_path):
    ids = torch.tensor([1, 2, 3])
    assert run(half, ids, null=0).records == run(half, [[1, 2, 3]], null=0).records
    (tmp_path / "questions").write_text('{"prompt": [1, 2, 3]}\n')
    assert run(half, tmp_path / "questions", null=0).records == run(half, ids, null=0).records


def test_half_a_surrogate_pair_is_one_sentence(half, tmp_path):
    (tmp_path / "q.jsonl").write_text(r'{"prompt": "\ud83d"}')
    with pytest.raises(InputError, match="Item '0' of q: The prompt holds half of a surrogate pair"):
        run(half, str(tmp_path / "q.jsonl"))


def always_right(text, item):
    return Scored(text, np.bool_(True))


def test_a_scorer_may_answer_with_numpy(half, tmp_path):
    task = kd.JsonlTask([{"prompt": "w001 w002", "answer": "x"}], scorer=always_right)
    assert run(half, task, store=tmp_path).records[0].trials[0].a.correct is True


# --- no item under another evaluation's name


def contains(text, item):
    return item.answer in text


def equals(text, item):
    return text.strip() == item.answer


@dataclass(frozen=True)
class Penalised:
    """Greedy, with a value that its label does not show."""

    penalty: float
    rank: object = None
    label: str = "penalised"

    def sampler(self, seed, item):
        return kd.Greedy().sampler(seed, item)


ROWS = [{"prompt": [1, 2, 3], "answer": "4"}]


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ({"strategies": Penalised(1.0)}, {"strategies": Penalised(1.5)}, r"sampling\.0\.penalty: 1\.0 there, 1\.5"),
        ({"strategies": Penalised(1.0, equals)}, {"strategies": Penalised(1.0, contains)}, r"sampling\.0\.rank"),
        ({"task": kd.JsonlTask(ROWS, scorer=contains)}, {"task": kd.JsonlTask(ROWS, scorer=equals)}, r"task\.scorer"),
        ({"task": kd.JsonlTask(ROWS)}, {"task": kd.JsonlTask(ROWS, scorer="exact")}, "normalised there, exact here"),
        ({"a": kd.CacheOn(prefill_chunk=2)}, {"a": kd.CacheOn(prefill_chunk=1)}, r"a\.path\.prefill_chunk"),
    ],
)  # fmt: skip
def test_another_strategy_scorer_or_path_is_not_handed_the_first_ones_texts(one, other, names, half, tmp_path):
    run(half, **{"task": Sums(), "limit": 1, "null": 0} | one, store=tmp_path)
    with pytest.raises(FileError, match=names):
        run(half, **{"task": Sums(), "limit": 1, "null": 0} | other, store=tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategies": Penalised(1.0, lambda scores: scores)}, r"sampling\.0\.rank is a lambda"),
        ({"task": kd.JsonlTask(ROWS, scorer=lambda text, item: True)}, r"task\.scorer is a lambda"),
        ({"b": kd.CacheOn(cache=lambda: None)}, r"b\.path\.cache is a lambda"),
    ],
)
def test_what_cannot_be_told_is_refused_where_items_are_kept(changes, words, half, tmp_path):
    with pytest.raises(InputError, match=words):
        run(half, **{"task": Sums(), "limit": 1} | changes, store=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_a_prompt_that_is_read_as_other_tokens_is_refused(word_model, tmp_path):
    model = word_model(torch.bfloat16)
    run(model, limit=1, null=0, store=tmp_path)
    encode = model.encode
    model.encode = lambda prompt, chat=False: [*encode(prompt, chat), 3]
    with pytest.raises(FileError, match="was read as other tokens, by another tokenizer or chat template"):
        run(model, limit=1, null=0, store=tmp_path)
