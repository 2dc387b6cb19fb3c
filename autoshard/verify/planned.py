"""Numbers at plan time: a small model is run once whole and once as planned; what differs refuses the plan.

A static finding has decided before. Numbers that agree show nothing about other values, so they acquit nothing; numbers
that differ show a fault of that finding, or of what carries it out, before anybody relies on it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoshard.capture.capture import calls_of
from autoshard.errors import AutoshardError
from autoshard.plan import Plan
from autoshard.runtime import apply_plan, is_applied
from autoshard.runtime.cuts import apply_cuts
from autoshard.runtime.local_ranks import LocalRanks
from autoshard.verify.cuts import CoarsestType
from autoshard.verify.divided import is_divided, same_draws
from autoshard.verify.runs import Work, coarsened, compare, run
from autoshard.verify.stage import fresh_models, same_start

NEAR_TOLERANCES = 100
"""Up to so many times what passes may still be rounding, where large terms cancel."""
MOST_ELEMENTS = 1 << 23
"""Of parameters and inputs of a model that is run: it takes a moment."""


def numbers_against(model: nn.Module, plan: Plan, inputs: Any) -> str:
    """Say what comes out differently under a plan with cuts or a divided batch; "" if nothing does.

    Nothing is said of a model that is large, on meta, on several devices or applied already, or can't be copied, nor
    where the user says that rows are independent. All ranks and parts are on the device of the model: where they are
    changes no number.
    """
    device = _device(model)
    if device is None or not (plan.cuts or is_divided(plan)) or (plan.batch is not None and plan.batch.assumed):
        return ""
    args, kwargs = calls_of(model, inputs, plan.workload)[0]
    work = Work(
        args=args, kwargs=kwargs, training=False, optimizer="none", new_tokens=0,
        cut=bool(plan.cuts), divided=is_divided(plan),
    )  # fmt: skip
    notes: list[str] = []
    try:
        with fresh_models(model, notes, False) as fresh, same_start([device]) as restart:
            if notes:  # it can't be copied
                return ""
            with same_draws(True, notes), CoarsestType() as types:
                expected = run(fresh(), work)
            restart()
            with same_draws(True, notes):
                found = run(_applied(fresh(), plan, device), work)
    except (AutoshardError, RuntimeError):  # it will be told where it is run in earnest
        return ""
    errors = compare(expected, found, 0.0, coarsened(work, types, notes))
    if errors.first is None or errors.beyond <= NEAR_TOLERANCES:
        return ""
    where = f" in {errors.first.module}" if errors.first.module else ""
    return f"{errors.first.output}{where} differs by {errors.first.max_error:.2g} from that of the model run whole"


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
