"""Traced: the work of a model, from one run with few samples, and whether its batch can be divided."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.capture.capture import calls_of, capture
from autoshard.capture.graph import ModelGraph
from autoshard.engine.blocks import ModelWork, model_work
from autoshard.errors import CaptureError, PlanError, SpecError
from autoshard.workload import Workload

TRACED_SAMPLES = 2
"""Samples of the traced run: two tell which dimensions belong to the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A forward that was recorded, and what it says.

    Attributes:
        workload: as asked, with the sequence length that was traced and the batch of all replicas.
        samples: of the batch, of all replicas together.
    """

    model: nn.Module
    inputs: Any
    workload: Workload
    graph: ModelGraph
    work: ModelWork
    samples: int


def trace(model: nn.Module, inputs: Any, workload: Workload) -> Traced:
    """Record one forward, with its loss in training. Raises `CaptureError` and `PlanError` where that can't be done."""
    few = workload if inputs is not None else replace(workload, batch_size=TRACED_SAMPLES)
    forward = replace(few, mode="inference", new_tokens=0)
    failed: CaptureError | None = None
    calls = calls_of(model, inputs, few)
    if inputs is None:  # training packs sequences and serving sorts them: full rows need no mask, if it may be left out
        unmasked = [(args, {k: v for k, v in kwargs.items() if k != "attention_mask"}) for args, kwargs in calls]
        calls = [*unmasked, *calls]
    for args, kwargs in calls:
        try:
            graph = capture(model, kwargs or args, workload=forward, composite=True)
        except CaptureError as error:
            failed = failed or error
            continue
        traced, tokens = _sizes(kwargs or args, workload)
        work = model_work(graph, traced, tokens)
        samples = workload.batch_size or (traced if inputs is not None else 1)
        asked = replace(workload, batch_size=samples, sequence_length=tokens if tokens > 1 else None)
        return Traced(
            model=model, inputs=kwargs or args, workload=asked, graph=graph, work=work, samples=samples
        )  # fmt: skip
    assert failed is not None
    raise failed


def _sizes(given: Any, workload: Workload) -> tuple[int, int]:
    """Samples and tokens of the inputs that were traced: those of the integers of two dimensions, else of the first."""
    tensors = [one for one in (given.values() if isinstance(given, dict) else given) if isinstance(one, torch.Tensor)]
    ids = next((one for one in tensors if one.dim() == 2 and not one.is_floating_point()), None)
    if ids is not None:
        return ids.shape[0], ids.shape[1]
    first = next((one for one in tensors if one.dim()), None)
    if first is None:
        raise PlanError("no input is a tensor with a dimension for the batch.")
    return first.shape[0], workload.sequence_length or 1


def why_undivided(traced: Traced, *, assume_independent_rows: bool = False) -> str:
    """Say why the batch can't be divided; "" where it can."""
    from autoshard.prove.batch import check_rows_apart

    if assume_independent_rows:
        return ""
    forward = replace(traced.workload, new_tokens=0, batch_size=None)
    try:
        check_rows_apart(traced.model, traced.inputs, forward, traced.graph)
    except (PlanError, SpecError) as error:
        return str(error)
    return ""
