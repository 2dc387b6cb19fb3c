"""Weights packed while they are read: the same values as packing the whole ones, never many whole rows in memory."""

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autoshard
from autoshard.checkpoint import reading
from autoshard.checkpoint.boxes import Box
from autoshard.checkpoint.data import Checkpoint, Source, whole_entry
from autoshard.checkpoint.header import open_checkpoint
from autoshard.checkpoint.load import load_applied
from autoshard.checkpoint.reading import read_into
from autoshard.checkpoint.traced import traced
from autoshard.common.packed import repacked, stored_bytes, stored_tensors
from tests.packed_models import TOKENS, Blocks, Scaled, pack_linears


def _empty(like: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    return repacked(Scaled.pack(like), lambda part: torch.empty_like(part, device=device))


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return all(a.cpu().equal(b) for a, b in zip(stored_tensors(left), stored_tensors(right), strict=True))


@pytest.mark.parametrize("elements", [1 << 20, 24, 1])
def test_packed_by_rows_as_whole(tmp_path, monkeypatch, elements):
    monkeypatch.setattr(reading, "PACKED_ELEMENTS", elements)
    tensors = {name: torch.randn(rows, 8).bfloat16() for name, rows in (("a", 40), ("b", 3), ("c", 17))}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    sources = {name: replace(whole_entry(checkpoint.entries[name]), pack=Scaled.pack) for name in tensors}
    joined = torch.cat([traced(sources["a"].made), traced(sources["c"].made)]).float()
    sources["joined"] = Source(shape=(57, 8), dtype=torch.float32, made=joined.expression, pack=Scaled.pack)
    sources["b"] = replace(sources["b"], pack=None)
    wanted = tensors | {"joined": torch.cat([tensors["a"], tensors["c"]]).float()}
    with autoshard.simulate("2x1MiB") as devices:
        found = [
            (name, _empty(tensor, device) if name != "b" else torch.empty_like(tensor))
            for device in devices
            for name, tensor in wanted.items()
        ]
        report = read_into(checkpoint, sources, [(name, Box(into)) for name, into in found])
        for name, into in found:
            assert into.equal(tensors["b"]) if name == "b" else _equal(into, Scaled.pack(wanted[name]))
        assert report == 2 * (40 + 17) * 16 + 3 * 16

    def refuse(rows: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        target = ("a", Box(_empty(tensors["a"])))
        read_into(checkpoint, {"a": replace(sources["a"], pack=refuse)}, [target])


def _saved_blocks(tmp_path, **settings) -> tuple[nn.Module, nn.Module, Checkpoint, dict[str, Source]]:
    """A model whose layers' last linear is packed, the same on meta, and how that is filled."""
    torch.manual_seed(0)
    whole = Blocks(**settings).eval()
    for block in whole.blocks:
        block.append(nn.Linear(block[-1].out_features, block[-1].out_features))
    save_file({name: tensor.detach() for name, tensor in whole.state_dict().items()}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    empty = copy.deepcopy(whole).to("meta")
    sources = {name: whole_entry(entry) for name, entry in checkpoint.entries.items()}
    for index in range(len(whole.blocks)):
        pack_linears(whole.blocks[index][3:])
        pack_linears(empty.blocks[index][3:])
        name = f"blocks.{index}.3.weight"
        sources[name] = replace(sources[name], pack=Scaled.pack)
    return whole, empty, checkpoint, sources


@torch.no_grad()
@pytest.mark.parametrize("strategy", ["balanced", "column-parallel"])
def test_a_model_is_filled_with_packed_weights(strategy, tmp_path):
    whole, empty, checkpoint, sources = _saved_blocks(tmp_path, width=64)
    expected = whole(TOKENS)
    pins = {"blocks.2": "cpu:1"} if strategy == "balanced" else None
    with autoshard.simulate("2x1MiB" if pins else "2x230KiB") as devices:
        plan = autoshard.plan(empty, devices.cluster, inputs=TOKENS, strategy=strategy, pins=pins)
        assert bool(plan.cuts) == (pins is None)
        load_applied(empty, plan, checkpoint, sources)
        if pins:
            assert sum(devices.memory(name)[0] for name in devices) == sum(map(stored_bytes, whole.parameters()))
        torch.testing.assert_close(empty(TOKENS).cpu(), expected, rtol=1e-5, atol=1e-5)
        if plan.cuts:
            autoshard.remove(empty)
            assert empty(TOKENS).equal(expected)
