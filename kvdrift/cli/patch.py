"""``kvdrift patch``: write one path's values into the other, with the controls that tell what it means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvdrift.cli import console, options
from kvdrift.cli.command import typed
from kvdrift.cli.prompts import gather, numbers_or_all, places
from kvdrift.cli.running import made_by
from kvdrift.cli.verb import check_targets, deliver, donor_and_recipient, open_model

if TYPE_CHECKING:
    from kvdrift.patching.spec import Patch, Positions


def patch(
    context: typer.Context,
    model: options.ModelName,
    prompt: options.Prompt = None,
    prompts: options.PromptFile = None,
    site: Annotated[
        list[str] | None,
        typer.Option(help="Such as kv, k, v, resid_post; repeat to write several together.", show_default="kv"),
    ] = None,
    layers: options.Layers = None,
    heads: options.Heads = None,
    positions: Annotated[
        str | None, typer.Option(help="past or all (k, v, kv), current or all (other sites), or such as 0,4-7.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="persistent, 'one_shot(3)' or 'window(2,5)'.")] = "persistent",
    write: options.Write = None,
    recipient: options.Recipient = "on",
    max_new_tokens: options.NewTokens = 32,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attn: options.Attention = "auto",
    placebos: Annotated[int, typer.Option(min=0, help="Noise placebos; 0 for none.")] = 3,
    checks: Annotated[
        bool,
        typer.Option("--checks/--no-checks", "--controls/--no-controls", help="Run the controls beside the placebos."),
    ] = True,
    chat: options.Chat = False,
    ignore_eos: options.IgnoreEos = False,
    prefill_chunk: options.PrefillChunk = None,
    threads: options.Threads = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    save: options.Save = None,
    report: options.Report = None,
) -> None:
    """Write one path's values into the other, and see how near that brings it."""
    given = gather(prompt, prompts)
    where = numbers_or_all(layers, "--layers"), numbers_or_all(heads, "--heads"), places(positions)
    check_targets(save=save, report=report)
    with console.working():
        from kvdrift.patching.patch import patch as run

        together = _together(site or ["kv"], *where, schedule, write)
        loaded = open_model(model, dtype, device, attn, threads)
        donor, patched = donor_and_recipient(recipient, prefill_chunk)
        result = run(
            loaded,
            given,
            together,
            donor=donor,
            recipient=patched,
            max_new_tokens=max_new_tokens,
            placebos=placebos,
            checks=checks,
            chat=chat,
            ignore_eos=ignore_eos,
            seed=seed,
        )
    deliver(made_by(result, typed(context)), as_json=as_json, save=save, report=report)


def _together(
    sites: list[str],
    layers: list[int] | None,
    heads: list[int] | None,
    positions: Positions,
    schedule: str,
    write: Literal["cache", "read"] | None,
) -> list[Patch]:
    """One patch per site; beside K/V sites, ``write`` is not for the others."""
    from kvdrift.patching.spec import Patch

    some_kv = any(Patch(site).is_kv for site in sites)
    return [
        Patch(site, layers, heads, positions, schedule, write if Patch(site).is_kv or not some_kv else None)
        for site in sites
    ]
