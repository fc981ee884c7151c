"""``kvdrift sweep``: the same patch at many places in turn."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from kvdrift.cli import console, options
from kvdrift.cli.command import typed
from kvdrift.cli.prompts import gather, names, numbers_or_all, places
from kvdrift.cli.running import resumable
from kvdrift.cli.verb import check_folder, check_targets, deliver, donor_and_recipient, open_model


def sweep(
    context: typer.Context,
    model: options.ModelName,
    prompt: options.Prompt = None,
    prompts: options.PromptFile = None,
    sites: Annotated[str, typer.Option(help="Comma-separated sites.")] = "resid_post,k,v,kv",
    over: Annotated[
        str, typer.Option(help="layer, head, position, step (one-shot at each), or several with commas: crossed.")
    ] = "layer",
    schedule: Annotated[
        list[str] | None,
        typer.Option(help="persistent, 'one_shot(3)' or 'window(2,5)'; repeat to cross.", show_default="persistent"),
    ] = None,
    layers: options.Layers = None,
    heads: options.Heads = None,
    positions: Annotated[
        str | None, typer.Option(help="Such as 0,4-7; current, past or all where positions are not swept.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Such as 1-5, with --over step; all if left out.")] = None,
    write: options.Write = None,
    recipient: options.Recipient = "on",
    max_new_tokens: options.NewTokens = 32,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    attn: options.Attention = "auto",
    placebos: Annotated[int, typer.Option(min=0, help="Noise placebos per cell; 0 for none.")] = 1,
    checks: Annotated[
        Literal["all", "shared", "none"],
        typer.Option(
            "--checks",
            "--controls",
            help="shared: re-roll and full patch beside the cells; all: each cell's own too; none.",
        ),
    ] = "shared",
    chat: options.Chat = False,
    ignore_eos: options.IgnoreEos = False,
    prefill_chunk: options.PrefillChunk = None,
    engine: options.Engine = "local",
    workers: options.Workers = None,
    address: options.Address = None,
    threads: options.Threads = None,
    seed: options.Seed = 0,
    store: options.Store = None,
    as_json: options.AsJson = False,
    save: options.Save = None,
    report: options.Report = None,
) -> None:
    """Patch one place after the other, and find which brings a path to the other."""
    given = gather(prompt, prompts)
    at_layers, at_heads = numbers_or_all(layers, "--layers"), numbers_or_all(heads, "--heads")
    at_positions, at_steps = places(positions), numbers_or_all(steps, "--steps")
    check_targets(save=save, report=report)
    check_folder(store)
    with console.working():
        from kvdrift.patching.sweep import sweep as run

        loaded = open_model(model, dtype, device, attn, threads)
        donor, patched = donor_and_recipient(recipient, prefill_chunk)
        found = resumable(
            loaded,
            given,
            typed(context),
            store,
            lambda store: run(
                loaded,
                given,
                sites=names(sites),
                over=names(over),
                schedule=schedule or ["persistent"],
                layers=at_layers,
                heads=at_heads,
                positions=at_positions,
                steps=at_steps,
                write=write,
                donor=donor,
                recipient=patched,
                max_new_tokens=max_new_tokens,
                placebos=placebos,
                checks=checks,
                chat=chat,
                ignore_eos=ignore_eos,
                seed=seed,
                store=store,
                engine=engine,
                workers=workers,
                threads=threads,
                address=address,
            ),
            cells=True,
        )
    deliver(found, as_json=as_json, save=save, report=report)
