"""Every model in micro-batches on three simulated devices: outputs and gradients are those of the whole batch."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch

import autoshard
from autoshard.check.batch import find_batch_axis
from autoshard.errors import PlanError
from autoshard.plan import Mesh, Stage
from autoshard.verify.compare import CoarsestType
from autoshard.verify.run import rounding_of
from tests.conformance.checks import difference_when_placed, forward, plan_tightly, profiled, seed, train
from tests.models import WORKING_CASES

ROWS, PARTS = 8, 4
ROUNDING = 2e-5
"""Parts take other matrix products than the whole: how far a float32 tensor may be off, of its largest value."""


def in_parts(case, inputs, workload, **stage):
    """A balanced plan on devices too small for the model, with the batch divided."""
    batch = find_batch_axis(case.model(), inputs, workload)
    plan, _ = plan_tightly(profiled(case.model, inputs, workload), "balanced")
    stages = {}
    for path, device in plan.placements.items():
        stages.setdefault(device, []).append(path)
    return replace(
        plan, batch=batch, num_microbatches=PARTS, schedule="gpipe", mesh=Mesh(pp=len(stages)),
        devices=tuple(device for device in plan.devices if device.name in stages),
        stages=tuple(Stage(paths=tuple(paths), **stage) for paths in stages.values()),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inference", "training", "recompute"])
@pytest.mark.parametrize("case", WORKING_CASES, ids=lambda case: case.name)
def test_parts_are_equal_to_the_whole(case, mode):
    training = mode != "inference"
    inputs, model = case.example((ROWS, case.shapes[0][1])), case.model()
    seed()
    state = torch.get_rng_state()
    with CoarsestType() as types, torch.no_grad():
        model(**copy.deepcopy(inputs))
    if not torch.equal(torch.get_rng_state(), state):
        pytest.skip("it draws random numbers, and every part draws its own")
    rounding = ROUNDING if types.dtype is None else rounding_of(torch.ones(()), types.dtype)
    try:
        workload = autoshard.Workload(mode="training" if training else "inference")
        plan = in_parts(case, inputs, workload, recompute=mode == "recompute")
    except PlanError as error:
        pytest.skip(f"refused: {error}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a call that runs undivided says so
        run = (lambda model: train(model, inputs, steps=1)) if training else (lambda model: forward(model, inputs))
        assert not difference_when_placed(case.model, plan, [run], rounding=rounding)
