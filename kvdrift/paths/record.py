"""`record`: run one path and keep the tensors of chosen sites."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from tqdm.auto import tqdm

from kvdrift.errors import InputError, SiteError
from kvdrift.fingerprint import one_job
from kvdrift.models.ending import stops, template_notes, tokens_written, way_on
from kvdrift.models.load import load
from kvdrift.models.model import Model
from kvdrift.models.prompts import as_prompts
from kvdrift.models.sites import choose_heads, choose_layers, parse_sites
from kvdrift.paths.cache_on import CacheOn
from kvdrift.paths.own import check_path
from kvdrift.paths.path import Path
from kvdrift.paths.path_capabilities import check_room, path_notes
from kvdrift.paths.recording import Positions, Recording
from kvdrift.tracing.trace import Trace

DEFAULT_SITES = ("resid_post", "k", "v", "logits")


@one_job()
def record(
    model: Any,
    prompts: Any,
    *,
    path: Path | None = None,
    sites: Iterable[str] | str | None = None,
    layers: Iterable[int] | int | None = None,
    heads: Sequence[int] | int | None = None,
    positions: Positions | int = "current",
    max_new_tokens: int = 32,
    tokens: Any = None,
    offload: bool = False,
    memory_budget: int | None = None,
    chat: bool = False,
    ignore_eos: bool = False,
    progress: bool = True,
) -> Trace | list[Trace]:
    """Run one path and keep what it computes at chosen sites.

    Parameters
    ----------
    model
        Anything `kvdrift.load` takes.
    prompts
        One prompt (text, ids, a tensor), or a list of prompts.
    path
        How to run; ``CacheOn()`` by default.
    sites
        Site names, short (``"k"``) or full (``"blocks.5.attn.hook_k"``); by default ``resid_post, k, v, logits``,
        as far as the model gives them.
    layers, heads
        Layers and query heads to keep (``k`` and ``v`` keep the KV heads that these read); all by default.
    positions
        ``"current"``: the position that each step predicts from, without a position axis. ``"all"`` or a list of
        absolute positions: what each step's pass computed there (for ``k`` and ``v``: what its kernel read).
    max_new_tokens
        Steps; a prompt ends earlier at an end-of-sequence token.
    tokens
        Token ids to follow (one list per prompt); by default the path feeds itself greedily.
    offload
        Keep the tensors on the CPU.
    memory_budget
        Bytes that the recording may take; by default half of what is free.
    chat
        Put text prompts into the chat template.
    ignore_eos
        Go on past an end-of-sequence token.
    progress
        Show the estimated size and a progress bar.

    Returns
    -------
    Trace or list of Trace
        One for one prompt, a list for a list of prompts.

    Raises
    ------
    SiteError
        If the model does not give a site, or a layer, head or position is out of range.
    MemoryBudgetError
        If the recording would not fit.

    Examples
    --------
    >>> import kvdrift as kd
    >>> trace = kd.record(kd.models.tiny("llama"), [1, 2, 3], sites=["k"], max_new_tokens=4, progress=False)
    >>> list(trace.axes("k")), tuple(trace["k"].shape)
    (['step', 'layer', 'kv_head', 'feature'], (4, 4, 2, 32))
    """
    model = load(model, quiet=not progress)
    path = CacheOn() if path is None else check_path(path, "path")
    given, many = as_prompts(prompts)
    encoded = [model.encode(prompt, chat) for prompt in given]
    followed = _followed(model, tokens, len(encoded))
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
        raise InputError(f"max_new_tokens={max_new_tokens}: give a whole number of at least 1.")
    used = path.model or model
    n_layers, n_heads = used.architecture.n_layers, used.architecture.n_heads
    default = [site for site in DEFAULT_SITES if site in used.coverage.sites]
    wanted = choose_layers(parse_sites(default if sites is None else sites), layers, n_layers)
    kept = choose_heads(heads, n_heads)
    positions = [positions] if isinstance(positions, int) else positions
    positions = positions if isinstance(positions, str) else [int(position) for position in positions]
    lengths = [max_new_tokens if ids is None else len(ids) for ids in followed]
    for ids, length in zip(encoded, lengths, strict=True):
        used.check_length(len(ids), length)
        _check_positions(positions, len(ids) + length - 1)
    longest = max(len(ids) + length for ids, length in zip(encoded, lengths, strict=True))
    check_room(path, used, longest - 1)
    notes = path_notes(used, (path,), longest)
    for note in notes:
        print(f"kvdrift: {note}.", file=sys.stderr)
    traces, weights = [], used.fingerprint
    with tqdm(total=sum(lengths), desc="record", unit="step", disable=not progress) as bar:
        for prompt, ids, follow, length in zip(given, encoded, followed, lengths, strict=True):
            recording = Recording(
                used, path, wanted, kept, positions, offload, memory_budget, progress, weights, stops(model, ignore_eos)
            )
            trace = recording.run(used.label(prompt, ids), follow, length, bar)
            traces.append(replace(trace, provenance=trace.provenance | {"notes": list(notes)}) if notes else trace)
    if progress:
        _tell(traces, template_notes(model, given, chat), stops(model, ignore_eos))
    return traces if many else traces[0]


def _tell(traces: Sequence[Trace], notes: Sequence[str], stop: frozenset[int]) -> None:
    """On stderr: which texts ended before a token was written, or that there is a chat template that was not used."""
    empty = sum(tokens_written(trace.fed, stop) == 0 for trace in traces)
    if empty:
        which = "The model ended its text" if empty == len(traces) else f"{empty} of {len(traces)} texts ended"
        print(f"kvdrift: {which} after 0 tokens, so there is one step. {way_on(notes)}", file=sys.stderr)
    for note in () if empty else notes:
        print(f"kvdrift: {note}.", file=sys.stderr)


def _followed(model: Model, tokens: Any, n_prompts: int) -> list[list[int] | None]:
    if tokens is None:
        return [None] * n_prompts
    lists, _ = as_prompts(tokens)
    if len(lists) != n_prompts:
        raise InputError(f"tokens: give one list of token ids per prompt ({n_prompts}), not {len(lists)}.")
    return [model.encode(ids) for ids in lists]


def _check_positions(positions: Positions, n_positions: int) -> None:
    if isinstance(positions, str):
        if positions not in ("current", "all"):
            raise InputError(f"positions={positions!r}: choose 'current', 'all' or a list of absolute positions.")
        return
    outside = [p for p in positions if not 0 <= p < n_positions]
    if outside or not positions or len(set(positions)) < len(positions):
        raise SiteError(f"positions={list(positions)}: give some of 0 to {n_positions - 1}, each once.")
