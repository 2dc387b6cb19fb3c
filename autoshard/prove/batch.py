"""Prove that the batch of a model can be divided.

    which dimensions     the leaf of the first dimension of the inputs, followed through one captured run (axes.batch)
    that rows are apart  random values, whole and in parts: outputs, gradients and buffers agree (prove.parts)
    who mixes them       the first module whose output differs, and the op in it that works along the leaf

The numbers are run with rows that differ in all values; with masks that end at another place in every row, since code
may look whether any row is masked at all; and with rows that are all alike, since what they share (the capacity of an
expert) may not be short otherwise.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard import nested
from autoshard.axes.batch import BatchWalk, Rows, follow, labels_of, mixing_in, walk_all
from autoshard.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.capture.capture import capture
from autoshard.capture.graph import ModelGraph
from autoshard.capture.inputs import Call, as_call, derive_inputs
from autoshard.errors import CaptureError, PlanError
from autoshard.module_paths import parent
from autoshard.prove.culprit import Key, find_mixer
from autoshard.prove.parts import Division, Mixed, Trial, check_parts
from autoshard.prove.rows import NotRun, alike, enlarged, is_mask, shortened, unlabelled, varied, with_rows
from autoshard.prove.sample import random_like
from autoshard.runtime.chunks import bind, plain_arguments
from autoshard.workload import Workload

ROWS = 4
"""Rows of a proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model and how it is called: `bound` are the arguments by the names of its
    forward's parameters."""

    model: nn.Module
    given: Call
    bound: dict[str, Any]
    graph: ModelGraph
    walk: BatchWalk
    workload: Workload

    def call(self, bound: Mapping[str, Any]) -> Call:
        """Arguments as they are given to the model."""
        args, kwargs = self.given
        signature = inspect.signature(self.model.forward).bind(*args, **kwargs)
        signature.arguments.update(bound)
        return signature.args, signature.kwargs


def find_batch_axis(model: nn.Module, inputs: Any, workload: Workload) -> BatchAxis:
    """Find the batch among the inputs and prove it parallel. Raises `PlanError` naming what mixes its rows."""
    with torch.random.fork_rng(devices=[]):
        question = _captured(model, inputs, workload)
        refused, tried = "", -1
        for batch, rows in _guesses(question):
            if batch.inputs[0].dim == tried:  # rows of all that has as many of them are mixed
                continue
            try:
                return _proved(question, batch, rows)
            except Mixed as error:
                refused, tried = refused or str(error), batch.inputs[0].dim
            except NotRun as error:
                refused = refused or f"with other rows the model could not be run: {error}"
    name = type(model).__name__
    raise PlanError(f"the batch of {name} can't be divided: {refused or 'no input has a dimension for it'}.")


def _captured(model: nn.Module, inputs: Any, workload: Workload) -> Question:
    """Record one forward with given or derived inputs."""
    forward = replace(workload, mode="inference", new_tokens=0)
    calls = [as_call(inputs, model)] if inputs is not None else derive_inputs(model, workload)
    refused: CaptureError | None = None
    for args, kwargs in calls:
        try:
            graph = capture(model, kwargs or args, workload=forward, composite=True)
        except CaptureError as error:
            refused = refused or error
            continue
        bound = bind(model, args, kwargs)
        return Question(
            model=model, given=(args, kwargs), bound=bound, graph=graph, walk=walk_all(graph), workload=workload
        )
    assert refused is not None
    raise refused


def _guesses(question: Question) -> Iterator[tuple[BatchAxis, Rows | None]]:
    """What the batch may be, the likeliest first: a size that inputs have in their first dimension, or their second."""
    graph, walk = question.graph, question.walk
    given = [tensor for _, tensor in nested.tensors_in(question.given)]
    wanted = question.workload.batch_size
    ordered = False  # whether something works along the first dimensions
    for dim in (0, 1):
        sizes = Counter(tensor.shape[dim] for tensor in given if tensor.dim() > dim)
        for size in sorted(sizes, key=lambda size: (size != wanted, -sizes[size])):
            same = [place for place, tensor in enumerate(given) if tensor.dim() > dim and tensor.shape[dim] == size]
            rows = next((found for p in same if (found := follow(walk, graph.inputs[p], dim))), None)
            if dim == 0:
                ordered |= rows is not None and bool(rows.blocked)
            elif size != wanted and not (ordered and rows and not rows.blocked and not rows.parameter and rows.outputs):
                continue
            linked = {place: (d, axis) for place, d, axis in rows.inputs} if rows else {}
            alone = {place: (dim, f"*{size}") for place in same if place not in linked}
            yield _guess(question, size, {**linked, **alone}, rows), rows
            if linked and alone:
                yield _guess(question, size, linked, rows), rows


def _guess(question: Question, size: int, chosen: Mapping[int, tuple[int, str]], rows: Rows | None) -> BatchAxis:
    """The batch as these dimensions of inputs; what else is given is for all parts."""
    paths: dict[int, list[str]] = {}
    for path, tensor in nested.tensors_in(question.bound):
        paths.setdefault(id(tensor), []).append(path)
    given = [tensor for _, tensor in nested.tensors_in(question.given)]
    items = {
        path: BatchInput(path=path, dim=dim, axis=axis)
        for place, (dim, axis) in sorted(chosen.items())
        for path in paths[id(given[place])]
    }
    whole = tuple(path for path, _ in nested.tensors_in(question.bound) if path not in items)
    outputs = _hints(question.graph, rows) if rows else ()
    plain = plain_arguments(question.model, question.bound)
    return BatchAxis(size=size, inputs=tuple(items.values()), outputs=outputs, whole=whole, plain=plain)


def _hints(graph: ModelGraph, rows: Rows) -> tuple[BatchOutput, ...]:
    paths = graph.calls[0].output_paths
    return tuple(BatchOutput(path=paths[place], how="cat", dim=dim, axis=axis) for place, dim, axis in rows.outputs)


def _proved(question: Question, batch: BatchAxis, rows: Rows | None) -> BatchAxis:
    """Run the numbers. Raises `Mixed` or `NotRun`."""
    try:
        return _compared(question, _trial(question, torch.float64), batch, rows)
    except NotRun:  # code that asks for single precision
        return _compared(question, _trial(question, torch.float32), batch, rows)


def _compared(question: Question, trial: Trial, batch: BatchAxis, rows: Rows | None) -> BatchAxis:
    """Compare the whole with parts for every kind of rows that the model takes."""
    found = _with_rows(batch, ROWS)
    labels = _labels(question)
    stopped: NotRun | None = None
    draws, kinds = 0, 0
    for bound, parts in _kinds(question, batch, rows, labels):
        masks = {item.path: 0 for item in found.inputs if is_mask(nested.tensor_at(bound, item.path))}
        args, kwargs = question.call(bound)
        division = Division(
            model=trial.model, batch=found, args=args, kwargs=kwargs, rows=parts, labels={**labels, **masks}
        )
        try:
            again, drawn = check_parts(trial, division)
        except NotRun as error:
            stopped = stopped or error
            continue
        except Mixed as error:
            raise Mixed(f"{_named(question, rows, find_mixer(trial, division))}{error}") from None
        if kinds and again.outputs != found.outputs:
            raise Mixed("outputs are made of those of parts in one way for some inputs, and in another for others")
        found, draws, kinds = again, draws + drawn, kinds + 1
    if stopped is not None and not kinds:
        raise stopped
    proof = f"equal in parts with random values, {'forward and backward' if trial.training else 'forward'}"
    if draws:
        proof += "; it draws random numbers, which were taken to be the same for all rows"
    return replace(_with_rows(found, batch.size), proof=proof)


def _kinds(
    question: Question, batch: BatchAxis, rows: Rows | None, labels: Mapping[str, int]
) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
    """Arguments of several kinds of rows, and how they are divided. A model may refuse some of them."""
    inputs = _with_rows(batch, ROWS).inputs
    same = enlarged(question.bound, batch.inputs, batch.size, ROWS)
    other = unlabelled(varied(same, inputs, 0), inputs, labels)
    masked = shortened(other, inputs, ROWS)
    if masked is not None:
        yield masked, (1, ROWS - 1)
    yield other, (ROWS - 1, 1)
    yield unlabelled(same, inputs, labels), (1, ROWS - 1)
    if rows is None or rows.blocked:
        yield alike(other, inputs, ROWS), (1, ROWS - 1)


def _labels(question: Question) -> dict[str, int]:
    """Inputs that a loss compares with, and which number says that a label does not count."""
    paths = {id(tensor): path for path, tensor in nested.tensors_in(question.bound)}
    given = [tensor for _, tensor in nested.tensors_in(question.given)]
    return {paths[id(given[place])]: ignored for place, ignored in labels_of(question.graph)}


def _named(question: Question, rows: Rows | None, mixer: tuple[Key, bool] | None) -> str:
    """Who mixes rows, in words that end where a reason may follow."""
    if mixer is None:
        return ""
    (path, time), inside = mixer
    graph = question.graph
    calls = [call for call in graph.calls if call.path == (path if inside else parent(path))]
    if not calls:
        return ""
    call = calls[min(time, len(calls) - 1)]
    why = mixing_in(rows, call) if rows is not None else ""
    kind = next(module.class_name for module in graph.modules if module.path == call.path)
    place = f"{call.path} ({kind})" if call.path else "the model's own forward"
    return f"{place} mixes its rows{f' ({why})' if why else ''}: "


def _with_rows(batch: BatchAxis, rows: int) -> BatchAxis:
    return replace(
        batch,
        size=rows,
        inputs=tuple(replace(item, axis=with_rows(item.axis, rows)) for item in batch.inputs),
        outputs=tuple(replace(item, axis=with_rows(item.axis, rows)) for item in batch.outputs),
    )


def _trial(question: Question, dtype: torch.dtype) -> Trial:
    """Copy the model with random parameters; buffers keep their values where they have any."""
    generator = torch.Generator().manual_seed(0)
    model = question.model
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo.setdefault(id(parameter), random_like(parameter, generator))
    for module in model.modules():
        for value in (*module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in memo:
                memo[id(value)] = random_like(value, generator)
    draws = any(torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ()) for op in question.graph.ops)
    made = copy.deepcopy(model, memo).to(dtype)
    return Trial(model=made, dtype=dtype, draws=draws, training=question.workload.training)
