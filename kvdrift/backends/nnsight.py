"""How a model wrapped by nnsight is driven: every forward pass is one nnsight trace."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from typing import Any

from kvdrift.backends.hf import HFBackend
from kvdrift.backends.manner import Manner
from kvdrift.errors import ModelError


def is_nnsight(x: Any) -> bool:
    """Whether ``x`` is one of nnsight's wrappers; nnsight itself is not imported to find out."""
    return any(cls.__module__.partition(".")[0] == "nnsight" and cls.__name__ == "Envoy" for cls in type(x).__mro__)


class NNsightBackend(HFBackend):
    """Drives a causal LM through nnsight (`TransformersModel`, `LanguageModel` or `NNsight` around it).

    One trace per pass, so nnsight's own input handling, its replaced ``forward`` methods and edits that the user
    stored with ``model.edit`` are all part of what is measured. kvdrift's hooks and attention seam sit on the
    wrapped module and fire within the trace. Copies that controls make of the module (other dtypes, other
    architectures) are plain `transformers` models, driven without nnsight and without its edits.

    Parameters
    ----------
    wrapper
        The nnsight model. One that is not dispatched yet gets its weights here.

    Raises
    ------
    ModelError
        If it wraps something else than a decoder language model of transformers, or is a part of one.

    Attributes
    ----------
    wrapper
        The nnsight model.
    name
        The wrapped model's name, and that it runs in nnsight.
    tokenizer
        Its tokenizer, or None.
    """

    def __init__(self, wrapper: Any) -> None:
        if wrapper.parent is not None:
            raise ModelError(f"{wrapper.path} is a part of an nnsight model; give the whole model that it belongs to.")
        if not getattr(wrapper, "dispatched", True):
            _dispatch(wrapper)
        module = wrapper._module
        if not hasattr(module, "config") or not hasattr(module, "get_input_embeddings"):
            raise ModelError(
                f"This nnsight model wraps {type(module).__name__}, which is not a transformers model; wrap a causal "
                "LM of transformers."
            )
        super().__init__(module)
        self.wrapper = wrapper
        self.name = f"{getattr(module.config, 'name_or_path', '') or module.config.model_type} (nnsight)"
        self.tokenizer = vars(wrapper).get("tokenizer")

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the module and the kind of wrapper, which is made anew; edits stay behind."""
        return _wrapped_again, (type(self.wrapper), self.module, self.tokenizer)

    @property
    def driver(self) -> str:
        """What runs the model, with its version."""
        return f"nnsight {metadata.version('nnsight')}"

    def manner(self, call: str) -> Manner:
        """As for any model, but always with a mask, over everything consumed so far if a cache keeps tokens.

        Where none is given nnsight adds one that covers the new tokens alone, which hides what the cache holds. A
        mask of ones changes no bit of what transformers computes without one.
        """
        return replace(super().manner(call), mask=True)

    def call(self, arguments: dict[str, Any]) -> Any:
        """Run the model once, inside a trace."""
        import nnsight

        with self.wrapper.trace(**arguments) as tracer:
            output = nnsight.save(tracer.result)
        return output


def _wrapped_again(kind: type, module: Any, tokenizer: Any) -> NNsightBackend:
    """The backend of a module that travelled without its wrapper."""
    return NNsightBackend(kind(module) if tokenizer is None else kind(module, tokenizer=tokenizer))


def _dispatch(wrapper: Any) -> None:
    """Have nnsight load the weights."""
    try:
        wrapper.dispatch()
    except Exception as error:  # transformers and the hub raise many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"This nnsight model has no weights yet, and they cannot be loaded: {reason}; kd.nnsight.sites works "
            "without them."
        ) from error
