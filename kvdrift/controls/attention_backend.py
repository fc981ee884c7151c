"""One of the kernels behind PyTorch's scaled_dot_product_attention, and which of them ran."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvdrift.controls.combine import ATTENTION_KERNEL
from kvdrift.controls.scope import Scope
from kvdrift.errors import InputError, ModelError
from kvdrift.models.model import Model

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "overrideable",
}
"""Which backend a fused operator belongs to; a call in which none of them runs is computed by ``math``."""


@dataclass(frozen=True)
class SdpaBackend:
    """A control that allows scaled_dot_product_attention one kernel, and checks that this one ran.

    Parameters
    ----------
    name
        ``"math"``, ``"flash"``, ``"efficient"`` or ``"cudnn"``. On the CPU there are math and flash.

    Raises
    ------
    InputError
        If the name is none of these.
    ModelError
        In a forward pass, if the kernel cannot run a call (with PyTorch's reason), or if scaled_dot_product_attention
        was never called: the model must run with attn="sdpa".

    Examples
    --------
    >>> import kvdrift as kd
    >>> model, math = kd.load(kd.models.tiny("llama"), quiet=True), (kd.SdpaBackend("math"),)
    >>> kd.CacheOn(attn="sdpa", controls=math).start(model, [1, 2, 3]).step().position
    2
    """

    decides: ClassVar[frozenset[str]] = frozenset({ATTENTION_KERNEL})

    name: str

    def __post_init__(self) -> None:
        if self.name not in BACKENDS:
            raise InputError(f"SdpaBackend({self.name!r}): choose one of {', '.join(BACKENDS)}.")

    @property
    def label(self) -> str:
        """``"sdpa NAME"``."""
        return f"sdpa {self.name}"

    def bind(self, model: Model) -> Scope:
        """Prepare the forward passes of ``model``."""

        def enter(stack: ExitStack) -> None:
            mode = _Watch(self.name, Counter())
            stack.push(mode.check)
            stack.enter_context(sdpa_kernel(BACKENDS[self.name]))
            stack.enter_context(mode)

        return Scope(enter)


@dataclass(frozen=True)
class WatchSdpa:
    """A control that changes nothing and counts which kernels scaled_dot_product_attention runs.

    Attributes
    ----------
    ran
        Calls by kernel (``"math"``, ``"flash"``, …), so far.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model, watch = kd.load(kd.models.tiny("llama"), quiet=True), WatchSdpa()
    >>> _ = kd.CacheOn(controls=(watch,)).start(model, [1, 2, 3]).step()
    >>> sum(watch.ran.values()) == model.architecture.n_layers
    True
    """

    ran: Counter[str] = field(default_factory=Counter)

    label: ClassVar[str] = "watched sdpa"

    def bind(self, model: Model) -> Scope:
        """Prepare the forward passes of ``model``."""

        def enter(stack: ExitStack) -> None:
            stack.enter_context(_Watch(None, self.ran))

        return Scope(enter)


class _Watch(TorchFunctionMode):
    """Sees calls of scaled_dot_product_attention and the kernels that they run."""

    def __init__(self, wanted: str | None, ran: Counter[str]) -> None:
        super().__init__()
        self.wanted, self.ran = wanted, ran

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        seen = _Fused()
        try:
            with seen:
                result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if self.wanted is None or not ("backend" in str(error) or "kernel" in str(error)):
                raise
            raise ModelError(
                f"The {self.wanted} kernel of scaled_dot_product_attention cannot run here: "
                f"{_reason(func, args, kwargs or {}) or _line(error)}"
            ) from error
        self.ran.update(seen.kernels or ["math"])
        return result

    def check(self, kind: type[BaseException] | None, *_: object) -> None:
        """Refuse a pass that ended well with another kernel, or with none."""
        if kind is None and set(self.ran) != {self.wanted}:
            found = " and ".join(self.ran) or "no scaled_dot_product_attention at all"
            raise ModelError(f"{found} ran instead of the {self.wanted} kernel; run the model with attn='sdpa'.")


class _Fused(TorchDispatchMode):
    """Remembers fused attention operators."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kernel = _KERNELS.get(func._schema.name.partition("::")[2])
        if kernel is not None:
            self.kernels.append(kernel)
        return func(*args, **(kwargs or {}))


def _reason(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What PyTorch warns about when the call is made once more."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(RuntimeError):
            func(*args, **kwargs)
    return " ".join(dict.fromkeys(_line(warning.message) for warning in caught))


def _line(message: object) -> str:
    """A message of PyTorch without the place in its source."""
    return " ".join(str(message).split("(Triggered internally")[0].split())
