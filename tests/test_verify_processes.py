"""verify under torchrun: stages and replicas are held against the model itself, and all ranks say the same."""

from dataclasses import replace

import pytest
import torch

import autoshard
from autoshard.errors import VerifyError
from autoshard.plan import Mesh
from tests.blocks import Mixes
from tests.pipelines.models import decoder, skips
from tests.pipelines.plans import plan_of
from tests.ranks import run_ranks
from tests.torch_releases import SHARDS_REPLICAS


def on_two():
    torch.manual_seed(0)
    said = {}
    model, stages, inputs = decoder(2, 2)
    plan = plan_of(model, stages, 2, inputs, parts=2)
    said["stages"] = autoshard.verify(model, plan, inputs=inputs, new_tokens=0)
    called = {"input_ids": inputs["input_ids"], "use_cache": False}
    served = replace(plan_of(model, stages, 2, called), workload=replace(plan.workload, mode="inference"))
    said["answers"] = autoshard.verify(model, served, inputs=called, new_tokens=0)
    with pytest.raises(VerifyError, match="new_tokens=0"):
        autoshard.verify(model, served, inputs=called, new_tokens=3)
    if SHARDS_REPLICAS:
        said["replicas"] = autoshard.verify(model, replicas(plan), inputs=inputs, new_tokens=0)
        said["sharded"] = autoshard.verify(model, replicas(plan, sharded=True), inputs=inputs, new_tokens=0)
    net, _, given = skips()
    del given["targets"]
    said["own loss"] = autoshard.verify(net, plan_of(net, [["down", "deep"], ["deeper", "up"]], 2, given), inputs=given)
    mixes, given = Mixes(4), {"x": torch.randn(8, 4)}
    said["mixed"] = autoshard.verify(mixes, plan_of(mixes, [["first"], ["second"]], 2, given), inputs=given)
    left = all(parameter.grad is None and not parameter.is_meta for parameter in model.parameters())
    autoshard.apply(model, plan)
    with pytest.raises(VerifyError, match="has a part of it only"):
        autoshard.verify(model, inputs=inputs)
    return said, left


def replicas(plan, sharded=False):
    mesh = Mesh(fsdp=2) if sharded else Mesh(dp=2)
    return replace(plan, mesh=mesh, stages=(), placements={"": "cpu:0"}, num_microbatches=1, schedule="none")


def test_two_ranks():
    (said, left), (other, _) = run_ranks(on_two, 2)
    assert left and said == other
    mixed = said.pop("mixed")
    assert not mixed.ok and "on rank" in mixed.first_difference.message
    for name, found in said.items():
        assert found.ok, (name, found)
    assert said["stages"].compared == ("forward", "backward", "optimizer step")
    assert said["answers"].compared == ("forward",)
