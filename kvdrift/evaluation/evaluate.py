"""`evaluate`: strategies × items × both paths, item by item, with a store to go on from."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from kvdrift import provenance
from kvdrift.errors import FileError, InputError
from kvdrift.evaluation.cost import estimate
from kvdrift.evaluation.gsm8k import GSM8K
from kvdrift.evaluation.jsonl import JsonlTask
from kvdrift.evaluation.notes import notes
from kvdrift.evaluation.records import ItemRecord
from kvdrift.evaluation.result import Evaluation
from kvdrift.evaluation.strategies import Strategy, parse
from kvdrift.evaluation.task import Item, Task
from kvdrift.evaluation.trial import Design, ItemRunner
from kvdrift.fingerprint import one_job
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.models.prompts import PromptLike, as_prompts
from kvdrift.paths.cache_off import CacheOff
from kvdrift.paths.cache_on import CacheOn
from kvdrift.paths.own import check_path
from kvdrift.paths.path import Path, path_info, path_settings
from kvdrift.paths.path_capabilities import check_room, path_notes
from kvdrift.plain import from_plain
from kvdrift.provenance import prompt_hash
from kvdrift.runs.comparable import comparable, kept_with
from kvdrift.runs.engine import pinned
from kvdrift.runs.engines import engine as engine_of
from kvdrift.runs.store import Store
from kvdrift.settings import settings_of


@one_job()
def evaluate(
    model: Any,
    task: Any,
    *,
    strategies: Strategy | str | Sequence[Strategy | str] = "greedy",
    a: Path | None = None,
    b: Path | None = None,
    null: int = 0,
    limit: int | None = None,
    max_new_tokens: int = 256,
    seeds: Sequence[int] = (0,),
    gold: bool = True,
    stop_at_divergence: bool = False,
    ignore_eos: bool = False,
    store: str | FilePath | None = None,
    engine: str = "local",
    workers: int | None = None,
    threads: int | None = None,
    address: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Evaluation:
    """Let two paths write the answers of a task, each feeding itself, under one or several sampling strategies.

    The noise of a strategy depends on seed, item and step alone, so both paths draw the same: a different text is
    numerics, never luck. The prompt is consumed once per path and item; each strategy and seed continues from a fork of
    it, which changes no bit.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes.
    task
        ``"gsm8k"``, a file of JSON lines, a list of prompts, or an object with the members of
        `kvdrift.evaluation.task.Task`.
    strategies
        One or several of `Greedy`, `Temperature`, `TopK`, `TopP`, or your own; or in words, as
        `kvdrift.evaluation.strategies.parse` reads them (``"top-p 0.9 at 0.7"``).
    a, b
        The path under test and the reference; by default ``CacheOn()`` and ``CacheOff()``.
    null
        How many re-rolls of path a run beside them: what the order of summation alone does to the same table. 19 is the
        fewest that can reach 5 %.
    limit
        Only the first so many items. A store that holds fewer is extended, one that holds more keeps them.
    max_new_tokens
        Where a text is cut off.
    seeds
        Seeds of the sampling noise; each is a trial of its own. Under greedy all are the same.
    gold
        Also take the log-probability of each item's gold text on every path.
    stop_at_divergence
        Let b and the re-rolls stop at the first token that differs from a's: enough for divergence rates, and cheaper;
        they have no accuracy then.
    ignore_eos
        Go on past an end-of-sequence token, up to ``max_new_tokens`` or a stop string: for rates of divergence. What is
        written past the end is scored with the rest.
    store
        A folder that keeps finished items: the same call goes on from there, whatever stopped it.
    engine
        ``"local"``, or ``"ray"`` to spread the items over the workers of a Ray cluster (needs ``kvdrift[ray]``).
    workers, threads, address
        For Ray: how many workers, how many threads each, and the address of a running cluster (a local one is started
        by default). ``threads`` holds for the local engine, too.
    seed
        First seed of the re-rolls.
    progress
        Show the cost beforehand, and a progress bar.

    Raises
    ------
    InputError
        If an argument cannot be used, or an item's prompt does not fit the model.
    FileError
        If a file or the store cannot be used, or the store holds another evaluation.
    NonFiniteError
        If a path gives logits that are not finite; finished items stay.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> found = kd.evaluate(model, [[1, 2, 3], [4, 5]], strategies=[kd.Greedy(), kd.TopP(0.9)],
    ...                     max_new_tokens=4, progress=False)
    >>> found.strategies, len(found.records)
    (('greedy', 'top-p 0.9'), 2)
    """
    model = load(model, quiet=not progress)
    task = _task(model, task)
    design = Design(
        task=task,
        a=CacheOn() if a is None else check_path(a, "a"),
        b=CacheOff() if b is None else check_path(b, "b"),
        strategies=_strategies(strategies),
        seeds=_seeds(seeds),
        null=_replicates(seed, _at_least(null, 0, "null")),
        max_new_tokens=_at_least(max_new_tokens, 1, "max_new_tokens"),
        gold=gold,
        stop_at_divergence=stop_at_divergence,
        ignore_eos=ignore_eos,
    )
    items = _items(task, limit)
    prompts = _fitting(model, design, items)
    run_on = engine_of(engine, workers=workers, threads=threads, address=address)
    settings = _settings(model, design, run_on.threads)
    with pinned(run_on.threads):
        whole = settings if store is None else settings | kept_with(*design.models(model))
    with Store(store, "evaluation", whole) as kept:
        found = {item.id: _record(kept, design, item, prompts[item.id][0]) for item in items if item.id in kept.done}
        missing = {item.id: item for item in items if item.id not in found}
        if progress and missing:
            print(f"kvdrift: {_cost(model, design, missing, prompts)}", file=sys.stderr)
        worker = _worker(model, design, engine)
        with tqdm(
            total=len(items), initial=len(items) - len(missing), desc="evaluate", unit="item", disable=not progress
        ) as bar:
            for key, record in run_on.run(worker, missing):
                kept.add(key, record)
                found[key] = from_plain(ItemRecord, kept.done[key])
                bar.update()
        records = tuple(found[item.id] for item in items)
    longest = max(len(ids) + max(design.max_new_tokens, n_gold) for ids, n_gold in prompts.values())
    said = (*path_notes(model, (design.a, design.b), longest), *notes(model, design.task, items, records))
    return _result(model, design, records, settings, said)


# --- arguments


def _task(model: Model, task: Any) -> Task:
    if isinstance(task, str) and task == "gsm8k":
        return GSM8K()
    if isinstance(task, FilePath) or (isinstance(task, str) and task.endswith((".jsonl", ".json"))):
        return JsonlTask(task)
    if isinstance(task, str):
        raise InputError(f"There is no task {task!r}; give 'gsm8k', a file of JSON lines, prompts or a task object.")
    if isinstance(task, (list, tuple, np.ndarray, torch.Tensor)):
        if len(task) and all(isinstance(row, Mapping) for row in task):
            return JsonlTask(task)
        prompts, _ = as_prompts(task)
        return JsonlTask([{"prompt": _prompt(model, number, prompt)} for number, prompt in enumerate(prompts)])
    if isinstance(task, type):
        raise InputError(f"{task.__name__} is a class; give a task made with it, such as kd.JsonlTask('mine.jsonl').")
    missing = [name for name in ("name", "stop", "items", "score", "settings") if not hasattr(task, name)]
    if missing:
        raise InputError(
            f"{type(task).__name__} is no task: it lacks {', '.join(missing)}; see kvdrift.evaluation.task.Task."
        )
    return task


def _prompt(model: Model, number: int, prompt: PromptLike) -> str | list[int]:
    """A text as it is, anything else as a list of ids."""
    if isinstance(prompt, str):
        return prompt
    try:
        return model.encode(prompt)
    except InputError as error:
        raise InputError(f"Item '{number}' of prompts: {error}") from error


def _strategies(strategies: Any) -> tuple[Strategy, ...]:
    several = strategies if isinstance(strategies, (list, tuple)) else [strategies]
    given = tuple(parse(each) if isinstance(each, str) else each for each in several)
    for strategy in given:
        if isinstance(strategy, type) or not hasattr(strategy, "sampler") or not hasattr(strategy, "label"):
            raise InputError(f"{strategy!r} is no strategy; give objects such as kd.Greedy() or kd.TopP(0.9).")
    labels = [strategy.label for strategy in given]
    if not given or len(set(labels)) < len(labels):
        raise InputError(f"strategies: give at least one, each once, not {', '.join(labels) or 'none'}.")
    return given


def _seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    given = tuple(seeds) if isinstance(seeds, (list, tuple, range)) else (seeds,)
    whole = all(isinstance(x, int) and not isinstance(x, bool) for x in given)
    if not given or not whole or len(set(given)) < len(given):
        raise InputError(f"seeds={seeds!r}: give whole numbers, each once.")
    return given


def _replicates(seed: int, number: int) -> tuple[int, ...]:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise InputError(f"seed={seed!r}: give a whole number.")
    return tuple(range(seed, seed + number))


def _at_least(value: int, least: int, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name}={value!r}: give a whole number of at least {least}.")
    return value


def _items(task: Task, limit: int | None) -> list[Item]:
    if limit is not None:
        _at_least(limit, 1, "limit")
    items = list(task.items())[:limit]
    if not items:
        raise InputError(f"The task {task.name} has no items.")
    counted = Counter(item.id for item in items)
    if repeated := [name for name, times in counted.items() if times > 1]:
        raise InputError(f"The task {task.name} has several items with the id {repeated[0]!r}; ids must be unique.")
    return items


def _fitting(model: Model, design: Design, items: Sequence[Item]) -> dict[str, tuple[list[int], int]]:
    """Every item's prompt ids and the length of its gold text, once all are known to fit.

    Raises
    ------
    InputError
        If an item's prompt is empty, no text for this model, or too long.
    """
    runner, found = ItemRunner(model, design), {}
    for item in items:
        try:
            ids = model.encode(item.prompt, item.chat)
            n_gold = len(runner.gold_ids(item, ids))
            for each in (design.a.model or model, design.b.model or model):
                each.check_length(len(ids), max(design.max_new_tokens, n_gold))
            for path in (design.a, design.b):
                check_room(path, runner.model, len(ids) + max(design.max_new_tokens, n_gold) - 1)
        except InputError as error:
            raise InputError(f"Item {item.id!r} of {design.task.name}: {error}") from error
        found[item.id] = (ids, n_gold)
    return found


# --- what runs


def _settings(model: Model, design: Design, threads: int) -> dict[str, Any]:
    """Everything that decides a record, beside the item."""
    models = design.models(model)
    with pinned(threads):
        here = comparable(any(each.device.type == "cuda" for each in models))
    settings = {
        "model": {
            "name": model.name,
            "weights": [each.fingerprint for each in models],
            "driver": [each.backend.driver for each in models],
        },
        "a": path_settings(design.a, model),
        "b": path_settings(design.b, model),
        "task": {
            "name": design.task.name,
            "type": settings_of(type(design.task)),
            **settings_of(dict(design.task.settings())),
        },
        "strategies": [strategy.label for strategy in design.strategies],
        "sampling": [settings_of(strategy) for strategy in design.strategies],
        "seeds": list(design.seeds),
        "null": list(design.null),
        "max_new_tokens": design.max_new_tokens,
        "gold": design.gold,
        "stop_at_divergence": design.stop_at_divergence,
        "ignore_eos": design.ignore_eos,
        **here,
    }
    as_json: dict[str, Any] = json.loads(json.dumps(settings))
    return as_json


def _record(kept: Store, design: Design, item: Item, ids: Sequence[int]) -> ItemRecord:
    """The record of an item that was finished before.

    Raises
    ------
    FileError
        If it is not as an evaluation writes it, or its prompt was read as other tokens.
    """
    try:
        record: ItemRecord = from_plain(ItemRecord, kept.done[item.id])
        cells = [(strategy.label, seed) for strategy in design.strategies for seed in design.seeds]
        answers = [answer for trial in record.trials for answer in (trial.a, trial.b, *trial.null)]
        whole = (
            record.item == item.id
            and [(trial.strategy, trial.seed) for trial in record.trials] == cells
            and all(len(trial.null) == len(design.null) for trial in record.trials)
            and all(isinstance(token, int) for answer in answers for token in answer.tokens)
        )
    except (FileError, KeyError, TypeError, ValueError, AttributeError):
        whole = False
    if not whole:
        raise FileError(
            f"The record of item {item.id!r} in {kept.folder} is not as an evaluation writes it, so the file was "
            "changed; remove its line, and the item runs again."
        )
    if record.prompt_hash != prompt_hash(ids):
        raise FileError(
            f"The prompt of item {item.id!r} in {kept.folder} was read as other tokens, by another tokenizer or chat "
            "template; choose another folder."
        )
    return record


def _cost(model: Model, design: Design, items: Mapping[str, Item], prompts: Mapping[str, tuple[list[int], int]]) -> str:
    chosen = [prompts[name] for name in items]
    return str(estimate(model, design, [ids for ids, _ in chosen], [n_gold for _, n_gold in chosen]))


def _worker(model: Model, design: Design, engine: str) -> Callable[[], ItemRunner]:
    """What makes an item runner in the process that runs the items."""
    if engine == "local":
        return partial(ItemRunner, model, design)
    from kvdrift.runs.ship import pack

    return partial(_unpacked, pack((model, design)))  # a path may have a model of its own


def _unpacked(packed: Any) -> ItemRunner:
    return ItemRunner(*packed.unpack())


def _result(
    model: Model, design: Design, records: tuple[ItemRecord, ...], settings: dict[str, Any], said: tuple[str, ...]
) -> Evaluation:
    one, two = design.a.model or model, design.b.model or model
    answers = [answer for record in records for trial in record.trials for answer in (trial.a, trial.b, *trial.null)]
    seen = sorted({token for answer in answers for token in answer.tokens})
    return Evaluation(
        a=path_info(design.a, one),
        b=path_info(design.b, two),
        architecture=one.architecture,
        task=design.task.name,
        strategies=tuple(strategy.label for strategy in design.strategies),
        seeds=design.seeds,
        max_new_tokens=design.max_new_tokens,
        replicates=len(design.null),
        records=records,
        token_texts={token: model.token_text(token) for token in seen},
        settings=settings,
        notes=said,
        provenance=provenance.collect(one, two) | {"settings": settings},
    )
