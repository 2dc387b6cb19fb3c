"""Memory of one backward of all micro-batches, as a pipeline in one process runs it: the last micro-batch goes first.

    micro-batch                          3           2           1           0
    what comes for a parameter           g           g           g           g
    what waits beside it                 g  ───────▶ +  ───────▶ +  ───────▶ +  ──▶ .grad

Only when the first micro-batch has gone back, autograd knows that no more will come (torch/csrc/autograd/engine.cpp):
so gradients wait, and a sum is there beside its terms. Gradients of copies on other devices come home with each one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.flow import Flow

_MOMENT = 2.0**-20
"""Time of one thing that autograd does between two ops."""
_Row = tuple[float, float, int]
"""(born, last time, bytes)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A gradient that a node sends to a parameter: made at op `born`, in the parameter's sum at `time`."""

    leaf: int
    storage: int
    nbytes: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedBytes:
    """Bytes of a device while micro-batches go back.

    Attributes:
        first: most while the first one does, with the gradients that begin to wait.
        later, last: most while others do, and the very last one, beside gradients that wait.
        waiting: gradients that wait here from one micro-batch to the next.
        returning: gradients of outputs that came from another device, of one micro-batch; `last` has its own.
    """

    first: int = 0
    later: int = 0
    last: int = 0
    waiting: int = 0
    returning: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedMoments:
    """The times of a backward and what lives then on a device, beside what is kept.

    Attributes:
        others, outputs: masks over the flow's buffers: what passes, and the gradients of outputs that came from another
            device.
        first, later, last: [times] bytes of gradients of parameters; waiting: as in `JoinedBytes`.
        alone: [times] the same, where a later micro-batch has a backward of its own: gradients are there already.
    """

    times: np.ndarray
    others: np.ndarray
    outputs: np.ndarray
    first: np.ndarray
    later: np.ndarray
    last: np.ndarray
    alone: np.ndarray
    waiting: int


class JoinedBackward:
    """What differs from the backward of one micro-batch alone, which `moves` says."""

    def __init__(self, graph: ModelGraph, moves: Flow) -> None:
        self.graph, self.moves, self.rows = graph, moves, moves.buffers
        self.sent = _sent(graph)
        leaf_of = _leaves(graph, self.sent)
        at = {name: index for index, name in enumerate(moves.devices)}
        home = {tensor.value: at.get(moves.tensor_device[tensor.name], -1) for tensor in graph.tensors}
        homes = np.array([home.get(leaf_of.get(storage, -1), -2) for storage in self.rows.storage.tolist()], np.int64)
        late = self.rows.born > graph.backward_begin - 1
        self.waits = late & (homes == self.rows.device)
        self.row_of = {int(self.rows.storage[row]): int(row) for row in np.flatnonzero(self.waits)}
        ends = {graph.values[value].op for value in graph.outputs}
        incoming = {graph.values[value].storage for node in graph.nodes if node.made in ends
                    for value in node.incoming if value >= 0}  # fmt: skip
        self.of_outputs = late & self.rows.copied & np.isin(self.rows.storage, list(incoming)) & ~self.waits

    def of(self, device: int, passing: np.ndarray, block_bytes: int) -> JoinedBytes:
        """Bytes of a device. `passing`: rows that pass in the backward of a micro-batch."""
        back = self.moments(device, passing, block_bytes)
        others = self._passing(back, back.others, block_bytes)
        outputs = -(-self.rows.nbytes[back.outputs] // block_bytes) * block_bytes
        return JoinedBytes(
            first=int((others + back.first).max(initial=0)),
            later=int((others + back.later).max(initial=0)),
            last=int((others + self._passing(back, back.outputs, block_bytes) + back.last).max(initial=0)),
            waiting=back.waiting,
            returning=int(outputs.sum()),
        )

    def apart(self, device: int, passing: np.ndarray, block_bytes: int) -> tuple[int, int]:
        """Most bytes of a device where each micro-batch has a backward of its own: in the first, and in a later one.

        Outputs stay where they are, so no gradients of them come. Arguments as of `of`.
        """
        back = self.moments(device, passing, block_bytes)
        others = self._passing(back, back.others, block_bytes)
        return int((others + back.first).max(initial=0)), int((others + back.alone).max(initial=0))

    def _passing(self, back: JoinedMoments, mask: np.ndarray, block_bytes: int) -> np.ndarray:
        """Bytes of some rows at the times of a backward."""
        rows, nbytes = self.rows, -(-self.rows.nbytes[mask] // block_bytes) * block_bytes
        return _live(back.times, rows.born[mask], rows.died[mask] - 1, nbytes)

    def moments(self, device: int, passing: np.ndarray, block_bytes: int) -> JoinedMoments:
        """Return when what lives on a device; the arguments are those of `of`."""
        rows, here = self.rows, self.rows.device == device
        begin, end = self.graph.backward_begin, len(self.graph.ops)
        first, later, last, alone, waiting = self._gradients(device, block_bytes)
        alive = here & passing & ~self.waits & (rows.died - 1 >= begin - 1)
        moments = {time for row in (*first, *last, *alone) for time in row[:2] if begin <= time <= end}
        times = np.union1d(np.arange(begin, end + 1), [*moments, *rows.born[alive & (rows.born >= begin)]])
        return JoinedMoments(
            times=times,
            others=alive & ~self.of_outputs,
            outputs=alive & self.of_outputs,
            first=_live(times, *_columns(first)),
            later=_live(times, *_columns(later)),
            last=_live(times, *_columns(last)),
            alone=_live(times, *_columns(alone)),
            waiting=waiting,
        )

    def _gradients(self, device: int, block_bytes: int) -> tuple[list[_Row], list[_Row], list[_Row], list[_Row], int]:
        """Gradients of parameters of a device in the first, in later and in the last micro-batch, in a later one with a
        backward of its own; bytes that wait.
        """
        forever = float(len(self.graph.ops) + 1)
        first: list[_Row] = []
        later: list[_Row] = []
        alone: list[_Row] = []
        end = {one.leaf: one.time for one in self.sent}
        waits: dict[int, int] = {}
        for one in self.sent:
            row = self.row_of.get(one.storage, -1)
            if row < 0 or self.rows.device[row] != device:
                continue
            nbytes, born = -(-one.nbytes // block_bytes) * block_bytes, float(self.rows.born[row])
            time = born + _MOMENT if self.rows.copied[row] else one.time
            added = [(born, time, nbytes), (time, time, nbytes)]
            later += added
            first += added if one.leaf in waits else [(born, forever, nbytes)]
            alone += added if one.leaf in waits else [(born, max(time, end[one.leaf]), nbytes)]
            waits[one.leaf] = nbytes
        last = list(later)
        for node in self.graph.nodes:  # a gradient of another layout is kept as a copy
            if node.leaf in waits and node.end > node.begin:
                last.append((node.begin, node.begin, waits[node.leaf]))
        return first, later, last, alone, sum(waits.values())


def _leaves(graph: ModelGraph, sent: Sequence[Sent]) -> dict[int, int]:
    """Storage of what is sent to a parameter, of sums of it and of what becomes of it -> the parameter."""
    values = {tensor.name: tensor.value for tensor in graph.tensors}
    found = {one.storage: one.leaf for one in sent} | _sums(graph)
    return found | {graph.values[value].storage: values.get(name, -1) for name, value in graph.gradients}


def _sent(graph: ModelGraph) -> list[Sent]:
    """What nodes send to parameters, in the order in which it comes."""
    found = []
    for node in graph.nodes:
        for edge in node.edges:
            leaf, value = graph.nodes[edge.node].leaf, graph.values[edge.value]
            if leaf >= 0:
                time = edge.sum if edge.sum >= 0 else max(node.end - 1, value.op) + _MOMENT
                found.append(Sent(leaf=leaf, storage=value.storage, nbytes=value.nbytes, time=time))
    return sorted(found, key=lambda one: one.time)


def _sums(graph: ModelGraph) -> dict[int, int]:
    """The storages of sums of what is sent to a parameter -> the parameter."""
    edges = [edge for node in graph.nodes for edge in node.edges if edge.sum >= 0 and graph.nodes[edge.node].leaf >= 0]
    return {
        graph.values[value].storage: graph.nodes[edge.node].leaf
        for edge in edges
        for value in graph.ops[edge.sum].outputs
    }


def _columns(rows: Sequence[_Row]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(column) for column in zip(*rows, strict=True)) if rows else (np.zeros(0, np.int64),) * 3


def _live(times: np.ndarray, born: np.ndarray, until: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Bytes that live at some times."""
    change = np.zeros(len(times) + 1, np.int64)
    np.add.at(change, np.searchsorted(times, born, "left"), nbytes)
    np.add.at(change, np.searchsorted(times, until, "right"), -nbytes)
    return np.cumsum(change)[:-1]
