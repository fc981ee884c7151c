"""Where the pieces of a long run are worked on: in this process, or by the workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvdrift.errors import InputError

Worker = Callable[[Any], Mapping[str, Any]]
"""Takes a job and gives its record."""
MakeWorker = Callable[[], Worker]
"""Makes a worker, once in each process; it must be picklable to reach another process."""


class Engine(Protocol):
    """Works on jobs and gives each one's record as it is finished."""

    @property
    def threads(self) -> int:
        """CPU threads of each worker: part of what decides the numbers."""
        ...

    @property
    def workers(self) -> int | None:
        """How many workers there are; None if that depends on the cluster."""
        ...

    def run(self, make_worker: MakeWorker, jobs: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Key and record of every job, in the order of finishing."""
        ...


@dataclass(frozen=True)
class LocalEngine:
    """Works in this process, one job after the other.

    Attributes
    ----------
    threads
        CPU threads for the time of a run; the process has its own number back afterwards.
    """

    threads: int
    workers: int = 1

    def run(self, make_worker: MakeWorker, jobs: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Key and record of every job, in order; the worker's ``close``, if it has one, is called at the end."""
        if not jobs:
            return
        with pinned(self.threads):
            worker = make_worker()
            try:
                for key, job in jobs.items():
                    yield key, worker(job)
            finally:
                getattr(worker, "close", lambda: None)()


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

    Returns
    -------
    Engine

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
        from kvdrift.runs.ray_engine import RayEngine  # Ray is an extra

        gpus = int(torch.cuda.is_available()) if gpus is None else gpus
        return RayEngine(threads=threads, workers=workers, address=address, gpus=gpus)
    if name != "local":
        raise InputError(f"engine={name!r}: choose 'local' or 'ray'.")
    if workers not in (None, 1) or address is not None:
        raise InputError("workers= and address= are for engine='ray'; the local engine is this process alone.")
    return LocalEngine(threads)


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Compute with so many CPU threads for a while.

    Examples
    --------
    >>> import torch
    >>> from kvdrift.runs.engines import pinned
    >>> with pinned(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
