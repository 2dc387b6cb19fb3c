"""Recordings of a forward with other numbers of samples, and what they tell of its outputs and of what it leaves.

outputs     logits [3, 8, 50] and [1024, 8, 50]      one part after the other
left        self.table = …                           in attributes of modules, in buffers, in flags
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from autoshard import nested
from autoshard.axes.given import ops_behind
from autoshard.axes.walk import AxisWalk
from autoshard.capture.call_log import CallLog, TooManyOps
from autoshard.capture.capture import Call, record_forward
from autoshard.capture.fake import SMALL_FLOATS
from autoshard.capture.graph import ModelGraph, written_storages
from autoshard.capture.run import Find
from autoshard.check.alike import is_same
from autoshard.check.inputs import NotRun, Padded, enlarged, marked, masked
from autoshard.errors import CaptureError
from autoshard.plan.batching import BatchAxis, BatchOutput, with_rows
from autoshard.plan.sharding import coordinates_of
from autoshard.plan.workload import Workload
from autoshard.runtime.chunks import bind, caller_like
from autoshard.runtime.flags import flags_of
from autoshard.runtime.left_behind import new_tensors

INDEPENDENT = "If its rows are independent all the same, assume_independent_rows=True divides it unchecked"
FOR_EACH = (
    "If each replica shall do that with its own samples, as with DDP, assume_independent_rows=True plans it unchecked"
)
ROWS = 3
"""Samples of the runs that are followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model and how it is called.

    `given`: the arguments as they are handed over; `paths`: for each tensor in them, where it is in `bound`, which are
    the arguments by the names of the forward's parameters.
    `for_replicas`: each runs the model as it is with samples of its own, and outputs are not put together.
    """

    model: nn.Module
    given: Call
    paths: tuple[tuple[str, ...], ...]
    bound: dict[str, Any]
    graph: ModelGraph
    walk: AxisWalk
    workload: Workload
    for_replicas: bool = False

    @property
    def advice(self) -> str:
        """What a user may say where samples are mixed, or may be."""
        return FOR_EACH if self.for_replicas else INDEPENDENT

    def call(self, bound: Mapping[str, Any]) -> Call:
        """Arguments as they are given to the model."""
        return caller_like(self.model, *self.given)(bound)


class Mixed(Exception):
    """The samples of the batch are not independent, or parts of it can't be put together; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSamples:
    """A forward with `ROWS` samples, what it leaves in the model, and the same with `rows` samples."""

    graph: ModelGraph
    left: "Left"
    other: ModelGraph
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """What was found of the outputs.

    Attributes:
        axes: of those of which every element belongs to one sample at most, by path and dimension: the axis with the
            samples starred, "" where all samples have the same; "-" where none has but numbers differ.
        merges: how one that several samples decide is merged.
        shared: those that depend on no sample.
        check_number: refuses code that does something else for just so many samples, by `Mixed`.
    """

    axes: Mapping[str, tuple[str, ...]]
    merges: Mapping[str, BatchOutput]
    shared: frozenset[str]
    recorded: RecordedSamples
    check_number: Callable[[int], None]

    def permits(self, how: BatchOutput) -> bool:
        """Whether an output may be put together of parts one after the other in this way."""
        axes = self.axes.get(how.path)
        if axes is None:
            return False
        if how.path in self.shared:
            return axes[how.dim] != "-"
        wanted = coordinates_of(with_rows(how.axis, ROWS))
        return "*" in axes[how.dim] and numpy.array_equal(coordinates_of(axes[how.dim]), wanted)


class Left:
    """What a forward leaves in a model: noted at the end of a recording, before all is put back.

    Attributes:
        before, tensors: values of the tensors in attributes of modules, by place: before the forward, and new ones.
        buffers: the values that buffers have then.
        flags: as `runtime.flags.flags_of` writes them; `counted`: numbers in attributes that are others than before.
        numbers: those in attributes before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors, self.numbers = new_tensors(model, ()), dict(_numbers(model))
        self.before: dict[str, int | None] = {}
        self.tensors: dict[str, int] = {}
        self.buffers: dict[str, int | None] = {}
        self.flags: tuple[str, ...] = ()
        self.counted: dict[str, float] = {}

    def note(self, find: Find) -> None:
        """Look at the model now."""
        model = self._model
        found = {place: find(tensor) for place, tensor in new_tensors(model, ()).items()}
        self.before = {place: find(tensor) for place, tensor in self._tensors.items()}
        self.tensors = {place: value for place, value in found.items() if value is not None}
        self.buffers = {name: find(buffer) for name, buffer in model.named_buffers()}
        self.flags = flags_of(model)
        self.counted = {name: value for name, value in _numbers(model) if self.numbers.get(name, value) != value}


def _numbers(model: nn.Module) -> Iterator[tuple[str, float]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) in (int, float):
                yield f"{path}.{name}".lstrip("."), value


def record_samples(
    question: Question, batch: BatchAxis, rows: int, *, padded: Padded = frozenset(),
    absent: Sequence[tuple[str, int]] = (), **options: Any,
) -> tuple[ModelGraph, CallLog, list[str]]:  # fmt: skip
    """Record a forward with so many samples: (graph, call_log, where each input is among the arguments).

    `options`: as of `record_forward`. Raises `NotRun` or `TooManyOps`.
    """
    bound = masked(enlarged(question.bound, batch.inputs, batch.size, rows), batch, padded, rows)
    bound = marked(bound, batch, padded, absent, rows)
    args, kwargs = question.call(bound)
    by_id = {id(tensor): path for path, tensor in nested.tensors_in(bind(question.model, args, kwargs))}
    paths = [by_id[id(tensor)] for _, tensor in nested.tensors_in((args, kwargs))]
    training = question.workload.training
    try:
        graph, call_log = record_forward(
            question.model, args, kwargs, grad=training, histories=training, backwards=training, real=True,
            small_floats=SMALL_FLOATS * max(1, rows // ROWS),  # so that the same is known of many samples
            **options,
        )  # fmt: skip
    except TooManyOps:
        raise
    except CaptureError as error:
        raise NotRun(str(error)) from error
    return graph, call_log, paths


def record_twice(question: Question, batch: BatchAxis) -> RecordedSamples:
    """Record a forward with two numbers of samples. Raises `NotRun`."""
    left = Left(question.model)
    graph, _, _ = record_samples(question, batch, ROWS, at_end=left.note)
    other, _, _ = record_samples(question, batch, ROWS + 1)
    return RecordedSamples(graph=graph, left=left, other=other, rows=ROWS + 1)


# ---- what a forward leaves


def check_left(question: Question, batch: BatchAxis, recorded: RecordedSamples) -> None:
    """Refuse what a second call, or a part, would find other than the first one did. Raises `Mixed`."""
    model, training = question.model, question.workload.training
    graph, left = recorded.graph, recorded.left
    for place, value in left.tensors.items():
        made, ancestors = graph.values[value].op >= 0, {one for op in ops_behind(graph, value) for one in op.inputs}
        # Of numbers in the code alone, or of parameters where there was one before: each part makes the same one.
        given = graph.inputs if place in left.before else (*graph.inputs, *(tensor.value for tensor in graph.tensors))
        if training and made and graph.values[value].dtype.is_floating_point and not ancestors.isdisjoint(given):
            raise left_by_parts(place, model)
        if made and left.before.get(place) in ancestors:
            raise Mixed(f"{_named(place, model)} is made of itself in every forward, so a second call gives another")
    if left.counted and not _is_settled(question, batch, recorded):
        raise Mixed(
            f"{_named(next(iter(left.counted)), model)} is another number after a forward, and each part of the batch "
            "would change it"
        )


def _is_settled(question: Question, batch: BatchAxis, recorded: RecordedSamples) -> bool:
    """Whether a forward that begins with the numbers which one has left does the same, and leaves them as they are."""
    model, left = question.model, recorded.left
    _set(model, left.counted)
    try:
        again = Left(model)
        graph, _, _ = record_samples(question, batch, ROWS, at_end=again.note)
    finally:
        _set(model, {name: left.numbers[name] for name in left.counted})
    return not again.counted and is_same(recorded.graph, graph)


def _set(model: nn.Module, numbers: Mapping[str, float]) -> None:
    for name, value in numbers.items():
        path, _, attribute = name.rpartition(".")
        vars(model.get_submodule(path))[attribute] = value


def left_by_parts(place: str, model: nn.Module) -> Mixed:
    """The error for a tensor that a forward leaves in an attribute; `place`: "path.attribute" and the path inside."""
    return Mixed(
        f"{_named(place, model)} is set by every forward, and each part of the batch would set its own. Return it from "
        "the forward, beside the output or in the loss, or make it a buffer"
    )


def _named(place: str, model: nn.Module) -> str:
    module = max((path for path, _ in model.named_modules() if place.startswith(f"{path}.")), key=len, default="")
    return f"{place.removeprefix(f'{module}.')} in {module or 'the model itself'}"


def written_in(recorded: RecordedSamples) -> tuple[str, ...]:
    """The buffers that a forward writes or replaces."""
    graph, buffers = recorded.graph, recorded.left.buffers
    storages = written_storages(graph)
    return tuple(
        sorted(
            tensor.name for tensor in graph.tensors
            if tensor.kind == "buffer"
            and (tensor.storage in storages or buffers.get(tensor.name, tensor.value) != tensor.value)
        )
    )  # fmt: skip


# ---- outputs


def merges_of(recorded: RecordedSamples, batch: BatchAxis, apart: Apart | None) -> tuple[BatchOutput, ...]:
    """How each output is made of those of parts, as its ops and its shapes say.

    Without `apart`, which the user says samples to be, by its shapes alone. Raises `Mixed`.
    """
    paths = recorded.graph.calls[0].output_paths
    if paths != recorded.other.calls[0].output_paths:
        raise Mixed("the outputs are others for other rows")
    hints = {(one.path, one.dim, with_rows(one.axis, 1)) for one in batch.outputs}
    found = []
    for path, mine, its in zip(paths, recorded.graph.outputs, recorded.other.outputs, strict=True):
        value, other = recorded.graph.values[mine], recorded.other.values[its]
        same, floating = value.shape == other.shape, value.dtype.is_floating_point
        merge = apart.merges.get(path) if apart is not None else None
        divided = sorted(
            _divided(path, value.shape, other.shape, recorded.rows),
            key=lambda way: (way.path, way.dim, with_rows(way.axis, 1)) not in hints,
        )
        found_axes = [way for way in divided if apart is None or (merge is None and apart.permits(way))]
        if same and merge is not None and (floating or merge.how == "sum"):
            found_axes = [merge]
        elif same and apart is not None and path in apart.shared:
            found_axes = [BatchOutput(path=path, how="same")]
        elif same and apart is None and floating and not found_axes:
            found_axes = [BatchOutput(path=path, how="mean")]
        if not found_axes:
            raise Mixed(f"{path or 'its output'} is not made of what parts give as its ops would")
        found.append(found_axes[0])
    return tuple(found)


def _divided(path: str, shape: Sequence[int], other: Sequence[int], rows: int) -> Iterator[BatchOutput]:
    """Ways to put parts one after the other that shapes allow: with `ROWS` and `rows` samples."""
    for dim, size in enumerate(shape):
        longer = torch.Size((*shape[:dim], size // ROWS * rows, *shape[dim + 1 :]))
        if size % ROWS == 0 and longer == torch.Size(other):
            each = size // ROWS
            for major in (major for major in range(1, each + 1) if each % major == 0):
                axis = f"{major}x*{ROWS}x{each // major}".removeprefix("1x").removesuffix("x1")
                yield BatchOutput(path=path, how="cat", dim=dim, axis=axis)
