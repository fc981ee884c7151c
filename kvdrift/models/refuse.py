"""What is no decoder language model that kvdrift can run: one sentence, which names what to give instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvdrift.backends.signature import beneath
from kvdrift.errors import ModelError

GGUF = b"GGUF"


def refuse_module(module: nn.Module) -> None:
    """Refuse a loaded module that is compiled, a wrapper, or no decoder language model with a head.

    Raises
    ------
    ModelError
        With what to give instead.
    """
    kind = type(module).__name__
    _refuse_compiled(module)
    if not hasattr(module, "config") or not hasattr(module, "get_input_embeddings"):
        inner = beneath(module)
        if inner is None:
            raise ModelError(f"{kind} is not a transformers model; give a causal LM of transformers.")
        path = next(name for name, part in module.named_modules() if part is inner)
        raise ModelError(
            f"{kind} is not a transformers model but a wrapper around one; give the {type(inner).__name__} inside it "
            f"(its .{path})."
        )
    tuned: Any = getattr(module, "active_peft_config", None)
    if getattr(tuned, "is_prompt_learning", False):
        raise ModelError(
            f"{kind} is tuned with {tuned.num_virtual_tokens} virtual tokens ({_name_of(tuned.peft_type)}), which its "
            "forward adds anew to every call, and without position ids, so that a pass with a cache does not go "
            "on where the last one ended; give an adapter that changes weights (LoRA), or the model that was tuned "
            "(model.get_base_model())."
        )
    inner = beneath(module)
    config = getattr(inner, "config", None)
    if not isinstance(inner, PreTrainedModel) or not isinstance(config, PreTrainedConfig):
        return
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(encoder_decoder(type(inner).__name__))
    known = type(inner).__module__.startswith("transformers.")  # classes of the user's may call their head otherwise
    if known and inner.get_output_embeddings() is None:
        raise ModelError(no_head(type(inner).__name__, config))


def refuse_folder(folder: Path) -> None:
    """Refuse a folder that holds no model of transformers.

    Raises
    ------
    ModelError
        With what it holds, as far as its files tell, and what to give instead.
    """
    if (folder / "config.json").is_file():
        return
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        raise ModelError(gguf_file(gguf[0]))
    if (folder / "adapter_config.json").is_file():
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
        raise ModelError(
            f"{folder} holds a PEFT adapter without its model; load {base or 'the model'}, put the adapter on it with "
            "peft.PeftModel.from_pretrained(model, folder), and give that."
        )
    if (folder / "model_index.json").is_file():
        raise ModelError(
            f"{folder} holds a diffusers pipeline, which has no causal language model; give a folder of transformers "
            "with one."
        )
    if (folder / "modules.json").is_file():
        raise ModelError(
            f"{folder} holds a sentence-transformers model, which embeds texts; give a causal language model, such as "
            "the one that it was made from."
        )
    raise ModelError(
        f"{folder} is a folder without a config.json, so it holds no transformers model; give the folder that "
        "save_pretrained wrote."
    )


def refuse_file(path: Path) -> None:
    """Refuse a file, which is never a model here.

    Raises
    ------
    ModelError
        With what to give instead.
    """
    with path.open("rb") as file:
        if path.suffix == ".gguf" or file.read(4) == GGUF:
            raise ModelError(gguf_file(path))
    raise ModelError(f"{path} is a file; give the folder that holds config.json and the weights.")


def refuse_config(source: str, config: PreTrainedConfig) -> None:
    """Refuse a checkpoint that is no decoder language model, before its weights are fetched.

    Raises
    ------
    ModelError
        With what to give instead.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(encoder_decoder(source))
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{source} is a {config.model_type} model, and transformers knows no causal language model of that type; "
            "give one that writes text (AutoModelForCausalLM)."
        )
    kinds = list(config.architectures or ())
    bodies = transformers.MODEL_MAPPING.get(type(config), None)
    names = {kind.__name__ for kind in (bodies if isinstance(bodies, tuple) else (bodies,)) if kind is not None}
    if kinds and set(kinds) <= names:
        raise ModelError(no_head(f"{source} ({kinds[0]})", config))


def encoder_decoder(name: str) -> str:
    """The sentence on an encoder-decoder."""
    return (
        f"{name} is an encoder-decoder model; kvdrift studies decoder-only language models: give one of those, such as "
        "a checkpoint of a Llama, Qwen or Gemma model."
    )


def no_head(name: str, config: PreTrainedConfig) -> str:
    """The sentence on a body without a head, as embedding models are."""
    causal: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if causal is None or getattr(config, "is_decoder", True) is False:
        instead = "give a decoder language model"
    else:
        instead = f"give a {causal.__name__}, with weights of its head"
    return f"{name} has no language-model head and so predicts no token; {instead}."


def gguf_file(path: Path) -> str:
    """The sentence on weights in llama.cpp's format."""
    return (
        f"{path} is a GGUF file, which llama.cpp runs and transformers does not; give a Hub id or a folder with "
        f"safetensors, or dequantise it: AutoModelForCausalLM.from_pretrained({str(path.parent)!r}, "
        f"gguf_file={path.name!r}), and give that model."
    )


def _refuse_compiled(module: nn.Module) -> None:
    if hasattr(module, "_orig_mod"):
        raise ModelError(
            "A compiled model fuses the sites that kvdrift reads; give the uncompiled one (model._orig_mod)."
        )
    for name, part in module.named_modules():
        place = f"model.{name}" if name else "model"
        if hasattr(part, "_orig_mod"):
            raise ModelError(
                f"{place} is compiled, which fuses the sites that kvdrift reads; put the uncompiled one "
                f"({place}._orig_mod) in its place, or load the model a second time."
            )
        if getattr(part, "_compiled_call_impl", None) is not None:
            raise ModelError(
                f"{place} was compiled in place (.compile()), which fuses the sites that kvdrift reads; undo it with "
                f"{place}._compiled_call_impl = None, or load the model a second time."
            )
        if hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable"):
            raise ModelError(
                f"{place}.forward is a compiled function, which fuses the sites that kvdrift reads; go back with "
                f"del {place}.forward, or load the model a second time."
            )


def _name_of(kind: Any) -> str:
    return str(getattr(kind, "value", kind)).lower().replace("_", " ")
