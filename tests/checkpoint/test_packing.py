"""Weights packed while they are read: the same values as packing the whole ones, never many whole rows in memory."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import autoshard
from autoshard.checkpoint import reading
from autoshard.checkpoint.data import Checkpoint, Piece, Source, Target
from autoshard.checkpoint.header import open_checkpoint
from autoshard.checkpoint.reading import read_into
from autoshard.checkpoint.targets import load_applied
from autoshard.packed import repacked, stored_bytes, stored_tensors
from tests.packed_models import TOKENS, Blocks, Scaled, pack_linears
from tests.ranks import run_ranks


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(0)
    weights = {name: torch.randn(rows, 8).bfloat16() for name, rows in (("a", 40), ("b", 3), ("c", 17))}
    save_file(weights, tmp_path / "model.safetensors")
    return weights, open_checkpoint(tmp_path)


def _source(name: str, like: torch.Tensor) -> Source:
    return Source(shape=tuple(like.shape), dtype=like.dtype, pieces=(Piece(entry=name),), pack=Scaled.pack)


def _empty(like: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    return repacked(Scaled.pack(like), lambda part: torch.empty_like(part, device=device))


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return all(a.cpu().equal(b) for a, b in zip(stored_tensors(left), stored_tensors(right), strict=True))


@pytest.mark.parametrize("elements", [1 << 20, 24, 16, 1])
def test_packed_by_rows_as_whole(weights, monkeypatch, elements):
    monkeypatch.setattr(reading, "PACKED_ELEMENTS", elements)
    tensors, checkpoint = weights
    sources = {name: _source(name, tensor) for name, tensor in tensors.items()}
    sources["b"] = replace(sources["b"], pack=None)
    targets = {name: _empty(tensor) if name != "b" else torch.empty_like(tensor) for name, tensor in tensors.items()}
    seen = []
    report = read_into(
        checkpoint, sources, [Target(source=name, tensor=into) for name, into in targets.items()],
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert _equal(targets["a"], Scaled.pack(tensors["a"])) and _equal(targets["c"], Scaled.pack(tensors["c"]))
    assert targets["b"].equal(tensors["b"])
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert report.bytes_read == nbytes and seen[-1] == (nbytes, nbytes)
    assert stored_bytes(targets["a"]) == 40 * 8 + 40 * 2


def test_packed_after_the_cast_and_for_several_targets(weights):
    tensors, checkpoint = weights
    source = replace(_source("a", tensors["a"]), dtype=torch.float32)
    with autoshard.simulate("2x1MiB") as devices:
        targets = [_empty(tensors["a"].float(), device) for device in devices]
        read_into(checkpoint, {"a": source}, [Target(source="a", tensor=into) for into in targets])
        assert all(_equal(into, Scaled.pack(tensors["a"].float())) for into in targets)


def test_computed_and_joined_sources_are_packed(weights, monkeypatch):
    monkeypatch.setattr(reading, "PACKED_ELEMENTS", 16)
    tensors, checkpoint = weights
    whole = torch.cat([tensors["a"], tensors["c"]])
    joined = Source(
        shape=(57, 8), dtype=torch.bfloat16, pack=Scaled.pack,
        pieces=(Piece(entry="a", region=((0, 40), (0, 8))), Piece(entry="c", region=((40, 17), (0, 8)))),
    )  # fmt: skip
    computed = replace(joined, pieces=(), compute=(("a", "c"), lambda a, c: torch.cat([a, c])))
    targets = {"joined": _empty(whole), "computed": _empty(whole)}
    read_into(
        checkpoint, {"joined": joined, "computed": computed},
        [Target(source=name, tensor=into) for name, into in targets.items()],
    )  # fmt: skip
    assert all(_equal(into, Scaled.pack(whole)) for into in targets.values())


def _saved_blocks(tmp_path, **settings) -> tuple[nn.Module, nn.Module, Checkpoint, dict[str, Source]]:
    """A model whose layers' last linear is packed, the same on meta, and how that is filled."""
    torch.manual_seed(0)
    whole = Blocks(**settings).eval()
    for block in whole.blocks:
        block.append(nn.Linear(block[-1].out_features, block[-1].out_features))
    save_file({name: tensor.detach() for name, tensor in whole.state_dict().items()}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    empty = copy.deepcopy(whole).to("meta")
    sources = {name: replace(_source(name, tensor), pack=None) for name, tensor in whole.state_dict().items()}
    for index in range(len(whole.blocks)):
        pack_linears(whole.blocks[index][3:])
        pack_linears(empty.blocks[index][3:])
        name = f"blocks.{index}.3.weight"
        sources[name] = replace(sources[name], pack=Scaled.pack)
    return whole, empty, checkpoint, sources


@torch.no_grad()
def test_a_placed_model_is_filled_with_packed_weights(tmp_path):
    whole, empty, checkpoint, sources = _saved_blocks(tmp_path)
    expected = whole(TOKENS)
    with autoshard.simulate("2x1MiB") as devices:
        plan = autoshard.plan(empty, devices.cluster, inputs=TOKENS, strategy="balanced", pins={"blocks.2": "cpu:1"})
        load_applied(empty, plan, checkpoint, sources)
        assert sum(devices.memory(name)[0] for name in devices) == sum(map(stored_bytes, whole.parameters()))
        assert empty(TOKENS).cpu().equal(expected)


@torch.no_grad()
def test_a_cut_model_is_filled_with_packed_weights(tmp_path):
    whole, empty, checkpoint, sources = _saved_blocks(tmp_path, width=64)
    expected = whole(TOKENS)
    with autoshard.simulate("2x230KiB") as devices:
        plan = autoshard.plan(empty, devices.cluster, inputs=TOKENS, strategy="column-parallel")
        assert plan.cuts
        load_applied(empty, plan, checkpoint, sources)
        torch.testing.assert_close(empty(TOKENS).cpu(), expected, rtol=1e-5, atol=1e-5)
        autoshard.remove(empty)
    assert empty(TOKENS).equal(expected)


def filled_on_ranks(folder, plan):
    whole, empty, checkpoint, sources = _saved_blocks(folder / str(dist.get_rank()), width=64)
    with torch.no_grad():
        report = load_applied(empty, plan, checkpoint, sources)
        torch.testing.assert_close(empty(TOKENS), whole(TOKENS), rtol=1e-5, atol=1e-5)
    assert all(_equal(empty.blocks[i][3].weight, whole.blocks[i][3].weight) for i in range(3))
    return report.bytes_read


def test_ranks_read_packed_weights(tmp_path):
    for name in ("0", "1", "here"):
        (tmp_path / name).mkdir()
    _, empty, checkpoint, _ = _saved_blocks(tmp_path / "here", width=64)
    plan = autoshard.plan(empty, {"cpu:0": "230KiB", "cpu:1": "230KiB"}, inputs=TOKENS, strategy="column-parallel")
    read = run_ranks(filled_on_ranks, 2, tmp_path, plan)
    assert max(read) <= sum(entry.nbytes for entry in checkpoint.entries.values())


def test_an_error_of_packing_is_raised(weights):
    tensors, checkpoint = weights

    def refuse(rows: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    source = replace(_source("a", tensors["a"]), pack=refuse)
    with pytest.raises(ValueError, match="no"):
        read_into(checkpoint, {"a": source}, [Target(source="a", tensor=_empty(tensors["a"]))])
