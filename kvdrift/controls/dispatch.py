"""What modes over single operators share."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """Hands every operator of this thread to `treat`, and runs by itself what that leaves alone."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each of the many calls of `__torch_dispatch__` a wrapper that matters to torch.compile alone."""
        return False

    def treat(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call, or ``NotImplemented`` to leave it alone."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self.treat(func, args, kwargs)
        if result is not NotImplemented:
            return result
        if arrives_whole(func):
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


def arrives_whole(op: OpOverload) -> bool:
    """Whether an operator is a composite of others that has not been taken apart, as under inference mode."""
    return torch.is_inference_mode_enabled() and op._can_decompose()
