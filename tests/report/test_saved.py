import json

import pytest
from safetensors.torch import save_file

from kvdrift.drift.result import Drift
from kvdrift.errors import FileError
from kvdrift.files import save_tensors
from kvdrift.patching.factorial_result import Factorial
from kvdrift.patching.result import PatchResult, Sweep
from kvdrift.report import load_result, write_report


def test_each_kind_is_found_by_its_header(made, bare, tmp_path):
    results = [bare, made.patch_result(), made.sweep(made.layer_cells(("k",))), made.factorial()]
    loaded = [load_result(result.save(tmp_path / f"{n}.safetensors")) for n, result in enumerate(results)]
    assert [type(result) for result in loaded] == [Drift, PatchResult, Sweep, Factorial]
    assert loaded[1].recovery() == results[1].recovery()
    assert write_report(tmp_path / "r.html", *loaded).is_file()


def test_a_trace_is_refused_by_name(tmp_path):
    path = save_tensors(tmp_path / "t.safetensors", "trace", {}, {})
    with pytest.raises(FileError, match=r"t\.safetensors holds a trace; a report is made from a drift, patch, sweep"):
        load_result(path)


def test_missing_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(FileError, match="There is no file"):
        load_result(tmp_path / "none.safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"something else")
    with pytest.raises(FileError, match="not a whole kvdrift file"):
        load_result(tmp_path / "x.safetensors")
    save_file({}, tmp_path / "y.safetensors", metadata={"kvdrift": json.dumps(["drift"])})
    with pytest.raises(FileError, match="not a whole kvdrift file"):
        load_result(tmp_path / "y.safetensors")


def test_an_edited_file_is_refused(made, tmp_path):
    path = made.factorial().save(tmp_path / "f.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileError, match="changed after it was saved"):
        load_result(path)
