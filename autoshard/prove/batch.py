"""Prove that the batch of a model can be divided.

    which dimensions     the leaf of the first dimension of the inputs, followed through one captured run (axes.batch)
    that rows are apart  random values, whole and in parts: outputs, gradients and buffers agree (prove.parts)
    who mixes them       the first module whose output differs, and the op in it that works along the leaf

The numbers are run with rows that differ in all values; with masks that end at another place in every row, since code
may look whether any row is masked at all; and with rows that are all alike, since what they share (the capacity of an
expert) may not be short otherwise.
"""

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
from autoshard.prove.copied import Trial, copy_model, is_heavy
from autoshard.prove.culprit import Key, find_mixer
from autoshard.prove.parts import Division, Mixed, check_parts
from autoshard.prove.rows import NotRun, alike, are_alike, enlarged, is_mask, shortened, unlabelled, varied, with_rows
from autoshard.runtime.chunks import bind, plain_arguments
from autoshard.workload import Workload

ROWS = 4
"""Rows of a proof."""
TOKENS = 8
"""What other dimensions of inputs are shortened to where the model is large."""


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


def find_batch_axis(model: nn.Module, inputs: Any, workload: Workload, graph: ModelGraph | None = None) -> BatchAxis:
    """Find the batch among the inputs and prove it parallel. Raises `PlanError` naming what mixes its rows.

    `graph`: a forward with these inputs that was captured with `composite=True`, if there is one.
    """
    with torch.random.fork_rng(devices=[]):
        question = _question(model, inputs, workload, graph)
        refused, tried = "", -1
        for batch, rows in _guesses(question):
            if batch.inputs[0].dim == tried:  # rows of all that has as many of them are mixed
                continue
            try:
                return _proved(question, batch, rows)
            except Mixed as error:
                refused, tried = refused or str(error), batch.inputs[0].dim
            except NotRun as error:
                refused = refused or f"with other rows the model could not be run: {error}{_packed(question, batch)}"
    name = type(model).__name__
    raise PlanError(f"the batch of {name} can't be divided: {refused or 'no input has a dimension for it'}.")


def _question(model: nn.Module, inputs: Any, workload: Workload, graph: ModelGraph | None) -> Question:
    """Record one forward with given or derived inputs, if that has not been done."""
    forward = replace(workload, mode="inference", new_tokens=0)
    calls = [as_call(inputs, model)] if inputs is not None else derive_inputs(model, workload)
    refused: CaptureError | None = None
    for args, kwargs in calls:
        if graph is not None and not _is_of(graph, (args, kwargs)):
            continue
        try:
            known = graph or capture(model, kwargs or args, workload=forward, composite=True)
        except CaptureError as error:
            refused = refused or error
            continue
        bound = bind(model, args, kwargs)
        return Question(
            model=model, given=(args, kwargs), bound=bound, graph=known, walk=walk_all(known), workload=workload
        )
    raise refused or PlanError("the recorded run is not one of these inputs.")


def _is_of(graph: ModelGraph, given: Call) -> bool:
    shapes = [tuple(tensor.shape) for _, tensor in nested.tensors_in(given)]
    return shapes == [graph.values[value].shape for value in graph.inputs]


def _packed(question: Question, batch: BatchAxis) -> str:
    """Inputs that may hold rows in a way that no dimension tells, in words."""
    found = [
        f"{path} {list(tensor.shape)}"
        for path, tensor in nested.tensors_in(question.bound)
        if path in batch.whole and tensor.dim() > 1 and tensor.shape[0] > batch.size
    ]
    listed = " and ".join(found)
    return f". No dimension of {listed} is the batch of {batch.size}: rows packed one after the other" if found else ""


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
    training = question.workload.training
    stopped: NotRun | None = None
    for short in (True, False) if is_heavy(question.graph) else (False,):
        bound = _ended(question, batch) if short else question.bound
        for dtype in (torch.float32,) if is_heavy(question.graph) else (torch.float64, torch.float32):
            trial = copy_model(question.model, question.graph, dtype, training)
            try:
                return _compared(replace(question, bound=bound), trial, batch, rows)
            except NotRun as error:  # code that asks for single precision, or for inputs of a size
                stopped = stopped or error
    assert stopped is not None
    raise stopped


def _compared(question: Question, trial: Trial, batch: BatchAxis, rows: Rows | None) -> BatchAxis:
    """Compare the whole with parts for every kind of rows that the model takes."""
    found = _with_rows(batch, ROWS)
    draws, ran = 0, None
    stopped: NotRun | None = None
    for bound, parts in _kinds(question, batch, rows):
        division = _division(question, trial, found, bound, parts)
        try:
            again, drawn = check_parts(trial, division)
        except NotRun as error:
            stopped = stopped or error
            continue
        except Mixed as error:
            raise Mixed(f"{_named(question, rows, find_mixer(trial, division))}{error}") from None
        if ran is not None and again.outputs != found.outputs:
            raise Mixed("outputs are made of those of parts in one way for some inputs, and in another for others")
        found, draws, ran = again, draws + drawn, ran or division
    if ran is None:
        raise stopped or NotRun("its rows are all alike; give inputs with two rows that differ")
    proof = f"equal in parts with random values, {'forward and backward' if trial.training else 'forward'}"
    if draws:
        proof += "; it draws random numbers, which were taken to be the same for all rows"
    frozen = _frozen(question.model, trial, replace(ran, batch=found))
    return replace(_with_rows(found, batch.size), frozen=frozen, proof=proof)


def _division(
    question: Question, trial: Trial, batch: BatchAxis, bound: Mapping[str, Any], parts: tuple[int, ...]
) -> Division:
    """A call divided into parts, with what its losses may be weighted by: labels, and masks."""
    masks = {item.path: 0 for item in batch.inputs if is_mask(nested.tensor_at(bound, item.path))}
    args, kwargs = question.call(bound)
    labels = {**_labels(question), **masks}
    return Division(model=trial.model, batch=batch, args=args, kwargs=kwargs, rows=parts, labels=labels)


def _frozen(model: nn.Module, trial: Trial, division: Division) -> tuple[str, ...]:
    """Modules in evaluation mode that would mix rows in training mode: those whose class is seen to; else all."""
    still = {path: type(module) for path, module in model.named_modules() if not module.training}
    if not still:
        return ()
    trial = replace(trial, draws=True)
    kept: set[type] = set()
    while True:
        for path, module in trial.model.named_modules():
            module.training = path not in still or still[path] not in kept
        try:
            check_parts(trial, division)
        except Mixed:
            mixer = find_mixer(trial, division)
            kind = still.get(mixer[0][0]) if mixer is not None and mixer[1] else None
            if kind is None or kind in kept:
                return ("",) if "" in still else tuple(still)
            kept.add(kind)
        except NotRun:
            return ("",) if "" in still else tuple(still)
        else:
            return tuple(path for path, kind in still.items() if kind in kept)


def _kinds(question: Question, batch: BatchAxis, rows: Rows | None) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
    """Arguments of several kinds of rows, and how they are divided. A model may refuse some of them."""
    inputs, labels = _with_rows(batch, ROWS).inputs, _labels(question)
    same = enlarged(question.bound, batch.inputs, batch.size, ROWS)
    other = unlabelled(varied(same, inputs, ROWS, 0), inputs, labels)
    masked = shortened(other, inputs, ROWS)
    kinds = [(other, (ROWS - 1, 1)), (unlabelled(same, inputs, labels), (1, ROWS - 1))]
    if masked is not None:
        kinds = [(masked, (1, ROWS - 1)), kinds[0]]
    yield from (kind for kind in kinds if not are_alike(kind[0], inputs, ROWS))
    if rows is None or rows.blocked:
        yield alike(other, inputs, ROWS), (1, ROWS - 1)


def _ended(question: Question, batch: BatchAxis) -> dict[str, Any]:
    """The call with the first few of its tokens: along dimensions that are neither the batch nor one of a parameter."""
    graph, walk = question.graph, question.walk
    paths = {id(tensor): path for path, tensor in nested.tensors_in(question.bound)}
    taken = {(item.path, item.dim) for item in batch.inputs}
    fixed = {axis for tensor in graph.tensors if tensor.kind == "parameter" for axis in walk.axes.get(tensor.value, ())}
    made = dict(question.bound)
    for value, (_, tensor) in zip(graph.inputs, nested.tensors_in(question.given), strict=True):
        path, short = paths[id(tensor)], tensor
        for dim, axis in enumerate(walk.axes.get(value, ())):
            if tensor.shape[dim] > TOKENS and (path, dim) not in taken and axis not in fixed:
                short = short.narrow(dim, 0, TOKENS)
        made = nested.replace_at(made, path, short)
    return made


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
