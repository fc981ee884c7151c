"""A made-up `Evaluation` with everything a figure or a table may meet: no model runs here."""

from __future__ import annotations

import hashlib

import numpy as np

from kvdrift.evaluation.records import Answer, Compared, Gold, ItemRecord, Trial
from kvdrift.evaluation.result import Evaluation
from kvdrift.models.architecture import Architecture, LayerInfo
from kvdrift.models.labels import PathInfo

WORDS = (
    " The", " eggs", " are", " sold", " at", " the", " farmers'", " market", " for", " $", "2", " each", ".", "\n",
    " She", " makes", " 9", " *", " =", "18", " so", " <b>bold</b>", " &amp", " dollars", " every", " day", "</script>",
    " remaining", " per", " altogether",
)  # fmt: skip
EOS = len(WORDS)
STRATEGIES = ("greedy", "top-k 50 at 0.7", "top-p 0.9")


def evaluation(
    n_items: int = 20,
    strategies: tuple[str, ...] = STRATEGIES,
    seeds: tuple[int, ...] = (0,),
    replicates: int = 19,
    max_new_tokens: int = 48,
    parting: float = 0.6,
    flipping: float = 0.15,
    null_parting: float | None = None,
    null_flipping: float | None = None,
    lost: float = 0.0,
    answers: bool = True,
    gold: bool = True,
    seed: int = 0,
) -> Evaluation:
    """Texts that part with a chance per strategy, and answers that flip in some of those that part.

    Parameters
    ----------
    parting, flipping
        Chance that b's text leaves a's, and that a text that left has its answer's rightness turned round.
    null_parting, null_flipping
        The same for the re-rolls; as the paths by default.
    lost
        Chance that b gets an item wrong although a has it right: a direction.
    """
    rng = np.random.default_rng(seed)
    null_parting = parting if null_parting is None else null_parting
    null_flipping = flipping if null_flipping is None else null_flipping
    records = []
    for n in range(n_items):
        reference = str(3 * n + 2) if answers else None
        trials = []
        for strategy in strategies:
            for one in seeds:
                a = _first(rng, reference, max_new_tokens)
                b = _compared(rng, a, reference, max_new_tokens, parting, flipping, lost)
                null = tuple(
                    _compared(rng, a, reference, max_new_tokens, null_parting, null_flipping) for _ in range(replicates)
                )
                trials.append(Trial(strategy, one, a, b, null))
        scores = -20 + 0.05 * rng.standard_normal(replicates + 2)
        text = f"Question {n}: Janet's ducks lay <i>{n}</i> eggs per day & she sells them for $2. How much?\nAnswer:"
        records.append(
            ItemRecord(
                item=f"item-{n}",
                prompt=text if n else None,
                prompt_hash=hashlib.sha256(text.encode()).hexdigest()[:16],
                n_prompt=20 + n,
                reference=reference,
                gold=Gold(7, *map(float, scores[:2]), tuple(map(float, scores[2:]))) if gold else None,
                trials=tuple(trials),
            )
        )
    return Evaluation(
        a=PathInfo("cache-ON", "made-up-135m", "bfloat16", "sdpa", "cpu"),
        b=PathInfo("cache-OFF", "made-up-135m", "bfloat16", "sdpa", "cpu"),
        task="made-up <u>questions</u>",
        max_new_tokens=max_new_tokens,
        strategies=strategies,
        seeds=seeds,
        records=tuple(records),
        replicates=replicates,
        token_texts={**dict(enumerate(WORDS)), EOS: "<|endoftext|>"},
        architecture=architecture(),
        settings={},
        provenance={"command": "kvdrift evaluate made-up"},
        notes=("A note about <u>markup</u>.",),
    )


def architecture() -> Architecture:
    layers = tuple(LayerInfo(index=i, attention="full", window=None, n_kv_heads=2, head_dim=32) for i in range(4))
    return Architecture(
        model_type="tiny", n_layers=4, d_model=256, n_heads=8, n_kv_heads=2, head_dim=32, vocab_size=384,
        max_positions=256, positional="rope", qk_norm=False, attn_softcap=None, final_softcap=None,
        tied_embeddings=True, layers=layers,
    )  # fmt: skip


def _first(rng, reference, max_new_tokens) -> Answer:
    n = int(rng.integers(max_new_tokens // 2, 2 * max_new_tokens))
    ends = n <= max_new_tokens
    tokens = [int(t) for t in rng.integers(0, len(WORDS), min(n, max_new_tokens))]
    if ends:
        tokens[-1] = EOS
    right = bool(rng.random() < 0.4)
    answer = None if reference is None else (reference if right else ("77" if rng.random() < 0.8 else "[invalid]"))
    correct = None if reference is None else right
    return Answer(tuple(tokens), _text(tokens), answer, correct, "eos" if ends else "length")


def _compared(rng, a, reference, max_new_tokens, parting, flipping, lost=0.0) -> Compared:
    if rng.random() >= parting:
        unequal = int(rng.integers(1, len(a.tokens))) if rng.random() < 0.7 and parting else None
        return Compared(a.tokens, a.text, a.answer, a.correct, a.stop, None, unequal, None)
    step = int(rng.integers(1, len(a.tokens)))
    other = (a.tokens[step] + 1) % EOS
    tail = [t if rng.random() < 0.7 else int(rng.integers(0, EOS)) for t in a.tokens[step + 1 :]]
    tokens = (*a.tokens[:step], other, *tail)
    turned = rng.random() < flipping or (a.correct and rng.random() < lost)
    correct = None if reference is None else bool(a.correct) != turned
    answer = None if reference is None else (reference if correct else "78")
    margins = (float(rng.exponential(0.05)), float(rng.exponential(0.05)) if rng.random() < 0.9 else 0.0)
    return Compared(tokens, _text(tokens), answer, correct, a.stop, step, int(rng.integers(0, step + 1)), margins)


def _text(tokens) -> str:
    return "".join(WORDS[t] for t in tokens if t != EOS)
