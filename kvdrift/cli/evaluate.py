"""``kvdrift evaluate``: strategies × the items of a task, both paths, paired."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvdrift.cli import console, options
from kvdrift.cli.command import typed
from kvdrift.cli.console import Interrupted
from kvdrift.cli.prompts import numbers
from kvdrift.cli.running import made_by
from kvdrift.cli.verb import check_targets, deliver, open_model
from kvdrift.errors import FileError, InputError

if TYPE_CHECKING:
    from kvdrift.evaluation.task import Task

RESULT, REPORT, TRIALS = "evaluation.safetensors", "report.html", "trials.parquet"
"""What is written to the folder beside the store once every item is finished."""


def evaluate(
    context: typer.Context,
    model: options.ModelName,
    task: Annotated[
        Literal["gsm8k", "prompts"], typer.Option(help="gsm8k, or the prompts (and answers) of your own --data file.")
    ] = "gsm8k",
    data: Annotated[
        Path | None,
        typer.Option(help="JSON lines of the task; gsm8k is fetched through datasets if left out.", show_default=False),
    ] = None,
    answer_key: Annotated[
        str | None, typer.Option(help="prompts: the key of the answers; answer if left out.", show_default=False)
    ] = None,
    scorer: Annotated[
        Literal["exact", "normalised", "contains", "first-number", "choice"] | None,
        typer.Option(
            help="prompts: the whole text (normalised as SQuAD does), the answer somewhere in it, its first number, or "
            "the letter chosen.",
            show_default="normalised",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help=r"prompts: a string that ends a text, \n for a line's end; repeat for several."),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="greedy, 'temperature 0.7', 'top-k 50', 'top-p 0.9 at 0.7'; repeat for several.", show_default="greedy"
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N items.", show_default=False)] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            "--out",
            help="A folder for finished items, the result, its report and a Parquet table; the same command goes on.",
            show_default=False,
        ),
    ] = None,
    null: Annotated[int, typer.Option(min=0, help="Re-rolls of cache-ON beside the two paths; 19 can reach 5 %.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per text at most.")] = 256,
    seeds: Annotated[str, typer.Option(help="Seeds of the sampling noise, such as 0-4.")] = "0",
    shots: Annotated[int, typer.Option(min=0, help="gsm8k: worked examples before the question.")] = 0,
    train: Annotated[
        Path | None, typer.Option(help="gsm8k: JSON lines that the examples are drawn from.", show_default=False)
    ] = None,
    extraction: Annotated[
        Literal["flexible", "strict"], typer.Option(help="gsm8k: the last number, or what follows ####.")
    ] = "flexible",
    gold: Annotated[
        Literal["solution", "answer", "none"],
        typer.Option(help="gsm8k: whose log-probability to take; for prompts, none leaves it out."),
    ] = "solution",
    stop_at_divergence: Annotated[
        bool, typer.Option("--stop-at-divergence", help="Divergence rates only: stop at the first other token.")
    ] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attn: options.Attention = "auto",
    chat: options.Chat = False,
    ignore_eos: options.IgnoreEos = False,
    engine: options.Engine = "local",
    workers: options.Workers = None,
    address: options.Address = None,
    threads: options.Threads = None,
    seed: Annotated[int, typer.Option(help="First seed of the re-rolls.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Let both paths answer a task under several sampling strategies, and test whether they differ."""
    if store is not None:
        check_targets(**{name.partition(".")[0]: store / name for name in (RESULT, REPORT, TRIALS)})
    with console.working():
        from kvdrift.evaluation.evaluate import evaluate as run
        from kvdrift.evaluation.strategies import parse

        strategies = [parse(text) for text in strategy or ["greedy"]]
        wanted = numbers(seeds, "--seeds")
        if task == "gsm8k":
            _refuse_for_gsm8k(answer_key=answer_key, scorer=scorer, stop=stop)
            questions = _gsm8k(data, shots, train, chat, extraction, gold)
        else:
            questions = _prompts(data, chat, answer_key, scorer, stop)
        loaded = open_model(model, dtype, device, attn, threads)
        try:
            found = run(
                loaded,
                questions,
                strategies=strategies,
                null=null,
                limit=limit,
                max_new_tokens=max_new_tokens,
                seeds=wanted,
                gold=gold != "none",
                stop_at_divergence=stop_at_divergence,
                ignore_eos=ignore_eos,
                store=store,
                engine=engine,
                workers=workers,
                threads=threads,
                address=address,
                seed=seed,
            )
        except KeyboardInterrupt:
            raise Interrupted(_kept(store)) from None
    result = made_by(found, typed(context))
    if store is not None:
        with console.working():
            console.say(f"Wrote {result.to_parquet(store / TRIALS)}")
    deliver(
        result,
        as_json=as_json,
        save=None if store is None else store / RESULT,
        report=None if store is None else store / REPORT,
    )


def _gsm8k(
    data: Path | None,
    shots: int,
    train: Path | None,
    chat: bool,
    extraction: Literal["flexible", "strict"],
    gold: Literal["solution", "answer", "none"],
) -> Task:
    from kvdrift.evaluation.gsm8k import GSM8K

    target: Literal["solution", "answer"] = "answer" if gold == "answer" else "solution"
    return GSM8K(data, shots=shots, train=train, chat=chat, extraction=extraction, gold=target)


def _prompts(data: Path | None, chat: bool, answer_key: str | None, scorer: str | None, stop: list[str] | None) -> Task:
    from kvdrift.evaluation.jsonl import JsonlTask

    if data is None:
        raise InputError("--task prompts needs --data FILE: JSON lines with a prompt, and an answer if there is one.")
    ends = [text.replace("\\n", "\n").replace("\\t", "\t") for text in stop or ()]
    return JsonlTask(data, chat=chat, answer=answer_key, scorer=scorer or "normalised", stop=ends)


def _refuse_for_gsm8k(**options: Any) -> None:
    """Its answers, scores and stop strings are lm-evaluation-harness's."""
    for name, value in options.items():
        if value:
            raise InputError(
                f"--{name.replace('_', '-')} belongs to --task prompts; gsm8k has --extraction and --gold."
            )


def _kept(store: Path | None) -> str:
    """Say what an interrupted run leaves behind."""
    from kvdrift.runs.store import Store

    if store is None:
        return "Stopped; nothing was kept: with --store FOLDER finished items are."
    try:
        finished = len(Store.read(store)[1])
    except FileError:  # it was stopped before there was a store
        finished = 0
    return f"Stopped; {finished} finished items are kept in {store}: the same command goes on from there."
