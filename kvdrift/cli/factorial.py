"""``kvdrift factorial``: whose K/V are read, crossed with which kernel reads them."""

from __future__ import annotations

from typing import Annotated

import typer

from kvdrift.cli import console, options
from kvdrift.cli.command import typed
from kvdrift.cli.prompts import gather
from kvdrift.cli.running import made_by
from kvdrift.cli.verb import check_targets, deliver, donor_and_recipient, open_model


def factorial(
    context: typer.Context,
    model: options.ModelName,
    prompt: options.Prompt = None,
    prompts: options.PromptFile = None,
    max_new_tokens: options.NewTokens = 32,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attn: options.Attention = "auto",
    chat: options.Chat = False,
    ignore_eos: options.IgnoreEos = False,
    prefill_chunk: options.PrefillChunk = None,
    threads: options.Threads = None,
    seed: Annotated[int, typer.Option(help="Which entry the placebo moves.")] = 0,
    as_json: options.AsJson = False,
    save: options.Save = None,
    report: options.Report = None,
) -> None:
    """Cross whose K/V are read with which kernel reads them, at every step."""
    given = gather(prompt, prompts)
    check_targets(save=save, report=report)
    with console.working():
        from kvdrift.patching.factorial import factorial as run

        loaded = open_model(model, dtype, device, attn, threads)
        off, on = donor_and_recipient("on", prefill_chunk)
        result = run(
            loaded, given, a=on, b=off, max_new_tokens=max_new_tokens, chat=chat, ignore_eos=ignore_eos, seed=seed
        )
    deliver(made_by(result, typed(context)), as_json=as_json, save=save, report=report)
