"""What a model takes is found through everything that is wrapped around its forward."""

import functools

import pytest
import torch
from torch import nn

import kvdrift as kd
from kvdrift.backends.signature import CACHE_ARGUMENTS, beneath, execution_device, forward_parameters
from kvdrift.models.tiny import tiny


def replaced(model):
    given = model.forward
    model.forward = lambda *args, **kwargs: given(*args, **kwargs)
    return model


def wrapped(model):
    given = model.forward

    @functools.wraps(given)
    def forward(*args, **kwargs):
        return given(*args, **kwargs)

    model.forward = forward
    return model


def extended(model):
    kind = type(model)

    class Extended(kind):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.__class__ = Extended
    return model


class Adapted(nn.Module):
    """An adapter's shape: its forward names some arguments, hands on the others, and has what the model has."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return self.base_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)


AROUND = {"replaced": replaced, "wrapped": wrapped, "extended": extended, "adapted": Adapted}
around = pytest.mark.parametrize("wrap", AROUND.values(), ids=AROUND.keys())


@around
@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
def test_the_forward_beneath_says_what_is_taken(wrap, family):
    plain = forward_parameters(tiny(family))
    assert plain.intersection(CACHE_ARGUMENTS)
    assert forward_parameters(wrap(tiny(family))) == plain


@around
def test_a_wrapped_model_runs_as_it_is(wrap, same_bits):
    prompt = [5, 9, 100, 33, 7]
    plain = kd.record(tiny("llama"), prompt, max_new_tokens=3, progress=False)
    found = kd.record(wrap(tiny("llama")), prompt, max_new_tokens=3, progress=False)
    assert same_bits(found.tensors["logits"], plain.tensors["logits"])


def test_a_forward_that_takes_nothing_more_is_not_looked_through():
    class Narrow(Adapted):
        def forward(self, input_ids):
            return self.base_model(input_ids=input_ids)

    assert forward_parameters(Narrow(tiny("llama"))) == {"input_ids"}
    with pytest.raises(kd.errors.ModelError, match="takes no cache"):
        kd.load(Narrow(tiny("llama")), quiet=True)


def test_the_model_inside():
    model = tiny("llama")
    assert beneath(model) is model
    assert beneath(Adapted(model)) is model
    assert beneath(nn.Linear(2, 2)) is None


def test_offloaded_weights_run_where_they_are_brought():
    accelerate = pytest.importorskip("accelerate")
    hf = accelerate.cpu_offload(tiny("llama"), execution_device="cpu")
    assert hf.get_input_embeddings().weight.is_meta
    assert execution_device(hf.get_input_embeddings()) == torch.device("cpu")
    model = kd.load(hf, quiet=True)
    drift = kd.compare(model, [5, 9, 100], max_new_tokens=3, floor=1, progress=False)
    plain = kd.compare(tiny("llama"), [5, 9, 100], max_new_tokens=3, floor=1, progress=False)
    assert (drift.values("logits", "logit_max") == plain.values("logits", "logit_max")).all()
    assert execution_device(tiny("llama")) is None


@pytest.mark.parametrize("kind", ["LoraConfig", "IA3Config"])
def test_adapters_that_change_weights_run(kind):
    peft = pytest.importorskip("peft")
    extra = {"r": 4, "init_lora_weights": False} if kind == "LoraConfig" else {"feedforward_modules": ["down_proj"]}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], **extra)
    with torch.random.fork_rng(devices=[]):
        model = peft.get_peft_model(tiny("llama"), config).eval()
    assert kd.load(model, quiet=True).backend.takes_logits_to_keep
    patched = kd.patch(model, [5, 9, 100], "kv", max_new_tokens=3, placebos=0, progress=False)
    assert patched.restored(role="full patch") == 1


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_are_refused(kind):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with torch.random.fork_rng(devices=[]):
        model = peft.get_peft_model(tiny("llama"), config)
    with pytest.raises(kd.errors.ModelError, match="4 virtual tokens"):
        kd.load(model, quiet=True)
