"""Faults of one of several processes that all of them must hear of, and what is left after a plan is removed."""

import copy
import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.errors import ApplyError, PlanError, RankError
from autoshard.plan import Mesh
from autoshard.runtime import data_parallel
from autoshard.runtime import sharded as sharded_replicas
from autoshard.runtime.collectives import ProcessRanks, lost
from autoshard.runtime.dispatch import own_name
from autoshard.runtime.pipeline_record import pipeline_record
from tests import torch_releases
from tests.hooks import is_hooked
from tests.ranks import run_jobs, run_ranks
from tests.runtime.test_lost_ranks import made


def stages():
    """A step that one rank can't do is none for the others, and a copy of the model outlives it."""
    model, plan, given = made("stages 2")
    rank = dist.get_rank()
    # what was free when each rank planned does not matter, what they would do does
    free = tuple(dataclasses.replace(device, memory_bytes=1 << (30 + rank)) for device in plan.devices)
    with pytest.raises(RankError, match=r"rank 1 has another plan than rank 0\. .*same plan file"):
        autoshard.apply(model, dataclasses.replace(plan, schedule="gpipe" if rank else "1f1b"))
    autoshard.apply(model, dataclasses.replace(plan, devices=free, reasons=(f"rank {rank}",)))
    runner = autoshard.schedule(model)
    runner.step(**given)
    begin = time.monotonic()
    with pytest.raises(PlanError if rank == 1 else RankError, match="can't be divided") as error:
        runner.step(given["x"][: 8 - rank])
    assert rank == 1 or "rank 1 can't take part" in str(error.value)
    assert time.monotonic() - begin < 5
    with pytest.raises(RankError, match="rank 1 has other inputs than rank 0"):
        runner.step(**{name: one[:4] for name, one in given.items()} if rank else given)
    runner.step(**given)
    twin = copy.deepcopy(model)
    autoshard.remove(model)
    found = autoshard.schedule(twin.eval()).eval(**given)
    with torch.no_grad():
        expected = model.eval()(**given)["x"]
    assert rank == 0 or torch.allclose(expected, found["x"], atol=1e-6)
    group = pipeline_record(twin)
    autoshard.remove(twin)
    assert not group.made.groups


class Either(nn.Module):
    """Which layer works depends on the values."""

    def __init__(self, model):
        super().__init__()
        self.blocks = model.blocks

    def forward(self, x):
        first = self.blocks[0 if bool(x.sum() > 0) else 1]
        return {"loss": self.blocks[2](first(x)).square().mean()}


def sharded(path):
    """Blocks that only some ranks run would be put together of parts of others; a training checkpoint has all parts."""
    model, plan, given = made("sharded")
    autoshard.apply(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(**given)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1:
            autoshard.save_checkpoint(path, model, optimizer, state={"step": 2})
    other, _, _ = made("sharded")
    autoshard.apply(other, plan)
    again = torch.optim.AdamW(other.parameters(), lr=0.1)
    assert autoshard.load_checkpoint(path, other, again) == {"step": 2}
    assert other(**given)["loss"].item() == losses[2]

    model = Either(made("sharded")[0])
    autoshard.apply(model, dataclasses.replace(plan, fingerprint=""))
    model(torch.ones(2, 8))["loss"].backward()
    with pytest.raises(RankError, match="ranks have run different blocks of this model"):
        model(torch.ones(2, 8) * (1 - 2 * dist.get_rank()))


def half_sharded():
    """Where one rank fails while blocks are sharded, all have the model as it was, and can apply a plan to it."""
    model, plan, given = made("sharded")
    expected, before = model(**given)["loss"], dict(model.named_parameters())
    classes, usual, made_so_far = [type(module) for module in model.modules()], sharded_replicas.ReduceScatter, []

    def failing(ranks):
        made_so_far.append(ranks)
        if dist.get_rank() == 1 and len(made_so_far) == 3:
            raise ValueError("the third block")
        return usual(ranks)

    sharded_replicas.ReduceScatter = failing
    with pytest.raises((RankError, ValueError), match=r"(rank 1 can't take part: )?the third block"):
        autoshard.apply(model, plan)
    sharded_replicas.ReduceScatter = usual
    assert [type(module) for module in model.modules()] == classes
    assert all(one is before[name] for name, one in model.named_parameters())
    assert not is_hooked(model)
    assert torch.equal(model(**given)["loss"], expected)
    autoshard.apply(model, plan)
    assert torch.allclose(model(**given)["loss"], expected)
    autoshard.remove(model)
    assert all(one is before[name] for name, one in model.named_parameters())


def half_cut():
    """As above, where columns are cut before: they are put together again over the groups that they were cut for."""
    model, plan, given = made("columns")
    training = dataclasses.replace(plan.workload, mode="training")
    plan = dataclasses.replace(plan, mesh=Mesh(tp=2), launch="processes", precision="full", workload=training)
    expected, usual = model(**given)["loss"], data_parallel.recompute_layers

    def failing(model, plan):
        raise ValueError("no recomputation")

    data_parallel.recompute_layers = failing
    with pytest.raises((RankError, ValueError), match="no recomputation"):
        autoshard.apply(model, plan)
    data_parallel.recompute_layers = usual
    assert torch.equal(model(**given)["loss"], expected)
    autoshard.apply(model, plan)
    assert torch.allclose(model(**given)["loss"], expected)


def own_norm():
    """A norm that is one of a rank's parts: ranks scale what they have whole by other numbers."""
    model, plan, given = made("columns")
    autoshard.apply(model, plan)
    _step_with_own_norm(model, given)


def _step_with_own_norm(model, given):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(**given)["loss"].backward()
        autoshard.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
    with pytest.raises(RankError, match=r"differ between the ranks.*use autoshard\.clip_grad_norm_"):
        optimizer.step()


def test_two_ranks(tmp_path):
    """In one launch: steps that one rank can't do, blocks that only some run, half of an apply, a norm of parts."""
    jobs = {"stages": (stages,), "own norm": (own_norm,)}
    if torch_releases.SHARDS_REPLICAS:
        jobs |= {"sharded": (sharded, tmp_path / "last"), "half sharded": (half_sharded,), "half cut": (half_cut,)}
    else:
        jobs["refused"] = (refused,)
    run_ranks(run_jobs, 2, jobs)


def refused():
    model, plan, _ = made("sharded")
    before = dict(model.named_parameters())
    with pytest.raises(ApplyError, match=r"can't exchange gradients that only some ranks have.* Update torch"):
        autoshard.apply(model, plan)
    assert all(one is before[name] for name, one in model.named_parameters())


def columns():
    """The norm of two models; `state_dict()` is for all ranks: one that is alone waits as long as the group says."""
    model, plan, given = made("columns")
    alone, other = copy.deepcopy(model), copy.deepcopy(model)
    autoshard.apply(model, plan)
    autoshard.apply(other, plan)
    norms = []  # two models under one optimizer
    for ones in ((model, other), (alone, copy.deepcopy(alone))):
        for factor, one in enumerate(ones, start=1):
            (factor * one(**given)["loss"]).backward()
        norms.append(autoshard.clip_grad_norm_([each for one in ones for each in one.parameters()], 0.1))
    assert torch.allclose(*norms)
    whole = model.state_dict()
    assert whole["blocks.0.up.weight"].shape == (24, 8)
    if dist.get_rank() == 1:
        time.sleep(6)
        return
    with pytest.raises(RankError, match=r"lost rank 1 in 5 s: .*call it on all ranks"):
        model.state_dict()


def test_two_models_are_clipped_and_their_state_is_asked_for_by_all():
    run_ranks(columns, 2, group_seconds=5.0)


def test_a_norm_of_parts_is_noticed_in_one_process():
    model, plan, given = made("columns")
    devices = [dataclasses.replace(device, name=f"cpu:{rank}") for rank, device in enumerate(plan.devices)]
    with autoshard.simulate("2x1GiB"):
        autoshard.apply(model, dataclasses.replace(plan, devices=tuple(devices)))
        _step_with_own_norm(model, given)


def test_a_rank_without_memory_blames_nobody_else():
    ranks = ProcessRanks(known=lambda: None, rank=1, size=2, members=(0, 1))
    error = lost(ranks, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert str(error).startswith("rank 1 has no memory left for a collective: CUDA out of memory.")


def test_devices_of_several_machines_are_counted_on_each():
    _, plan, _ = made("mesh")
    hosts = [dataclasses.replace(plan.devices[0], name=f"cuda:{rank}", host=f"host{rank // 2}") for rank in range(4)]
    assert [own_name(dataclasses.replace(plan, devices=tuple(hosts)), rank) for rank in range(4)] == [
        "cuda:0", "cuda:1", "cuda:0", "cuda:1",
    ]  # fmt: skip
    alone = dataclasses.replace(plan, devices=(dataclasses.replace(hosts[3]),))
    assert own_name(alone, 0) == "cuda:3"
