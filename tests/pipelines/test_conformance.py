"""Planned pipelines of many architectures over processes: outputs, losses and gradients equal those of the model."""

import contextlib

import pytest
import torch

import autoshard
from autoshard import Plan, Workload
from autoshard.errors import PlanError
from autoshard.nested import tensors_in
from tests.models.hf import HF_CASES
from tests.models.hostile import HOSTILE_CASES
from tests.pipelines.rank_checks import unlike
from tests.ranks import run_ranks
from tests.runtime.test_launched import completed

ROWS = 4
SCHEDULES = {"gpipe": 2, "1f1b": 4, "interleaved": 2}  # -> parts
CASES = {case.name: case for case in (*HF_CASES, *HOSTILE_CASES)}
MORE = ["translator", "residual"]
NAMES = [case.name for case in HF_CASES] + MORE
# Of those that have no stages, why.
WHOLE = {
    "clip": "can't be divided", "llava": "mixes its rows", "albert": "at most 1",
}  # fmt: skip


def made(name):
    """(model, inputs): in eval mode, for dropout draws other numbers in parts."""
    case = CASES[name]
    return case.model().eval(), case.inputs(ROWS, case.shapes[0][1])


def mean_of_squares(output):
    """A loss that is a mean over rows, of all that has them."""
    tensors = [tensor for _, tensor in tensors_in(output) if tensor.is_floating_point() and tensor.dim()]
    return sum(tensor.float().pow(2).mean() for tensor in tensors)


def plan_of(name, devices, schedule):
    """Raises `PlanError` if there is none."""
    model, inputs = made(name)
    text = autoshard.plan(
        model, {f"cpu:{rank}": "1GiB" for rank in range(devices)}, inputs=inputs, launch="processes",
        mesh=f"pp={devices}", schedule=schedule, workload=Workload(mode="training", batch_size=ROWS),
        num_microbatches=max(SCHEDULES[schedule], devices if schedule == "1f1b" else 0),
    ).to_json()  # fmt: skip
    return completed(text, model, inputs).to_json()


def run_plans(name, plans):
    """What was wrong on this rank, by schedule."""
    torch.manual_seed(1)
    problems = {}
    for schedule, text in plans.items():
        torch.manual_seed(1)
        model, inputs = made(name)
        reference = model(**inputs)
        loss = mean_of_squares(reference)
        loss.backward()
        wanted = {key: parameter.grad for key, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = None
        autoshard.apply(model, Plan.from_json(text))
        losses = []
        output = autoshard.schedule(model, mean_of_squares).step(**inputs, losses=losses)
        found = []
        if output is not None:
            found += unlike("output", tensors_in(output), tensors_in(reference))
            found += unlike("loss", [("", sum(losses) / len(losses))], [("", loss)])
        own = {key: parameter.grad for key, parameter in model.named_parameters() if not parameter.is_meta}
        problems[schedule] = found + unlike("gradient", own.items(), [(key, wanted[key]) for key in own])
    return problems


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_planned_pipelines(name, devices):
    if name in WHOLE:
        with pytest.raises(PlanError, match=f"{WHOLE[name]}|more stages than the model has layers"):
            plan_of(name, devices, "gpipe")
        return
    try:
        plans = {schedule: plan_of(name, devices, schedule) for schedule in ("gpipe", "1f1b")}
    except PlanError as error:
        assert devices == 4 and "more stages than the model has layers" in str(error), error
        pytest.skip(f"too few layers for four stages: {error}")
    with contextlib.suppress(PlanError):  # two stages on each device want twice as many layers
        plans["interleaved"] = plan_of(name, devices, "interleaved")
    for problems in run_ranks(run_plans, devices, name, plans, timeout_seconds=300):
        assert not any(problems.values()), problems
