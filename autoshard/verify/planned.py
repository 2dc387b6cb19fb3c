"""Numbers at plan time: a small model is run once whole and once as planned; what differs refuses the plan.

A static finding has decided before. Numbers that agree show nothing about other values, so they acquit nothing; numbers
that differ show a fault of that finding, or of what carries it out, before anybody relies on it. What differs no longer
in float64, or by a millionth of that, was rounding: a model chooses among numbers that are almost equal, or divides by
differences of such (batch norm of two samples).
"""

import contextlib
import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoshard import nested
from autoshard.capture.capture import calls_of
from autoshard.plan import Plan
from autoshard.runtime.cuts import apply_cuts
from autoshard.runtime.dispatch import apply_plan, is_applied
from autoshard.runtime.local_ranks import LocalRanks
from autoshard.verify.compare import Errors, compare
from autoshard.verify.run import Work, run
from autoshard.verify.runner import copies_of, run_both
from autoshard.verify.stage import is_divided

NEAR_TOLERANCES = 100
"""Up to so many times what passes may still be rounding, where large terms cancel."""
SHRINKS = 1e-6
"""Errors of rounding, also those that a model amplifies, shrink to less than this part in float64."""
MOST_ELEMENTS = 1 << 23
"""Of the parameters of a model that is run: copies take a moment."""
MOST_FLOPS = 1 << 34
"""Of a pass that is run: it takes a second on a core."""


def numbers_against(model: nn.Module, plan: Plan, inputs: Any, flops: int) -> str:
    """Say what comes out differently under a plan with cuts or a divided batch; "" if nothing does.

    `flops`: of a pass. Nothing is said where those are many, of a model that is large, on meta, on several devices or
    applied already, or can't be copied, nor where the user says that rows are independent. All ranks and parts are on
    the device of the model: where they are changes no number.
    """
    device = _device(model) if flops <= MOST_FLOPS else None
    if device is None or not (plan.cuts or is_divided(plan)) or (plan.batch is not None and plan.batch.assumed):
        return ""
    call = calls_of(model, inputs, plan.workload)[0]
    try:
        errors = _errors(model, plan, call, device)
    except Exception:  # it can't be copied, or its copy can't be run; all else is told where it is run in earnest
        return ""
    if errors.first is None or errors.beyond <= NEAR_TOLERANCES:
        return ""
    with contextlib.suppress(Exception):  # a model that insists on its own type stays as it was found
        in_float64 = _errors(model, plan, nested.map_tensors(call, _widened), device, torch.float64)
        shrunk = math.isfinite(errors.largest) and in_float64.largest <= SHRINKS * errors.largest
        if shrunk or in_float64.beyond <= NEAR_TOLERANCES:
            return ""
    where = f" in {errors.first.module}" if errors.first.module else ""
    return f"{errors.first.output}{where} differs by {errors.first.max_error:.2g} from that of the model run whole"


def _errors(
    model: nn.Module, plan: Plan, call: tuple[tuple, dict[str, Any]], device: torch.device,
    dtype: torch.dtype | None = None,
) -> Errors:  # fmt: skip
    """What differs between a copy of the model and one under the plan; `dtype`: of both, if not the model's."""
    args, kwargs = call
    work = Work(args=args, kwargs=kwargs, cut=bool(plan.cuts), divided=True)  # rows of parts draw the same numbers
    copies = copies_of(model)

    def fresh() -> nn.Module:
        return copies() if dtype is None else copies().to(dtype)

    expected, found, work = run_both(
        lambda: run(fresh(), work), lambda: run(_applied(fresh(), plan, device), work), work, [], [device]
    )
    if dtype is not None and work.coarsest == torch.float32:  # what differed before in its own type is held to more
        work = replace(work, coarsest=None)
    return compare(expected, found, 0.0, work)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _device(model: nn.Module) -> torch.device | None:
    """The device of a model that can be run here in a moment."""
    tensors = [*model.parameters(), *model.buffers()]
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or is_applied(model) or sum(tensor.numel() for tensor in tensors) > MOST_ELEMENTS:
        return None
    device = devices.pop()
    return None if device.type == "meta" else device


def _applied(model: nn.Module, plan: Plan, device: torch.device) -> nn.Module:
    """A model with the cuts of a plan, or with the parts that it makes of a batch, all on one device."""
    if plan.cuts:
        return apply_cuts(model, plan.cuts, LocalRanks.of([device] * plan.cuts[0].degree), results=plan.results)
    count = plan.num_microbatches * (plan.mesh.data if plan.mesh is not None else 1)
    parts = replace(
        plan, mesh=None, stages=(), schedule="none", num_microbatches=count, placements={"": str(device)},
        devices=(replace(plan.devices[0], name=str(device)),), pins={},
    )  # fmt: skip
    return apply_plan(model, parts)
