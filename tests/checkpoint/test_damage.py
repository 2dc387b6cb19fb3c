"""A whole checkpoint with a damaged header or index: an error that names a file, or the right tensors; nothing else."""

import random
from pathlib import Path

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import CheckpointError
from tests.checkpoint.directories import assert_same, contents


def make() -> nn.Module:
    """Float and integer tensors of several shapes, in three files when saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False), nn.Embedding(5, 3))
    return model.to(torch.float64).half().append(nn.Linear(2, 2)).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("damage") / "model"
    autoshard.save(make(), directory, max_shard_size=70)
    assert len(contents(directory)) == 4
    return directory


def head_of(name: str, data: bytes) -> int:
    """How many bytes of a file are header; an index is nothing else."""
    return len(data) if name.endswith(".json") else 8 + int.from_bytes(data[:8], "little")


def load_damaged(directory: Path, expected: dict[str, torch.Tensor]) -> bool:
    """Whether it loads; then it must be right. An error must name a file of the directory."""
    try:
        model = autoshard.load(directory, "cpu", model=make)
    except CheckpointError as error:
        assert str(directory) in str(error), error
        assert len(str(error)) < 2000
        return False
    assert_same(model.state_dict(), expected)
    return True


def spoil(data: bytes, chance: random.Random) -> bytes:
    """Damage some bytes: change, drop, double, exchange or blank."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        begin = chance.randrange(len(changed))
        length = chance.choice((1, 1, 2, 8, 40))
        part = changed[begin : begin + length]
        kind = chance.randrange(6)
        if kind == 0:
            changed[begin] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[begin] = chance.choice(b'0123456789"{}[]:,.-eE \\\0\xff')
        elif kind == 2:
            del changed[begin : begin + length]
        elif kind == 3:
            changed[begin:begin] = part
        elif kind == 4:
            other = chance.randrange(len(changed))
            changed[begin : begin + length], changed[other : other + length] = (changed[other : other + length], part)
        else:
            changed[begin : begin + length] = bytes([chance.choice((0, 32, 48, 255))]) * len(part)
    return bytes(changed)


def test_random_damage(saved, tmp_path):
    expected, files = make().state_dict(), contents(saved)
    chance = random.Random(0)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert load_damaged(tmp_path, expected)
    loaded = 0
    for _ in range(300):
        name = chance.choice(list(files))
        head = head_of(name, files[name])
        (tmp_path / name).write_bytes(spoil(files[name][:head], chance) + files[name][head:])
        loaded += load_damaged(tmp_path, expected)
        (tmp_path / name).write_bytes(files[name])
    assert 0 < loaded < 30  # what was changed back, white space, and words that mean nothing


@pytest.mark.parametrize("word", [b"I32", b"U32"])
def test_numbers_of_another_kind(word, saved, tmp_path):
    """The bytes of a float32 fit an integer as well, and reading them as one would go unnoticed."""
    for name, data in contents(saved).items():
        (tmp_path / name).write_bytes(data.replace(b'"F32"', b'"' + word + b'"'))
    assert not load_damaged(tmp_path, make().state_dict())


def test_a_missing_or_exchanged_file(saved, tmp_path):
    expected, files = make().state_dict(), contents(saved)
    shards = [name for name in files if name.endswith(".safetensors")]
    for name in shards:
        for other, data in files.items():
            (tmp_path / other).write_bytes(data)
        (tmp_path / name).unlink()
        assert not load_damaged(tmp_path, expected)
        (tmp_path / name).write_bytes(files[shards[shards.index(name) - 1]])
        assert not load_damaged(tmp_path, expected)
