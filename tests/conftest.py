"""Shared fixtures: one thread, so that the numbers of a test do not depend on what else runs."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import functools
import importlib.util
from pathlib import Path

import checked  # noqa: F401  from here on annotations hold at run time
import pytest
import torch

from kvdrift.models.load import load
from kvdrift.models.tiny import tiny
from kvdrift.tracing import seam

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """A test has the same name in every process, or pytest-xdist cannot spread it."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid} holds an address in memory: give ids= that say which case it is.")


@pytest.fixture(autouse=True)
def nothing_left_hooked():
    """After every test the attention tables are nobody's."""
    yield
    links, tables = list(seam._STATE.links), dict(seam._STATE.tables)
    assert not links, "a link stayed in the attention seam"
    assert not tables, "an attention table stayed wrapped"


@pytest.fixture(scope="session")
def tiny_model():
    """``tiny_model(family, dtype, attn, **overrides)``: a loaded tiny model, shared: do not change it."""

    @functools.lru_cache(maxsize=16)
    def build(family="llama", dtype=torch.float32, attn="auto", **overrides):
        return load(tiny(family, dtype=dtype, attn=attn, **overrides), quiet=True)

    return build


@pytest.fixture(scope="session")
def hooks():
    """``hooks(module)``: every hook in a module's tree; empty when nothing is left behind."""

    def count(module):
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        return [hook for m in module.modules() for kind in kinds for hook in getattr(m, kind).values()]

    return count


@pytest.fixture(scope="session")
def same_bits():
    """``same_bits(x, y)``: same dtype, shape and bits, NaNs included."""

    def same(x, y):
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        return x.numel() == 0 or torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))

    return same


@pytest.fixture(scope="session")
def made():
    """The module that makes up results of patching; see tests/patching/outcomes_fixture.py."""
    path = Path(__file__).parent / "patching" / "outcomes_fixture.py"
    spec = importlib.util.spec_from_file_location("outcomes_fixture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def made_ladder():
    """The module that makes up precision ladders; see tests/ladder/ladder_fixture.py."""
    path = Path(__file__).parent / "ladder" / "ladder_fixture.py"
    spec = importlib.util.spec_from_file_location("ladder_fixture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def cluster():
    """A small Ray cluster on this machine, which this process has joined."""
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def made_evaluation():
    """The module that makes up evaluations; see tests/evaluation/evaluation_fixture.py."""
    path = Path(__file__).parent / "evaluation" / "evaluation_fixture.py"
    spec = importlib.util.spec_from_file_location("evaluation_fixture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
