"""What an engine is: what works on the pieces of a long run, here or elsewhere; and the one of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

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


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Compute with so many CPU threads for a while.

    Examples
    --------
    >>> import torch
    >>> from kvdrift.runs.engine import pinned
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
