"""What a number depends on besides the model and the prompt: versions, hardware, threads, arithmetic flags.

Nothing here names a person, a machine or a folder: a report made from it can be handed on.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kvdrift.version import __version__

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "gguf", "tokenizers", "numpy")
ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "KMP_AFFINITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def collect(*models: Any) -> dict[str, Any]:
    """Gather everything about this process that can change a bit of the arithmetic.

    Parameters
    ----------
    models
        The models in use (what `kvdrift.load` returns), each described once by name, dtypes, attention and device.

    Returns
    -------
    dict
        Groups ``software``, ``hardware``, ``threads``, ``arithmetic`` and ``models``; every value is one that
        JSON can hold.

    Examples
    --------
    >>> from kvdrift import provenance
    >>> provenance.collect()["arithmetic"]["float32_matmul_precision"]
    'highest'
    """
    return {
        "software": _software(),
        "hardware": _hardware(),
        "threads": {"intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads()},
        "arithmetic": _arithmetic(),
        "models": [_model(model) for model in dict.fromkeys(models)],
    }


def prompt_hash(ids: Sequence[int]) -> str:
    """The first 16 hex digits of the SHA-256 of token ids: equal hashes mean equal prompts.

    Examples
    --------
    >>> from kvdrift.provenance import prompt_hash
    >>> prompt_hash([1, 2, 3]) == prompt_hash((1, 2, 3))
    True
    """
    return hashlib.sha256(",".join(str(int(token)) for token in ids).encode()).hexdigest()[:16]


@lru_cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _software() -> dict[str, Any]:
    versions = {package: _version(package) for package in PACKAGES}
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        "kvdrift": __version__,
        "python": platform.python_version(),
        **{package: number for package, number in versions.items() if number is not None},
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "cudnn": str(cudnn) if cudnn is not None else None,
    }


def _cpu_name() -> str:
    """The processor's own name, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _hardware() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "gpus": gpus,
    }


def _math_libraries() -> list[str]:
    """The lines of torch's build summary that name a maths library, without its build paths."""
    words = ("Math Kernel Library", "MKL-DNN", "oneDNN", "OpenMP", "BLAS is", "Accelerate")
    lines = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    named = [line for line in lines if any(word in line for word in words) and "Build settings" not in line]
    settings = torch.__config__.show().partition("Build settings:")[2]
    blas = [part.strip() for part in settings.split(",") if part.strip().startswith("BLAS_INFO=")]
    return [*named, *blas]


def _arithmetic() -> dict[str, Any]:
    cuda = torch.backends.cuda
    fp16_bf16_math = getattr(cuda, "fp16_bf16_reduction_math_sdp_allowed", None)
    return {
        "math_libraries": _math_libraries(),
        "mkl": torch.backends.mkl.is_available(),
        "mkldnn": torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "float32_matmul_precision": _float32_matmul_precision(),
        "tf32_matmul": _tf32(cuda.matmul),
        "tf32_cudnn": _tf32(torch.backends.cudnn),
        "fp16_reduced_precision_reduction": _flag(cuda.matmul.allow_fp16_reduced_precision_reduction),
        "bf16_reduced_precision_reduction": _flag(cuda.matmul.allow_bf16_reduced_precision_reduction),
        "fp16_bf16_reduction_math_sdp": bool(fp16_bf16_math()) if fp16_bf16_math else None,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": bool(torch.backends.cudnn.deterministic),
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
        "flush_denormal": _flushes_denormals(),
        "sdpa_backends": [
            name
            for name, enabled in (
                ("flash", cuda.flash_sdp_enabled()),
                ("mem_efficient", cuda.mem_efficient_sdp_enabled()),
                ("cudnn", cuda.cudnn_sdp_enabled()),
                ("math", cuda.math_sdp_enabled()),
            )
            if enabled
        ],
    }


def _tf32(backend: Any) -> Any:
    """Whether TensorFloat-32 is allowed, or what the backend says where it was set by PyTorch's newer flags alone."""
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:
        return str(backend.fp32_precision)


def _float32_matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set by the newer flags, in a way that has no older name
        return str(getattr(torch.backends, "fp32_precision", "unknown"))


def _flag(value: Any) -> Any:
    """A flag as JSON: some torch versions hold a tuple of booleans here."""
    return [bool(part) for part in value] if isinstance(value, tuple) else bool(value)


def _flushes_denormals() -> bool:
    """Whether this thread turns subnormal results into zero (there is no getter, so: one multiplication)."""
    tiny = torch.finfo(torch.float32).tiny
    return bool((torch.tensor([tiny]) * 0.5).item() == 0.0)


def _model(model: Any) -> dict[str, Any]:
    module = model.hf
    parameters = dict(module.named_parameters())
    config = module.config
    return {
        "name": Path(str(model.name)).name if os.path.isabs(str(model.name)) else str(model.name),
        **({} if model.weights is None else {"weights": model.weights}),
        "class": type(module).__name__,
        "parameters": sum(p.numel() for p in parameters.values()),
        "weight_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values()}),
        "driver": model.backend.driver,
        "attention": str(model.attn),
        "experts": getattr(config, "_experts_implementation", None) if model.architecture.n_experts else None,
        "devices": sorted({str(p.device) for p in parameters.values()}),
    }
