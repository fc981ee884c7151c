"""``kvdrift falsify``: the precision ladder of one model."""

from __future__ import annotations

from typing import Annotated

import typer

from kvdrift.cli import console, options
from kvdrift.cli.command import typed
from kvdrift.cli.prompts import gather
from kvdrift.cli.running import made_by
from kvdrift.cli.verb import check_targets, deliver, open_model


def falsify(
    context: typer.Context,
    model: options.ModelName,
    prompt: options.Prompt = None,
    prompts: options.PromptFile = None,
    arms: Annotated[
        str | None,
        typer.Option(help="Such as float32,float16,fixed-shape; all if left out.", show_default=False),
    ] = None,
    max_new_tokens: options.NewTokens = 24,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attn: options.Attention = "auto",
    chat: options.Chat = False,
    ignore_eos: options.IgnoreEos = False,
    threads: options.Threads = None,
    seed: Annotated[int, typer.Option(help="Seed of the re-rolls.")] = 0,
    store: options.Store = None,
    as_json: options.AsJson = False,
    save: options.Save = None,
    report: options.Report = None,
) -> None:
    """Compare cache-ON with cache-OFF in one arithmetic after another: is it rounding?"""
    given = gather(prompt, prompts)
    check_targets(save=save, report=report)
    with console.working():
        from kvdrift.ladder.arms import chosen
        from kvdrift.ladder.falsify import falsify as run

        names = None if arms is None else [name.strip() for name in arms.split(",") if name.strip()]
        chosen(names)  # refuses an unknown name before the model is loaded
        loaded = open_model(model, dtype, device, attn, threads)
        result = run(
            loaded, given, arms=names, max_new_tokens=max_new_tokens, chat=chat, ignore_eos=ignore_eos, seed=seed,
            store=store,
        )  # fmt: skip
    deliver(made_by(result, typed(context)), as_json=as_json, save=save, report=report)
