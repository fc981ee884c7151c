"""One patched run against a loop written without kvdrift: the same logits to the last bit, before, at and after."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvdrift as kd
from kvdrift.drift.metrics import kl_divergence, logit_l2

PROMPT = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44]  # longer than the windows of 8
TOKENS = [3, 1, 4, 1, 5, 9]
N, STEPS = len(PROMPT), len(TOKENS)


def patched(model, patch, **options):
    options = {"tokens": TOKENS, "placebos": 0, "controls": False, "progress": False} | options
    return kd.patch(model, PROMPT, patch, **options)


def rows(result, metric, role="patched"):
    return result.values(metric, role)[0, 0]


@torch.no_grad()
def recomputed(model, t):
    """A cache-free pass at step t: its logits, and the K/V of every position."""
    ids = torch.tensor([PROMPT + TOKENS[:t]])
    plain = model.hf(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    cache = DynamicCache()  # without a configuration it keeps every position
    logits = model.hf(ids, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    assert torch.equal(logits, plain)
    return logits, cache


@torch.no_grad()
def decoded(model, before=lambda t, cache: None, during=None):
    """Logits of a cached loop in which ``before`` may edit the cache and ``during`` gives a hook for a step."""
    cache, found = DynamicCache(config=model.hf.config), []
    for t in range(STEPS):
        some, at = (PROMPT, 0) if t == 0 else ([TOKENS[t - 1]], N + t - 1)
        before(t, cache)
        handle = during(t) if during is not None else None
        out = model.hf(
            torch.tensor([some]), position_ids=torch.arange(at, at + len(some))[None], cache=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        if handle is not None:
            handle.remove()
        found.append(out.logits[0, -1])
    return found, cache


def same_run(result, logits, donor):
    """The patched arm has exactly these logits: every distance to the donor and the top token agree."""
    np.testing.assert_array_equal(
        rows(result, "logit_l2"), [float(logit_l2(x, y)) for x, y in zip(logits, donor, strict=True)]
    )
    np.testing.assert_array_equal(
        rows(result, "kl"), [float(kl_divergence(y, x)) for x, y in zip(logits, donor, strict=True)]
    )
    assert rows(result, "top1").tolist() == [int(x.argmax()) for x in logits]
    assert rows(result, "identical").tolist() == [float(torch.equal(x, y)) for x, y in zip(logits, donor, strict=True)]


SCHEDULES = {"one_shot(2)": (2, 2), "window(2, 3)": (2, 3), "persistent": (1, 99)}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("mistral", torch.float32), ("gemma3", torch.float32), ("mistral", torch.bfloat16)],
)
def test_kv_into_the_cache(family, dtype, schedule, tiny_model):
    """Cache-OFF's keys and values of some layers and a head, by absolute position, into a cache of one's own."""
    model = tiny_model(family, dtype, intermediate_size=1024)
    first, last = SCHEDULES[schedule]
    layers, head = (1, 2), 1
    donor = [recomputed(model, t) for t in range(STEPS)]

    def before(t, cache):
        if not first <= t <= last:
            return
        n = N + t - 1
        for layer in layers:
            window = model.architecture.layers[layer].window
            start = 0 if window is None else max(0, n - (window - 1))
            mine, theirs = cache.layers[layer], donor[t][1].layers[layer]
            assert mine.keys.shape[2] == n - start
            mine.keys[0, head] = theirs.keys[0, head, start:n]
            mine.values[0, head] = theirs.values[0, head, start:n]

    logits, _ = decoded(model, before)
    result = patched(model, kd.Patch("kv", layers, head, schedule=schedule))
    same_run(result, logits, [x for x, _ in donor])
    unchanged = rows(result, "unchanged")
    assert (unchanged[:first] == 1).all(), "before the first write nothing differs"
    if dtype == torch.float32:
        assert not unchanged[first:].all()
    plain, _ = decoded(model)
    np.testing.assert_array_equal(
        rows(result, "logit_l2", "unpatched"),
        [float(logit_l2(x, y)) for x, (y, _) in zip(plain, donor, strict=True)],
    )


@pytest.mark.parametrize("schedule", ["one_shot(3)", "persistent(2)"])
def test_kv_as_read_leaves_the_cache_alone(schedule, tiny_model):
    """Each step runs on a copy with the donor's past in it, and only its own new entry goes into the cache."""
    model = tiny_model("llama")
    donor = [recomputed(model, t) for t in range(STEPS)]
    chosen = kd.Schedule.parse(schedule)
    kept = {}

    def before(t, cache):
        if t and chosen.covers(t - 1):  # put back what was there, and the entry that the step added
            for layer, (keys, values) in kept.items():
                now = cache.layers[layer]
                now.keys = torch.cat([keys, now.keys[:, :, -1:]], dim=2)
                now.values = torch.cat([values, now.values[:, :, -1:]], dim=2)
        if chosen.covers(t):
            n = N + t - 1
            for layer, now in enumerate(cache.layers):
                kept[layer] = now.keys, now.values
                now.keys, now.values = (
                    getattr(donor[t][1].layers[layer], name)[:, :, :n].clone() for name in ("keys", "values")
                )

    logits, _ = decoded(model, before)
    stays = patched(model, kd.Patch("kv", schedule=schedule, write="cache"))
    reads = patched(model, kd.Patch("kv", schedule=schedule, write="read"))
    same_run(reads, logits, [x for x, _ in donor])
    first = chosen.first
    assert rows(reads, "logit_l2")[first] == rows(stays, "logit_l2")[first], "at the step itself they are the same"
    if chosen.is_one_shot:
        assert rows(reads, "logit_l2")[first + 1] != rows(stays, "logit_l2")[first + 1], "and then they are not"


@pytest.mark.parametrize("schedule", ["one_shot(2)", "persistent"])
@pytest.mark.parametrize("site", ["resid_post", "attn_out", "mlp_out", "resid_pre"])
def test_a_residual_site_by_a_hook_of_ones_own(site, schedule, tiny_model):
    model = tiny_model("llama")
    block = model.hf.model.layers[2]
    module = {"attn_out": block.self_attn, "mlp_out": block.mlp}.get(site, block)
    chosen = kd.Schedule.parse(schedule)
    given, donor = {}, []

    def main(output):
        return output[0] if isinstance(output, tuple) else output

    for t in range(STEPS):

        def look(_, args, kwargs, output=None, t=t):
            given[t] = (main(output) if output is not None else args[0])[:, -1].clone()

        if site == "resid_pre":
            handle = module.register_forward_pre_hook(look, with_kwargs=True)
        else:
            handle = module.register_forward_hook(look, with_kwargs=True)
        donor.append(recomputed(model, t)[0])
        handle.remove()

    def during(t):
        if not chosen.covers(t):
            return None
        if site == "resid_pre":
            return module.register_forward_pre_hook(lambda _, args: (given[t][:, None], *args[1:]))

        def put(_module, _args, output):
            return (given[t][:, None], *output[1:]) if isinstance(output, tuple) else given[t][:, None]

        return module.register_forward_hook(put)

    logits, _ = decoded(model, during=during)
    result = patched(model, kd.Patch(site, layers=2, schedule=schedule))
    same_run(result, logits, donor)
    assert not rows(result, "unchanged").all()


@pytest.mark.parametrize("schedule", ["one_shot(2)", "persistent"])
def test_cache_off_reads_the_values_of_a_cache(schedule, tiny_model):
    """The other direction, through the value projection: cache-ON's values of one head, at every past position."""
    model = tiny_model("llama")
    chosen, layer, head = kd.Schedule.parse(schedule), 1, 0
    donor, final = decoded(model)
    logits = []
    for t in range(STEPS):
        n = N + t - 1

        def put(_module, _args, output, n=n):
            output[0, :n, 32 * head : 32 * (head + 1)] = final.layers[layer].values[0, head, :n]

        handle = model.hf.model.layers[layer].self_attn.v_proj.register_forward_hook(put) if chosen.covers(t) else None
        with torch.no_grad():
            ids = torch.tensor([PROMPT + TOKENS[:t]])
            logits.append(model.hf(ids, use_cache=False, logits_to_keep=1).logits[0, -1])
        if handle is not None:
            handle.remove()
    result = patched(model, kd.Patch("v", layer, head, schedule=schedule), recipient=kd.CacheOff())
    same_run(result, logits, donor)
    assert not rows(result, "unchanged").all()


def test_a_one_shot_on_cache_off_leaves_nothing_after_its_step(tiny_model):
    for site in ("kv", "resid_post", "q"):
        result = patched(tiny_model("llama"), kd.Patch(site, schedule="one_shot(3)"), recipient=kd.CacheOff())
        assert rows(result, "unchanged").tolist() == [1, 1, 1, 0, 1, 1]
        moved = rows(result, "moved")
        assert np.isnan(np.delete(moved, 3)).all()
        assert moved[3] > 0


@pytest.mark.parametrize("site", ["kv", "resid_post"])
@pytest.mark.parametrize("recipient", [kd.CacheOn(), kd.CacheOff()], ids=["on", "off"])
def test_a_window_of_one_shots(site, recipient, tiny_model):
    """A window agrees with a one-shot at its first step, and with a longer one as far as it goes."""
    model = tiny_model("mistral")
    one, two, more = (
        rows(patched(model, kd.Patch(site, schedule=s), recipient=recipient), "logit_l2")
        for s in ("one_shot(2)", "window(2, 3)", "persistent(2)")
    )
    assert one[:3].tolist() == two[:3].tolist() == more[:3].tolist()
    assert two[3] == more[3]


def test_patches_of_one_cell_are_written_together(tiny_model):
    model = tiny_model("llama")
    together = patched(model, kd.Patch("kv", schedule="one_shot(2)"))
    in_two = patched(model, [kd.Patch("k", schedule="one_shot(2)"), kd.Patch("v", schedule="one_shot(2)")])
    alone = patched(model, kd.Patch("k", schedule="one_shot(2)"))
    np.testing.assert_array_equal(rows(together, "logit_l2"), rows(in_two, "logit_l2"))
    assert (rows(together, "logit_l2") != rows(alone, "logit_l2")).any()
    assert rows(together, "moved")[2] == rows(in_two, "moved")[2] > rows(alone, "moved")[2]


def test_what_was_moved_by_hand(tiny_model):
    model = tiny_model("llama")
    off = [recomputed(model, t)[1] for t in range(STEPS)]
    _, on = decoded(model)
    moved = rows(patched(model, kd.Patch("k", [0, 3], [1], [2, 7, 11])), "moved")
    assert np.isnan(moved[0])
    for t in range(1, STEPS):
        square = 0.0
        for layer in (0, 3):
            for p in (2, 7, 11):
                if p < N + t - 1:
                    difference = off[t].layers[layer].keys[0, 1, p].double() - on.layers[layer].keys[0, 1, p].double()
                    square += float((difference**2).sum())
        assert moved[t] == pytest.approx(np.sqrt(square), rel=1e-12)
