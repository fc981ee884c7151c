"""`factorial`: whose K/V are read, crossed with which kernel reads them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from kvdrift.bits import same_bits
from kvdrift.drift.metrics import kl_divergence, logit_l2
from kvdrift.drift.stacking import pad_stack
from kvdrift.errors import SiteError
from kvdrift.fingerprint import one_job
from kvdrift.models.model import Model
from kvdrift.patching.blocks import gather
from kvdrift.patching.factorial_result import METRICS, PAIRS, Factorial
from kvdrift.patching.noise import generator, nudged
from kvdrift.patching.setup import Setup, read
from kvdrift.patching.spec import Patch
from kvdrift.patching.state import State, state
from kvdrift.paths.cache_off import CacheOff
from kvdrift.paths.cache_on import CacheOn
from kvdrift.paths.path import Path
from kvdrift.paths.path_capabilities import refuse_rows
from kvdrift.paths.sampling import greedy
from kvdrift.paths.stepper import Stepper, started
from kvdrift.shapes import Logits
from kvdrift.tracing.tap import Tap
from kvdrift.tracing.writer import Block, Writer

PAST = Patch("kv", write="read")
"""Keys and values of every position before the current one, as the kernel reads them at one step."""
DRAWS = 8
"""The placebo looks at so many random entries for one whose move by one ulp is not lost in rounding."""


@one_job()
def factorial(
    model: Any,
    prompts: Any,
    *,
    a: Path | None = None,
    b: Path | None = None,
    max_new_tokens: int = 32,
    tokens: Any = None,
    chat: bool = False,
    ignore_eos: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> Factorial:
    """Cross whose past K/V are read with which kernel reads them, at every step.

    y00 is path *b* (cache-OFF), y11 is path *a* (cache-ON), y10 is *a*'s one-token kernel on *b*'s past K/V, y01 is
    *b*'s full recompute with *a*'s K/V read for the past, all on path *b*'s tokens. The placebo factor is one entry
    of the past K/V moved by one ulp: the first of eight random entries with which any bit of the logits changes.

    Parameters
    ----------
    model, prompts, max_new_tokens, chat, ignore_eos, progress
        As `kvdrift.patch` takes them.
    a, b
        The path with and the path without a cache; `CacheOn` and `CacheOff` by default.
    tokens
        Token ids that all consume instead of path b's own (one list per prompt).
    seed
        Which entry the placebo moves.

    Raises
    ------
    SiteError
        If the model's K/V cannot be read and written.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> found = kd.factorial(model, [1, 2, 3], max_new_tokens=4, progress=False)
    >>> found.values("y11-y00").shape
    (1, 4)
    """
    setup = read(
        model, prompts, donor=CacheOff() if b is None else b, recipient=CacheOn() if a is None else a,
        max_new_tokens=max_new_tokens, tokens=tokens, chat=chat, ignore_eos=ignore_eos, progress=progress,
    )  # fmt: skip
    refuse_rows(setup.donor, "b")
    on, off = setup.recipient.model or setup.model, setup.donor.model or setup.model
    for owner in (on, off):
        owner.coverage.resolve("k", None)
    if [x.n_kv_heads for x in on.architecture.layers] != [x.n_kv_heads for x in off.architecture.layers]:
        raise SiteError("The two paths' models have K/V of different shapes, so neither can read the other's.")
    found = []
    with tqdm(total=sum(setup.lengths), desc="factorial", unit="step", disable=not progress) as bar:
        for number in range(len(setup.prompts)):
            found.append(_one_prompt(setup, number, on, off, seed, bar))
    arrays = {name: pad_stack([rows[name] for rows in found]) for name in found[0]}
    arrays["n_steps"] = np.array([len(rows["fed"]) for rows in found])
    return Factorial(
        off=setup.donor_info,
        on=setup.recipient_info,
        architecture=on.architecture,
        prompts=setup.prompts,
        arrays=arrays,
        token_texts=setup.token_texts(*np.unique(arrays["fed"]).tolist()),
        notes=setup.notes,
        provenance=setup.provenance(seed=seed),
    )


def _one_prompt(setup: Setup, number: int, on: Model, off: Model, seed: int, bar: tqdm) -> dict[str, np.ndarray]:
    ids = setup.prompts[number].ids
    tokens, rows = list(ids), []
    every = {site: frozenset(on.coverage.layers(site)) for site in PAST.sites}
    with ExitStack() as stack:
        tap_on = stack.enter_context(Tap(on, every, kv_where="all", copy=False))
        tap_off = stack.enter_context(Tap(off, every, kv_where="all", copy=False))
        tap_on.enabled = tap_off.enabled = False
        a = stack.enter_context(started(setup.recipient, setup.model, ids, tap_on))
        b = stack.enter_context(started(setup.donor, setup.model, ids, tap_off))
        writer_on = Writer(on, {site: sorted(layers) for site, layers in every.items()})
        writer_off = writer_on if off is on else Writer(off, writer_on.sites)
        for step in range(setup.lengths[number]):
            token = tokens[-1] if step else None
            with ExitStack() as before:
                forks = [] if token is None else [before.enter_context(x.fork()) for x in (a, b)]
                y00, y11 = state(b.step(token)), state(a.step(token))
                crossed = {"y10": y11.logits, "y01": y00.logits, "ulp1": y11.logits, "ulp0": y00.logits}
                if token is not None:
                    at_on, at_off = forks
                    crossed = {
                        "y10": _crossed(on, at_on, token, y11, y00, writer_on),
                        "y01": _crossed(off, at_off, token, y00, y11, writer_off),
                        "ulp1": _nudged(on, at_on, token, y11, writer_on, (seed, step)),
                        "ulp0": _nudged(off, at_off, token, y00, writer_off, (seed, step)),
                    }
            rows.append(_distances({"y00": y00.logits, "y11": y11.logits, **crossed}))
            chosen = setup.follow[number][step] if setup.follow is not None else greedy(y00.logits, step)
            tokens.append(chosen)
            bar.update()
            if chosen in setup.stop:
                break
    found = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return found | {"fed": np.array(tokens[len(ids) :])}


def _crossed(model: Model, at: Stepper, token: int, own: State, other: State, writer: Writer) -> Logits:
    """One step from ``at`` that reads the other path's past K/V."""
    given, _ = gather(PAST, model, own, other, None, 0)
    return _step(at, token, own, writer, [entry.block for entry in given])


def _nudged(model: Model, at: Stepper, token: int, own: State, writer: Writer, key: tuple[int, int]) -> Logits:
    """One step from ``at`` that reads its own past K/V with one entry moved by one ulp: the first of `DRAWS` random
    entries whose move changes a bit of the logits, or the last."""
    given, _ = gather(PAST, model, own, own, None, 0)
    logits = own.logits
    for draw in range(DRAWS if given else 0):
        random = generator(*key, draw, "factorial")
        block = given[int(torch.randint(len(given), (1,), generator=random))].block
        logits = _step(at, token, own, writer, [replace(block, value=nudged(block.value, random))])
        if not same_bits(logits, own.logits):
            break
    return logits


def _step(at: Stepper, token: int, own: State, writer: Writer, blocks: list[Block]) -> Logits:
    """One step of a fork of ``at`` with ``blocks`` written."""
    writer.load(blocks)
    with at.fork() as fork, writer:
        writer.position, writer.keys = own.position, fork.run.key_positions
        return fork.step(token, watch=False, finite=False).logits


def _distances(y: dict[str, Logits]) -> dict[str, float]:
    """Every pair of `PAIRS` by every metric."""
    y = {name: logits.to(y["y00"].device) for name, logits in y.items()}
    found: dict[str, float] = {}
    for pair in PAIRS:
        left, right = pair.split("-")
        name = f"ulp{right[1]}" if left == "ulp" else left
        one, two = y[name], y[right]
        same = one.dtype == two.dtype and same_bits(one, two)
        found[f"logit_l2/{pair}"] = 0.0 if same else float(logit_l2(one, two))
        found[f"kl/{pair}"] = 0.0 if same else float(kl_divergence(two, one))
        found[f"identical/{pair}"] = float(same)
    assert set(found) == {f"{metric}/{pair}" for metric in METRICS for pair in PAIRS}
    return found
