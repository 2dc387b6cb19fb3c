"""Headers and indices: what is whole opens as the safetensors library says; what is not is refused by name."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from autoshard.checkpoint.header import open_checkpoint
from autoshard.errors import CheckpointError


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


@pytest.mark.parametrize(
    ("header", "data", "problem"),
    [
        ({"a": tensor(0, 4), "b": tensor(2, 6)}, b"123456", "invalid offset for tensor `b`"),
        ({"a": tensor(0, 4)}, b"12345", "file not fully covered"),
        ({"a": tensor(0, 4, "F32", [2])}, b"1234", "invalid shape"),
        ({"a": tensor(0, 4, "F99", [4])}, b"1234", "`F99`"),
        ({"a": {"dtype": "U8", "shape": [4]}}, b"1234", "missing field"),
        ({"__metadata__": {"x": 1}, "a": tensor(0, 4)}, b"1234", "damaged"),
        (b'{"a":' + b"[" * 200_000, b"", "JSON"),
        (b"", b"", "damaged"),
    ],
)
def test_damaged_headers_are_refused_by_name(tmp_path, header, data, problem):
    write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        open_checkpoint(tmp_path)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 1000 + len(str(tmp_path))


@pytest.mark.parametrize("name", ["/etc/passwd", "../one.safetensors", "x/../../one.safetensors", "a/../one"])
def test_an_index_may_not_leave_its_directory(sharded, name):
    index(sharded, {"a": name, "b": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"index\.json says that .* no file in its directory"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        ({"a": "one.safetensors", "b": "one.safetensors"}, "no file of the index has it"),
        ({"a": "two.safetensors", "b": "one.safetensors"}, "it is in"),
        ({"a": "one.safetensors", "b": "three.safetensors"}, "does not exist"),
        ({"a": "one.safetensors"}, None),
        ({"b": "two.safetensors", "a": 3}, "no file in its directory"),
        ({"b": "two.safetensors", "a": "o\0"}, "no file in its directory"),
        ({"b": "two.safetensors", "a": "."}, "not a file"),
        ({}, "no weight_map"),
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
