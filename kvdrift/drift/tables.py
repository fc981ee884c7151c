"""A drift as tidy tables: one row per measured cell, one column per metric."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvdrift.drift.metrics import SITE_METRICS
from kvdrift.drift.result import Drift
from kvdrift.models.sites import HEAD_SITES


def layers(drift: Drift) -> pd.DataFrame:
    """One row per prompt, measured step, residual site and layer.

    Columns: ``prompt, step, site, layer, kind, window``, the metrics that were measured (``rel_l2, max_abs,
    max_ulp, cosine, identical``), and beside them, where present, ``floor_median`` (median over the seeds of
    the rounding floor's ``rel_l2``), ``local`` (local drift, ``rel_l2``) and ``local_floor_median``.
    ``layer`` is missing (``<NA>``) for ``embed`` and ``final_norm``.

    Examples
    --------
    >>> import kvdrift as kd
    >>> drift = kd.compare(kd.load(kd.models.tiny("llama")), [1, 2, 3], max_new_tokens=4, progress=False)
    >>> table = drift.to_dataframe("layers").query("site == 'resid_post' and step >= 1")
    >>> table.groupby("layer").rel_l2.median().index.tolist()
    [0, 1, 2, 3]
    """
    sites = [site for site in drift.sites if site not in HEAD_SITES]
    return _concat([_layer_rows(drift, site) for site in sites])


def logits(drift: Drift) -> pd.DataFrame:
    """One row per prompt and measured step.

    Columns: ``prompt, step``, the top-1 tokens of both paths (``top1_a, top1_b`` and their texts ``text_a,
    text_b``), the token both were fed next (``fed``, -1 after the last step), every logit metric, and, where
    there is a rounding floor, ``kl_floor_median`` and ``logit_l2_floor_median`` (median over seeds) and
    ``flip_floor_share`` (share of seeds that flip).
    """
    prompt, step = np.nonzero(drift.measured)
    cell = (prompt, step)
    number = drift.steps[step]
    columns: dict[str, np.ndarray] = {"prompt": prompt, "step": number}
    for path in "ab":
        columns[f"top1_{path}"] = drift.top1(path)[cell]
        columns[f"text_{path}"] = _texts(drift, columns[f"top1_{path}"])
    inside = number < drift.fed.shape[1]
    columns["fed"] = np.where(inside, drift.fed[prompt, np.where(inside, number, 0)], -1)
    columns |= {metric: drift.values(site, metric)[cell] for site, metric in drift.pairs() if site == "logits"}
    for metric in ("kl", "logit_l2"):
        if (floor := drift.floor("logits", metric=metric)) is not None:
            columns[f"{metric}_floor_median"] = _median(floor)[cell]
    if (floor := drift.floor("logits", metric="flip")) is not None:
        columns["flip_floor_share"] = floor.mean(axis=0)[cell]
    return pd.DataFrame(columns)


def heads(drift: Drift) -> pd.DataFrame:
    """One row per prompt, measured step, attention site (``q, k, v, z``), layer and head.

    ``head`` counts KV heads for ``k`` and ``v``, query heads for ``q`` and ``z``. Beside the metrics stand
    ``self_a`` and ``self_b``, where they were asked for: how far a path's own K/V
    moved since the step before.
    """
    sites = [site for site in drift.sites if site in HEAD_SITES]
    return _concat([_head_rows(drift, site) for site in sites])


def positions(drift: Drift) -> pd.DataFrame:
    """One row per prompt, kept step, K or V, layer, KV head and absolute position.

    Only positions that exist at that step are listed. ``rel_l2`` is NaN where a path does not read the
    position (``visible_a``, ``visible_b``), as for one that a sliding window has evicted.
    """
    return _concat([_position_rows(drift, site) for site in ("k", "v")])


def _concat(parts: list[pd.DataFrame]) -> pd.DataFrame:
    filled = [part for part in parts if len(part)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame()


def _median(values: np.ndarray) -> np.ndarray:
    """Median over seeds; NaN where nothing was measured."""
    return np.asarray(np.median(values, axis=0))


def _texts(drift: Drift, tokens: np.ndarray) -> np.ndarray:
    known, where = np.unique(tokens, return_inverse=True)
    return np.array([drift.token_texts.get(int(token), "") for token in known], dtype=object)[where]


def _metrics(drift: Drift, site: str, cell: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    return {m: drift.values(site, m)[cell] for m in SITE_METRICS if drift.has(site, m)}


def _layer_columns(drift: Drift, numbers: np.ndarray) -> dict[str, object]:
    """``layer``, ``kind`` and ``window`` for layer numbers ``[row]``."""
    infos = {info.index: info for info in drift.architecture.layers}
    known, where = np.unique(numbers, return_inverse=True)
    kinds = np.array([infos[int(n)].attention for n in known], dtype=object)[where]
    windows = np.array([infos[int(n)].window or np.nan for n in known], dtype=float)[where]
    return {
        "layer": pd.array(numbers, dtype="Int64"),
        "kind": kinds,
        "window": pd.array(windows, dtype="Int64"),
    }


def local_on_layers(drift: Drift, site: str, values: np.ndarray) -> np.ndarray:
    """Local drift ``[..., local layer]`` on the site's layers ``[..., layer]``; NaN where it was not measured."""
    layers, measured = drift.layers(site), drift.layers(site, "local")
    if np.array_equal(layers, measured):
        return values
    full = np.full((*values.shape[:-1], len(layers)), np.nan)
    known = np.isin(layers, measured)
    full[..., known] = values[..., np.searchsorted(measured, layers[known])]
    return full


def _layer_rows(drift: Drift, site: str) -> pd.DataFrame:
    values = drift.values(site)
    if values.ndim == 2:
        cell: tuple[np.ndarray, ...] = np.nonzero(drift.measured)
        missing = pd.array([pd.NA] * len(cell[0]), dtype="Int64")
        layer: dict[str, object] = {"layer": missing, "kind": None, "window": missing}
    else:
        cell = np.nonzero(np.broadcast_to(drift.measured[..., None], values.shape))
        layer = _layer_columns(drift, drift.layers(site)[cell[2]])
    columns: dict[str, object] = {"prompt": cell[0], "step": drift.steps[cell[1]], "site": site, **layer}
    columns |= _metrics(drift, site, cell)
    if (floor := drift.floor(site)) is not None:
        columns["floor_median"] = _median(floor)[cell]
    if drift.has(site, of="local"):
        columns["local"] = local_on_layers(drift, site, drift.values(site, of="local"))[cell]
    if (floor := drift.floor(site, "local")) is not None:
        columns["local_floor_median"] = local_on_layers(drift, site, _median(floor))[cell]
    return pd.DataFrame(columns)


def head_exists(drift: Drift, site: str) -> np.ndarray:
    """Which heads a layer has, bool ``[layer, head]``: a head axis is as wide as the widest layer."""
    values = drift.values(site)[drift.measured]
    seen = ~np.isnan(values).all(axis=0) if len(values) else np.ones(values.shape[1:], dtype=bool)
    infos = {info.index: info for info in drift.architecture.layers}
    own = [infos[int(n)].n_kv_heads if site in ("k", "v") else drift.architecture.n_heads for n in drift.layers(site)]
    return seen | (np.arange(values.shape[2]) < np.array(own, dtype=int)[:, None])


def _head_rows(drift: Drift, site: str) -> pd.DataFrame:
    cell = np.nonzero(drift.measured[:, :, None, None] & head_exists(drift, site))
    columns: dict[str, object] = {"prompt": cell[0], "step": drift.steps[cell[1]], "site": site}
    columns |= _layer_columns(drift, drift.layers(site)[cell[2]])
    columns["head"] = cell[3]
    columns |= _metrics(drift, site, cell)
    for path in ("self_a", "self_b"):
        if drift.has(site, of=path):
            columns[path] = drift.values(site, of=path)[cell]
    return pd.DataFrame(columns)


def _position_rows(drift: Drift, site: str) -> pd.DataFrame:
    if not drift.has(site, of="positions"):
        return pd.DataFrame()
    values, kept = drift.values(site, of="positions"), drift.position_steps
    measured = drift.measured[:, np.searchsorted(drift.steps, kept)]
    lengths = np.array([len(prompt.ids) for prompt in drift.prompts])[:, None] + kept
    exists = measured[..., None] & (np.arange(values.shape[-1]) < lengths[..., None])
    cell = np.nonzero(exists[:, :, None, None, :] & head_exists(drift, site)[:, :, None])
    columns: dict[str, object] = {"prompt": cell[0], "step": kept[cell[1]], "site": site}
    columns |= _layer_columns(drift, drift.layers(site)[cell[2]])
    columns |= {"head": cell[3], "position": cell[4], "rel_l2": values[cell]}
    where = (cell[0], cell[1], cell[2], cell[4])
    columns |= {f"visible_{path}": drift.visible(path)[where] for path in "ab"}
    return pd.DataFrame(columns)
