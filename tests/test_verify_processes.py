"""verify under torchrun: stages and replicas are held against the model itself, and all ranks say the same."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import autoshard
from autoshard.errors import PlanError, VerifyError
from autoshard.plan import Mesh, Plan
from autoshard.plan.workload import Workload
from autoshard.verify.processes import OWN_PRECISION
from tests.blocks import Mixes
from tests.pipelines.models import decoder, llama, skips
from tests.pipelines.plans import plan_of
from tests.ranks import run_ranks
from tests.runtime.test_launched import decoder as attentive
from tests.runtime.test_launched import devices_of, plan_for, samples
from tests.torch_releases import SHARDS_REPLICAS


def on_two(plans):
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
        ids = samples()
        given = {"ids": ids, "labels": ids}
        for mesh in ("fsdp=2", "tp=2", "pp=2"):
            said[mesh] = autoshard.verify(attentive(), Plan.from_json(plans[mesh]), inputs=given)
        said["derived inputs"] = with_a_cache(Plan.from_json(plans["cache"]))
        said["wrong"] = autoshard.verify(wrong(attentive()), Plan.from_json(plans["dp=2"]), inputs=given)
        with pytest.raises(PlanError, match="4 processes, one per device, and 2 run"):
            autoshard.verify(attentive(), Plan.from_json(plans["fsdp=2,tp=2"]), inputs=given)
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


def made_plans():
    """Made once, and not by each rank."""
    plans = {mesh: plan_for(mesh, 2, precision="mixed", recompute="full") for mesh in ("fsdp=2", "tp=2", "pp=2")}
    plans |= {"dp=2": plan_for("dp=2", 2), "fsdp=2,tp=2": plan_for("fsdp=2,tp=2", 4)}
    model, given = caching()
    cached = autoshard.plan(
        model, devices_of(2), inputs=given, launch="processes", mesh="pp=2", recompute="full", precision="full",
        workload=Workload(mode="training", batch_size=4, sequence_length=8),
    )  # fmt: skip
    return plans | {"cache": cached.to_json()}


def caching():
    """A decoder that makes a cache unless it is told not to, and inputs."""
    ids = torch.arange(32).view(4, 8)
    return llama(2, tie_word_embeddings=False), {"input_ids": ids, "labels": ids}


def with_a_cache(plan):
    """Of a decoder whose layers are recomputed, and which makes a cache unless it is told not to, as verify does."""
    model, given = caching()
    with pytest.raises(VerifyError, match=r"nothing could be compared.*use_cache=False"):
        autoshard.verify(model, plan, inputs=given)
    return autoshard.verify(model, plan)


def wrong(model):
    """A model of which the second process makes something else, where it is applied."""
    model.register_forward_hook(
        lambda module, args, result: result * (1 + dist.get_rank() * hasattr(module, "no_sync"))
    )
    return model


def replicas(plan, sharded=False):
    mesh = Mesh(fsdp=2) if sharded else Mesh(dp=2)
    return replace(plan, mesh=mesh, stages=(), placements={"": "cpu:0"}, num_microbatches=1, schedule="none")


def test_two_ranks():
    (said, left), (other, _) = run_ranks(on_two, 2, made_plans() if SHARDS_REPLICAS else {})
    assert left and said == other
    mixed = said.pop("mixed")
    assert not mixed.ok and "on rank" in mixed.first_difference.message
    if SHARDS_REPLICAS:
        found = said.pop("wrong")
        assert not found.ok and "on rank" in found.first_difference.message
        assert OWN_PRECISION in said["fsdp=2"].notes
    for name, found in said.items():
        assert found.ok, (name, found)
    assert said["stages"].compared == ("forward", "backward", "optimizer step")
    assert said["answers"].compared == ("forward",)
