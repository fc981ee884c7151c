"""From a name, a folder or a loaded module to a `Model`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from kvdrift.backends.kinds import wrapped
from kvdrift.errors import InputError, ModelError
from kvdrift.models.model import Model
from kvdrift.models.presets import PRESETS, resolve, suggest
from kvdrift.models.refuse import refuse_config, refuse_file, refuse_folder, refuse_module
from kvdrift.models.source import Source

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


def load(
    x: Any,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    attn: str = "auto",
    *,
    tokenizer: Any = None,
    device_map: Any = None,
    repair: bool = True,
    quiet: bool = False,
) -> Model:
    """Load a model, or wrap one that is loaded already.

    Parameters
    ----------
    x
        A preset name (``"smollm2-135m"``, …), a Hub id, a local folder, a `transformers` causal LM, a TransformerLens
        bridge or an nnsight model around one, or a `Model`.
    dtype
        ``"auto"``: bfloat16 on the CPU; on CUDA float16 if a probe pass stays finite, else bfloat16. For a module
        that is loaded already only its own dtype can be asked for.
    device
        ``"auto"``: CUDA where there is one, else the CPU.
    attn
        ``"auto"``: sdpa where the model supports it, else eager. Or the name of an implementation.
    tokenizer
        For a loaded module: its tokenizer. Without one, prompts are token ids.
    device_map
        Passed through to ``from_pretrained`` for models over several GPUs.
    repair
        For a TransformerLens bridge whose attention does not find its cache: hand it over while kvdrift runs the
        bridge, and at no other time. The message printed says whether that was needed.
    quiet
        Do not print what was chosen.

    Raises
    ------
    InputError
        If an argument cannot be used.
    ModelError
        If there is no such model or it is not a decoder language model.
    WeightsError
        If a preset's weights cannot be fetched or verified.

    Examples
    --------
    >>> import kvdrift as kd
    >>> model = kd.load(kd.models.tiny("llama"), quiet=True)
    >>> model.architecture.grouping
    'GQA'
    """
    if device_map is not None and not isinstance(x, (str, Path)):
        raise InputError(
            f"device_map={device_map!r} is for a model that is loaded here, and this one is loaded already."
        )
    if isinstance(x, Model):
        return _unchanged(_again(x, tokenizer, repair), dtype, device, attn)
    if (backend := wrapped(x, repair)) is not None:
        own = backend.tokenizer if tokenizer is None else tokenizer
        model = _unchanged(Model(backend.module, own, backend.name, backend), dtype, device, attn)
        for note in () if quiet else backend.notes():
            print(f"kvdrift: {note}", file=sys.stderr)
    elif isinstance(x, nn.Module):
        refuse_module(x)
        model = _unchanged(Model(x, tokenizer), dtype, device, attn)
    elif isinstance(x, (str, Path)):
        model = _from_pretrained(str(x), dtype, device, attn, tokenizer, device_map, quiet)
        name = str(x) if str(x) in PRESETS or not Path(x).is_dir() else str(Path(x).resolve())
        if name in PRESETS:
            model.weights = PRESETS[name].weights
        model.source = Source(name, model.device.type, attn, device_map, tokenizer is None)
    else:
        inner = getattr(x, "model", None)  # of a pipeline, say
        hint = f"; give the {type(inner).__name__} in it (its .model)" if isinstance(inner, nn.Module) else ""
        raise InputError(f"kd.load takes a name, a folder or a loaded model, not {type(x).__name__}{hint}.")
    if model.attn == "flex_attention":
        raise ModelError(
            "flex_attention compiles its kernel, so that nothing inside can be seen or re-ordered; use attn='sdpa' or "
            "'eager'."
        )
    if not quiet:
        print(f"kvdrift: {model!r}", file=sys.stderr)
    return model


def _again(model: Model, tokenizer: Any, repair: bool) -> Model:
    """A model that was loaded before, with another tokenizer or without repair where that is asked for."""
    if not repair:
        model = model.as_it_is()
    if tokenizer is None or tokenizer is model.tokenizer:
        return model
    other = Model(model.hf, tokenizer, model.name, model.backend)
    other.weights = model.weights
    other.source = None if model.source is None else replace(model.source, tokenizer=False)
    return other


def _unchanged(model: Model, dtype: str | torch.dtype, device: str | torch.device, attn: str) -> Model:
    """Check that what is asked of a loaded model is what it is already."""
    if dtype != "auto" and _dtype(dtype) != model.dtype:
        raise InputError(
            f"This model is loaded in {model.dtype_name} and kvdrift does not cast your copy; "
            f"load it with dtype={str(dtype).removeprefix('torch.')!r} instead."
        )
    if device != "auto" and (wanted := _device(device)) != model.device and wanted != torch.device(model.device.type):
        raise InputError(
            f"This model is on {model.device} and kvdrift does not move your copy; move it with .to({str(device)!r})."
        )
    if attn not in ("auto", model.attn):
        model.backend.refuse_switching(attn)
    return model


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype!r} is not supported; choose auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device={device!r} is no device; choose auto, cpu, cuda or cuda:N.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device={str(device)!r} was asked for, but there is no CUDA device here; use cpu.")
    if chosen.type not in ("cpu", "cuda") and not (chosen.type == "mps" and torch.backends.mps.is_available()):
        raise InputError(f"device={str(device)!r} cannot be used here; choose auto, cpu, cuda or cuda:N.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device={str(device)!r}: this machine has {torch.cuda.device_count()} CUDA devices.")
    return chosen


def _from_pretrained(
    name: str,
    dtype: str | torch.dtype,
    device: str | torch.device,
    attn: str,
    tokenizer: Any,
    device_map: Any,
    quiet: bool,
) -> Model:
    where = _device(device)
    wanted = None if dtype == "auto" else _dtype(dtype)
    source = _source(name, quiet)
    options: dict[str, Any] = {"trust_remote_code": False}
    if attn != "auto":
        options["attn_implementation"] = attn
    if device_map is not None:
        options["device_map"] = device_map
    _quietly(_check_config, source)  # before anything large is fetched
    if tokenizer is None:
        tokenizer = _tokenizer(source)

    def fetch(chosen: torch.dtype) -> Model:
        hf = _quietly(_pretrained, source, dtype=chosen, **options)
        hf.eval().requires_grad_(False)
        if device_map is None:
            hf.to(where)
        return Model(hf, tokenizer, Path(name).name if Path(name).is_dir() else name)

    if wanted is not None:
        return fetch(wanted)
    on_cuda = torch.cuda.is_available() and (where.type == "cuda" if device_map is None else device_map != "cpu")
    if not on_cuda:
        return fetch(torch.bfloat16)
    return _float16_if_finite(fetch, name, quiet)


def _float16_if_finite(fetch: Callable[[torch.dtype], Model], name: str, quiet: bool) -> Model:
    """The model in float16, or in bfloat16 if a probe pass in float16 overflows."""
    model = fetch(torch.float16)
    if _stays_finite(model):
        return model
    if not quiet:
        print(f"kvdrift: {name} overflows in float16 on a probe pass, so bfloat16 it is.", file=sys.stderr)
    return fetch(torch.bfloat16)


def _source(name: str, quiet: bool) -> str:
    """What ``from_pretrained`` is given for ``name``."""
    if name in PRESETS:
        return str(resolve(name, progress=not quiet))
    folder = Path(name)
    if folder.is_dir():
        refuse_folder(folder)
        return name
    if folder.is_file():
        refuse_file(folder)
    if folder.is_absolute() or name.startswith((".", "~")):
        raise ModelError(f"There is no folder {name}; give one that holds config.json and the weights.")
    if "/" not in name:
        near = suggest(name)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ModelError(f"There is no preset, folder or Hub id {name!r}{hint} (presets: {', '.join(PRESETS)}).")
    return name


def _check_config(source: str) -> None:
    refuse_config(source, AutoConfig.from_pretrained(source, trust_remote_code=False))


def _pretrained(source: str, **options: Any) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f"The weights of {source} are incomplete: {len(missing)} are missing ({missing[0]}, …) and would be random "
            "numbers; get the whole checkpoint."
        )
    return model


def _quietly(call: Any, source: str, **options: Any) -> Any:
    """Run a ``from_pretrained`` without its bars, and turn its many failures into one sentence."""
    bars, hub_level = hf_logging.is_progress_bar_enabled(), hub_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    try:
        return call(source, **options)
    except ModelError:
        raise
    except Exception as error:  # transformers and safetensors raise many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "a Hub id needs a network or a local copy; gated models need `hf auth login`"
        local = Path(source).is_dir()
        raise ModelError(f"Cannot load {source!r}: {reason}{'' if local else f' ({hint}).'}") from error
    finally:
        hub_logging.set_verbosity(hub_level)
        if bars:
            hf_logging.enable_progress_bar()


def _tokenizer(source: str) -> Any:
    """The tokenizer beside the weights, or None where there is none."""
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception:  # transformers raises many kinds; prompts are token ids then
        return None


def _stays_finite(model: Model) -> bool:
    ids = torch.randint(model.vocab_size, (1, 32), generator=torch.Generator().manual_seed(0)).to(model.device)
    return bool(model.backend.forward(ids, 0).isfinite().all())
