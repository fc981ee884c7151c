"""The section of one drift: tiles, reading, figures, tables."""

from __future__ import annotations

import numpy as np

from kvdrift.drift import findings, peaks
from kvdrift.drift.result import Drift
from kvdrift.report import parts
from kvdrift.report.figures import drift_figures
from kvdrift.report.parts import Column, Group, Section, Table, Tile
from kvdrift.statistics.resampling import MIN_PROMPTS
from kvdrift.summaries.drift import headline, reading
from kvdrift.words.numbers import number, plural, times

MAX_FLIPS = 300
VISIBLE = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})

LOGIT_NAMES = {
    "kl": "KL(b‖a), nats",
    "kl_float32_head": "KL with the LM head in float32, nats",
    "js": "Jensen-Shannon divergence, nats",
    "flip": "flips (share of steps)",
    "tie_a": "exact ties, path a (share of steps)",
    "tie_b": "exact ties, path b (share of steps)",
    "margin_a": "distance of the best two logits, path a",
    "margin_b": "distance of the best two logits, path b",
    "topk_overlap": "overlap of the top tokens (share)",
    "logit_l2": "centred L2 distance of the logits",
    "logit_max": "largest difference of a logit",
}


def section(drift: Drift, id: str) -> Section:
    """Everything the page says about one drift."""
    drawn, missing = drift_figures(drift, id)
    return Section(
        id=id,
        heading=parts.subject(drift.a),
        what=headline(drift),
        tiles=tiles(drift),
        reading=reading(drift),
        notes=list(drift.notes),
        figures=drawn,
        missing=missing,
        tables=tables(drift),
        provenance=provenance(drift),
        command=drift.provenance.get("command"),
    )


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
    peak = peaks.local_peak(drift)
    most = ""
    if peak is not None and peak.layer != start.source_layer and peak.ratio is not None:
        most = f"; layer {peak.layer} makes most for its floor ({times(peak.ratio)})"
    return Tile("drift starts", f"layer {start.source_layer}", f"in {module}{most}")


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
    return [Tile(f"KL in {drift.control.a.dtype}", number(kl), f"nats, mean; {found} {plural(found, 'flip')}")]


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
    for metric, name in LOGIT_NAMES.items():
        cells = findings.counted_logits(drift, metric)
        if not cells.size:
            continue
        floor = findings.mean(findings.counted_logits(drift, metric, "floor"))
        row = [
            name,
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
    values = [
        [
            str(int(drift.measured[p].sum())),
            number(findings.mean(kl[p][drift.counted[p]])),
            str(flips.count(p)),
            "none seen" if drift.free_divergence[p] is None else str(drift.free_divergence[p]),
        ]
        for p in range(len(drift.prompts))
    ]
    columns = (Column("steps"), Column("KL, mean"), Column("flips"), Column("free divergence"))
    return parts.prompt_table(drift.prompts, columns, values)


def layer_table(drift: Drift) -> Table:
    """One row per layer: drift, floor, local drift and its floor."""
    site = next((s for s in ("resid_post", *drift.sites) if drift.has(s) and drift.values(s).ndim == 3), None)
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
    axis = drift.layers(site, of)
    return {int(layer): float(value) for layer, value in zip(axis, medians, strict=True)}


def token_text(drift: Drift, token: int) -> str:
    """A token's text in quotes, white space made visible, and its id."""
    text = drift.token_texts.get(token)
    return f"id {token}" if text is None or text == str(token) else f"“{text.translate(VISIBLE)}” ({token})"


def provenance(drift: Drift) -> list[Group]:
    """What the numbers depend on, the control's paths included."""
    groups = parts.provenance({"a": drift.a, "b": drift.b}, drift.architecture, drift.provenance)
    if drift.control is not None:
        rows = parts.path_rows({"a": drift.control.a, "b": drift.control.b})
        groups.append(Group(f"control ({drift.control.a.dtype})", rows))
    return groups
