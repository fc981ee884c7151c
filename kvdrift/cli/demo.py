"""``kvdrift demo``: a real model, a few word problems, one report."""

from __future__ import annotations

import shlex
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from kvdrift.cli import console
from kvdrift.cli.command import command_line, portable
from kvdrift.cli.running import resumable

MODEL = "smollm2-135m"
PROMPTS = 5
NEW_TOKENS = 12
FLOOR_SEEDS = 2
CONTROL = "float32"
QUICK_PROMPTS = 2
QUICK_NEW_TOKENS = 8
QUICK_FLOOR_SEEDS = 1


def demo(
    model: Annotated[str, typer.Option(help="Preset, Hub id or local folder.")] = MODEL,
    out: Annotated[Path, typer.Option(help="The HTML report to write.")] = Path("kvdrift-report.html"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts and steps: a first look.")] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the report in the browser when it is written.")] = False,
) -> None:
    """Trace a small real model on built-in word problems and write an HTML report."""
    console.check_target(out)
    command = command_line("demo", [], {"--model": None if model == MODEL else portable(model), "--quick": quick})
    with console.working():
        from kvdrift.demo_prompts import DEMO_PROMPTS
        from kvdrift.drift.compare import compare
        from kvdrift.models.load import load
        from kvdrift.report import write_report

        loaded = load(model)
        prompts = list(DEMO_PROMPTS[: QUICK_PROMPTS if quick else PROMPTS])
        drift = resumable(
            loaded,
            prompts,
            command,
            None,
            lambda store: compare(
                loaded,
                prompts,
                max_new_tokens=QUICK_NEW_TOKENS if quick else NEW_TOKENS,
                floor=QUICK_FLOOR_SEEDS if quick else FLOOR_SEEDS,
                also_in=CONTROL,
                store=store,
            ),
        )
        written = write_report(out, drift)
        chat = bool(getattr(loaded.tokenizer, "chat_template", None))
    if show:
        webbrowser.open(written.resolve().as_uri())
    console.answer(
        f"{drift.summary()}\n\nWrote {written.resolve()}{'' if show else ': open it in a browser (--open does)'}\n"
        f"Next, on a text of your own: kvdrift compare {shlex.quote(model)}{' --chat' if chat else ''} --prompt "
        "'What is the capital of France?' --report mine.html"
    )
