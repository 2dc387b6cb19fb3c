"""Every model in micro-batches on three simulated devices: outputs and gradients are those of the whole batch."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch

import autoshard
from autoshard.check.batch import find_batch_axis
from autoshard.errors import PlanError
from autoshard.nested import tensors_in
from autoshard.plan import Mesh, Stage
from autoshard.verify.compare import CoarsestType
from autoshard.verify.run import rounding_of
from tests.conformance.checks import loss_of, plan_tightly, profiled, seed
from tests.models import WORKING_CASES

ROWS, PARTS = 8, 4
ROUNDING = 1e-5
"""Parts take other matrix products than the whole: how far a float32 tensor may be off, of its largest value."""
ZERO = torch.zeros(())
NOISE = 1e-6
"""Of the largest gradient of all: a gradient that is zero but for rounding has no size of its own."""


def in_parts(case, inputs, workload, **stage):
    """A balanced plan on devices too small for the model, with the batch divided."""
    batch = find_batch_axis(case.model(), inputs, workload)
    plan, _ = plan_tightly(profiled(case.model, inputs, workload), "balanced")
    stages = {}
    for path, device in plan.placements.items():
        stages.setdefault(device, []).append(path)
    return replace(
        plan,
        batch=batch,
        num_microbatches=PARTS,
        schedule="gpipe",
        mesh=Mesh(pp=len(stages)),
        devices=tuple(device for device in plan.devices if device.name in stages),
        stages=tuple(Stage(paths=tuple(paths), **stage) for paths in stages.values()),
    )


def check(name, found, wanted, coarsest, noise=0.0):
    found = found.detach().cpu()
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted), name
        return
    scale = float(wanted.detach().abs().nan_to_num(posinf=0, neginf=0).max()) if wanted.numel() else 0.0
    atol = (ROUNDING if coarsest is None else rounding_of(wanted, coarsest)) * scale + noise
    torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=atol, equal_nan=True, msg=lambda m: f"{name}: {m}")


def values(output):
    return [tensor.nan_to_num() for _, tensor in tensors_in(output)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inference", "training", "recompute"])
@pytest.mark.parametrize("case", WORKING_CASES, ids=lambda case: case.name)
def test_parts_are_equal_to_the_whole(case, mode):
    training = mode != "inference"
    workload = autoshard.Workload(mode="training" if training else "inference")
    inputs = case.example((ROWS, case.shapes[0][1]))
    original = case.model()
    seed()
    with CoarsestType() as types:
        wanted = original(**copy.deepcopy(inputs))
    seed(8)
    if any(
        not torch.equal(*pair)
        for pair in zip(values(case.model()(**copy.deepcopy(inputs))), values(wanted), strict=True)
    ):
        pytest.skip("it draws random numbers, and every part draws its own")
    if training and loss_of(wanted) is None:
        pytest.skip("nothing in the output is differentiable")
    try:
        plan = in_parts(case, inputs, workload, recompute=mode == "recompute")
    except PlanError as error:
        pytest.skip(f"refused: {error}")
    model = case.model()
    with autoshard.simulate("3x1GiB"), warnings.catch_warnings(), torch.set_grad_enabled(training):
        warnings.simplefilter("error", RuntimeWarning)  # a call that runs undivided says so
        autoshard.apply(model, plan)
        seed()
        found = model(**copy.deepcopy(inputs))
        assert [path for path, _ in tensors_in(found)] == [path for path, _ in tensors_in(wanted)]
        for (path, ours), (_, theirs) in zip(tensors_in(found), tensors_in(wanted), strict=True):
            check(path, ours, theirs, types.dtype)
        if training:
            loss_of(wanted).backward()
            loss_of(found).backward()
            pairs = list(zip(model.named_parameters(), original.parameters(), strict=True))
            largest = max((p.grad.abs().max() for _, p in pairs if p.grad is not None and p.numel()), default=ZERO)
            noise = NOISE * float(largest)
            if types.dtype is not None:
                noise *= rounding_of(largest, types.dtype) / ROUNDING
            for (name, ours), theirs in pairs:
                assert (ours.grad is None) == (theirs.grad is None), name
                if theirs.grad is not None:
                    check(name, ours.grad, theirs.grad, types.dtype, noise)
        del found
