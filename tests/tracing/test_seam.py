"""The attention seam: what links see, in which order, and that nothing stays behind."""

import gc
import weakref
from contextlib import ExitStack

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvdrift.controls.fixed_shape import fixed_shape
from kvdrift.errors import InputError
from kvdrift.models.tiny import FAMILIES, tiny
from kvdrift.tracing.seam import Order, attention_tables, eager_function, seam

IDS = torch.tensor([[5, 9, 100, 33, 7]])


class Link:
    def __init__(self, order=Order.OBSERVE, log=None, name=None, act=None):
        self.order, self.log, self.name, self.act = order, [] if log is None else log, name, act
        self.calls = []

    def __call__(self, call, proceed):
        self.calls.append((call.module, call.query.shape, call.key.shape))
        self.log.append(self.name)
        if self.act is not None:
            self.act(call)
        return proceed(call)


@pytest.fixture
def snapshot():
    before = {id(t): (dict(t._local_mapping), dict(t._global_mapping)) for t in [ALL_ATTENTION_FUNCTIONS]}

    def unchanged():
        return before == {id(t): (t._local_mapping, t._global_mapping) for t in [ALL_ATTENTION_FUNCTIONS]}

    return unchanged


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_link_sees_every_layer_and_changes_nothing(attn, snapshot):
    model, link = tiny("llama", attn=attn), Link()
    plain = model(IDS).logits
    with seam(model, link):
        watched = model(IDS).logits
    assert torch.equal(plain, watched)
    assert [shape for _, shape, _ in link.calls] == [torch.Size([1, 8, 5, 32])] * 4
    assert [shape for _, _, shape in link.calls] == [torch.Size([1, 2, 5, 32])] * 4
    assert [module.layer_idx for module, _, _ in link.calls] == [0, 1, 2, 3]
    assert snapshot()
    model(IDS)
    assert len(link.calls) == 4, "the link still listens"


def test_stages_stand_in_order_whatever_was_entered_first():
    model, log = tiny("llama", num_hidden_layers=1), []
    with ExitStack() as stack:
        for order in (Order.EXECUTE, Order.OBSERVE, Order.KERNEL, Order.READ, Order.WRITE_OUTPUT, Order.WRITE):
            stack.enter_context(seam(model, Link(order, log, order.name)))
        model(IDS)
    assert log == ["READ", "WRITE", "OBSERVE", "WRITE_OUTPUT", "EXECUTE", "KERNEL"] == [order.name for order in Order]


def test_links_of_one_stage_stand_as_they_were_entered():
    model, log = tiny("llama", num_hidden_layers=1), []
    with seam(model, Link(Order.READ, log, "outer")), seam(model, Link(Order.READ, log, "inner")):
        model(IDS)
    assert log == ["outer", "inner"]


class Kernel(Link):
    def __init__(self, name):
        super().__init__(Order.KERNEL, name=name)

    def __str__(self):
        return self.name


def test_a_second_kernel_is_refused_before_anything_is_put_in_place(snapshot):
    model, other, one = tiny("llama", num_hidden_layers=1), tiny("llama", num_hidden_layers=1, seed=1), Kernel("one")
    with seam(model, one):
        with (
            pytest.raises(InputError, match="one and two both decide the kernel that attention runs"),
            seam(model.model.layers[0], Kernel("two")),
        ):
            raise AssertionError("was put in place")
        with seam(other, Kernel("elsewhere")), seam(model, one):
            model(IDS)
            assert len(one.calls) == 2
    assert snapshot()
    with seam(model, Kernel("two")):
        model(IDS)


def test_kernels_that_are_equal_replace_alike():
    model = tiny("llama", num_hidden_layers=1)
    one, alike, other = (fixed_shape(model, length) for length in (32, 32, 16))
    with one, alike:
        model(IDS)
        with pytest.raises(InputError, match=r"FixedShape\(max_length=32, .* and FixedShape\(max_length=16"), other:
            raise AssertionError("was put in place")


def test_a_write_reaches_later_links_and_the_kernel():
    model = tiny("llama")

    def zero(call):
        call.value = torch.zeros_like(call.value)

    seen = []
    writer, reader = Link(Order.WRITE, act=zero), Link(act=lambda call: seen.append(call.value.abs().max().item()))
    plain = model(IDS).logits
    with seam(model, reader), seam(model, writer):
        written = model(IDS).logits
    assert seen == [0.0] * 4
    assert not torch.equal(plain, written)


def test_two_models_do_not_see_each_other():
    one, two = tiny("llama"), tiny("llama", seed=1)
    first, second = Link(), Link()
    with seam(one, first), seam(two, second):
        one(IDS)
        assert (len(first.calls), len(second.calls)) == (4, 0)
        two(IDS)
        assert (len(first.calls), len(second.calls)) == (4, 4)


def test_nested_seams_leave_one_after_the_other(snapshot):
    model, outer, inner = tiny("llama"), Link(), Link()
    with seam(model, outer):
        with seam(model, inner):
            model(IDS)
        model(IDS)
        assert (len(outer.calls), len(inner.calls)) == (8, 4)
    assert snapshot()


def test_links_that_come_and_go_inside_a_pass_see_the_calls_that_follow():
    model, log = tiny("llama", num_hidden_layers=4), []
    inner, stack = Link(Order.WRITE, log, "inner"), ExitStack()

    def enter_and_leave(call):
        if call.module.layer_idx == 1:
            stack.enter_context(seam(model, inner))
        if call.module.layer_idx == 3:
            stack.close()

    outer = Link(Order.OBSERVE, log, "outer", act=enter_and_leave)
    with seam(model, outer):
        for _ in range(2):
            model(IDS)
            assert log == ["outer", "outer", "inner", "outer", "inner", "outer"]  # a call keeps the chain it began with
            log.clear()
    model(IDS)
    assert log == []


def test_nothing_of_a_link_is_held_when_it_has_left():
    model, link = tiny("llama", num_hidden_layers=1), Link()
    with seam(model, Link()):
        with seam(model, link):
            model(IDS)
        left = weakref.ref(link)
        del link
        gc.collect()
        assert left() is None


def test_the_same_link_twice_leaves_once_at_a_time():
    model, link = tiny("llama"), Link()
    with seam(model, link):
        with seam(model, link):
            model(IDS)
        model(IDS)
    assert len(link.calls) == 12
    model(IDS)
    assert len(link.calls) == 12


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_an_exception_inside_a_pass_restores_the_table(attn, snapshot):
    model = tiny("llama", attn=attn)

    def fail(call):
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"), seam(model, Link(act=fail)):
        model(IDS)
    assert snapshot()
    assert model(IDS).logits.isfinite().all()


def test_a_users_own_override_is_called_and_put_back():
    model, calls = tiny("llama"), []

    def mine(module, query, key, value, attention_mask, **kwargs):
        calls.append(module.layer_idx)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = mine
    try:
        with seam(model, Link()):
            model(IDS)
        assert calls == [0, 1, 2, 3]
        assert ALL_ATTENTION_FUNCTIONS._local_mapping == {"sdpa": mine}
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_eager_is_the_function_of_the_models_own_file():
    from transformers.models.gemma2 import modeling_gemma2

    module = next(m for m in tiny("gemma2").modules() if type(m).__name__.endswith("Attention"))
    assert eager_function(module) is modeling_gemma2.eager_attention_forward
    with pytest.raises(LookupError, match="Linear"):
        eager_function(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_inside_a_seam_and_leaves_no_trace(family, snapshot):
    model, link = tiny(family, num_hidden_layers=2) if family != "lfm2" else tiny(family), Link()
    plain = model(IDS).logits
    with seam(model, link):
        assert torch.equal(model(IDS).logits, plain)
    assert snapshot()
    if attention_tables(model) and family not in ("falcon", "bloom", "mamba"):
        assert link.calls


def test_extra_arguments_reach_the_native_function():
    """A soft-cap, a sink or a window travels in kwargs: dropping one would change the numbers."""
    for family in ("gemma2", "gpt-oss", "granite"):
        model, kwargs = tiny(family), []
        with seam(model, Link(act=lambda call, kwargs=kwargs: kwargs.append(call.kwargs))):
            model(IDS)
        assert all(call["scaling"] is not None for call in kwargs)
        if family == "gemma2":
            assert all(call["softcap"] for call in kwargs)


def test_an_override_made_inside_a_seam_stays():
    def mine(*args, **kwargs):
        raise AssertionError("never called")

    try:
        with seam(tiny("llama"), Link()):
            ALL_ATTENTION_FUNCTIONS["sdpa"] = mine
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is mine
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)
