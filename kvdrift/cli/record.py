"""``kvdrift record``: the raw tensors of one path, in files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvdrift.cli import console
from kvdrift.cli.prompts import gather, names, numbers
from kvdrift.errors import InputError


def record(
    model: Annotated[str, typer.Argument(help="Preset, Hub id or local folder.", show_default=False)],
    out: Annotated[Path, typer.Option(help="File to write; several prompts are numbered.", show_default=False)],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat for several.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines: a string, or an object with prompt, question, text or ids.")
    ] = None,
    path: Annotated[Literal["on", "off"], typer.Option(help="With the cache or without.")] = "on",
    sites: Annotated[str, typer.Option(help="Comma-separated sites.")] = "resid_post,k,v",
    layers: Annotated[str | None, typer.Option(help="Such as 0,3,5-8; all if left out.")] = None,
    heads: Annotated[str | None, typer.Option(help="Such as 0-2; all if left out.")] = None,
    positions: Annotated[str, typer.Option(help="current, all, or a list such as 0,4-7.")] = "current",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Steps per prompt.")] = 32,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16, float32 or float64.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    attn: Annotated[str, typer.Option(help="auto, sdpa, eager or another implementation.")] = "auto",
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Feed the prompt to cache-ON in chunks of N.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the chat template.")] = False,
    offload: Annotated[bool, typer.Option("--offload", help="Keep recorded tensors on the CPU.")] = False,
    memory_gb: Annotated[float | None, typer.Option(min=0, help="Memory allowed for the recording, in GB.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; they change the bits.")] = None,
) -> None:
    """Record tensors of one path at chosen sites, layers, heads and positions."""
    given = gather(prompt, prompts)
    if path == "off" and prefill_chunk is not None:
        raise InputError("--prefill-chunk belongs to the cached path; leave it out with --path off.")
    where = _positions(positions)
    files = output_files(out, len(given))
    for file in files:
        console.check_target(file)
    with console.working():
        import torch

        from kvdrift.models.load import load
        from kvdrift.paths.cache_off import CacheOff
        from kvdrift.paths.cache_on import CacheOn
        from kvdrift.paths.record import record as run

        if threads is not None:
            torch.set_num_threads(threads)
        loaded = load(model, dtype=dtype, device=device, attn=attn)
        traces = run(
            loaded,
            given,
            path=CacheOn(prefill_chunk=prefill_chunk) if path == "on" else CacheOff(),
            sites=names(sites),
            layers=None if layers is None else numbers(layers, "--layers"),
            heads=None if heads is None else numbers(heads, "--heads"),
            positions=where,
            max_new_tokens=max_new_tokens,
            offload=offload,
            memory_budget=None if memory_gb is None else int(memory_gb * 1e9),
            chat=chat,
        )
        assert isinstance(traces, list), "a list of prompts gives a list of traces"
        for trace, file in zip(traces, files, strict=True):
            console.say(f"Saved {trace.save(file)}")


def _positions(text: str) -> Literal["current", "all"] | list[int]:
    if text == "current":
        return "current"
    if text == "all":
        return "all"
    return numbers(text, "--positions")


def output_files(out: Path, prompts: int) -> list[Path]:
    """``run.safetensors`` for one prompt, ``run-1.safetensors``, ``run-2.safetensors``, … for several."""
    if prompts == 1:
        return [out]
    return [out.with_name(f"{out.stem}-{number}{out.suffix}") for number in range(1, prompts + 1)]
