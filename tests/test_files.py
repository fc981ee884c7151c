"""Files: every bit comes back, and every edit is refused with a sentence."""

import json
import os
import stat
import string
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvdrift.errors import FileError, KvdriftError
from kvdrift.files import load_tensors, save_tensors, write_atomically

DTYPES = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"]
names = st.text(string.ascii_letters + string.digits + "/._é-", min_size=1, max_size=12).filter(
    lambda x: x != "__metadata__"
)
tensors = st.dictionaries(
    names,
    st.sampled_from(DTYPES).flatmap(
        lambda d: arrays.arrays(d, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    ),
    max_size=4,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@settings(max_examples=60, deadline=None)
@given(tensors, st.dictionaries(st.text(max_size=5), json_values, max_size=3))
def test_round_trip(folder, content, manifest):
    content = {name: torch.from_numpy(np.array(array)) for name, array in content.items()}
    path = save_tensors(folder / "any", "test", content, manifest)
    found, again = load_tensors(path, "test")
    assert sorted(found) == sorted(content)
    for name, tensor in content.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes()
    assert json.dumps(again) == json.dumps(manifest)


def test_bfloat16_views_and_strides(folder):
    base = torch.randn(4, 6).to(torch.bfloat16)
    content = {
        "whole": base,
        "transposed": base.T,
        "rows": base[::2],
        "row": base[1],
        "expanded": base[:1].expand(3, 6),
    }
    found, _ = load_tensors(save_tensors(folder / "views", "test", content, {}), "test")
    assert all(torch.equal(found[name], tensor) for name, tensor in content.items())


@pytest.fixture(scope="module")
def saved(folder):
    content = {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.tensor([True, False, True, True])}
    return save_tensors(folder / "small", "test", content, {"words": "é", "number": 1.5}).read_bytes()


def refuses_or_equal(path, original):
    """A changed file is refused (any other exception than `FileError` comes through); only a change that leaves
    the content as it was may pass."""
    try:
        found, manifest = load_tensors(path, "test")
    except FileError:
        return True
    wanted, words = original
    assert sorted(found) == sorted(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert manifest == words
    return False


def test_one_flipped_bit_in_any_byte(saved, folder):
    path = folder / "flipped"
    path.write_bytes(saved)
    original = load_tensors(path, "test")
    header_ends = 8 + struct.unpack("<Q", saved[:8])[0]
    refused = 0
    for place in range(len(saved)):
        for bit in (0, 5) if place >= 8 else (0,):
            changed = bytearray(saved)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            here = refuses_or_equal(path, original)
            refused += here
            assert here or place < header_ends, f"byte {place} of the data was changed unseen"
    assert refused > len(saved)


def test_truncated_at_any_place(saved, folder):
    path = folder / "cut"
    for length in [*range(0, len(saved), 7), len(saved) - 1]:
        path.write_bytes(saved[:length])
        with pytest.raises(FileError):
            load_tensors(path, "test")
    path.write_bytes(saved + b"\0")
    with pytest.raises(FileError):
        load_tensors(path, "test")


@pytest.mark.parametrize("content", [b"", b"hello", b"{}", b"\0" * 100, b"\xff" * 64, b"PK\x03\x04" + b"x" * 60])
def test_other_files_are_refused(content, folder):
    path = folder / "other"
    path.write_bytes(content)
    with pytest.raises(FileError, match="not a whole kvdrift file"):
        load_tensors(path, "test")


@pytest.mark.parametrize(
    "header",
    [
        None,
        {},
        {"kvdrift": "[]"},
        {"kvdrift": "null"},
        {"kvdrift": "not json"},
        {"kvdrift": '{"kind": "test"}'},
        {"kvdrift": '{"kind": "test", "schema": 1, "manifest": {}, "sha256": null}'},
    ],
)
def test_safetensors_of_somebody_else(header, folder):
    from safetensors.torch import save_file

    path = folder / "foreign.safetensors"
    save_file({"a": torch.zeros(2)}, path, metadata=header)
    with pytest.raises(FileError):
        load_tensors(path, "test")


def test_kind_schema_and_missing_file(saved, folder):
    path = folder / "kinds"
    path.write_bytes(saved)
    with pytest.raises(FileError, match="holds a test, not a trace"):
        load_tensors(path, "trace")
    path.write_bytes(saved.replace(b'\\"schema\\": 1', b'\\"schema\\": 9'))
    with pytest.raises(FileError, match="schema 9"):
        load_tensors(path, "test")
    for missing in (folder / "nothing", folder):
        with pytest.raises(FileError, match="no file"):
            load_tensors(missing, "test")


def test_manifests_that_json_cannot_hold_leave_nothing(tmp_path):
    with pytest.raises(TypeError):
        save_tensors(tmp_path / "x", "test", {}, {"a": object()})
    assert not list(tmp_path.iterdir())


def test_writing_is_atomic(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda temporary: temporary.write_text("first"))

    def fail(temporary):
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail)
    assert path.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        path = write_atomically(tmp_path / "file", lambda temporary: temporary.write_text("x"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "below", tmp_path):
        with pytest.raises(FileError, match="Cannot write") as caught:
            write_atomically(path, lambda temporary: temporary.write_text("y"))
        assert isinstance(caught.value, (KvdriftError, OSError))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*"))


def test_no_room_left_is_one_sentence(tmp_path):
    def full(temporary):
        raise OSError(28, "No space left on device")

    with pytest.raises(FileError, match="No space left"):
        write_atomically(tmp_path / "file", full)
    assert not list(tmp_path.iterdir())


def test_a_device_is_not_replaced_by_a_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileError, match="no ordinary file"):
        write_atomically(pipe, lambda path: path.write_text("x"))
    assert pipe.is_fifo()
