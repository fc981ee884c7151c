"""What every control is bound to: a model whose parts were looked up once."""

import pytest
import torch
from torch import nn

import kvdrift as kd
from kvdrift.controls.fixed_shape import FixedShape
from kvdrift.models.tiny import tiny

CONTROLS = (FixedShape(64), kd.ReRoll(0), kd.AttentionFloat32(), kd.HeadFloat32(), kd.MatmulFloat32(), kd.TrueFloat32(),
            kd.WideSums(), kd.LayerCast(), kd.SdpaBackend("math"))  # fmt: skip


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.label)
def test_a_fork_does_not_walk_the_module_tree(control, monkeypatch):
    model = kd.load(tiny("llama", dtype=torch.bfloat16), quiet=True)
    run = kd.CacheOn(controls=(control,)).start(model, [1, 2, 3])
    run.step()
    visited, walk = [], nn.Module.named_modules

    def counted(module, *args, **kwargs):
        visited.append(module)
        return walk(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    run.fork().close()
    assert len(visited) < len(model.modules) / 8  # at most down to the first weight
