"""What a user's own code adds: a penalty on parameters, and batch norm that puts its sums together over processes."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as across
from torch import nn

import autoshard
from autoshard.errors import ApplyError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from tests.ranks import run_jobs, run_ranks
from tests.runtime.test_launched import decoder, devices_of, own_part, plan_for, samples, wholes
from tests.torch_releases import sharded_replicas


def square(parameter):
    return 1e-2 * parameter.pow(2).sum()


def norm(parameter):
    return 1e-2 * parameter.norm()


def added(text, penalty):
    """How far gradients are from those of the whole model, where the penalty has a backward of its own."""
    plan, ids = Plan.from_json(text), samples()
    whole, model = decoder(torch.float64), decoder(torch.float64)
    (whole(ids, labels=ids) + sum(penalty(one) for one in whole.parameters() if one.dim())).backward()
    autoshard.apply(model, plan, inputs={"ids": ids, "labels": ids})
    own = own_part(ids, plan.mesh.tp * plan.mesh.cp)
    model(own, labels=own).backward()
    sum(penalty(one) for one in model.parameters() if one.dim()).backward()
    found = wholes(model, {name: one.grad for name, one in model.named_parameters()})
    penalty(model.temperature).backward()
    with pytest.raises(ApplyError, match="a parameter without a dimension has a gradient that was not averaged"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return max(float((found[name] - one.grad).abs().max()) for name, one in whole.named_parameters())


@sharded_replicas
def test_a_penalty_with_a_backward_of_its_own_is_that_of_the_whole_model():
    """Of sums over elements on every mesh; of norms where ranks don't share matrices."""
    jobs = {
        (mesh, one): (added, plan_for(mesh, 2, torch.float64), one)
        for mesh, one in (("fsdp=2", square), ("tp=2", square), ("cp=2", square), ("fsdp=2", norm))
    }
    for found in run_ranks(run_jobs, 2, jobs):
        assert max(found.values()) < 1e-12, found


class Synced(nn.BatchNorm1d):
    """Does on CPUs what torch's SyncBatchNorm does on GPUs."""

    def forward(self, x):
        sums, count = across.all_reduce(torch.stack([x.sum(0), x.square().sum(0)])), len(x) * dist.get_world_size()
        mean = sums[0] / count
        variance = sums[1] / count - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x, target):
        return nn.functional.mse_loss(self.last(self.norm(self.first(x)).relu()), target)


def normed():
    torch.manual_seed(0)
    return Normed().double(), torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)


def synced(text):
    whole, x, target = normed()
    whole(x, target).backward()
    model = normed()[0]
    model.norm.__class__ = Synced
    autoshard.apply(model, Plan.from_json(text))
    rank, each = dist.get_rank(), len(x) // dist.get_world_size()
    model(*(one[rank * each : (rank + 1) * each] for one in (x, target))).backward()
    found = wholes(model, {name: one.grad for name, one in model.named_parameters()})
    found |= {name: one for name, one in model.named_buffers() if one.is_floating_point()}
    expected = {name: one.grad for name, one in whole.named_parameters()} | dict(whole.named_buffers())
    return max(float((one - expected[name]).abs().max()) for name, one in found.items())


@sharded_replicas
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
def test_batch_norm_that_is_made_one_over_ranks_after_planning_is_that_of_the_whole_batch(mesh):
    model, x, target = normed()
    plan = autoshard.plan(
        model, devices_of(2), inputs={"x": x, "target": target}, workload=Workload(mode="training", batch_size=8),
        launch="processes", mesh=mesh, assume_independent_rows=True,
    )  # fmt: skip
    assert max(run_ranks(synced, 2, plan.to_json())) < 1e-12
