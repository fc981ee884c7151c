"""Links that a path owns: in place during its own passes alone, seen by whatever observes, carried by forks."""

from dataclasses import dataclass

import pytest
import torch

import kvdrift as kd
from kvdrift.errors import InputError
from kvdrift.settings import settings_of
from kvdrift.tracing.seam import Order, seam

PROMPT, TOKENS = [5, 9, 100, 33, 7, 8], [3, 1, 4]


def rounded(key):
    """``key`` in eight bits with one scale for each head and position."""
    scale = key.abs().amax(-1, keepdim=True) / 127
    return (key / scale).round().clamp(-127, 127) * scale


class Int8Keys:
    """Hands the kernel keys rounded to eight bits; the cache keeps them as they are."""

    order = Order.READ

    def __init__(self, fail=False):
        self.fail = fail

    def __call__(self, call, proceed):
        if self.fail and call.module.layer_idx == 1:
            raise RuntimeError("in the middle")
        call.key = rounded(call.key)
        return proceed(call)


class Kernel:
    order = Order.KERNEL

    def __call__(self, call, proceed):
        return proceed(call)

    def __repr__(self):
        return "Kernel"


@dataclass(frozen=True)
class EightBits(kd.CacheOn):
    links = (Int8Keys(),)


class EightBitsOff(kd.CacheOff):
    links = (Int8Keys(),)


class Failing(kd.CacheOn):
    links = (Int8Keys(fail=True),)


class Replacing(kd.CacheOn):
    links = (Kernel(),)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


def decoded(path, model):
    run = path.start(model, PROMPT)
    return [run.step().logits, *(run.step(token).logits for token in TOKENS)], run


def test_k_is_what_the_kernel_reads_and_not_what_is_stored(model):
    native, read = (kd.record(model, PROMPT, path=path, sites=["k"], tokens=TOKENS) for path in (None, EightBits()))
    assert torch.equal(read["k"][:, 0], rounded(native["k"][:, 0]))
    assert not torch.equal(read["k"][:, 0], native["k"][:, 0])
    logits, run = decoded(EightBits(), model)
    plain, stored = decoded(kd.CacheOn(), model)
    assert torch.equal(run.cache.layers[0].keys, stored.cache.layers[0].keys)
    assert not any(torch.equal(x, y) for x, y in zip(logits, plain, strict=True))


def test_a_tap_in_a_loop_of_ones_own_sees_what_was_read(model):
    ids = torch.tensor([PROMPT])
    with torch.no_grad(), kd.tap(model, ["k"], positions="all") as plain:
        model.hf(ids)
    with torch.no_grad(), kd.tap(model, ["k"], positions="all") as read, seam(model.hf, Int8Keys()):
        model.hf(ids)
    assert torch.equal(read["k"][0], rounded(plain["k"][0]))


def test_a_patch_is_written_over_what_is_read(model):
    """Keys and values that the kernel reads replaced by the native ones: the native logits, bit for bit."""
    native = kd.Patch("kv", positions="all")
    result = kd.patch(
        model, PROMPT, native, donor=kd.CacheOn(), recipient=EightBits(), tokens=TOKENS, placebos=0, progress=False
    )
    assert result.distance("unpatched").min() > 0
    assert result.distance("patched").max() == 0


def test_a_path_without_a_cache_owns_links_too(model):
    read, run = decoded(EightBitsOff(), model)
    plain, _ = decoded(kd.CacheOff(), model)
    assert not any(torch.equal(x, y) for x, y in zip(read, plain, strict=True))
    assert torch.equal(run.fork().step(7).logits, run.step(7).logits)


def test_they_belong_to_their_own_run_and_its_forks(model):
    alone, native = decoded(EightBits(), model)[0], decoded(kd.CacheOn(), model)[0]
    eight, plain = EightBits().start(model, PROMPT), kd.CacheOn().start(model, PROMPT)
    for place, token in enumerate([None, *TOKENS]):
        forks = [run.fork() for run in (eight, plain)]
        for run, expected in ((eight, alone), (forks[1], native), (plain, native), (forks[0], alone)):
            assert torch.equal(run.step(token).logits, expected[place])
    rerolled = eight.fork((kd.ReRoll(0),)).step(7).logits
    assert not torch.equal(rerolled, plain.fork((kd.ReRoll(0),)).step(7).logits)


def test_an_exception_inside_a_pass_takes_them_away(model):
    with pytest.raises(RuntimeError, match="in the middle"):
        Failing().start(model, PROMPT).step()
    assert torch.equal(kd.CacheOn().start(model, PROMPT).step().logits, decoded(kd.CacheOn(), model)[0][0])


def test_a_path_that_replaces_the_kernel_takes_no_control_that_does(model):
    for control in (kd.FixedShape(32), kd.SdpaBackend("math")):
        with pytest.raises(InputError) as refused:
            Replacing(controls=(control,)).start(model, PROMPT)
        assert str(refused.value).startswith(f"{control} and Kernel both decide the kernel that attention runs, so")
    bound = kd.FixedShape(32).bind(model)
    with bound, pytest.raises(InputError) as met, seam(model.hf, Kernel()):
        raise AssertionError("was put in place")
    assert str(met.value) == str(refused.value).replace(str(kd.SdpaBackend("math")), str(kd.FixedShape(32)))


def test_what_decides_a_path_names_its_links_where_it_has_any():
    assert "links" not in settings_of(kd.CacheOn())
    assert settings_of(EightBits()) != settings_of(Replacing())
