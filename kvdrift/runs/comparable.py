"""What must be alike in all processes of a run, and in all runs that add to one store."""

from __future__ import annotations

from typing import Any

import torch

from kvdrift import provenance
from kvdrift.models.model import Model
from kvdrift.runs.ship import digest

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Of these it is the number of threads that counts, which is asked for directly."""


def comparable(with_gpu: bool) -> dict[str, Any]:
    """What must be alike in all processes of a run: everything of `provenance.collect` that can change a bit.

    Parameters
    ----------
    with_gpu
        Whether the work is done on a GPU; the first one is compared then.

    Examples
    --------
    >>> from kvdrift.runs.comparable import comparable
    >>> sorted(comparable(False))
    ['arithmetic', 'gpu', 'hardware', 'software', 'threads']
    """
    found = provenance.collect()
    arithmetic = found["arithmetic"]
    variables = {name: value for name, value in arithmetic["environment"].items() if name not in THREAD_VARIABLES}
    gpu = torch.cuda.get_device_name(0) if with_gpu and torch.cuda.is_available() else None
    unused = () if with_gpu else ("cuda", "cudnn")
    return {
        "software": {name: value for name, value in found["software"].items() if name not in unused},
        "hardware": {name: found["hardware"][name] for name in ("system", "cpu", "cpu_capability")},
        "threads": found["threads"]["intra_op"],
        "arithmetic": arithmetic | {"environment": variables},
        "gpu": gpu,
    }


def kept_with(*models: Model) -> dict[str, Any]:
    """What a store must have been made with beside a verb's own settings: `comparable`, and what the models compute.

    Each model is run over a short text, with and without a cache: hooks, patched functions, buffers and whatever else
    changes its numbers, but not its weights, shows in the bits of the logits.

    Parameters
    ----------
    models
        In order; one that is given twice runs once.
    """
    digests = {id(model): digest(model) for model in dict.fromkeys(models)}
    here = comparable(any(model.device.type == "cuda" for model in models))
    return here | {"logits_of_a_short_text": [digests[id(model)] for model in models]}
