"""What is cut is right, and what is wrong is found: on blocks with traps."""

import copy
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import autoshard
from autoshard.axes.groups import AxisGroup, AxisGroups, find_groups
from autoshard.capture.capture import capture
from autoshard.capture.graph import ModelGraph
from autoshard.check import local_sizes
from autoshard.check.cuts import CutChecks, check_cuts
from autoshard.common.module_paths import join
from autoshard.plan.sharding import Cut, Refusal, even_shares
from autoshard.runtime.collectives import Ranks
from autoshard.runtime.cuts import apply_cuts
from tests.check.blocks import (
    Alike,
    Attending,
    Dropped,
    Fused,
    Grouped,
    Measuring,
    Partly,
    Peeking,
    Plain,
    Rescaled,
    Scaled,
    Stack,
)
from tests.threads import run_ranks

X = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))


def analysed(model: nn.Module, inputs: torch.Tensor = X) -> tuple[ModelGraph, AxisGroups, CutChecks]:
    """A model's composite graph, its groups and what checks them."""
    graph = capture(model, inputs, composite=True)
    found = find_groups(graph)
    return graph, found, check_cuts(model, inputs, None, graph, found)


def of_blocks(found: AxisGroups, *sizes: int) -> AxisGroup:
    """The group of the repeated blocks themselves, not of a module in them, with one of these sizes: the largest."""
    mine = [group for group in found.groups if group.blocks == ("blocks.0", "blocks.1") and group.size in sizes]
    return max(mine, key=lambda group: group.nbytes)


def scales_of(cut: Cut) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {f"{scale.module}.{scale.attribute}".lstrip("."): (scale.value, scale.local) for scale in cut.scales}


def test_heads_in_groups_need_both_counts_scaled():
    _, found, checks = analysed(Stack(Grouped))
    group = of_blocks(found, 2)
    cut = checks([group], [(1, 1)])[0]
    assert isinstance(cut, Cut)
    assert scales_of(cut) == {"many": (4, (2, 2)), "few": (2, (1, 1))}


def test_masks_of_cut_tensors_are_cut_in_training():
    """Every rank draws what the whole block draws, and uses its part."""
    model = Stack(Dropped).train()
    torch.manual_seed(3)
    before, others = torch.get_rng_state(), random.getstate()
    _, found, checks = analysed(model)
    group = of_blocks(found, 48)
    assert [action.kind for action in group.actions].count("dropout") == 1
    cut = checks([group], [(24, 24)])[0]
    assert isinstance(cut, Cut) and cut.training
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == others
    _, found, checks = analysed(model.eval())
    cut = checks([of_blocks(found, 48)], [(24, 24)])[0]
    assert isinstance(cut, Cut) and not cut.training


def test_a_list_of_sizes_is_scaled_item_by_item():
    _, found, checks = analysed(Stack(Fused))
    group = of_blocks(found, 4)
    assert {shard.axis for shard in group.shards if shard.name == "all.weight"} == {"(*4x6|*4x6|*4x6)"}
    cut = checks([group], [(3, 1)])[0]
    assert isinstance(cut, Cut)
    assert {name: local for name, (_, local) in scales_of(cut).items()} == {
        "heads": (3, 1), "sizes.0": (18, 6), "sizes.1": (18, 6), "sizes.2": (18, 6)
    }  # fmt: skip


def check_on_ranks(model: nn.Module, cut: Cut, x: torch.Tensor) -> None:
    """The model with one cut is equal to the model on all ranks; the ranks are threads."""

    def rank(ranks: Ranks) -> torch.Tensor:
        return apply_cuts(copy.deepcopy(model), [cut], ranks)(x)

    with torch.no_grad():
        wanted = model(x)
        for found in run_ranks(rank, cut.degree):
            assert torch.allclose(found, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("shares", [(2, 2), (3, 1)])
def test_sizes_that_are_read_from_whole_tensors(shares):
    """The number of heads is an attribute, of which code makes their width: it has to stay, and the lengths do not."""
    model = Stack(Measuring)
    _, found, checks = analysed(model)
    cut = checks([of_blocks(found, 4)], [shares])[0]
    assert isinstance(cut, Cut), cut
    lengths = [(a.module, a.function, a.occurrence, a.argument, a.axis) for a in cut.actions if a.kind == "length"]
    assert lengths == [("", "view", -1, "0.1.2", "*4"), ("", "reshape", -1, "0.3", "*4x6")]
    assert scales_of(cut) == {"width": (24, tuple(6 * share for share in shares))}
    for x in (X, torch.randn(3, 7, 24)):
        check_on_ranks(model, cut, x)


@pytest.mark.parametrize("shares", [(2, 2), (3, 1)])
@pytest.mark.parametrize("added", [False, True])
def test_attention_of_torch_is_cut_by_its_heads(shares, added):
    model = Stack(partial(Attending, add_bias_kv=added, add_zero_attn=added))
    _, found, checks = analysed(model)
    cut = checks([of_blocks(found, 4)], [shares])[0]
    assert isinstance(cut, Cut), cut
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", *(("bias_k", "bias_v") if added else ()))
    assert {shard.name for shard in cut.shards} == {f"inner.{name}" for name in names}
    assert not cut.scales  # heads are counted by the width of what a rank has
    check_on_ranks(model, cut, X)


def test_attention_of_torch_with_a_mask_for_each_head_stays_whole():
    _, found, _ = analysed(Stack(partial(Attending, mask=torch.zeros(5 * 4, 2, 2))))
    assert not found.groups
    assert any("sums inside of multi_head_attention_forward" in row.reason for row in found.unshardable)


@pytest.mark.parametrize("other", [Plain, Scaled])
def test_weights_that_blocks_share_are_cut_in_all_of_them(other):
    """Alike blocks are cut as such; of unlike ones, the modules that are alike."""
    model = Stack(Plain)
    model.blocks[1] = other()
    model.blocks[1].inner = copy.deepcopy(model.blocks[0].inner, {id(p): p for p in model.blocks[0].inner.parameters()})
    assert len(list(model.parameters())) < 12
    inputs, devices = {"inputs": X}, ["cpu:0", "cpu:1"]
    plan = autoshard.plan(model, devices, strategy="column-parallel", objective="memory", **inputs)
    cut = {(join(b, shard.name), shard.dim) for one in plan.cuts for b in one.blocks for shard in one.shards}
    columns = {(f"blocks.{n}.inner.{name}.weight", 0) for n in (0, 1) for name in "abc"}
    assert columns <= cut and {name for name, _ in cut} >= {"blocks.0.inner.d.weight", "blocks.1.inner.d.weight"}
    assert other is Scaled or ("blocks.0.inner.d.weight", 1) in cut
    whole = copy.deepcopy(model)
    for one in (whole, autoshard.apply(model, plan)):
        one(X).square().mean().backward()
        torch.optim.SGD(one.parameters(), 0.1).step()
    for (name, found), wanted in zip(autoshard.remove(model).named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=name)


def test_what_all_ranks_keep_has_its_gradient_once():
    _, found, checks = analysed(Stack(Partly))
    group = of_blocks(found, 48)
    assert any(shard.axis == "(*48|6)" for shard in group.shards)
    assert set(group.summed) >= {"mix.weight"}
    cut = checks([group], [(24, 24)])[0]
    assert isinstance(cut, Cut), cut
    assert scales_of(cut) == {"own": (48, (24, 24))}


def test_an_attribute_with_the_same_number_is_left_out_again():
    _, found, checks = analysed(Stack(Alike), X[:, :4])
    cut = checks([of_blocks(found, 4)], [(2, 2)])[0]
    assert isinstance(cut, Cut), cut
    assert scales_of(cut) == {"heads": (4, (2, 2))}


class Noted(Alike):
    """As many heads as notes say that nobody reads, and as what is read in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up.notes, self.down.notes, self.own = [4] * 9, [4] * 9, 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.heads = vars(self)["own"]
        return super().forward(x)


def test_no_attribute_is_tried_that_nobody_reads(monkeypatch):
    _, found, checks = analysed(Stack(Noted), X[:, :4])
    runs, run = [], local_sizes._run
    monkeypatch.setattr(local_sizes, "_run", lambda *given: runs.append(given) or run(*given))
    cut = checks([of_blocks(found, 4)], [(2, 2)])[0]
    assert isinstance(cut, Cut), cut
    assert scales_of(cut) == {"own": (4, (2, 2))}
    assert len(runs) <= 8
    assert "__getattribute__" not in vars(nn.Module)


def test_a_bias_that_other_code_reads_is_not_hidden_from_it():
    _, found, _ = analysed(Stack(Peeking))
    reasons = {row.reason for row in found.unshardable if row.name == "blocks.0.down.weight"}
    assert "sum in blocks.0 reads what linear in blocks.0.down adds" in reasons


@pytest.mark.parametrize("slopes", [1, 5])
def test_layers_around_a_prelu_are_cut_together(slopes):
    _, found, checks = analysed(nn.Sequential(nn.Linear(24, 16), nn.PReLU(slopes), nn.Linear(16, 8)))
    group = next(group for group in found.groups if {"0.weight", "2.weight"} <= {shard.name for shard in group.shards})
    assert group.size == 16 and isinstance(checks([group], [(8, 8)])[0], Cut)


def test_a_missing_sum_is_found():
    _, found, checks = analysed(Stack(Grouped))
    group = of_blocks(found, 2)
    wrong = replace(group, actions=tuple(action for action in group.actions if action.kind != "reduce"))
    outcome = checks([wrong], [(1, 1)])[0]
    assert isinstance(outcome, Refusal)
    assert "reads a sum that is not complete" in outcome.reason


def test_a_wrong_axis_is_found():
    """Queries cut in another order than the values they meet."""
    _, found, checks = analysed(Stack(Fused))
    group = of_blocks(found, 4)
    shards = tuple(replace(s, axis="6x*4") if s.name == "out.weight" else s for s in group.shards)
    outcome = checks([replace(group, shards=shards)], [(2, 2)])[0]
    assert isinstance(outcome, Refusal) and "can't be cut by its axes" in outcome.reason


def test_what_can_not_be_followed_says_so():
    _, found, _ = analysed(nn.GRUCell(24, 24), X[0])
    reasons = {row.reason for row in found.unshardable}
    assert reasons == {
        "linear in the model itself sums inside of gru_cell", "a tensor of the inputs would be cut twice"
    }  # fmt: skip


class GivesWeight(Stack):
    def forward(self, x):
        return super().forward(x), self.blocks[1].all.weight


def test_a_parameter_that_the_model_gives_is_whole():
    _, found, _ = analysed(GivesWeight(Fused))
    assert "blocks.1.all.weight is an output of the model" in {row.reason for row in found.unshardable}


def test_weights_that_are_scaled_from_outside_are_cut_all_the_same():
    expected, model = Rescaled(Grouped).eval(), Rescaled(Grouped).eval()
    model.load_state_dict(expected.state_dict())
    plan = autoshard.plan(model, ["cpu:0", "cpu:1"], inputs=X, strategy="column-parallel", objective="memory")
    assert {"d.weight", "a.weight"} <= {shard.name for cut in plan.cuts for shard in cut.shards}
    autoshard.apply(model, plan)
    for _ in range(2):
        torch.testing.assert_close(model(X), expected(X))
    assert torch.equal(autoshard.remove(model).blocks[1].d.weight, expected.blocks[1].d.weight)


def test_the_model_is_as_it_was():
    model = Stack(Grouped)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, found, checks = analysed(model)
    for group in found.groups:
        checks([group], [even_shares(group.size, 2)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.many == 4 for module in model.blocks)
