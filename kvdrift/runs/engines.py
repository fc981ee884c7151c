"""Where the pieces of a long run are worked on, by name: in this process, or by the workers of a Ray cluster."""

from __future__ import annotations

import torch

from kvdrift.errors import InputError
from kvdrift.runs.engine import Engine, LocalEngine
from kvdrift.runs.ray_engine import RayEngine


def engine(
    name: str = "local",
    *,
    workers: int | None = None,
    threads: int | None = None,
    address: str | None = None,
    gpus: int | None = None,
) -> Engine:
    """An engine by its name.

    Parameters
    ----------
    name
        ``"local"``: this process. ``"ray"``: the workers of a Ray cluster, each with a model of its own.
    workers
        How many, for Ray; by default as many as the cluster has room for.
    threads
        CPU threads of each worker; by default those of this process.
    address
        A running Ray cluster (``"HOST:6379"``, ``"ray://HOST:10001"``, ``"auto"``). By default one is started on this
        machine for the time of a run, unless this process has joined one already.
    gpus
        GPUs of each Ray worker; by default one where this process has CUDA, else none.

    Raises
    ------
    InputError
        If an argument cannot be used, or Ray is not installed.

    Examples
    --------
    >>> from kvdrift.runs.engines import engine
    >>> def make_worker():
    ...     return lambda job: {"square": job**2}
    >>> list(engine("local").run(make_worker, {"two": 2, "three": 3}))
    [('two', {'square': 4}), ('three', {'square': 9})]
    """
    for option, value, least in (("workers", workers, 1), ("threads", threads, 1), ("gpus", gpus, 0)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise InputError(f"{option}={value!r}: give a whole number of at least {least}, or leave it out.")
    threads = torch.get_num_threads() if threads is None else threads
    if name == "ray":
        gpus = int(torch.cuda.is_available()) if gpus is None else gpus
        return RayEngine(threads=threads, workers=workers, address=address, gpus=gpus)
    if name != "local":
        raise InputError(f"engine={name!r}: choose 'local' or 'ray'.")
    if workers not in (None, 1) or address is not None:
        raise InputError("workers= and address= are for engine='ray'; the local engine is this process alone.")
    return LocalEngine(threads)
