"""What must be alike in all processes of a run, and in all runs that add to one store."""

from __future__ import annotations

from typing import Any

import torch

from kvdrift import provenance

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
