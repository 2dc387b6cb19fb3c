"""What is done to traced tensors, done by reading: the same values, and in pieces wherever they can say it."""

import pytest
import safetensors.torch
import torch

from autoshard.checkpoint.data import Target
from autoshard.checkpoint.header import open_checkpoint
from autoshard.checkpoint.reading import read_into
from autoshard.integrations.recipe import sources_of
from autoshard.integrations.traced import missing, traced

PIECES = {
    "as it is": lambda t: t["a"],
    "cast": lambda t: t["a"].to(torch.bfloat16),
    "transposed": lambda t: t["a"].T.contiguous(),
    "permuted": lambda t: t["c"].permute(2, 0, 1),
    "chunk": lambda t: torch.chunk(t["a"], 3, dim=0)[1].contiguous(),
    "split unevenly": lambda t: torch.split(t["a"], [1, 3, 2])[1],
    "column slice": lambda t: t["a"][:, 1:3],
    "row": lambda t: t["a"][-2],
    "unbind": lambda t: t["c"].unbind(1)[2],
    "squeezed": lambda t: t["a"][2:3].squeeze(0),
    "view": lambda t: t["a"].view(2, 3, -1).transpose(0, 1)[1],
    "padded by nothing": lambda t: torch.nn.functional.pad(t["a"], (0, 0)),
    "cat of rows": lambda t: torch.cat([t["a"], t["b"]]),
    "cat of columns": lambda t: torch.cat([t["b"], t["a"]], dim=-1),
    "fused experts": lambda t: torch.cat([torch.stack([t["a"], t["b"]]), torch.stack([t["b"], t["a"]])], dim=1),
    "transposed experts": lambda t: torch.stack([t["a"], t["b"]]).transpose(1, 2).contiguous(),
    "one expert back": lambda t: torch.stack([t["a"], t["b"]], dim=1)[:, 1].half(),
    "across a seam": lambda t: torch.cat([t["a"], t["b"]])[4:9, 1:],
    "seam, unsqueezed": lambda t: torch.cat([t["a"], t["b"]])[5:7].unsqueeze(-1),
}
COMPUTED = {
    "sum": lambda t: t["a"] + t["b"],
    "interleaved": lambda t: t["a"].reshape(3, 2, 4).transpose(0, 1).reshape(6, 4).contiguous(),
    "every second": lambda t: t["a"][::2],
    "padded": lambda t: torch.nn.functional.pad(t["a"], (0, 1)),
    "two roundings": lambda t: t["a"].to(torch.float16).to(torch.float32),
    "flattened seam": lambda t: torch.cat([t["a"], t["b"]]).view(-1),
    "with a constant": lambda t: t["a"] * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "nothing left": lambda t: t["a"][2:2],
}


@pytest.fixture
def checkpoint(tmp_path):
    values = {"a": torch.randn(6, 4), "b": torch.randn(6, 4), "c": torch.randn(2, 3, 5)}
    safetensors.torch.save_file(values, tmp_path / "model.safetensors")
    return open_checkpoint(tmp_path), values


@pytest.mark.parametrize("name", [*PIECES, *COMPUTED])
def test_reading_gives_what_the_calls_give(name, checkpoint):
    opened, values = checkpoint
    call = PIECES.get(name) or COMPUTED[name]
    made = call({key: traced(key, tuple(value.shape), value.dtype) for key, value in values.items()})
    described = {key: (entry.shape, entry.dtype) for key, entry in opened.entries.items()}
    sources = sources_of({"made": made}, described)
    expected = call(values)
    assert (sources["made"].compute is None) == (name in PIECES)
    assert sources["made"].shape == expected.shape and sources["made"].dtype == expected.dtype
    found = torch.empty(expected.shape, dtype=expected.dtype)
    read_into(opened, sources, [Target(source="made", tensor=found)])
    assert torch.equal(found, expected)


def test_writes_are_refused_unless_they_do_no_harm(checkpoint):
    leaf = traced("a", (6, 4), torch.float32)
    for write in (leaf.zero_, leaf[1].zero_, leaf.view(-1).normal_):
        with pytest.raises(NotImplementedError, match="values come from elsewhere"):
            write()
    nothing = missing("lost", torch.empty(3))
    nothing.normal_()[1].fill_(2)
    total = leaf + 1
    row = total[0]
    total.zero_()
    source = sources_of({"row": row}, {"a": ((6, 4), torch.float32)})["row"]
    assert source.compute is not None
    with pytest.raises(NotImplementedError, match="was written to"):
        source.compute[1](torch.ones(6, 4))


def test_values_are_read_where_the_library_compares_them():
    values = torch.randn(3)
    one, two, other = (traced(name, (3,), torch.float32, lambda v=v: v) for name, v in
                       (("one", values), ("two", values.clone()), ("other", values + 1)))  # fmt: skip
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert float(one[0]) == float(values[0])
    with pytest.raises(KeyError):
        torch.equal(one, traced("unknown", (3,), torch.float32))
