"""``kvdrift compare``: drift between two paths of one model, over one prompt or many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvdrift.cli import console
from kvdrift.cli.command import command_line
from kvdrift.cli.prompts import gather
from kvdrift.cli.running import resumable
from kvdrift.errors import InputError


def compare(
    model: Annotated[str, typer.Argument(help="Preset, Hub id or local folder.", show_default=False)],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat for several.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines: a string, or an object with prompt, question, text or ids.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Steps per prompt.")] = 32,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16, float32 or float64.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    attn: Annotated[str, typer.Option(help="auto, sdpa, eager or another implementation.")] = "auto",
    control: Annotated[str | None, typer.Option(help="A second dtype for the same tokens, such as float32.")] = None,
    floor: Annotated[int, typer.Option(min=0, help="Seeds of the rounding floor; 0 for none.")] = 3,
    local: Annotated[bool, typer.Option(help="Measure what each layer adds by itself.")] = True,
    every: Annotated[int, typer.Option(min=1, help="Measure every K-th step only.")] = 1,
    tokens: Annotated[Literal["a", "b"], typer.Option(help="Whose tokens both paths follow.")] = "a",
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the chat template.")] = False,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Feed the prompt to cache-ON in chunks of N.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; they change the bits.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the rounding floor.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    save: Annotated[Path | None, typer.Option(help="Keep the whole drift in this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report.")] = None,
) -> None:
    """Measure how far cache-ON drifts from cache-OFF on the same tokens."""
    given = gather(prompt, prompts)
    if save is not None and save == report:
        raise InputError(f"--save and --report both name {save}; give two files.")
    console.check_target(save)
    console.check_target(report)
    command = command_line(
        "compare",
        [model],
        {
            "--prompt": prompt,
            "--prompts": prompts,
            "--max-new-tokens": max_new_tokens,
            "--dtype": _unless(dtype, "auto"),
            "--device": _unless(device, "auto"),
            "--attn": _unless(attn, "auto"),
            "--control": control,
            "--floor": floor,
            "--no-local": not local,
            "--every": _unless(every, 1),
            "--tokens": _unless(tokens, "a"),
            "--chat": chat,
            "--prefill-chunk": prefill_chunk,
            "--threads": threads,
            "--seed": _unless(seed, 0),
        },
    )
    with console.working():
        import torch

        from kvdrift.drift.compare import compare as run
        from kvdrift.models.load import load
        from kvdrift.paths.cache_off import CacheOff
        from kvdrift.paths.cache_on import CacheOn
        from kvdrift.report import write_report

        if threads is not None:
            torch.set_num_threads(threads)
        loaded = load(model, dtype=dtype, device=device, attn=attn)
        drift = resumable(
            loaded,
            given,
            command,
            lambda resume: run(
                loaded,
                given,
                max_new_tokens=max_new_tokens,
                a=CacheOn(prefill_chunk=prefill_chunk),
                b=CacheOff(),
                tokens=tokens,
                every=every,
                floor=floor,
                local=local,
                control=control,
                chat=chat,
                seed=seed,
                resume=resume,
            ),
        )
        if save is not None:
            console.say(f"Saved {drift.save(save)}")
        if report is not None:
            console.say(f"Wrote {write_report(report, drift)}")
        if not as_json:
            console.say(drift.summary())
    if as_json:
        typer.echo(json.dumps(drift.to_dict(), allow_nan=False))


def _unless(value: object, default: object) -> object:
    """None for a value that need not be typed."""
    return None if value == default else value
