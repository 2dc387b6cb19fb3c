"""Estimates of plans with cuts: equal to what a rank's own run is measured at, when its model is really cut."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.axes.groups import find_groups
from autoshard.capture.capture import capture
from autoshard.check.rank import LoneRank
from autoshard.cluster.device import Device
from autoshard.engine.cuts import Tracer, estimate_cuts, local_profile
from autoshard.engine.links import all_gather_seconds, all_reduce_seconds
from autoshard.engine.pricer import price
from autoshard.errors import PlanError
from autoshard.plan.sharding import Cut, Scale
from autoshard.plan.workload import Workload
from autoshard.runtime.cuts import apply_cuts
from autoshard.strategies.cut_reasons import collectives
from tests.clusters import linked
from tests.runtime.cut_models import cut_plan

INFERENCE, TRAINING = Workload(), Workload(mode="training")


class Mixer(nn.Module):
    def __init__(self, count=8, groups=4, size=8):
        super().__init__()
        self.count, self.groups, self.size = count, groups, size
        self.fused = nn.Linear(64, (count + 2 * groups) * size)
        self.out = nn.Linear(count * size, 64)

    def forward(self, x):
        wide, narrow = self.count * self.size, self.groups * self.size
        parts = self.fused(x).split([wide, narrow, narrow], -1)
        a, b, c = (y.unflatten(-1, (-1, self.size)).transpose(1, 2) for y in parts)
        b, c = (y.repeat_interleave(self.count // self.groups, 1) for y in (b, c))
        return self.out(F.scaled_dot_product_attention(a, b, c).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.norm = Mixer(), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        x = x + self.mixer(self.norm(x))
        inner = F.gelu(self.up(x))
        return x + self.down(inner), inner  # nobody reads the second; it is put together all the same


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.blocks = nn.Embedding(48, 64), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, 48, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x).softmax(-1).square().sum()


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.Conv2d(12, 5, 3)

    def forward(self, x):
        return self.two(self.norm(self.one(x)).relu()).mean()


CASES = {
    "words": (Words, torch.arange(12).reshape(2, 6), {32: ("mixer", {"count": 8, "groups": 4})}),
    "pixels": (Pixels, torch.zeros(2, 3, 12, 12), {}),
}
# which dimensions are cut, and over how many slices: (a parameter, its dimension)
WANTED = {
    "words": [("mixer.out.weight", 1, 4), ("down.weight", 1, 96), ("table.weight", 0, 48), ("head.weight", 1, 64)],
    "pixels": [("two.weight", 1, 12)],
}


@dataclass(frozen=True, slots=True, eq=False)
class InPlace(LoneRank):
    """One rank whose all-reduce takes no memory, as that of NCCL."""

    def all_reduce(self, tensor):
        return tensor


def cuts_of(name, shares_of):
    """Cuts of a case along the wanted dimensions, with the integers that its module needs."""
    make, inputs, _ = CASES[name]
    found = find_groups(capture(make().eval(), inputs, composite=True))
    cuts = []
    for parameter, dim, size in WANTED[name]:
        (group,) = [
            g for g in found.groups
            if g.size == size and any((s.name, s.dim) == (parameter, dim) for s in g.shards)
        ]  # fmt: skip
        shares = shares_of(size)
        scales = ()
        if parameter.startswith("mixer"):
            scales = (
                Scale(module="mixer", attribute="count", value=8, local=tuple(2 * share for share in shares)),
                Scale(module="mixer", attribute="groups", value=4, local=shares),
            )
        cuts.append(
            Cut(blocks=group.blocks, size=size, shares=shares, shards=group.shards, actions=group.actions,
                scales=scales, summed=group.summed)
        )  # fmt: skip
    return tuple(cuts)


def cluster(count, **figures):
    devices = tuple(
        Device(name=f"cpu:{i}", memory_bytes=1 << 30, flops_per_second={"default": 1e12}, launch_seconds=0.0, **figures)
        for i in range(count)
    )
    return linked(devices, 1e10, 1e-5)


SHARES = {"even": lambda size: (size // 2, size // 2), "uneven": lambda size: (size - size // 4, size // 4)}


@pytest.mark.parametrize(
    ("workload", "shares"), [(INFERENCE, "even"), (TRAINING, "uneven")], ids=["inference-even", "training-uneven"]
)
@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_what_a_rank_measures(name, workload, shares):
    make, inputs, _ = CASES[name]
    model = make().train(workload.training)
    cuts = cuts_of(name, SHARES[shares])
    plan, posed = cut_plan(cuts, workload=workload), cluster(2)
    profile = autoshard.profile(model, inputs, workload=workload)
    found = estimate_cuts(plan, profile, posed)
    traced = Tracer(profile.graph).trace(cuts)
    handed_out = 12 * 96 * 4 if name == "words" else 0  # counts whole from where it is made, not from the gather on
    for rank in (0, 1):
        local = copy.deepcopy(model)
        apply_cuts(local, cuts, InPlace(rank=rank, size=2))
        measured = autoshard.profile(local, inputs, workload=workload)
        alone = replace(plan, cuts=(), placements={"": f"cpu:{rank}"})
        true = price(alone, measured, posed, lower_bound_seconds=0.0).devices[rank]
        assert found.devices[rank].parameter_bytes == true.parameter_bytes
        assert found.devices[rank].optimizer_bytes == true.optimizer_bytes
        over = found.devices[rank].peak_bytes - true.peak_bytes
        assert -0.01 * true.peak_bytes <= over <= 0.01 * true.peak_bytes + handed_out
        flops = sum(op.flops for op in local_profile(profile, traced, rank).graph.ops)
        assert flops == pytest.approx(sum(op.flops for op in measured.graph.ops), rel=1e-6)
    assert not any("can't be followed" in note for note in found.notes)


def test_collectives_are_counted_and_priced():
    cuts, posed = cuts_of("words", SHARES["even"]), cluster(2)
    make, inputs, _ = CASES["words"]
    profile = autoshard.profile(make().eval(), inputs, workload=INFERENCE)
    found = estimate_cuts(cut_plan(cuts), profile, posed)
    # two per block, the table's lookup, the head
    assert (found.all_reduces, found.all_gathers) == (2 * 2 + 1 + 1, 2) == collectives(cuts)
    states, inner, logits = (12 * width * 4 for width in (64, 96, 48))
    seconds = 5 * all_reduce_seconds(posed, posed.names, states) + all_reduce_seconds(posed, posed.names, logits)
    seconds += 2 * all_gather_seconds(posed, posed.names, inner)
    assert found.collective_seconds == pytest.approx(seconds)
    assert found.latency_seconds == pytest.approx(seconds + found.devices[0].compute_seconds)
    whole = price(replace(cut_plan(cuts), cuts=()), profile, posed, lower_bound_seconds=0.0)
    assert found.devices[0].compute_seconds < whole.devices[0].compute_seconds
    trained = autoshard.profile(make(), inputs, workload=TRAINING)
    assert estimate_cuts(cut_plan(cuts, workload=TRAINING), trained, posed).all_reduces == 2 * found.all_reduces


def test_plans_for_others_are_refused():
    cuts = cuts_of("pixels", SHARES["even"])
    profile = autoshard.profile(Words().eval(), CASES["words"][1])
    with pytest.raises(PlanError, match=r"cuts one.*, which this model does not have"):
        estimate_cuts(cut_plan(cuts[:1]), profile, cluster(2))
    with pytest.raises(PlanError, match="the devices are cpu:0"):
        estimate_cuts(cut_plan(cuts), profile, cluster(1))
