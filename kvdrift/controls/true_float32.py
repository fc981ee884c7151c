"""True float32: no TensorFloat-32 or bfloat16 inside float32 products, read back and measured."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvdrift.controls.scope import Scope
from kvdrift.errors import ModelError
from kvdrift.models.model import Model

_SIZE = 128


@dataclass(frozen=True)
class TrueFloat32:
    """A control under which float32 products are computed in float32.

    GPUs may round the factors of a float32 product to 10 bits (TensorFloat-32), and CPUs to bfloat16, if PyTorch's
    flags allow it. Inside the context the flags of matrix products and convolutions are off, were read back, and are
    then put back as they were. Whether it took is also measured, on a product whose result shows the rounding, for
    environment variables can overrule the flags.

    Raises
    ------
    ModelError
        When entered, if a flag does not stay off or products are still rounded.

    Examples
    --------
    >>> import kvdrift as kd
    >>> from kvdrift.controls.true_float32 import TrueFloat32
    >>> with TrueFloat32().bind(kd.load(kd.models.tiny("llama"), quiet=True)):
    ...     torch.backends.cuda.matmul.allow_tf32
    False
    """

    label: ClassVar[str] = "true float32"

    def bind(self, model: Model) -> Scope:
        """Prepare the forward passes of ``model``."""
        device = next((weight.device for weight in model.hf.parameters() if not weight.is_meta), torch.device("cpu"))
        checked: list[bool] = []

        def enter(stack: ExitStack) -> None:
            for name, holder, flag, exact in switches():
                before = getattr(holder, flag)
                setattr(holder, flag, exact)
                stack.callback(setattr, holder, flag, before)
                if getattr(holder, flag) != exact:
                    raise ModelError(f"torch.backends.{name}.{flag} stays {getattr(holder, flag)!r}, not {exact!r}, so "
                                     "there is no true float32 here; look for code that sets it.")  # fmt: skip
            if not checked and rounds_factors(device):
                raise ModelError(
                    f"float32 products on {device} are rounded to fewer bits although PyTorch's flags are off; unset "
                    "NVIDIA_TF32_OVERRIDE and ONEDNN_DEFAULT_FPMATH_MODE."
                )
            checked.append(True)

        return Scope(enter)


def switches() -> list[tuple[str, Any, str, Any]]:
    """PyTorch's flags that let float32 products be rounded: name, holder, attribute, and its value for true float32."""
    backends: Any = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        return [
            ("cuda.matmul", backends.cuda.matmul, "allow_tf32", False),
            ("cudnn", backends.cudnn, "allow_tf32", False),
        ]
    holders = {
        "cuda.matmul": backends.cuda.matmul,
        "cudnn.conv": backends.cudnn.conv,
        "cudnn.rnn": backends.cudnn.rnn,
        "mkldnn.matmul": backends.mkldnn.matmul,
        "mkldnn.conv": backends.mkldnn.conv,
    }
    return [(name, holder, "fp32_precision", "ieee") for name, holder in holders.items()]


def rounds_factors(device: torch.device) -> bool:
    """Whether a float32 product on ``device`` rounds its factors: 1 + 2⁻¹⁸ times the unit matrix must stay itself.

    Examples
    --------
    >>> rounds_factors(torch.device("cpu"))
    False
    """
    fine = torch.full((_SIZE, _SIZE), 1 + 2.0**-18, dtype=torch.float32, device=device)
    return not torch.equal(fine @ torch.eye(_SIZE, device=device), fine)
