"""Traced: the work of a model, from one run with few samples, and whether its batch can be divided."""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.axes.batch import batch_dim
from autoshard.axes.walk import AxisWalk, walk_over
from autoshard.capture.capture import calls_of, capture
from autoshard.capture.graph import ModelGraph
from autoshard.engine.blocks import ModelWork, model_work
from autoshard.errors import AutoshardError, CaptureError, PlanError
from autoshard.nested import map_tensors
from autoshard.plan.workload import Workload

TRACED_SAMPLES = 2
"""Samples of the traced run: two tell which dimensions belong to the batch."""

SHORT_TOKENS = 32
"""Tokens with which samples are followed where inputs are derived: how long they are does not mix them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A forward that was recorded, and what it says.

    Attributes:
        workload: as asked, with the sequence length that was traced and the batch of all replicas.
        samples: of the batch, of all replicas together.
        derived: the inputs were made from the model's configuration.
        batch_dim: the dimension of the inputs that is the batch.
    """

    model: nn.Module
    inputs: Any
    workload: Workload
    graph: ModelGraph
    walk: AxisWalk
    work: ModelWork
    samples: int
    derived: bool = False
    batch_dim: int = 0


def trace(model: nn.Module, inputs: Any, workload: Workload) -> Traced:
    """Record one forward, with its loss in training. Raises `CaptureError` and `PlanError` where that can't be done."""
    few = workload if inputs is not None else replace(workload, batch_size=TRACED_SAMPLES)
    calls = arguments(model, inputs, few)
    given, graph = _recorded(model, calls, few, derived=inputs is None)
    walk = walk_over(graph, graph.ops)
    dim = batch_dim(walk)
    traced, tokens = sizes_of(given, workload, dim)
    work = model_work(walk, traced, tokens, batch_dim=dim)
    samples = workload.batch_size or (1 if inputs is None else sizes_of(calls[0], workload, dim)[0])
    asked = replace(workload, batch_size=samples, sequence_length=tokens if tokens > 1 else None)
    return Traced(
        model=model, inputs=given, workload=asked, graph=graph, walk=walk, work=work, samples=samples,
        derived=inputs is None, batch_dim=dim,
    )  # fmt: skip


def _recorded(model: nn.Module, calls: list[Any], workload: Workload, *, derived: bool) -> tuple[Any, ModelGraph]:
    """The first of the arguments that the model takes, and the forward that was recorded with them."""
    forward = replace(workload, mode="inference", new_tokens=0)
    failed: CaptureError | None = None
    for given in _likeliest(calls, workload, derived=derived):
        for called in (_keeping_cache(model, given), given) if workload.new_tokens else (given,):
            try:
                return given, capture(model, called, workload=forward, composite=True)
            except CaptureError as error:
                failed = failed or error
    assert failed is not None
    raise failed


def _keeping_cache(model: nn.Module, given: Any) -> Any:
    """The same arguments, with the flag that `generate` adds: what is kept for the next token is seen."""
    known = "use_cache" in inspect.signature(model.forward).parameters
    return {**given, "use_cache": True} if known and isinstance(given, dict) else given


def _likeliest(calls: list[Any], workload: Workload, *, derived: bool) -> list[Any]:
    """Arguments that a model may take, the likeliest first: of one sample, with the same sample twice before."""
    if derived:  # training packs sequences and serving sorts them: full rows need no mask, if it may be left out
        unmasked = [{k: v for k, v in given.items() if k != "attention_mask"} for given in calls if given]
        return [*unmasked, *calls]
    (given,) = calls
    if sizes_of(given, workload)[0] > 1:
        return calls
    return [*(repeated(given, 1, TRACED_SAMPLES, least_dims=dims) for dims in (1, 2)), given]


def found_batch_dim(model: nn.Module, inputs: Any, workload: Workload) -> int:
    """The dimension of inputs that is the batch, found by recording one forward."""
    _, graph = _recorded(model, arguments(model, inputs, workload), workload, derived=False)
    return batch_dim(walk_over(graph, graph.ops))


def arguments(model: nn.Module, inputs: Any, workload: Workload) -> list[Any]:
    """The arguments of calls that the model may take, each as a tuple or a dict."""
    return [kwargs or args for args, kwargs in calls_of(model, inputs, workload)]


def repeated(given: Any, have: int, samples: int, *, least_dims: int, dim: int = 0) -> Any:
    """The same arguments with so many samples instead of those they have, in tensors with enough dimensions."""
    made: dict[int, torch.Tensor] = {}

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < least_dims or tensor.shape[dim] != have:
            return tensor
        whole = torch.cat([tensor] * -(-samples // have), dim).narrow(dim, 0, samples).clone()
        return made.setdefault(id(tensor), whole)  # `labels=ids` are one tensor before and after

    return map_tensors(given, change)


def _shorter(traced: Traced, workload: Workload) -> Any:
    """The same arguments with few tokens."""
    short = replace(workload, batch_size=TRACED_SAMPLES, sequence_length=SHORT_TOKENS)
    names = list(traced.inputs) if isinstance(traced.inputs, dict) else None
    for given in _likeliest(arguments(traced.model, None, short), short, derived=True):
        if names == (list(given) if isinstance(given, dict) else None):
            return given
    return traced.inputs


def sizes_of(given: Any, workload: Workload, dim: int = 0) -> tuple[int, int]:
    """Samples and tokens of the inputs that were traced: those of the integers of two dimensions, else of the first.

    `dim`: the dimension of the samples, 0 or 1.
    """
    tensors = list(_in_dicts(given))
    ids = next((one for one in tensors if one.dim() == 2 and not one.is_floating_point()), None)
    if ids is not None:
        return ids.shape[dim], ids.shape[1 - dim]
    first = next((one for one in tensors if one.dim() > dim), None)
    if first is None:
        raise PlanError("no input is a tensor with a dimension for the batch.")
    return first.shape[dim], workload.sequence_length or 1


def _in_dicts(given: Any) -> Iterator[torch.Tensor]:
    """The tensors of arguments, also in dicts among them; those of a list may be one per sample."""
    for one in given.values() if isinstance(given, dict) else given:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, dict):
            yield from _in_dicts(one)


def why_undivided(traced: Traced, *, assume_independent_rows: bool = False) -> str:
    """Say why the batch can't be divided; "" where it can."""
    from autoshard.check.batch import check_rows_apart

    if assume_independent_rows or traced.samples == 1:
        return ""
    workload = replace(traced.workload, new_tokens=0, batch_size=None)
    tried = [traced.inputs]
    if traced.derived and traced.work.tokens > SHORT_TOKENS:
        with suppress(AutoshardError):
            tried.insert(0, _shorter(traced, workload))
    reason = ""
    for inputs in tried:  # some models take one length alone
        try:
            check_rows_apart(traced.model, inputs, workload, traced.walk, traced.batch_dim)
        except AutoshardError as error:
            reason = str(error)
        else:
            return ""
    return reason
