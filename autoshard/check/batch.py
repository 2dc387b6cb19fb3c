"""Check that the batch of a model can be divided.

which dimensions       the factor of the first dimension of the inputs, followed through one captured run (axes.batch)
samples are apart      the ops of whole runs, one by one (check.independence): this decides
how outputs are made   by their shapes, and by what the ops permit (check.records)
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard import nested
from autoshard.axes.batch import Rows, batch_dim, follow
from autoshard.axes.walk import AxisWalk, walk_over
from autoshard.capture.capture import Call, calls_of, capture
from autoshard.capture.changed import changed_inputs, changed_parameters
from autoshard.capture.graph import ModelGraph
from autoshard.capture.run import own_random_numbers
from autoshard.check.independence import check_apart
from autoshard.check.inputs import NotRun
from autoshard.check.modes import frozen_modules
from autoshard.check.records import (
    INDEPENDENT,
    ROWS,
    Apart,
    Mixed,
    Question,
    check_left,
    merges_of,
    record_twice,
    written_in,
)
from autoshard.errors import CaptureError, PlanError
from autoshard.plan.batching import ASSUMED, BatchAxis, BatchInput, BatchOutput, with_rows
from autoshard.plan.workload import Workload
from autoshard.runtime.chunks import bind, plain_arguments, shapes_of
from autoshard.runtime.flags import flags_of

WHOLE = 'Use strategy="balanced", which divides no batch.'


def find_batch_axis(
    model: nn.Module, inputs: Any, workload: Workload, graph: ModelGraph | None = None, *,
    assume_independent_rows: bool = False,
) -> BatchAxis:  # fmt: skip
    """Find the batch among the inputs and check that its rows are apart. Raises `PlanError` naming what mixes them.

    `graph`: a forward with these inputs that was captured with `composite=True`, if there is one.
    `assume_independent_rows`: the user says that rows are apart; then only what can't be put together, by its shapes,
    refuses it.
    """
    return find_batch(model, inputs, workload, graph, assume_independent_rows=assume_independent_rows)[0]


def find_batch(
    model: nn.Module, inputs: Any, workload: Workload, graph: ModelGraph | None = None, *,
    assume_independent_rows: bool = False,
) -> tuple[BatchAxis, Callable[[Iterable[int]], None]]:  # fmt: skip
    """As `find_batch_axis`, with what checks parts once it is known how many rows each has, and raises `PlanError`."""
    with own_random_numbers():
        question = _question(model, inputs, workload, graph)
        for changed in changed_inputs(question.graph):
            what = "which a part of the batch does to its own. Let forward work on a clone of it."
            raise _refusal(model, f"{changed}, {what}")
        if not assume_independent_rows and (changed := changed_parameters(question.graph)):
            raise _refusal(
                model,
                f"{changed}, and each part of the batch would do so again. Write it after the step, or make it a "
                "buffer; call the model before, if only its first call writes.",
            )
        refused, packed, tried = "", "", -1
        for batch in _guesses(question):
            if batch.inputs[0].dim == tried:  # rows of all that has as many of them are mixed
                continue
            try:
                apart = None if assume_independent_rows else check_apart(question, batch)
                return _divided(question, batch, apart), partial(_check_parts, model, apart)
            except Mixed as error:
                refused = refused or str(error)
                tried = batch.inputs[0].dim
            except NotRun as error:
                refused = refused or _not_run(error)
                packed = packed or _packed(question, batch)
    refused = f"{refused or 'no input has a dimension for it'}{packed}".rstrip(".")
    advice = "" if INDEPENDENT in refused else f" {WHOLE}"
    raise _refusal(model, f"{refused}.{advice}")


def _check_parts(model: nn.Module, apart: Apart | None, parts: Iterable[int]) -> None:
    """Refuse code that does something else for as many rows as a part has, or the batch; small parts were tried."""
    if apart is None:
        return
    with own_random_numbers():
        try:
            for rows in sorted({*parts} - {0, 1, 2, ROWS}):
                apart.check_number(rows)
        except Mixed as error:
            raise _refusal(model, f"{error}.") from None


def check_rows_apart(model: nn.Module, inputs: Any, workload: Workload, walk: AxisWalk, dim: int = 0) -> None:
    """Follow the samples of the batch through every op, for replicas, without comparing numbers.

    Raises `PlanError` as above. `dim`: the dimension of the inputs that is the batch.

    `walk`: over a forward with as many samples, which may be longer: where the batch may be is taken from it.
    """
    with own_random_numbers():
        question = replace(_question(model, inputs, workload, walk.graph, walk), for_replicas=True)
        batch = next(_guesses(question, dim), None)
        if batch is None:
            raise _refusal(model, "no input has a dimension for it.")
        try:
            check_apart(question, batch)
        except Mixed as error:
            raise _refusal(model, f"{error}.") from None
        except NotRun as error:
            raise _refusal(model, f"{_not_run(error)}{_packed(question, batch)}. {question.advice}.") from None


def _refusal(model: nn.Module, why: str) -> PlanError:
    return PlanError(f"the batch of {type(model).__name__} can't be divided: {why}")


def _not_run(error: NotRun) -> str:
    return f"with other rows the model could not be run: {str(error).rstrip('.')}"


def _question(
    model: nn.Module, inputs: Any, workload: Workload, graph: ModelGraph | None, walk: AxisWalk | None = None
) -> Question:
    """Record one forward with given or derived inputs, if that has not been done.

    `walk`: over one that may be longer.
    """
    forward = replace(workload, mode="inference", new_tokens=0)
    calls = calls_of(model, inputs, workload)
    refused: CaptureError | None = None
    for given in calls:
        args, kwargs = _apart(given)
        try:
            if graph is None or not _is_of(graph, (args, kwargs), longer=walk is not None):
                graph, walk = capture(model, kwargs or args, workload=forward, composite=True), None
        except CaptureError as error:
            refused = refused or error
            continue
        bound = bind(model, args, kwargs)
        by_id: dict[int, list[str]] = {}
        for path, tensor in nested.tensors_in(bound):
            by_id.setdefault(id(tensor), []).append(path)
        paths = tuple(tuple(by_id[id(tensor)]) for _, tensor in nested.tensors_in((args, kwargs)))
        return Question(
            model=model, given=(args, kwargs), paths=paths, bound=bound, graph=graph,
            walk=walk or walk_over(graph, graph.ops), workload=workload,
        )  # fmt: skip
    assert refused is not None
    raise refused


def _apart(given: Call) -> Call:
    """The same arguments with a tensor of its own in every place: `labels=ids` are labels, and `ids` are not."""
    seen: set[int] = set()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        known = id(tensor) in seen
        seen.add(id(tensor))
        return tensor.clone() if known else tensor

    return nested.map_tensors(given, own)


def _is_of(graph: ModelGraph, given: Call, longer: bool) -> bool:
    """Whether a run was recorded with such arguments, or longer ones; each of its inputs is a value of its own."""
    shapes = [tuple(tensor.shape) for _, tensor in nested.tensors_in(given)]
    found = [tuple(graph.values[value].shape) for value in graph.inputs]
    same = shapes == found
    if longer:
        same = [(len(one), one[:1]) for one in shapes] == [(len(one), one[:1]) for one in found]
    return same and len(set(graph.inputs)) == len(graph.inputs)


def _packed(question: Question, batch: BatchAxis) -> str:
    """Inputs that may hold rows in a way that no dimension tells, in words."""
    uneven = {item.path for item in batch.inputs if "(" in item.axis}
    found = [
        f"{path} {list(tensor.shape)}"
        for path, tensor in nested.tensors_in(question.bound)
        if path in uneven or (path in batch.whole and tensor.dim() > 1 and tensor.shape[0] > batch.size)
    ]
    if found:
        return f". No dimension of {' and '.join(found)} is the batch: its rows may be packed one after the other"
    lists = Counter(item.path.rpartition(".")[0] for item in batch.inputs)
    (name, count), *others = lists.items()
    if others or not name or count < 2:
        return ""
    return f". {name} holds {count} tensors: samples in a list are not divided, only those along a dimension"


def _guesses(question: Question, known: int | None = None) -> Iterator[BatchAxis]:
    """What the batch may be, the likeliest first: a size that inputs have in their first dimension, or their second.

    `known`: which dimension it is, if that was found.
    """
    graph, walk = question.graph, question.walk
    given = [tensor for _, tensor in nested.tensors_in(question.given)]
    wanted = question.workload.batch_size
    likeliest = batch_dim(walk) if known is None else known
    for dim in (likeliest, 1 - likeliest) if known is None else (known,):
        sizes = Counter(tensor.shape[dim] for tensor in given if tensor.dim() > dim)
        for size in sorted(filter(None, sizes), key=lambda size: (size != wanted, -sizes[size])):
            if dim > likeliest and size != wanted:
                continue
            same = [place for place, tensor in enumerate(given) if tensor.dim() > dim and tensor.shape[dim] == size]
            rows = next((found for p in same if (found := follow(walk, graph.inputs[p], dim))), None)
            linked = {place: (d, axis) for place, d, axis in rows.inputs} if rows else {}
            alone = {place: (dim, f"*{size}") for place in same if place not in linked}
            yield _guess(question, size, {**linked, **alone}, rows)
            if linked and alone:
                yield _guess(question, size, linked, rows)


def _guess(question: Question, size: int, chosen: Mapping[int, tuple[int, str]], rows: Rows | None) -> BatchAxis:
    """The batch as these dimensions of inputs; what else is given is for all parts."""
    items = {
        path: BatchInput(path=path, dim=dim, axis=axis)
        for place, (dim, axis) in sorted(chosen.items())
        for path in question.paths[place]
    }
    whole = tuple(path for path, _ in nested.tensors_in(question.bound) if path not in items)
    outputs = _hints(question.graph, rows) if rows else ()
    plain = plain_arguments(question.model, question.bound)
    shapes = shapes_of(question.bound, items)
    return BatchAxis(size=size, inputs=tuple(items.values()), outputs=outputs, whole=whole, plain=plain, shapes=shapes)


def _hints(graph: ModelGraph, rows: Rows) -> tuple[BatchOutput, ...]:
    paths = graph.calls[0].output_paths
    return tuple(BatchOutput(path=paths[place], how="cat", dim=dim, axis=axis) for place, dim, axis in rows.outputs)


def _divided(question: Question, batch: BatchAxis, apart: Apart | None) -> BatchAxis:
    """The batch with all that a plan says of it; `apart`: None if the user says so. Raises `Mixed` or `NotRun`."""
    model, workload = question.model, question.workload
    recorded = record_twice(question, batch) if apart is None else apart.recorded
    if apart is not None:
        check_left(question, batch, recorded)
    written = written_in(recorded)
    if written and apart is not None:
        raise Mixed(f"the forward writes into {written[0]}, and each part of the batch would do so again")
    outputs = merges_of(recorded, batch, apart)
    flags = {*flags_of(model)} & {*recorded.left.flags}
    return replace(
        batch,
        outputs=tuple(replace(way, axis=with_rows(way.axis, batch.size)) for way in outputs),
        written=written,
        flags=() if apart is None else tuple(sorted(flags)),
        frozen=frozen_modules(model, question.given, question.graph, workload),
        proof=f"{ASSUMED} (assume_independent_rows)" if apart is None else "checked op by op",
    )
