"""Work spread over a Ray cluster: one long-lived process per worker, and Ray's own scheduling."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pickle import PicklingError
from typing import Any

import torch

from kvdrift import provenance
from kvdrift.errors import InputError, KvdriftError
from kvdrift.runs.comparable import comparable
from kvdrift.runs.engine import MakeWorker, Worker, pinned
from kvdrift.runs.settings import differences

RETRIES = 3
"""A job whose worker died is tried so many times more."""
ANSWER_SECONDS = 12
"""A cluster must answer within so many seconds."""
START = "start one with `ray start --head`, or leave out address= to use this machine"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True)
class RayEngine:
    """Works in the processes of a Ray cluster; see `kvdrift.runs.engines.engine`.

    A worker computes with ``threads`` CPU threads and must be like this process in software, hardware and arithmetic
    flags, else the run is refused. A job whose worker died is given to its successor. The cluster, if it was started
    for this run, ends with it.
    """

    threads: int
    workers: int | None = None
    address: str | None = None
    gpus: int = 0

    def __post_init__(self) -> None:
        _ray()

    def run(self, make_worker: MakeWorker, jobs: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Key and record of every job, in the order of finishing.

        Raises
        ------
        InputError
            If the cluster does not answer or has no room for the workers, or a worker is unlike this process.
        KvdriftError
            What a job raised; or, if its worker died each time it was tried, a sentence about that.
        """
        if not jobs:
            return
        ray = _ray()
        with _session(ray, self.address, self._cpus()):
            from ray.util import ActorPool

            shared, environment = self._share(ray, make_worker)  # held here: a worker that died would take it along
            actors = self._actors(ray, environment, len(jobs))
            try:
                pool = ActorPool(actors)
                for item in jobs.items():
                    pool.submit(lambda actor, item: actor.work.remote(*item, [shared]), item)
                while pool.has_next():
                    try:
                        key, record, error = pool.get_next_unordered()
                    except ray.exceptions.RayError as failure:
                        raise KvdriftError(_died(failure)) from failure
                    if error is not None:
                        raise error
                    yield key, record
            finally:
                for actor in actors:
                    with suppress(Exception):
                        ray.kill(actor)

    def _cpus(self) -> int:
        """The CPUs that a cluster of one's own must be said to have."""
        return max(os.cpu_count() or 1, (self.workers or 1) * self.threads)

    def _share(self, ray: Any, make_worker: MakeWorker) -> tuple[Any, dict[str, Any]]:
        """Where the cluster keeps ``make_worker``, and what this process is like with the threads of a worker."""
        with pinned(self.threads):
            try:
                return ray.put(make_worker), comparable(self.gpus > 0)
            except (TypeError, AttributeError, PicklingError) as error:
                reason = str(error).strip().splitlines()[0]
                raise InputError(f"This run cannot be sent to other processes: {reason}") from error

    def _actors(self, ray: Any, environment: dict[str, Any], n_jobs: int) -> list[Any]:
        kind, each = ("GPU", self.gpus) if self.gpus else ("CPU", self.threads)
        there = int(ray.cluster_resources().get(kind, 0))
        if there // each < (self.workers or 1):
            raise InputError(
                f"{self.workers or 1} workers with {each} {kind}s each do not fit a cluster of {there} {kind}s; ask "
                "for fewer."
            )
        variables = {name: os.environ[name] for name in provenance.ENVIRONMENT if name in os.environ}
        variables |= {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        actor = ray.remote(RayWorker).options(
            num_gpus=self.gpus,
            num_cpus=0 if self.gpus else self.threads,
            max_restarts=-1,
            max_task_retries=RETRIES,
            runtime_env={"env_vars": variables},
        )
        n_workers = min(self.workers or there // each, n_jobs)
        return [actor.remote(self.threads, environment) for _ in range(n_workers)]


class RayWorker:
    """What runs in each process of the cluster.

    Parameters
    ----------
    threads
        CPU threads.
    environment
        `comparable` of the process that gives the work.
    """

    def __init__(self, threads: int, environment: dict[str, Any]) -> None:
        self._environment = environment
        self._worker: Worker | None = None
        torch.set_num_threads(threads)

    def work(
        self, key: str, job: Any, make_worker: list[Any]
    ) -> tuple[str, Mapping[str, Any] | None, Exception | None]:
        """The key, and the record of the job or what it raised.

        ``make_worker`` is a list of one: where the cluster keeps the function that makes the worker. It comes with each
        job, since Ray cannot promise a restarted worker what only its constructor was given.
        """
        try:
            if self._worker is None:
                self._worker = self._start(*make_worker)
            return key, self._worker(job), None
        except Exception as error:
            return key, None, _portable(error)

    def _start(self, make_worker: Any) -> Worker:
        here = comparable(bool(self._environment["gpu"]))
        if other := differences(here, self._environment):
            raise InputError(
                f"A worker on {socket.gethostname()} is unlike this process (it differs in {other}), and their results "
                "must not be mixed; use machines of one kind with one set of packages."
            )
        made: Worker = _ray().get(make_worker)()
        return made


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise InputError("engine='ray' needs Ray, which is not installed: pip install 'kvdrift[ray]'.") from error
    return ray


@contextmanager
def _session(ray: Any, address: str | None, cpus: int) -> Iterator[None]:
    """A connection to a cluster: the one that is open, the one at ``address``, or one of our own."""
    if address is not None:
        _check(address)
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", joined) and not str(address).startswith("ray://"):
            raise InputError(
                f"This process has joined the Ray cluster at {joined}, not {address}; call ray.shutdown() first, or "
                "leave out address=."
            )
        with redirect_stdout(sys.stderr):
            yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        options |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    else:
        options["address"] = address
    before = signal.getsignal(signal.SIGTERM)  # Ray puts one of its own there
    try:
        with _environ(QUIET):
            ray.init(**options)
    except BaseException as error:  # Ray raises many kinds, and takes long enough to be interrupted
        ray.shutdown()
        _handle_sigterm(before)
        if not isinstance(error, Exception):
            raise
        where = "on this machine" if address is None else f"at {address}"
        raise InputError(f"Cannot use a Ray cluster {where}: {str(error).strip().splitlines()[0]}") from error
    try:
        with redirect_stdout(sys.stderr):  # where Ray's own remarks belong: stdout is for results
            yield
    finally:
        ray.shutdown()
        _handle_sigterm(before)


def _handle_sigterm(handler: Any) -> None:
    with suppress(ValueError, TypeError):  # not the main thread, or not a handler of Python's
        signal.signal(signal.SIGTERM, handler)


def _check(address: str) -> None:
    """Refuse an address where no cluster answers: Ray itself may wait for minutes, or end the process."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"address={address!r}: give HOST:PORT, ray://HOST:PORT or auto.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS / 3).close()
        if not address.startswith("ray://"):
            command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
            subprocess.run(command, timeout=ANSWER_SECONDS, check=True, capture_output=True)
    except (OSError, OverflowError, subprocess.SubprocessError) as error:
        reason = str(error) if isinstance(error, OSError) else "what listens there is no Ray cluster"
        raise InputError(f"No Ray cluster answers at {address} ({reason}); {START}.") from error


@contextmanager
def _environ(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while, where they are not set already."""
    added = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _portable(error: Exception) -> Exception:
    """The same error, able to travel; one that is not kvdrift's own carries where it was raised."""
    from ray import cloudpickle

    if not isinstance(error, KvdriftError):
        error.add_note("In a worker:\n" + "".join(traceback.format_exception(error)))
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # an exception with arguments of its own
        return KvdriftError(f"{type(error).__name__} in a worker: {error}")
    return error


def _died(failure: Exception) -> str:
    words = " ".join(str(failure).split())
    if "creation task" in words:
        return f"A worker could not be started; every machine of the cluster needs kvdrift: {words[-200:]}"
    return (
        f"A worker died {RETRIES + 1} times over the same job (out of memory?); what is finished stays, and the same "
        f"call goes on, with fewer workers if need be: {words[:200]}"
    )
