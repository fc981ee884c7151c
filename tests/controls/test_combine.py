"""Every pair of controls: both halves take effect in either order, or the pair is refused by naming both."""

from __future__ import annotations

import inspect
from itertools import combinations_with_replacement, permutations

import pytest
import torch

import kvdrift as kd
from kvdrift.controls.attention_backend import WatchSdpa
from kvdrift.controls.combine import check_together, with_arm
from kvdrift.controls.layer_cast import LayerCast
from kvdrift.controls.true_float32 import TrueFloat32
from kvdrift.errors import InputError

PROMPT, TOKENS = [5, 9, 100, 33, 7, 8, 250, 301, 12, 44], [3, 1, 4]
HALF = (
    kd.FixedShape(32), kd.WideSums(), kd.AttentionFloat32(), kd.MatmulFloat32(), LayerCast(), kd.HeadFloat32(),
    kd.SdpaBackend("math"), kd.ReRoll(1), TrueFloat32(),
)  # fmt: skip
CHECKED = (kd.AttentionFloat32, kd.MatmulFloat32, kd.SdpaBackend, TrueFloat32)
"""Controls that raise after a pass in which they did nothing; on a CPU they may change no bit."""
TWICE = {frozenset({type(control).__name__}) for control in HALF if getattr(control, "decides", None)}
REFUSED = {
    frozenset(pair)
    for pair in [
        ("FixedShape", "SdpaBackend"), ("WideSums", "AttentionFloat32"), ("WideSums", "MatmulFloat32"),
        ("LayerCast", "AttentionFloat32"), ("LayerCast", "MatmulFloat32"), ("LayerCast", "HeadFloat32"),
        ("LayerCast", "WideSums"),
    ]
}  # fmt: skip


@pytest.fixture(scope="module")
def half(tiny_model):
    return tiny_model("llama", torch.bfloat16)


@pytest.fixture(scope="module")
def logits(half):
    """Logits of every step of a path under some controls, each run once."""
    kept = {}

    def run(*controls, path=kd.CacheOn):
        key = (path, controls)
        if key not in kept:
            kept[key] = steps(half, path(controls=controls))
        return kept[key]

    return run


def steps(model, path):
    run = path.start(model, PROMPT)
    try:
        return torch.stack([run.step(token).logits.double() for token in [None, *TOKENS]])
    finally:
        run.close()


def kinds(*controls):
    return frozenset(type(control).__name__ for control in controls)


@pytest.mark.parametrize(
    "pair", [*combinations_with_replacement(HALF, 2)], ids=lambda pair: "+".join(sorted(kinds(*pair)))
)
def test_both_halves_show_in_either_order_or_the_pair_is_refused(pair, half, logits):
    for one, other in permutations(pair):
        if kinds(*pair) in REFUSED | TWICE:
            with pytest.raises(InputError, match=r"both decide .*, so one would undo the other") as refused:
                kd.CacheOn(controls=(one, other)).start(half, PROMPT)
            assert all(repr(control) in str(refused.value) for control in pair)
            continue
        found = logits(one, other)
        if "ReRoll" not in kinds(*pair):
            assert torch.equal(found, logits(other, one)), "the order of controls matters"
        for control, alone in ((one, other), (other, one)):
            order_only = isinstance(control, (kd.FixedShape, kd.ReRoll)) and getattr(alone, "decides", None)
            if one == other or isinstance(control, CHECKED) or order_only:
                continue  # the order of terms shows in no bit where sums are wider than what is stored
            assert not torch.equal(found, logits(alone)), f"{control} left no trace beside {alone}"
        if "FixedShape" in kinds(*pair) and "ReRoll" not in kinds(*pair):
            assert torch.equal(found, logits(one, other, path=kd.CacheOff)), "rows are no longer computed at one shape"


@pytest.mark.parametrize(
    "pair",
    [
        (kd.FixedShape(32), kd.FixedShape(32, tile=8)),
        (kd.SdpaBackend("math"), kd.SdpaBackend("flash")),
        (kd.TrueFloat64(), kd.WideSums()),
        (kd.TrueFloat64(), LayerCast()),
    ],
)
def test_two_of_one_kind_that_differ_are_refused(pair, half):
    with pytest.raises(InputError, match="both decide"):
        kd.CacheOff(controls=pair).start(half, PROMPT)


def test_attention_at_one_shape_is_widened(half, logits):
    """The half that was lost: under fixed shape, attention itself ran in 16 bits."""
    seen = []

    def watched(module, query, *rest, **more):
        seen.append((query.dtype, query.shape[2]))
        return native(module, query, *rest, **more)

    layer = half.hf.model.layers[0].self_attn
    namespace = inspect.unwrap(type(layer).forward).__globals__
    native = namespace["eager_attention_forward"]
    namespace["eager_attention_forward"] = watched
    try:
        steps(half, kd.CacheOn(controls=(kd.FixedShape(32), kd.WideSums())))
        assert set(seen) == {(torch.float64, 16)}
        seen.clear()
        steps(half, kd.CacheOn(controls=(kd.FixedShape(32), kd.AttentionFloat32())))
        assert set(seen) == {(torch.float32, 16)}
    finally:
        namespace["eager_attention_forward"] = native


def test_a_control_of_ones_own_goes_with_all_and_an_arm_takes_the_place_of_what_it_decides():
    class Mine:
        label = "mine"

    mine, watch = Mine(), WatchSdpa()
    check_together((mine, mine, kd.FixedShape(8), watch))
    own = (kd.SdpaBackend("math"), mine, kd.WideSums())
    assert with_arm(own, (kd.FixedShape(8),)) == (mine, kd.WideSums(), kd.FixedShape(8))
    assert with_arm(own, (kd.TrueFloat64(),)) == (kd.SdpaBackend("math"), mine, kd.TrueFloat64())


@pytest.mark.parametrize("control", [kd.SdpaBackend("math"), kd.WideSums(), kd.FixedShape(64), kd.AttentionFloat32()])
def test_a_path_with_a_control_is_still_diagnosed(control, tiny_model):
    half = tiny_model("llama", torch.bfloat16, num_hidden_layers=1)
    paths = {"a": kd.CacheOn(controls=(control,)), "b": kd.CacheOff(controls=(control,))}
    assert kd.diagnose(half, PROMPT[:4], **paths, max_new_tokens=2, progress=False).kind in ("rounding", "exact")
