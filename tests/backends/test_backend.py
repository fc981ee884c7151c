"""What every backend gives: all that is asked of one, without an empty body of the protocol left in between."""

import pytest
import torch

from kvdrift.backends.backend import Backend
from kvdrift.backends.hf import HFBackend
from kvdrift.backends.kinds import kind_of
from kvdrift.backends.nnsight import NNsightBackend
from kvdrift.backends.transformer_lens import BridgeBackend
from kvdrift.models.tiny import tiny

ASKED = {name for name in vars(Backend) if not name.startswith("_")}
PLAIN = {"notes", "refuse_rewriting", "around_plain", "as_it_is", "unwrapped", "plain_name", "hook_points",
         "attention_of", "rerouted"}  # fmt: skip


@pytest.mark.parametrize("kind", [HFBackend, BridgeBackend, NNsightBackend])
def test_every_member_without_a_body_is_its_own(kind):
    homes = {name: next(cls for cls in kind.__mro__ if name in vars(cls)) for name in ASKED}
    assert {name for name, home in homes.items() if home is Backend} <= PLAIN < ASKED


def test_a_plain_model_has_a_backend_that_leaves_it_alone():
    module = tiny("llama")
    backend = kind_of(module)(module)
    assert backend.plain_name("model.layers.0.mlp") == "model.layers.0.mlp"
    assert backend.attention_of(module.model.layers[0].self_attn) is None
    assert backend.as_it_is() is backend
    assert (backend.notes(), backend.hook_points((), None)) == ((), {})
    assert backend.refuse_rewriting("tiny") is None
    with backend.unwrapped() as stand_in, backend.rerouted(module, lambda *_: pytest.fail("nothing goes beside it")):
        assert stand_in(module) is module
        module(torch.tensor([[1, 2, 3]]))
