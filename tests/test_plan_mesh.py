"""Mesh, batch and stages in a plan: they survive JSON, and a damaged file is refused."""

import json

import pytest

from autoshard.errors import PlanError
from autoshard.plan import Mesh, Plan, PlanDevice, Stage
from autoshard.plan.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.plan.workload import Workload


def plan_of_four():
    return Plan(
        strategy="pipeline",
        objective="throughput",
        workload=Workload(batch_size=8),
        devices=tuple(PlanDevice(name=f"cuda:{i}", memory_bytes=1 << 30) for i in range(4)),
        placements={"embed": "cuda:0", "layers.0": "cuda:0", "layers.1": "cuda:1", "head": "cuda:1"},
        mesh=Mesh(dp=2, pp=2, shares=(2, 1)),
        stages=(Stage(paths=("embed", "layers.0")), Stage(paths=("layers.1", "head"), recompute=True)),
        batch=BatchAxis(
            size=8,
            inputs=(BatchInput(path="input_ids", dim=0, axis="*8"),),
            outputs=(BatchOutput(path="loss", how="mean"), BatchOutput(path="logits", how="cat", axis="*8x3")),
            whole=("position_ids",),
            proof="by its axes",
        ),
        num_microbatches=4,
        schedule="1f1b",
    )


def test_json_round_trip():
    plan = plan_of_four()
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_mesh_numbers_its_devices():
    mesh = Mesh(dp=2, pp=3, tp=4)
    places = [(d, p, t) for d in range(2) for p in range(3) for t in range(4)]
    assert [mesh.rank(data=d, pipeline=p, tensor=t) for d, p, t in places] == [*range(24)]
    assert [mesh.place(rank) for rank in range(24)] == places


def test_a_mesh_of_version_1_is_read():
    data = json.loads(plan_of_four().to_json())
    data["version"], data["mesh"] = 1, {"data": 2, "pipeline": 2, "tensor": 1, "sharded": False, "shares": [2, 1]}
    assert Plan.from_json(json.dumps(data)) == plan_of_four()
    data["mesh"], data["stages"] = {"data": 4, "pipeline": 1, "tensor": 1, "sharded": True, "shares": []}, []
    assert Plan.from_json(json.dumps(data)).mesh == Mesh(fsdp=4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data["mesh"].update(dp=3), "a product of 4"),
        (lambda data: data["mesh"].update(shares=[1]), "mesh.shares"),
        (lambda data: data["batch"].update(inputs=[]), "what is divided"),
        (lambda data: data["batch"]["inputs"][0].update(axis="*9"), "batch.axis"),
        (lambda data: data["batch"]["outputs"][0].update(how="median"), "one of cat"),
        (lambda data: data["stages"].pop(), "paths of the placements"),
        (lambda data: data["stages"][1]["paths"].append("embed"), "different paths"),
        (lambda data: data["stages"].append({"paths": []}), "multiple of 2"),
    ],
)
def test_a_damaged_plan_is_refused(change, words):
    data = json.loads(plan_of_four().to_json())
    change(data)
    with pytest.raises(PlanError, match=words):
        Plan.from_json(json.dumps(data))
