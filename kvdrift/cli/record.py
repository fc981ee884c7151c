"""``kvdrift record``: the raw tensors of one path, in files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvdrift.cli import console, options
from kvdrift.cli.prompts import gather, names, numbers
from kvdrift.cli.verb import open_model
from kvdrift.errors import InputError


def record(
    model: options.ModelName,
    out: Annotated[Path, typer.Option(help="File to write; several prompts are numbered.", show_default=False)],
    prompt: options.Prompt = None,
    prompts: options.PromptFile = None,
    path: Annotated[Literal["on", "off"], typer.Option(help="With the cache or without.")] = "on",
    sites: Annotated[str, typer.Option(help="Comma-separated sites.")] = "resid_post,k,v",
    layers: options.Layers = None,
    heads: options.Heads = None,
    positions: Annotated[str, typer.Option(help="current, all, or a list such as 0,4-7.")] = "current",
    max_new_tokens: options.NewTokens = 32,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attn: options.Attention = "auto",
    prefill_chunk: options.PrefillChunk = None,
    chat: options.Chat = False,
    ignore_eos: options.IgnoreEos = False,
    offload: Annotated[bool, typer.Option("--offload", help="Keep recorded tensors on the CPU.")] = False,
    memory_gb: Annotated[float | None, typer.Option(min=0, help="Memory allowed for the recording, in GB.")] = None,
    threads: options.Threads = None,
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
        from kvdrift.paths.cache_off import CacheOff
        from kvdrift.paths.cache_on import CacheOn
        from kvdrift.paths.record import record as run

        loaded = open_model(model, dtype, device, attn, threads)
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
            ignore_eos=ignore_eos,
        )
        assert isinstance(traces, list), "a list of prompts gives a list of traces"
        saved = [trace.save(file) for trace, file in zip(traces, files, strict=True)]
    console.answer("\n".join(f"Saved {file}" for file in saved))


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
