"""What the page says about one drift besides its figures: tiles, tables, provenance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from kvdrift.drift import findings, summary
from kvdrift.drift.profile import MIN_PROMPTS
from kvdrift.drift.result import LOGIT_METRICS, Drift
from kvdrift.drift.summary import number, times
from kvdrift.provenance import prompt_hash

MAX_FLIPS = 300
VISIBLE = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})

LOGIT_NAMES = {
    "kl": "KL(b‖a), nats",
    "kl_float32_head": "KL with the LM head in float32, nats",
    "js": "Jensen-Shannon divergence, nats",
    "logit_l2": "centred L2 distance of the logits",
    "logit_max": "largest difference of a logit",
    "margin_a": "distance of the best two logits, path a",
    "margin_b": "distance of the best two logits, path b",
    "topk_overlap": "overlap of the top tokens (share)",
    "flip": "flips (share of steps)",
    "tie_a": "exact ties, path a (share of steps)",
    "tie_b": "exact ties, path b (share of steps)",
}

GLOSSARY = (
    ("path", "One way to run the model over tokens. Path a is under test, path b is the reference."),
    ("step", "One next-token prediction. Step 0 predicts from the prompt alone and is left out of statistics."),
    ("drift", "The difference between the two paths at one place in the model, fed the same tokens."),
    ("relative L2", "The length of the difference divided by the length of path b's vector."),
    (
        "local drift",
        "What one layer makes by itself: both paths get bitwise the same inputs there. Drift starts at the first "
        "layer where it is not zero.",
    ),
    (
        "rounding floor",
        "The drift of a path against itself with every sum added in another order. Above it means more than the "
        "order of summation; that is not by itself a bug.",
    ),
    ("plateau", "The level that drift reaches in the last quarter of the layers."),
    ("flip", "A step at which the two paths, fed the same tokens, would choose different next tokens."),
    ("margin", "The distance between a path's best and second-best logit; an exact tie is a margin of zero."),
    ("free divergence", "The first token that differs when each path feeds itself."),
    ("KL", "How far the two predicted distributions lie apart, in nats."),
)


@dataclass(frozen=True)
class Tile:
    """One number to see first; ``tone`` is ``""``, ``"quiet"`` or ``"warn"``."""

    label: str
    value: str
    detail: str
    tone: str = ""


@dataclass(frozen=True)
class Column:
    """A table's column: its heading, and whether it holds numbers."""

    name: str
    number: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of ready-made text; without rows, only the caption is shown."""

    heading: str
    caption: str
    columns: tuple[Column, ...]
    rows: list[list[str]]
    open: bool = False


@dataclass(frozen=True)
class Group:
    """A named block of provenance: ``(name, value)`` pairs."""

    name: str
    rows: list[tuple[str, str]]


# --- tiles


def tiles(drift: Drift) -> list[Tile]:
    """The five-second reading: start, plateau, floor, KL, flips, control."""
    return [
        _start_tile(drift),
        *_growth_tiles(drift),
        _kl_tile(drift),
        _flip_tile(drift),
        *_control_tile(drift),
    ]


def _start_tile(drift: Drift) -> Tile:
    start = findings.onset(drift)
    if start is None or start.n_pairs == 0:
        return Tile("drift starts", "not measured", "no local drift", "quiet")
    if start.source_layer is None:
        return Tile("drift starts", "nowhere", "every layer gives the same bits on the same inputs", "quiet")
    module = {"attn": "its attention", "mlp": "its MLP"}.get(start.source_module or "", "this block")
    return Tile("drift starts", f"layer {start.source_layer}", f"in {module}")


def _growth_tiles(drift: Drift) -> list[Tile]:
    grows = findings.growth(drift)
    if grows is None or grows.n_prompts == 0:
        return [Tile("plateau", "not measured", "no resid_post, or no step after step 0", "quiet")]
    if grows.plateau is None:
        share = findings.share_differing(drift)
        detail = f"bit-identical at {1 - share:.0%} of steps" if share is not None else ""
        return [Tile("plateau", "0", detail, "quiet")]
    where = f"relative L2, from layer {int(grows.plateau_layer.value)} on" if grows.plateau_layer else "relative L2"
    plateau = Tile("plateau", number(grows.plateau.value), where)
    ratio = grows.plateau_over_floor
    if ratio is None:
        return [plateau, Tile("vs rounding floor", "not measured", "no floor to divide by", "quiet")]
    if ratio.interval is None:
        return [plateau, Tile("vs rounding floor", times(ratio.value), "one prompt: no interval", "quiet")]
    low, high = ratio.interval
    tone = "warn" if low > 1 and grows.n_prompts >= MIN_PROMPTS else ""
    return [
        plateau,
        Tile(
            "vs rounding floor",
            times(ratio.value),
            f"{times(low)} to {times(high)} over {grows.n_prompts} prompts",
            tone,
        ),
    ]


def _kl_tile(drift: Drift) -> Tile:
    kl = findings.counted_logits(drift, "kl")
    return Tile("KL, mean", number(findings.mean(kl)), f"nats; at most {number(findings.largest(kl))}")


def _flip_tile(drift: Drift) -> Tile:
    found, steps = findings.flips(drift), int(drift.measured.sum())
    ties = sum(flip.tie for flip in found)
    detail = f"of {steps:,} steps" + (f"; {ties} at an exact tie" if found else "")
    return Tile("flips", f"{len(found):,}", detail, "" if found else "quiet")


def _control_tile(drift: Drift) -> list[Tile]:
    if drift.control is None:
        return []
    kl = findings.mean(findings.counted_logits(drift.control, "kl"))
    found = len(findings.flips(drift.control))
    return [Tile(f"KL in {drift.control.a.dtype}", number(kl), f"nats, mean; {found} flip{'s' * (found != 1)}")]


# --- tables


def tables(drift: Drift) -> list[Table]:
    """Flips, logits, prompts and layers."""
    return [flip_table(drift), logit_table(drift), prompt_table(drift), layer_table(drift)]


def flip_table(drift: Drift) -> Table:
    """One row per flip, with both tokens and their margins."""
    found = findings.flips(drift)
    columns = (
        Column("prompt"), Column("step"), Column("path a says", False), Column("path b says", False),
        Column("margin"), Column("exact tie", False), Column("KL, nats"),
    )  # fmt: skip
    if not found:
        return Table("Flips", "The paths chose the same token at every measured step.", columns, [])
    step_index = {int(step): index for index, step in enumerate(drift.steps)}
    kl = drift.values("logits", "kl") if drift.has("logits", "kl") else None
    rows = [
        [
            str(flip.prompt),
            str(flip.step),
            token_text(drift, flip.token_a),
            token_text(drift, flip.token_b),
            number(flip.margin),
            "yes" if flip.tie else "no",
            number(None if kl is None else float(kl[flip.prompt, step_index[flip.step]])),
        ]
        for flip in found[:MAX_FLIPS]
    ]
    rest = f" The first {MAX_FLIPS} of {len(found):,} are listed." if len(found) > MAX_FLIPS else ""
    caption = f"The margin is the larger of the two paths' distances between their best two logits.{rest}"
    return Table("Flips", caption, columns, rows, open=len(found) <= 20)


def logit_table(drift: Drift) -> Table:
    """Mean and largest value of each logit metric, beside the floor and the control."""
    control = drift.control
    columns = [Column("metric", False), Column("mean"), Column("median"), Column("largest"), Column("floor, mean")]
    if control is not None:
        columns.append(Column(f"{control.a.dtype}, mean"))
    rows = []
    for metric in LOGIT_METRICS:
        cells = findings.counted_logits(drift, metric)
        if not cells.size:
            continue
        floor = findings.mean(findings.counted_logits(drift, metric, "floor"))
        row = [
            LOGIT_NAMES[metric],
            number(findings.mean(cells)),
            number(float(np.median(cells))),
            number(findings.largest(cells)),
            "" if floor is None else number(floor),
        ]
        if control is not None:
            row.append(number(findings.mean(findings.counted_logits(control, metric))))
        rows.append(row)
    return Table("Logits", "Over all measured steps from step 1 on.", tuple(columns), rows)


def prompt_table(drift: Drift) -> Table:
    """One row per prompt: its hash, its length, what became of it."""
    kl = drift.values("logits", "kl") if drift.has("logits", "kl") else np.full(drift.measured.shape, np.nan)
    flips = [flip.prompt for flip in findings.flips(drift)]
    rows = [
        [
            str(p),
            prompt_hash(prompt.ids),
            str(len(prompt.ids)),
            str(int(drift.measured[p].sum())),
            number(findings.mean(kl[p][drift.counted[p]])),
            str(flips.count(p)),
            "none seen" if drift.free_divergence[p] is None else str(drift.free_divergence[p]),
            _beginning(prompt.text if prompt.text is not None else "".join(prompt.tokens)),
        ]
        for p, prompt in enumerate(drift.prompts)
    ]
    columns = (
        Column("prompt"), Column("hash of its tokens", False), Column("tokens"), Column("steps"),
        Column("KL, mean"), Column("flips"), Column("free divergence"), Column("text", False),
    )  # fmt: skip
    return Table("Prompts", "Equal hashes mean equal token ids.", columns, rows)


def layer_table(drift: Drift) -> Table:
    """One row per layer: drift, floor, local drift and its floor."""
    site = next((s for s in ("resid_post", *drift.sites) if drift.has(s) and _has_plain_layers(drift, s)), None)
    if site is None:
        return Table("Layers", "No residual site with layers was measured.", (), [])
    columns = [Column("layer"), Column("attention", False)]
    rows = [[str(layer), _kind(drift, int(layer))] for layer in drift.layers(site)]
    for of, floor_of, name in (("drift", "floor", "drift"), ("local", "local_floor", "local drift")):
        values, floors = _by_layer(drift, site, of), _by_layer(drift, site, floor_of)
        if values is None:
            continue
        columns.append(Column(name))
        for row, layer in zip(rows, drift.layers(site), strict=True):
            row.append(number(values.get(int(layer))))
        if floors is None:
            continue
        columns += [Column(f"{name}'s floor"), Column("ratio")]
        for row, layer in zip(rows, drift.layers(site), strict=True):
            value, floor = values.get(int(layer)), floors.get(int(layer))
            row += [number(floor), times(value / floor) if value is not None and floor else ""]
    caption = f"Relative L2 at {site}: median over steps from step 1 on, then over prompts. Zero: equal in every bit."
    return Table("Layers", caption, tuple(columns), rows)


def _kind(drift: Drift, layer: int) -> str:
    info = next(info for info in drift.architecture.layers if info.index == layer)
    return f"{info.attention}, window {info.window}" if info.window else info.attention


def _by_layer(drift: Drift, site: str, of: str) -> dict[int, float] | None:
    """Median by layer number; local drift may cover fewer layers than the site has."""
    medians = findings.over_prompts(drift, site, of)
    if medians is None:
        return None
    axis = drift.arrays.get("layers/local", drift.layers(site)) if of.startswith("local") else drift.layers(site)
    return {int(layer): float(value) for layer, value in zip(axis, medians, strict=True)}


def _has_plain_layers(drift: Drift, site: str) -> bool:
    return drift.values(site).ndim == 3


def token_text(drift: Drift, token: int) -> str:
    """A token's text in quotes, white space made visible, and its id."""
    text = drift.token_texts.get(token)
    return f"id {token}" if text is None or text == str(token) else f"“{text.translate(VISIBLE)}” ({token})"


def _beginning(text: str, limit: int = 140) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


# --- provenance


def provenance(drift: Drift) -> list[Group]:
    """Everything the numbers depend on, as groups of names and values."""
    groups = [
        Group("paths", _path_rows(drift)),
        Group("architecture", [("summary", str(drift.architecture))]),
    ]
    loose = {}
    for name, value in drift.provenance.items():
        if name == "command":
            continue
        if isinstance(value, dict):
            groups.append(Group(_words(name), [(_words(key), _plain(item)) for key, item in value.items()]))
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for item in value:
                groups.append(Group(_words(name), [(_words(key), _plain(x)) for key, x in item.items()]))
        else:
            loose[name] = value
    if loose:
        groups.append(Group("other", [(_words(name), _plain(value)) for name, value in loose.items()]))
    if drift.control is not None:
        groups.append(Group(f"control ({drift.control.a.dtype})", _path_rows(drift.control)))
    return [group for group in groups if group.rows]


def _path_rows(drift: Drift) -> list[tuple[str, str]]:
    rows = []
    for field in fields(drift.a):
        a, b = (_plain(getattr(info, field.name)) for info in (drift.a, drift.b))
        rows.append((_words(field.name), a if a == b else f"a: {a}; b: {b}"))
    return rows


def _words(name: str) -> str:
    return str(name).replace("_", " ")


def _plain(value: Any) -> str:
    if value is None or value in ([], (), {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "; ".join(f"{key} = {_plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple) and _is_range(value):
        return f"{value[0]} to {value[-1]}"
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    text = str(value)
    return summary.model_name(text)


def _is_range(values: Sequence[Any]) -> bool:
    """Whether these are more than three whole numbers that follow each other."""
    if len(values) < 4 or any(type(value) is not int for value in values):
        return False
    return list(values) == list(range(values[0], values[0] + len(values)))
