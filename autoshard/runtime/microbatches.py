"""A pipeline in one process: each call of the model runs in parts of its batch, one after another.

    call of the root ── RootHook: inputs go to the first device
                     ── Divide:   forward(part 0), forward(part 1) …        the outputs of all parts become one
                     ── it goes to where the inputs were                    gradients go back to each part

Kernels and copies between accelerators are only queued, so that the first device is at part 1 while the second one
computes part 0. What is not known to be divisible runs whole, with equal results.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.batching import BatchAxis
from autoshard.runtime.chunks import AS_CALLED, BatchPart, bind, count_rows, split, state_in, unlike
from autoshard.runtime.devices import check_copies, resolve_device
from autoshard.runtime.flags import changed_flag
from autoshard.runtime.given import Given
from autoshard.runtime.merging import merge
from autoshard.runtime.recompute import runs_again
from autoshard.runtime.state import Division, Runtime

OF_PARTS = "it runs in parts of its batch, of which each has its own"
"""Why changes of arguments can't be seen by the caller."""


def division_of(plan: Plan) -> Division | None:
    """How a plan divides the batch of a model that one process runs, None if it does not.

    Raises `ApplyError` where a device of a replica is not here.
    """
    replicated = plan.mesh is not None and plan.mesh.data > 1
    if plan.batch is None or (plan.num_microbatches < 2 and not replicated):
        return None
    devices: tuple[torch.device, ...] = ()
    if replicated:
        devices = tuple(resolve_device(device.name) for device in plan.devices)
        check_copies(devices)
    return Division(
        batch=plan.batch,
        count=plan.num_microbatches,
        devices=devices,
        shares=plan.mesh.shares if plan.mesh is not None else (),
    )


class Divide:
    """Around the forward of the root: runs it on all parts of the batch. Hooks of the user are around whole calls."""

    undivided = "one device after another"

    def __init__(self, runtime: Runtime, division: Division) -> None:
        self.runtime = runtime
        self.division = division
        self.said: set[str] = set()

    def __call__(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # torch.compile of the whole model; of its parts it goes with this
            return forward(*args, **kwargs)
        local = self.runtime.local
        whole = local.divides or runs_again(module)
        parts = [] if whole else self.parts(module, args, kwargs)
        if len(parts) < 2:
            return forward(*args, **kwargs)
        local.divides = True
        try:
            return merge(self.division.batch, self.run(module, forward, parts), parts)
        finally:
            local.divides = False

    def run(self, module: nn.Module, forward: Callable[..., Any], parts: Sequence[BatchPart]) -> list[Any]:
        """The output of each part."""
        return [run_part(forward, part.args, part.kwargs, type(module).__name__) for part in parts]

    def shares(self, rows: int) -> int | Sequence[int]:
        """Into how many parts so many rows are divided, or the rows of each."""
        return min(rows, self.division.count)

    def parts(self, module: nn.Module, args: tuple, kwargs: dict) -> list[BatchPart]:
        """Divide a call; none where it has to run whole."""
        division = self.division
        try:
            bound = bind(module, args, kwargs)
        except TypeError:
            return []  # the forward itself says what is wrong with its arguments
        if state_in(bound):
            return []
        problem, advice = why_whole(division.batch, module), "Set it back, or plan again as it is."
        if not problem:
            problem, advice = unlike(division.batch, module, bound), AS_CALLED
        try:
            rows = 0 if problem else count_rows(division.batch, bound)
            if not problem:
                return split(division.batch, module, args, kwargs, self.shares(rows)) if rows > 1 else []
        except PlanError as error:
            problem = str(error).removesuffix(f" {AS_CALLED}").rstrip(".")
        if problem not in self.said:
            self.said.add(problem)
            text = f"this call of {type(module).__name__} runs undivided, {self.undivided}"
            warnings.warn(f"autoshard: {text}: {problem}. {advice}", RuntimeWarning, stacklevel=8)
        return []


def run_part(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any], name: str) -> Any:
    """Call a forward on a part. Raises `ApplyError` if it changes a list or dict that it was given."""
    given = Given(args, kwargs)
    output = forward(*args, **kwargs)
    given.check(name, OF_PARTS)
    return output


def why_whole(batch: BatchAxis, model: nn.Module) -> str:
    """Say why no call of a model may be divided as it is now, "" if calls may be."""
    for path in batch.frozen:
        if any(module.training for module in model.get_submodule(path).modules()):
            return f"{path or 'the model'} was in evaluation mode at planning, and in training mode it may mix rows"
    return changed_flag(batch.flags, model)
