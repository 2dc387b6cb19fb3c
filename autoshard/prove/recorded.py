"""Recordings of a forward with other rows, and what they tell of a batch without any number of the model.

outputs     logits [3, 8, 50] and [1024, 8, 50]      one part after the other
left        self.table = …                           in attributes of modules, in buffers, in flags
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from autoshard import nested
from autoshard.batching import BatchAxis, BatchOutput
from autoshard.capture.capture import record_forward
from autoshard.capture.fake import SMALL_FLOATS
from autoshard.capture.graph import ModelGraph
from autoshard.capture.run import Find
from autoshard.capture.tape import Tape, TooManyOps
from autoshard.errors import CaptureError
from autoshard.prove.padded import Padded, marked, masked
from autoshard.prove.parts import Mixed, by_shape, left_by_parts, ways
from autoshard.prove.rows import NotRun, enlarged
from autoshard.runtime.chunks import bind
from autoshard.runtime.flags import flags_of
from autoshard.runtime.left_behind import new_tensors

if TYPE_CHECKING:
    from autoshard.prove.apart import Apart
    from autoshard.prove.batch import Question

ROWS = 3
"""Rows of the runs that are followed."""


class Left:
    """What a forward leaves in a model: noted at the end of a recording, before all is put back.

    Attributes:
        tensors: in attributes of modules, by place: their values, and whether they have a history.
        buffers: the values that buffers have then.
        flags: as `runtime.flags.flags_of` writes them; `counted`: numbers in attributes that are others than before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = dict(_numbers(model))
        self.tensors: dict[str, int] = {}
        self.buffers: dict[str, int | None] = {}
        self.flags: tuple[str, ...] = ()
        self.counted: tuple[str, ...] = ()

    def note(self, find: Find) -> None:
        """Look at the model now."""
        model = self._model
        found = {place: find(tensor) for place, tensor in new_tensors(model, ()).items()}
        self.tensors = {place: value for place, value in found.items() if value is not None}
        self.buffers = {name: find(buffer) for name, buffer in model.named_buffers()}
        self.flags = flags_of(model)
        self.counted = tuple(name for name, value in _numbers(model) if self._before.get(name, value) != value)


def _numbers(model: nn.Module) -> Iterator[tuple[str, float]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) in (int, float):
                yield f"{path}.{name}".lstrip("."), value


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A forward with `ROWS` rows, what it leaves in the model, and the same with other rows."""

    graph: ModelGraph
    left: Left
    other: ModelGraph
    rows: int


def record_rows(
    question: "Question", batch: BatchAxis, rows: int, *, padded: Padded = frozenset(),
    absent: Sequence[tuple[str, int]] = (), **options: Any,
) -> tuple[ModelGraph, Tape, list[str]]:  # fmt: skip
    """Record a forward with so many rows: (graph, tape, where each input is among the arguments); `options`: as of
    `record_forward`. Raises `NotRun` or `TooManyOps`.
    """
    bound = masked(enlarged(question.bound, batch.inputs, batch.size, rows), batch, padded, rows)
    bound = marked(bound, batch, padded, absent, rows)
    args, kwargs = question.call(bound)
    by_id = {id(tensor): path for path, tensor in nested.tensors_in(bind(question.model, args, kwargs))}
    paths = [by_id[id(tensor)] for _, tensor in nested.tensors_in((args, kwargs))]
    training = question.workload.training
    try:
        graph, tape = record_forward(
            question.model, args, kwargs, grad=training, histories=training, real=True,
            small_floats=SMALL_FLOATS * max(1, rows // ROWS),  # so that the same is known of many rows
            **options,
        )  # fmt: skip
    except TooManyOps:
        raise
    except CaptureError as error:
        raise NotRun(str(error)) from error
    return graph, tape, paths


def record_twice(question: "Question", batch: BatchAxis) -> Recorded:
    """Record a forward with two numbers of rows. Raises `NotRun`."""
    left = Left(question.model)
    graph, _, _ = record_rows(question, batch, ROWS, at_end=left.note)
    other, _, _ = record_rows(question, batch, ROWS + 1)
    return Recorded(graph=graph, left=left, other=other, rows=ROWS + 1)


def written_in(recorded: Recorded) -> tuple[str, ...]:
    """The buffers that a forward writes or replaces."""
    graph, buffers = recorded.graph, recorded.left.buffers
    storages = {graph.values[value].storage for op in graph.ops for value in op.mutates}
    return tuple(
        sorted(
            tensor.name for tensor in graph.tensors
            if tensor.kind == "buffer"
            and (tensor.storage in storages or buffers.get(tensor.name, tensor.value) != tensor.value)
        )
    )  # fmt: skip


def ways_in(
    recorded: Recorded, batch: BatchAxis, labels: Mapping[str, int], apart: "Apart | None"
) -> dict[str, BatchOutput]:
    """How each output is made of those of parts, by its shapes and what ops permit.

    Without `apart`, which the user says rows to be, by its shapes alone. Raises `Mixed`.
    """
    paths = recorded.graph.calls[0].output_paths
    if paths != recorded.other.calls[0].output_paths:
        raise Mixed("the outputs are others for other rows")
    found = {}
    for path, mine, its in zip(paths, recorded.graph.outputs, recorded.other.outputs, strict=True):
        value = recorded.graph.values[mine]
        shapes = {ROWS: value.shape, recorded.rows: recorded.other.values[its].shape}
        possible = ways(path, shapes, value.dtype.is_floating_point, batch, labels)
        way = by_shape(possible) if apart is None else next(filter(apart.permits, possible), None)
        if way is None:
            raise Mixed(f"{path or 'its output'} is not made of what parts give as its ops would")
        found[path] = way
    return found


def check_left(model: nn.Module, recorded: Recorded, training: bool) -> None:
    """Refuse what a second call, or a part, would find other than the first one did, where nothing is run twice.

    Raises `Mixed`.
    """
    graph, left = recorded.graph, recorded.left
    for place, value in left.tensors.items():
        if training and graph.values[value].op >= 0 and graph.values[value].dtype.is_floating_point:
            raise left_by_parts(place, model)
    for name in left.counted:
        raise Mixed(f"{name} is another number after a forward, and each part of the batch would change it")
