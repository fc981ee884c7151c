"""The engines: the same records wherever the work is done, and one sentence where it cannot be."""

import builtins
import os
import re
import signal
import socket
import threading
import time

import pytest
import torch

from kvdrift.errors import InputError, KvdriftError, NonFiniteError
from kvdrift.runs import ray_engine
from kvdrift.runs.comparable import comparable
from kvdrift.runs.engine import pinned
from kvdrift.runs.engines import engine
from kvdrift.runs.ray_engine import RayWorker

JOBS = {f"job {i}": i for i in range(6)}


def squares(fail=None, kill=None):
    """A function that makes a worker; by value, so that it reaches processes that cannot import this file."""

    def make_worker():
        made = os.getpid()

        def work(job):
            if job == fail:
                raise NonFiniteError("NaN appeared at step 3; run in float32.")
            if kill is not None and job == 2 and not os.path.exists(kill):
                with open(kill, "w") as mark:
                    mark.write(str(made))
                os.kill(os.getpid(), signal.SIGKILL)
            return {"square": job**2, "threads": torch.get_num_threads(), "process": made}

        return work

    return make_worker


def plain(found):
    return {key: {name: value for name, value in record.items() if name != "process"} for key, record in found}


# --- this process


def test_local_works_here_in_order_and_makes_one_worker():
    found = list(engine("local").run(squares(), JOBS))
    assert [key for key, _ in found] == list(JOBS)
    assert {record["process"] for _, record in found} == {os.getpid()}
    assert plain(found)["job 3"] == {"square": 9, "threads": torch.get_num_threads()}


def test_local_yields_what_is_finished_before_it_starts_the_next():
    begun = []
    found = engine("local").run(lambda: lambda job: begun.append(job) or {}, JOBS)
    assert (next(found), begun) == (("job 0", {}), [0])
    assert (next(found), begun) == (("job 1", {}), [0, 1])


@pytest.mark.parametrize("end", ["all", "some", "error"])
def test_threads_are_pinned_for_the_run_and_put_back(end):
    before = torch.get_num_threads()
    found = engine("local", threads=before + 1).run(squares(fail=3 if end == "error" else None), JOBS)
    assert next(found)[1]["threads"] == before + 1
    if end == "error":
        with pytest.raises(NonFiniteError):
            list(found)
    elif end == "all":
        list(found)
    else:
        found.close()
    assert torch.get_num_threads() == before


def test_a_worker_that_can_be_closed_is_closed_at_the_end():
    closed = []

    class Closing:
        def __call__(self, job):
            assert not closed
            return {}

        def close(self):
            closed.append(True)

    assert len(list(engine().run(Closing, JOBS))) == 6
    assert closed == [True]


@pytest.mark.parametrize("name", ["local", "ray"])
def test_nothing_to_do_starts_nothing(name):
    def never():
        raise AssertionError("a worker was made")

    assert list(engine(name).run(never, {})) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "slurm"}, "engine='slurm': choose 'local' or 'ray'"),
        ({"workers": 2}, "workers= and address= are for engine='ray'"),
        ({"address": "auto"}, "workers= and address= are for engine='ray'"),
        ({"threads": 0}, "threads=0: give a whole number of at least 1"),
        ({"name": "ray", "workers": 1.5}, r"workers=1\.5: give a whole number"),
        ({"name": "ray", "gpus": -1}, "gpus=-1"),
    ],
)
def test_bad_arguments_are_one_sentence(options, words):
    with pytest.raises(InputError, match=words):
        engine(**options)


def test_without_ray_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name.partition(".")[0] == "ray":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(InputError, match=r"pip install 'kvdrift\[ray\]'"):
        engine("ray")


# --- a cluster


def test_two_workers_give_the_records_of_this_process_also_where_one_is_killed(cluster, tmp_path, capfd):
    mark = tmp_path / "killed"
    found = list(engine("ray", workers=2, threads=1).run(squares(kill=str(mark)), JOBS))
    assert sorted(key for key, _ in found) == list(JOBS)
    assert sorted(plain(found).items()) == sorted(plain(engine("local", threads=1).run(squares(), JOBS)).items())
    processes = {key: record["process"] for key, record in found}
    assert os.getpid() not in processes.values()
    assert processes["job 2"] != int(mark.read_text()), "its job is done by its successor"
    assert cluster.is_initialized(), "a cluster that was open before stays open"
    said = "".join(capfd.readouterr())
    assert "constructor arguments" not in said  # Ray's warning that a restart may fail


def test_what_a_job_raises_comes_out_as_itself_and_finished_items_stay(cluster):
    found, kept = engine("ray", workers=1, threads=1).run(squares(fail=2), JOBS), []
    with pytest.raises(NonFiniteError) as raised:
        kept.extend(key for key, _ in found)
    assert str(raised.value) == "NaN appeared at step 3; run in float32."
    assert not hasattr(raised.value, "__notes__")
    assert kept == ["job 0", "job 1"]


def work_on(cluster, make_worker, environment=None):
    """What one job gives in a process of a cluster, here in this one."""
    worker = RayWorker(torch.get_num_threads(), environment or comparable(False))
    return worker.work("job", 1, [cluster.put(make_worker)])


def test_a_fault_in_a_job_says_where_it_was(cluster):
    key, record, error = work_on(cluster, lambda: lambda job: {}["no such key"])
    assert (key, record, type(error)) == ("job", None, KeyError)
    assert "no such key" in error.__notes__[0]
    assert error.__notes__[0].startswith("In a worker:\nTraceback")


def test_an_error_that_cannot_travel_becomes_a_sentence(cluster):
    class Odd(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    def work(job):
        raise Odd("this", "that")

    _, _, error = work_on(cluster, lambda: work)
    assert type(error) is KvdriftError
    assert str(error) == "Odd in a worker: this and that"


def test_a_worker_unlike_the_driver_is_refused_by_name(cluster):
    unlike = comparable(False) | {"hardware": comparable(False)["hardware"] | {"cpu": "Abacus 3000"}}
    _, record, error = work_on(cluster, squares(), unlike)
    assert record is None
    assert isinstance(error, InputError)
    assert re.search(r"unlike this process .it differs in hardware\.cpu: .+ there, Abacus 3000 here.", str(error))


def test_what_cannot_travel_is_refused_in_one_sentence(cluster):
    lock = threading.Lock()
    with pytest.raises(InputError, match="cannot be sent to other processes") as raised:
        list(engine("ray", workers=1).run(lambda: lambda job: {"lock": str(lock)}, JOBS))
    assert "\n" not in str(raised.value)


def test_a_cluster_without_room_is_refused(cluster):
    with pytest.raises(InputError, match="3 workers with 1 CPUs each do not fit a cluster of 2 CPUs"):
        list(engine("ray", workers=3, threads=1).run(squares(), JOBS))


def test_workers_that_keep_dying_are_one_sentence():
    died = ray_engine._died(RuntimeError("The actor is\n dead"))
    assert died.startswith("A worker died 4 times over the same job (out of memory?); what is finished stays")
    assert "\n" not in died
    assert "needs kvdrift" in ray_engine._died(RuntimeError("an error raised in its creation task: No module"))


# --- addresses


@pytest.fixture
def silent():
    """The port of something that listens and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_sigterm_is_handled_as_before_when_no_cluster_can_be_joined(monkeypatch):
    ray = pytest.importorskip("ray")
    before = signal.getsignal(signal.SIGTERM)
    try:
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "shutdown", lambda: None)

        def init(**options):
            signal.signal(signal.SIGTERM, lambda *_: None)
            raise ConnectionError("nothing there")

        monkeypatch.setattr(ray, "init", init)
        with pytest.raises(InputError, match="Cannot use a Ray cluster"):
            list(engine("ray", address="auto").run(squares(), JOBS))
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("address", "words"),
    [("nonsense", "give HOST:PORT"), ("host:", "give HOST:PORT"), ("127.0.0.1:1", "No Ray cluster answers at 127")],
)
def test_an_address_where_nothing_is_says_so_at_once(address, words):
    start = time.monotonic()
    with pytest.raises(InputError, match=words):
        ray_engine._check(address)
    assert time.monotonic() - start < 5


def test_an_address_where_something_else_listens_is_given_up(silent, monkeypatch):
    monkeypatch.setattr(ray_engine, "ANSWER_SECONDS", 3)
    with pytest.raises(InputError, match="what listens there is no Ray cluster"):
        ray_engine._check(f"127.0.0.1:{silent}")


def test_a_cluster_that_answers_is_taken_and_no_other_beside_it(cluster, silent, monkeypatch):
    address = cluster.get_runtime_context().gcs_address
    with ray_engine._session(cluster, address, 2):
        pass
    assert cluster.is_initialized()
    monkeypatch.setattr(ray_engine, "_check", lambda address: None)
    with pytest.raises(InputError, match=f"has joined the Ray cluster at {address}, not 127"):
        list(engine("ray", address=f"127.0.0.1:{silent}").run(squares(), JOBS))


def test_pinned_restores_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(KvdriftError), pinned(before + 1):
        raise KvdriftError("no")
    assert torch.get_num_threads() == before
