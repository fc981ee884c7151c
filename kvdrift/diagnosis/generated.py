"""``model.generate()`` against path a: its position ids and masks can differ from those of ``forward``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvdrift.bits import same_bits
from kvdrift.controls.combine import with_arm
from kvdrift.controls.fixed_shape import FixedShape
from kvdrift.diagnosis.cases import Case
from kvdrift.diagnosis.evidence import Finding
from kvdrift.diagnosis.lockstep import Moment
from kvdrift.errors import InternalError, one_line
from kvdrift.paths.path import Path

if TYPE_CHECKING:
    from kvdrift.models.model import Model

NEW_TOKENS = 8


def differs_from_forward(model: Model, path: Path, case: Case) -> Finding | None:
    """Generate greedily, follow the same tokens along ``path``, and compare logits in shape-invariant arithmetic.

    Returns
    -------
    Finding or None
        The first step whose logits have other bits; None if none has.
    """
    model = path.model or model
    control = FixedShape(len(case.prompt) + NEW_TOKENS + 1)
    with control.bind(model.hf):
        output = _generated(model, path, case)
    tokens = output.sequences[0, len(case.prompt) :].tolist()
    run = path.start(model, case.prompt, with_arm(path.controls, (control,)))
    try:
        for step, logits in enumerate(output.logits):
            own = run.step(tokens[step - 1] if step else None)
            if not same_bits(own.logits.float(), logits[0].float()):  # generate() returns them in float32
                what = "other logits than forward() with explicit positions gives in shape-invariant arithmetic"
                return Finding("generate", "generate()", what, Moment(case, step, own.position))
    finally:
        run.close()
    return None


def crash(model: Model, path: Path, case: Case, error: Exception) -> Finding:
    """What an error in `differs_from_forward` means: generate() raises by itself, or kvdrift failed.

    Raises
    ------
    InternalError
        If generate() runs with nothing of kvdrift's around it.
    """
    model = path.model or model
    try:
        _generated(model, path, case)
    except Exception as own:  # whatever the model raises
        what = f"raises {type(own).__name__} ({one_line(own)}), where {path.label} runs"
        return Finding("crash", "generate()", what)
    raise InternalError.of(error, f"while it followed generate() of {model.name}") from error


def _generated(model: Model, path: Path, case: Case) -> Any:
    """What generate() returns, greedily, with logits."""
    ids = torch.tensor([case.prompt], device=model.device)
    with model.evaluating(), model.backend.attention(path.attn):
        return model.hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
