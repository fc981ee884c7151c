"""Arguments and options that several verbs share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

# --- the model and how it runs
ModelName = Annotated[str, typer.Argument(help="Preset, Hub id or local folder.", show_default=False)]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16, float32 or float64.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Attention = Annotated[str, typer.Option(help="auto, sdpa, eager or another implementation.")]
PrefillChunk = Annotated[int | None, typer.Option(min=1, help="Feed the prompt to cache-ON in chunks of N.")]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads; they change the bits.")]

# --- prompts
Prompt = Annotated[list[str] | None, typer.Option(help="A prompt; repeat for several.")]
PromptFile = Annotated[
    Path | None,
    typer.Option(path_type=Path, help="JSON lines: a string, or an object with prompt, question, text or ids."),
]
NewTokens = Annotated[int, typer.Option(min=1, help="Steps per prompt.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put prompts into the chat template.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past an end-of-sequence token.")]

# --- where
Layers = Annotated[str | None, typer.Option(help="Such as 0,3,5-8; all if left out.")]
Heads = Annotated[str | None, typer.Option(help="Such as 0-2; all if left out.")]

# --- patching
Recipient = Annotated[Literal["on", "off"], typer.Option(help="Which path is patched; the other one is the donor.")]
Write = Annotated[
    Literal["cache", "read"] | None,
    typer.Option(help="k, v, kv: overwrite the cache, or change what is read; cache if there is one."),
]
Seed = Annotated[int, typer.Option(help="Seed of the noise and the re-roll.")]

# --- what comes out
Store = Annotated[
    Path | None,
    typer.Option(
        "--store", "--results", help="A folder that keeps finished work: the same command goes on.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Save = Annotated[Path | None, typer.Option(help="Keep the whole result in this file.")]
Report = Annotated[Path | None, typer.Option(help="Write an HTML report.")]

# --- where a long run is worked on
Engine = Annotated[Literal["local", "ray"], typer.Option(help="This process, or the workers of a Ray cluster.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Ray: how many, each with a model of its own.", show_default=False)
]
Address = Annotated[
    str | None, typer.Option(help="Ray: of a running cluster; one is started here if left out.", show_default=False)
]
