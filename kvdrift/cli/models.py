"""``kvdrift models``: what is known by name, fetch it, look at it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvdrift.cli import console
from kvdrift.errors import WeightsError

app = typer.Typer(help="Presets: list them, fetch one, show a model's architecture.", no_args_is_help=True)

HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.model"]


@app.command("list")
def list_presets(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list on stdout.")] = False,
) -> None:
    """List the presets, where their weights come from, and which lie in the cache."""
    from kvdrift.models.presets import PRESETS, is_cached

    cached = {p.name: None if p.gguf is None else is_cached(p.name) for p in PRESETS.values()}
    if as_json:
        rows = [
            {
                "name": preset.name,
                "source": preset.source,
                "licence": preset.licence,
                "cached": cached[preset.name],
                "weights": preset.weights,
                "description": preset.description,
            }
            for preset in PRESETS.values()
        ]
        console.answer_json(rows)
        return
    words = {True: "yes", False: "no", None: "by the Hub"}
    about = [
        (preset.name, preset.source, words[cached[preset.name]], f"{preset.description} ({preset.licence})")
        for preset in PRESETS.values()
    ]
    console.answer_table(("name", "source", "cached", "what it is"), about)


@app.command()
def pull(name: Annotated[str, typer.Argument(help="A preset.", show_default=False)]) -> None:
    """Fetch and verify a preset's weights, once."""
    from kvdrift.models import presets

    preset = presets.find(name)
    with console.working():
        if preset.hub_id is None:
            presets.preset_folder(name)
        else:
            _pull_from_hub(preset.hub_id)
    console.answer(f"{name} is ready.")


def _pull_from_hub(hub_id: str) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        snapshot_download(hub_id, allow_patterns=HUB_FILES)
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise WeightsError(
            f"Cannot fetch {hub_id!r} from the Hugging Face Hub: {reason} "
            "(a network is needed, and gated models need their licence accepted and `hf auth login`)."
        ) from error


@app.command()
def show(
    model: Annotated[str, typer.Argument(help="Preset, Hub id or local folder.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16, float32 or float64.")] = "auto",
    attn: Annotated[str, typer.Option(help="auto, sdpa, eager or another implementation.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="The architecture as JSON on stdout.")] = False,
) -> None:
    """Show a model's architecture, and at which sites kvdrift can trace it."""
    with console.working():
        from kvdrift.tracing import load

        loaded = load(model, dtype=dtype, attn=attn, quiet=True)
        found = f"{loaded!r}\n{loaded.coverage}"
    if as_json:
        console.answer_json(loaded.architecture.to_dict())
    else:
        console.answer(found)
