"""verify on plans with cuts: equal to rounding, and what is wrong with a cut is found and named."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.errors import ApplyError, RankError
from autoshard.plan import Plan
from autoshard.plan.sharding import Action, Cut
from autoshard.plan.workload import Workload
from autoshard.runtime.dispatch import is_applied
from autoshard.verify.verify import verify
from tests.ranks import run_ranks
from tests.runtime.cut_models import cut_plan, decoder_cuts, make_decoder, reduce, shard

IDS = {"input_ids": torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])}


@pytest.fixture(scope="module")
def decoder() -> nn.Module:
    return make_decoder()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return cut_plan(decoder_cuts(("model.layers.0", "model.layers.1")), "cuda")


def test_a_cut_decoder_is_equal_to_rounding(decoder):
    """So is an applied one to its removed state."""
    found = autoshard.plan(decoder, "2x1GiB", inputs=IDS, strategy="column-parallel", objective="memory")
    report = verify(decoder, found, IDS, training=True, new_tokens=4)
    assert report.ok, report.first_difference
    assert report.compared == ("forward", "backward", "optimizer step", "decode") and report.simulated
    assert any("another order" in note for note in report.notes)
    for peak in report.peaks:
        assert peak.measured_bytes < 1 << 22 and peak.predicted_bytes is not None
    assert not is_applied(decoder)
    devices = tuple(replace(one, name=f"cpu:{rank}") for rank, one in enumerate(found.devices))
    autoshard.apply(decoder, replace(found, devices=devices, placements={"": "cpu:0"}))
    try:
        assert verify(decoder, inputs=IDS, new_tokens=3).ok
    finally:
        autoshard.remove(decoder)


def without(plan, kind, module):
    cuts = []
    for cut in plan.cuts:
        actions = tuple(one for one in cut.actions if (one.kind, one.module) != (kind, module))
        cuts.append(replace(cut, actions=actions))
    assert cuts != list(plan.cuts)
    return replace(plan, cuts=tuple(cuts))


def test_a_sum_that_is_left_out_is_found(decoder, plan):
    report = verify(decoder, without(plan, "reduce", "mlp.down_proj"), IDS, new_tokens=0)
    assert not report.ok and report.first_difference.module == "model.layers.0.mlp.down_proj"


def test_a_gradient_that_is_not_summed_is_found(decoder, plan):
    wrong = without(plan, "copy_to", "self_attn.k_proj")
    assert verify(decoder, wrong, IDS, training=False, new_tokens=0).ok
    report = verify(decoder, wrong, IDS, training=True, new_tokens=0)
    assert not report.ok and report.first_difference.during == "backward"
    assert report.first_difference.module.startswith("model.layers.1")


class Remembering(nn.Module):
    """Returns what it would keep for the next call, which stays cut."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Remembers() for _ in range(2))

    def forward(self, x):
        kept = []
        for block in self.blocks:
            x, keys = block(x)
            kept.append(keys)
        return x, kept


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), k


HEADS = Cut(
    blocks=("blocks.0", "blocks.1"),
    size=4,
    shares=(2, 2),
    shards=(
        *(shard(f"{x}.{y}", 0, "*4x4") for x in "qkv" for y in ("weight", "bias")),
        shard("out.weight", 1, "*4x4"),
    ),
    actions=(*(Action(kind="copy_to", module=x, argument="0.0") for x in "qkv"), reduce("out", addend="0.2")),
)


@pytest.mark.parametrize("training", [False, True])
def test_outputs_that_stay_cut_are_compared_part_by_part(training, monkeypatch):
    torch.manual_seed(0)
    model, x = Remembering().train(training), torch.randn(2, 3, 16)
    plan = cut_plan((HEADS,), "cuda")
    report = verify(model, plan, x, training=training)
    assert report.ok, report.first_difference
    forward = Remembers.forward

    def shifted(self, x):
        y, k = forward(self, x)
        return y, k + 0.01 * (k.shape[1] < 4)

    monkeypatch.setattr(Remembers, "forward", shifted)
    report = verify(model, plan, x, training=training)
    assert not report.ok and report.first_difference.output == "output 1.0"


@pytest.mark.slow
def test_autocast(decoder, plan):
    with torch.autocast("cpu", torch.bfloat16):
        found = verify(decoder, plan, IDS, training=True, new_tokens=0)
        assert found.ok, found.first_difference
        assert any("computes in bfloat16" in note for note in found.notes)
        assert not verify(decoder, without(plan, "reduce", "mlp.down_proj"), IDS, training=False, new_tokens=0).ok


def verified():
    model = make_decoder()
    found = cut_plan(decoder_cuts(("model.layers.0", "model.layers.1")))
    wrong = replace(found, cuts=tuple(replace(cut, actions=without_sums(cut)) for cut in found.cuts))
    good, bad = (verify(model, plan, IDS, training=True, new_tokens=3) for plan in (found, wrong))
    torch.manual_seed(0)
    remembering = verify(Remembering(), cut_plan((HEADS,)), torch.randn(2, 3, 16), training=True)
    with pytest.raises((ApplyError, RankError), match="can't be used here"):
        verify(Remembering(), cut_plan((HEADS,), "hpu"), torch.randn(2, 3, 16))
    return good.ok, good.compared, bad.ok, bad.first_difference.module, remembering.ok


def without_sums(cut):
    return tuple(action for action in cut.actions if action.kind != "reduce")


def test_several_processes_verify_together():
    steps = ("forward", "backward", "optimizer step", "decode")
    assert run_ranks(verified, 2) == [(True, steps, False, "model.layers.0.self_attn.o_proj", True)] * 2


class Complex(nn.Module):
    """What it gives is complex: its parts on ranks are summed in another order, and training begins with it."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(16, 32, dtype=torch.complex64) / 4)
        self.down = nn.Parameter(torch.randn(32, 8, dtype=torch.complex64) / 4)

    def forward(self, x):
        return torch.tanh(x @ self.up) @ self.down


def test_complex_outputs_are_equal_to_rounding():
    torch.manual_seed(0)
    model, x = Complex(), torch.randn(4, 16, dtype=torch.complex64)
    workload = Workload(mode="training")
    plan = autoshard.plan(model, "2x1GiB", inputs=x, strategy="column-parallel", objective="memory", workload=workload)
    assert plan.cuts
    report = verify(model, plan, x, training=True)
    assert report.ok, report.first_difference
