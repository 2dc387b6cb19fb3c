"""Headers and indices: what is whole opens as the safetensors library says; what is not is refused by name."""

import json
import os
import struct
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from autoshard.checkpoint.header import DTYPES, open_checkpoint
from autoshard.errors import CheckpointError

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.tensor(7), "empty": torch.zeros(0, 4)}


def write(file: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def tensor(begin: int, end: int, dtype: object = "U8", shape: object = None) -> dict:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def index(directory: Path, weight_map: object) -> Path:
    directory.mkdir(exist_ok=True)
    file = directory / "model.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return file


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A directory of two files and an index."""
    index(tmp_path / "model", {"a": "one.safetensors", "b": "two.safetensors"})
    save_file({"a": torch.ones(2)}, tmp_path / "model" / "one.safetensors", {"format": "pt"})
    save_file({"b": torch.zeros(3)}, tmp_path / "model" / "two.safetensors")
    return tmp_path / "model"


def test_entries_are_those_of_the_library(tmp_path):
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
    dtypes += [torch.float32, torch.float64, torch.uint16, torch.uint32, torch.uint64, torch.complex64]
    dtypes += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
    tensors = {str(dtype): torch.arange(24).remainder(2).to(dtype).view(2, 3, 4) for dtype in dtypes} | TENSORS
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.metadata == {"format": "pt"}
    assert set(checkpoint.entries) == set(tensors)
    data = (tmp_path / "model.safetensors").read_bytes()
    for name, value in tensors.items():
        entry = checkpoint.entries[name]
        assert (entry.dtype, entry.shape) == (value.dtype, tuple(value.shape)), name
        assert data[entry.offset :][: entry.nbytes] == value.reshape(-1).view(torch.uint8).numpy().tobytes(), name


def test_packed_halves_of_bytes_are_what_the_library_loads(tmp_path):
    write(tmp_path / "model.safetensors", {"w": tensor(0, 4, "F4", [2, 4])}, bytes([1, 2, 3, 4]))
    entry = open_checkpoint(tmp_path).entries["w"]
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        loaded = file.get_tensor("w")
    assert (entry.dtype, entry.shape, entry.nbytes) == (loaded.dtype, tuple(loaded.shape), 4)
    assert len(DTYPES) == 20


def test_a_directory_opens_as_transformers_opens_it(sharded, tmp_path):
    both = open_checkpoint(sharded)
    assert {name: entry.file.name for name, entry in both.entries.items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
    }
    assert both.files == (sharded / "one.safetensors", sharded / "two.safetensors")
    assert open_checkpoint(sharded / "model.safetensors.index.json") == open_checkpoint(str(sharded)) == both
    (sharded / "model.safetensors.index.json").unlink()
    assert open_checkpoint(sharded).entries == both.entries  # files without an index
    assert set(open_checkpoint(sharded / "two.safetensors").entries) == {"b"}
    save_file({"c": torch.ones(1)}, sharded / "model.safetensors")
    assert set(open_checkpoint(sharded).entries) == {"c"}


def test_a_relative_path_may_be_read_from_elsewhere(sharded, tmp_path, monkeypatch):
    monkeypatch.chdir(sharded.parent)
    assert all(file.is_absolute() for file in open_checkpoint("model").files)


@pytest.mark.parametrize(
    ("header", "data", "problem"),
    [
        ({"a": tensor(0, 4), "b": tensor(2, 6)}, b"123456", "overlaps"),
        ({"a": tensor(0, 2), "b": tensor(4, 6)}, b"123456", "gap"),
        ({"a": tensor(1, 4)}, b"1234", "gap"),
        ({"a": tensor(0, 4)}, b"12345", "belong to nothing"),
        ({"a": tensor(0, 4)}, b"123", "truncated"),
        ({"a": tensor(0, 4, "F32", [2])}, b"1234", "needs 8"),
        ({"a": tensor(0, 4, "F99", [4])}, b"1234", "dtype 'F99'"),
        ({"a": tensor(0, 4, None, [4])}, b"1234", "dtype None"),
        ({"a": tensor(0, 4, shape=[-4])}, b"1234", "shape"),
        ({"a": tensor(0, 4, shape=[4.0])}, b"1234", "shape"),
        ({"a": tensor(0, 4, shape=[True, 4])}, b"1234", "shape"),
        ({"a": tensor(0, 4, shape=4)}, b"1234", "shape"),
        ({"a": tensor(0, 0, shape=[0, 2**62, 2**62])}, b"", "shape"),
        ({"a": tensor(0, 4, shape=[1] * 65 + [4])}, b"1234", "shape"),
        ({"a": tensor(0, 1, "F4", [1])}, b"1", "half a byte"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]}}, b"1234", "lies at"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]}}, b"1234", "lies at"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 8]}}, b"1234", "lies at"),
        ({"a": {"dtype": "U8", "shape": [4]}}, b"1234", "described by"),
        ({"a": [1]}, b"1234", "described by"),
        ({"__metadata__": {"x": 1}, "a": tensor(0, 4)}, b"1234", "metadata"),
        ([1], b"", "not a JSON object"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', b"1", "'a' is there twice"),
        (b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"1", "'dtype' is there twice"),
        (b'{"a":NaN}', b"", "NaN"),
        (b'{"a":' + b"9" * 5000 + b"}", b"", "JSON"),
        (b'{"a":' + b"[" * 200_000, b"", "JSON"),
        (b'{"\xff":1}', b"", "JSON"),
        (b'{"a"', b"", "JSON"),
        (b"", b"", "not a JSON object"),
    ],
)
def test_damaged_headers_are_refused_by_name(tmp_path, header, data, problem):
    write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        open_checkpoint(tmp_path)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 1000 + len(str(tmp_path))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 50])
def test_a_header_longer_than_the_file_is_not_read(tmp_path, length):
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", length) + b"{}" + b" " * 40)
    with pytest.raises(CheckpointError, match=r"x\.safetensors.*header should have"):
        open_checkpoint(tmp_path)


def test_every_truncation_is_refused(tmp_path):
    save_file(TENSORS, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    for length in range(len(whole)):
        file = tmp_path / "model.safetensors"
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_checkpoint(tmp_path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_leaves_a_whole_file(tmp_path, position, byte):
    """What still opens is a valid file, and the safetensors library sees the same tensors in it."""
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[position % len(data)] = byte
    (tmp_path / "model.safetensors").write_bytes(data)
    try:
        entries = open_checkpoint(tmp_path).entries
    except CheckpointError as error:
        assert "model.safetensors" in str(error)
        return
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        loaded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name: (entry.dtype, entry.shape) for name, entry in entries.items()} == {
        name: (value.dtype, tuple(value.shape)) for name, value in loaded.items()
    }


@pytest.mark.parametrize("name", ["/etc/passwd", "../one.safetensors", "x/../../one.safetensors", "..\\one", "c:\\one"])
def test_an_index_may_not_leave_its_directory(sharded, name):
    index(sharded, {"a": name, "b": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"index\.json names the file .* outside of its directory"):
        open_checkpoint(sharded)


def test_an_index_may_not_follow_a_link_out_of_its_directory(sharded, tmp_path):
    os.rename(sharded / "one.safetensors", tmp_path / "one.safetensors")
    os.symlink(tmp_path / "one.safetensors", sharded / "one.safetensors")
    with pytest.raises(CheckpointError, match="a link that leaves its directory"):
        open_checkpoint(sharded)


def test_the_links_of_a_hub_cache_are_followed(sharded, tmp_path):
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "4f2c"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate(["one.safetensors", "two.safetensors", "model.safetensors.index.json"]):
        os.rename(sharded / name, blobs / str(number))
        os.symlink(f"../../blobs/{number}", snapshot / name)
    assert set(open_checkpoint(snapshot).entries) == {"a", "b"}


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        ({"a": "one.safetensors", "b": "one.safetensors"}, "no file of the index has it"),
        ({"a": "two.safetensors", "b": "one.safetensors"}, "it is in"),
        ({"a": "one.safetensors", "c": "two.safetensors"}, "no file of the index has it"),
        ({"a": "one.safetensors", "b": "three.safetensors"}, "does not exist"),
        ({"a": "one.safetensors"}, None),
        ({"b": "two.safetensors", "a": 3}, "no file name"),
        ({"b": "two.safetensors", "a": "o\0"}, "no file name"),
        ({"b": "two.safetensors", "a": "."}, "not a file"),
        ({}, "no weight_map"),
        (["a"], "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_an_index_that_disagrees_with_the_files_is_refused(sharded, weight_map, problem):
    index(sharded, weight_map)
    if problem is None:  # files that no name is in are not of this checkpoint
        assert set(open_checkpoint(sharded).entries) == {"a"}
        return
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(sharded)


def test_a_tensor_that_the_index_does_not_list_is_refused(sharded):
    save_file({"a": torch.ones(2), "c": torch.ones(2)}, sharded / "one.safetensors")
    with pytest.raises(CheckpointError, match=r"index\.json does not list 'c', which one\.safetensors has"):
        open_checkpoint(sharded)


def test_a_name_in_two_files_is_refused(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    save_file({"a": torch.ones(2)}, sharded / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors and .*one\.safetensors both have a tensor 'a'"):
        open_checkpoint(sharded)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no safetensors file: it holds nothing"):
        open_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")  # opening it would wait forever
    with pytest.raises(CheckpointError, match=r"pipe\.safetensors is not a file"):
        open_checkpoint(tmp_path)
    (tmp_path / "pipe.safetensors").unlink()
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        open_checkpoint(tmp_path)


def test_a_pickle_is_refused_with_a_conversion_that_works(tmp_path):
    torch.save({"w": torch.arange(4.0)}, tmp_path / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match=r"pickle.*Convert it") as caught:
            open_checkpoint(path)
    code = str(caught.value).partition('python -c "')[2].removesuffix('"')
    exec(code, {})
    assert open_checkpoint(tmp_path).entries["w"].shape == (4,)
