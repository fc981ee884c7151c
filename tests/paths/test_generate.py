"""Both paths, alone and untraced, give the logits of transformers' own `generate`: every bit, at every step."""

from itertools import product

import pytest
import torch
from pairwise import params

import kvdrift as kd
from kvdrift.evaluation.strategies import Greedy, Temperature, TopK, TopP
from kvdrift.models.tiny import FAMILIES, supported_attn

PROMPT = torch.randint(384, (56,), generator=torch.Generator().manual_seed(1)).tolist()  # seven windows of 8
STEPS = 12  # past position 64, where kernels change their blocks
UNTIED = {"tie_word_embeddings": False}  # tied to random embeddings, a head repeats one token for ever
PATHS = {"on": kd.CacheOn(), "off": kd.CacheOff()}
CASES = [
    (family, dtype, attn, name)
    for family in FAMILIES
    for dtype in (torch.float32, torch.bfloat16)
    for attn in supported_attn(family)
    for name in PATHS
]
STRATEGIES = {  # what generate calls them; its top_k is 50 unless told
    Temperature(): {"temperature": 1.0, "top_k": 0},
    Temperature(0.7): {"temperature": 0.7, "top_k": 0},
    TopK(20): {"top_k": 20, "temperature": 1.0},
    TopK(5, temperature=1.3): {"top_k": 5, "temperature": 1.3},
    TopP(0.5): {"top_p": 0.5, "top_k": 0, "temperature": 1.0},
    TopP(0.9, temperature=0.6): {"top_p": 0.9, "top_k": 0, "temperature": 0.6},
}
TEXT = (  # unfinished, so that no model ends it at once
    "A baker fills 14 trays with 12 rolls each. She sells 95 rolls before noon and 48 after it, and gives the rest "
    "to a school in equal bags of 5. To find how many bags that makes, she first"
)


def generate(model, ids, steps, name, **options):
    """Transformers' own loop, with everything that it computed on the way."""
    return model.hf.generate(
        torch.tensor([ids]),
        max_new_tokens=steps,
        use_cache=name == "on",
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )


def walk(model, ids, path, steps, choose):
    """The loop of an evaluation: the logits and tokens of each step, chosen by ``choose(logits, step)``."""
    run, tokens, logits = path.start(model, ids), [], []
    for number in range(steps):
        logits.append(run.step(tokens[-1] if number else None).logits)
        tokens.append(choose(logits[-1], number))
    run.close()
    return logits, tokens


def equal_steps(mine, theirs, same_bits):
    return [same_bits(x.float(), y[0]) for x, y in zip(mine, theirs, strict=True)]


@pytest.mark.parametrize(("family", "dtype", "attn", "name"), params(CASES))
def test_greedy(family, dtype, attn, name, tiny_model, same_bits):
    model = tiny_model(family, dtype, attn, **UNTIED)
    theirs = generate(model, PROMPT, STEPS, name, do_sample=False)
    logits, tokens = walk(model, PROMPT, PATHS[name], STEPS, Greedy().sampler(0, ""))
    assert equal_steps(logits, theirs.logits, same_bits) == [True] * STEPS
    assert tokens == theirs.sequences[0, len(PROMPT) :].tolist()
    assert len(set(tokens)) > STEPS / 2, "a text that moves on"


def sampled_as_generate(model, ids, steps, name, strategy, same_bits):
    """Follow what ``generate`` drew: its logits are the path's, its scores what the strategy decides by."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        theirs = generate(model, ids, steps, name, do_sample=True, **STRATEGIES[strategy])
    drawn, decision = theirs.sequences[0, len(ids) :].tolist(), strategy.sampler(0, "item")
    logits, _ = walk(model, ids, PATHS[name], len(drawn), lambda _, step: drawn[step])
    assert equal_steps(logits, theirs.logits, same_bits) == [True] * len(drawn)
    for step, (mine, scores) in enumerate(zip(logits, theirs.scores, strict=True)):
        noise = torch.from_numpy(decision.noise(step, len(mine)))
        assert same_bits(decision.scores(mine, step), scores[0].double() + noise), step
    return theirs.scores


@pytest.mark.parametrize(
    ("family", "strategy", "name"), params(list(product(["llama", "gemma2", "mamba"], STRATEGIES, PATHS)))
)
def test_sampling(family, strategy, name, tiny_model, same_bits):
    scores = sampled_as_generate(tiny_model(family, torch.bfloat16, **UNTIED), PROMPT, 3, name, strategy, same_bits)
    ruled_out = [int(row.isneginf().sum()) for row in scores]
    assert all(bool(n) == (not isinstance(strategy, Temperature)) for n in ruled_out)
    assert max(ruled_out) < 383, "a choice is left"


REAL = [
    ("smollm2-135m", "bfloat16", "on", 12),
    ("smollm2-135m", "bfloat16", "off", 12),
    ("gemma3-270m", "bfloat16", "on", 6),
    ("gemma3-270m", "bfloat16", "off", 2),  # a step takes seconds
]


@pytest.mark.real
@pytest.mark.parametrize(("preset", "dtype", "name", "steps"), REAL)
def test_presets(preset, dtype, name, steps, same_bits):
    model = kd.load(preset, dtype=dtype, quiet=True)
    ids = model.encode(TEXT)
    theirs = generate(model, ids, steps, name, do_sample=False)
    logits, tokens = walk(model, ids, PATHS[name], steps, Greedy().sampler(0, ""))
    assert equal_steps(logits, theirs.logits, same_bits) == [True] * steps
    assert tokens == theirs.sequences[0, len(ids) :].tolist()
    assert len(set(tokens)) > steps / 2, "a text that moves on"
    if preset == "smollm2-135m":
        sampled_as_generate(model, ids, steps, name, TopP(0.9, temperature=0.6), same_bits)
