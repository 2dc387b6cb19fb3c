"""Packed tensors (quantised weights, and any wrapper of tensors) counted, planned for and moved by what is in them."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.common.packed import repacked, stored_bytes, stored_tensors
from autoshard.plan import Plan
from autoshard.runtime.moves import move_tensors, named_tensors
from tests.packed_models import TOKENS, Blocks, pack_linears
from tests.replay import replay


def quantised(model: nn.Module) -> nn.Module:
    """Quantise with torchao, as users do."""
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


@pytest.fixture(params=[pack_linears, quantised])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return request.param(Blocks().to(torch.bfloat16).eval())


def _bytes(model: nn.Module) -> int:
    storages = {t.untyped_storage(): t.untyped_storage() for p in model.parameters() for t in stored_tensors(p)}
    return sum(storage.nbytes() for storage in storages.values())


def test_profile_is_the_same_without_values(model):
    profile = autoshard.profile(model, TOKENS)
    empty = copy.deepcopy(model)
    for module in empty.modules():
        for name, parameter in module.named_parameters(recurse=False):
            made = nn.Parameter(repacked(parameter, lambda part: part.to("meta")), parameter.requires_grad)
            setattr(module, name, made)
    again = autoshard.profile(empty, TOKENS)
    assert again.modules == profile.modules and again.graph.fingerprint == profile.graph.fingerprint
    gone = autoshard.profile(empty, TOKENS).graph
    assert replay(gone, model, TOKENS)[0][0].equal(model(TOKENS))


@torch.no_grad()
def test_applied_on_several_devices(model):
    expected = model(TOKENS)
    with autoshard.simulate("3x1MiB") as devices:
        pins = {"embed": "cpu:0", "blocks.1": "cpu:1", "blocks.2": "cpu:2"}
        plan = autoshard.plan(model, devices.cluster, inputs=TOKENS, strategy="balanced", pins=pins)
        estimated = autoshard.estimate(plan, autoshard.profile(model, TOKENS))
        objects = dict(model.named_parameters())
        autoshard.apply(model, plan)
        assert len({parameter.device for parameter in model.parameters()}) == 3
        assert all(
            part.device == parameter.device for parameter in model.parameters() for part in stored_tensors(parameter)
        )
        assert sum(devices.memory(name)[0] for name in devices) == _bytes(model)
        model(TOKENS)
        devices.reset_peak()
        assert model(TOKENS).cpu().equal(expected)
        peaks = {device.name: device.peak_bytes for device in estimated.devices}
        assert {name: devices.memory(name)[1] for name in devices} == peaks
        autoshard.remove(model)
        assert all(parameter is objects[name] for name, parameter in model.named_parameters())
        assert [devices.memory(name)[0] for name in devices] == [0, 0, 0]
    assert model(TOKENS).equal(expected)


def test_the_rest_trains(model):
    with autoshard.simulate("2x1MiB"):
        plan = autoshard.plan(model, "2x1MiB", inputs=TOKENS, workload=autoshard.Workload(mode="training"))
        assert autoshard.verify(model, plan, inputs=TOKENS).ok


def test_ties_of_packed_tensors_are_kept(model):
    model.blocks[2][0].weight = model.blocks[0][0].weight
    model.blocks[1][0].weight = nn.Parameter(model.blocks[0][0].weight.detach(), requires_grad=False)
    profile = autoshard.profile(model, TOKENS)
    assert profile.parameter_bytes == _bytes(model)
    assert profile.graph.tied() == (tuple(f"blocks.{i}.0.weight" for i in (0, 1, 2)),)
    with autoshard.simulate("2x1MiB") as devices, torch.no_grad():
        expected = model(TOKENS)
        autoshard.apply(model, {"embed": "cpu:0", "norm": "cpu:0"} | {f"blocks.{i}": f"cpu:{i % 2}" for i in range(3)})
        assert sum(devices.memory(name)[0] for name in devices) == _bytes(model)
        assert model(TOKENS).cpu().equal(expected)
        autoshard.remove(model)
        first, alias, same = (stored_tensors(model.blocks[i][0].weight)[0] for i in range(3))
        assert first.data_ptr() == alias.data_ptr() and model.blocks[2][0].weight is model.blocks[0][0].weight
        del first, alias, same


def test_a_failed_move_leaves_packed_tensors_where_they_were(model):
    before = model(TOKENS)
    with autoshard.simulate("1x8KiB"):
        with pytest.raises(autoshard.errors.ApplyError, match="Nothing was moved"):
            move_tensors(named_tensors(model), dict.fromkeys(named_tensors(model), torch.device("cpu:0")))
        assert all(part.device.index is None for p in model.parameters() for part in stored_tensors(p))
    assert model(TOKENS).equal(before)


@torch.no_grad()
def test_packed_tensors_stay_whole_where_others_are_cut():
    torch.manual_seed(0)
    model = Blocks(width=64).eval()
    for block in model.blocks:
        block.append(pack_linears(nn.Sequential(nn.Linear(64, 64)))[0])
    expected = model(TOKENS)
    with autoshard.simulate("2x176KiB") as devices:  # too full for a whole matrix beside the parts: that takes the CPU
        plan = autoshard.plan(model, devices.cluster, inputs=TOKENS, strategy="column-parallel")
        cut = {f"{block}.{shard.name}" for cut in plan.cuts for block in cut.blocks for shard in cut.shards}
        assert "blocks.0.2.weight" in cut and "blocks.0.3.weight" not in cut
        assert any("3.weight" in whole.names for whole in plan.whole)
        autoshard.apply(model, plan)
        torch.testing.assert_close(model(TOKENS).cpu(), expected, rtol=1e-5, atol=1e-5)
        autoshard.remove(model)
        assert all(type(block[3].weight) is type(model.blocks[0][3].weight) for block in model.blocks)
    assert model(TOKENS).equal(expected)


@torch.no_grad()
def test_packed_tensors_are_streamed(model):
    expected, objects = model(TOKENS), dict(model.named_parameters())
    blocks = [f"blocks.{index}" for index in range(3)]
    plan = Plan.from_device_map({"embed": "cpu:0", "norm": "cpu:0", **dict.fromkeys(blocks, "cpu:0")})
    with autoshard.simulate("1x1MiB") as devices:
        autoshard.apply(model, replace(plan, offloaded=dict.fromkeys(blocks, "cpu")))
        largest = sum(map(stored_bytes, model.blocks[0].parameters()))
        resident = sum(stored_bytes(p) for module in (model.embed, model.norm) for p in module.parameters())
        assert devices.memory("cpu:0")[0] <= resident + 2 * largest < _bytes(model)
        for _ in range(2):
            assert model(TOKENS).cpu().equal(expected)
        assert all(part.device.index is None for p in model.blocks.parameters() for part in stored_tensors(p))
        autoshard.remove(model)
        gc.collect()
        assert devices.memory("cpu:0")[0] == 0
    assert all(parameter is objects[name] for name, parameter in model.named_parameters())
    assert model(TOKENS).equal(expected)
