"""``kvdrift compare``: drift between two paths of one model, over one prompt or many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvdrift.cli import console, options
from kvdrift.cli.command import typed
from kvdrift.cli.prompts import gather
from kvdrift.cli.running import resumable
from kvdrift.cli.verb import check_folder, check_targets, deliver, open_model


def compare(
    context: typer.Context,
    model: options.ModelName,
    prompt: options.Prompt = None,
    prompts: options.PromptFile = None,
    max_new_tokens: options.NewTokens = 32,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attn: options.Attention = "auto",
    also_in: Annotated[
        str | None,
        typer.Option("--also-in", "--control", help="A second dtype for the same tokens, such as float32."),
    ] = None,
    floor: Annotated[int, typer.Option(min=0, help="Seeds of the rounding floor; 0 for none.")] = 3,
    local: Annotated[bool, typer.Option(help="Measure what each layer adds by itself.")] = True,
    every: Annotated[int, typer.Option(min=1, help="Measure every K-th step only.")] = 1,
    tokens: Annotated[Literal["a", "b"], typer.Option(help="Whose tokens both paths follow.")] = "a",
    chat: options.Chat = False,
    ignore_eos: options.IgnoreEos = False,
    prefill_chunk: options.PrefillChunk = None,
    threads: options.Threads = None,
    seed: Annotated[int, typer.Option(help="Seed of the rounding floor.")] = 0,
    store: options.Store = None,
    as_json: options.AsJson = False,
    save: Annotated[Path | None, typer.Option(help="Keep the whole drift in this file.")] = None,
    report: options.Report = None,
) -> None:
    """Measure how far cache-ON drifts from cache-OFF on the same tokens."""
    given = gather(prompt, prompts)
    check_targets(save=save, report=report)
    check_folder(store)
    with console.working():
        from kvdrift.drift.compare import compare as run
        from kvdrift.paths.cache_off import CacheOff
        from kvdrift.paths.cache_on import CacheOn

        loaded = open_model(model, dtype, device, attn, threads)
        drift = resumable(
            loaded,
            given,
            typed(context),
            store,
            lambda store: run(
                loaded,
                given,
                max_new_tokens=max_new_tokens,
                a=CacheOn(prefill_chunk=prefill_chunk),
                b=CacheOff(),
                tokens=tokens,
                every=every,
                floor=floor,
                local=local,
                also_in=also_in,
                chat=chat,
                ignore_eos=ignore_eos,
                seed=seed,
                store=store,
            ),
        )
    deliver(drift, as_json=as_json, save=save, report=report)
