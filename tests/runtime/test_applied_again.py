"""A plan with cuts for a model that is applied already: as removing first, or refused with everything in place."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import autoshard
from autoshard.common.fingerprint import fingerprint
from autoshard.errors import PlanError, RankError
from autoshard.plan import Plan, PlanDevice
from autoshard.plan.workload import Workload
from autoshard.runtime import apply_plan, remove
from autoshard.runtime.cuts import cut_record
from tests.ranks import run_ranks
from tests.runtime.cut_checks import CASES, make


def _plan(ranks: int, mark: str) -> Plan:
    devices = tuple(PlanDevice(name=f"cpu:{rank}", memory_bytes=0) for rank in range(ranks))
    return Plan(
        strategy="column_parallel", objective="latency", workload=Workload(assumed=True), devices=devices,
        placements={"": "cpu:0"}, cuts=CASES["perceptron"].cuts(ranks), fingerprint=mark,
    )  # fmt: skip


def test_in_one_process():
    model, inputs = make("perceptron"), CASES["perceptron"].inputs
    mark = fingerprint(model)
    plan, expected = _plan(2, mark), model(*inputs)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with autoshard.simulate("4x1MiB"):
        apply_plan(model, Plan.from_device_map({"": "cpu:1"}))
        for again in (plan, plan, _plan(4, mark), plan):
            apply_plan(model, again)
            assert cut_record(model).ranks.size == len(again.devices)
            torch.testing.assert_close(model(*inputs).cpu(), expected)
        with pytest.raises(PlanError, match="made for another model"):
            apply_plan(model, replace(plan, fingerprint="0" * 64))
        assert cut_record(model).ranks.size == 2
        remove(model)
    assert all(value.equal(weights[name]) for name, value in model.state_dict().items())


def again_on_ranks():
    model, inputs = make("perceptron"), CASES["perceptron"].inputs
    plan, expected = _plan(2, fingerprint(model)), model(*inputs)
    for _ in range(3):
        apply_plan(model, plan)
        torch.testing.assert_close(model(*inputs), expected)
    other = replace(plan, fingerprint="0" * 64) if dist.get_rank() == 1 else plan
    with pytest.raises((PlanError, RankError), match="made for another model"):
        apply_plan(model, other)
    torch.testing.assert_close(model(*inputs), expected)  # still cut, on both
    if dist.get_rank() == 1:
        remaining = make("perceptron")
        with pytest.raises(RankError, match="another"):
            apply_plan(remaining, plan)  # the other rank removes first: no hang
    else:
        with pytest.raises(RankError, match="another"):
            apply_plan(model, plan)
    return cut_record(model) is not None


def test_on_ranks():
    assert run_ranks(again_on_ranks, 2) == [True, True]
