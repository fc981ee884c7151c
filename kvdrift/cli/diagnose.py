"""``kvdrift diagnose``: is a difference between cached and cache-free decoding rounding, or a bug?"""

from __future__ import annotations

from typing import Annotated

import typer

from kvdrift.cli import console, options
from kvdrift.cli.prompts import gather
from kvdrift.cli.verb import open_model
from kvdrift.errors import KvdriftError

UNUSABLE = 2


def diagnose(
    model: options.ModelName,
    prompt: options.Prompt = None,
    prompts: options.PromptFile = None,
    max_new_tokens: options.NewTokens = 16,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attn: options.Attention = "auto",
    chat: options.Chat = False,
    prefill_chunk: options.PrefillChunk = None,
    generate: Annotated[bool, typer.Option("--generate", help="Also compare generate() with forward().")] = False,
    threads: options.Threads = None,
    seed: Annotated[int, typer.Option(help="Seed of the random prompts.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Decide between rounding and a bug.

    Exit code 0: exact, rounding, lossy or by design; 1: a bug, NaN or infinity, or results that do not repeat;
    2: inconclusive, or the model cannot be used.
    """
    try:
        with console.working():
            from kvdrift.diagnosis.diagnose import diagnose as run
            from kvdrift.paths.cache_on import CacheOn

            given = gather(prompt, prompts) if prompt or prompts else None
            loaded = open_model(model, dtype, device, attn, threads)
            verdict = run(
                loaded, given, CacheOn(prefill_chunk=prefill_chunk), max_new_tokens=max_new_tokens, chat=chat,
                generate=generate, seed=seed,
            )  # fmt: skip
    except KvdriftError as error:
        console.complain(str(error))
        raise typer.Exit(UNUSABLE) from error
    if as_json:
        console.answer_json(verdict.to_dict())
    else:
        console.answer(str(verdict))
    raise typer.Exit(verdict.exit_code)
