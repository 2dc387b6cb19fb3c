"""Bytes and FLOPs of the recorded run as functions of the rows of the batch, for one device that has the whole model.

    live(t)  =  what has no rows  +  rows / size x what has           op i:  FLOPs and bytes in the same way

So a share of the batch is priced without building its profile: planning asks for hundreds.
"""

from dataclasses import dataclass

import numpy as np

from autoshard.batching import BatchAxis
from autoshard.capture.columns import columns_of
from autoshard.capture.latest import Latest
from autoshard.profile.measure import trained_sizes
from autoshard.profile.part import carriers_of_rows
from autoshard.profile.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """A recorded run by rows.

    Attributes:
        size: rows of the batch that was recorded.
        storage, storage_bytes, born, died: [S] activations and inputs, live at ops `born` to `died - 1`.
        carries: [S] has rows.
        gradient, cache: [S] what backward leaves in `.grad`; what outlives the forward.
        flops: [ops]; `with_rows`: [ops] FLOPs grow with the rows.
        moved_bytes: [ops], of which `moved_part` has rows.
        dtypes: per op; end: number of ops; backward_begin: the first op of backward.
        input_bytes, output_bytes: of what has rows.
        parameter_sizes, buffer_sizes: of every storage. trained: (name, bytes) of what gets a gradient.
    """

    size: int
    storage: np.ndarray
    storage_bytes: np.ndarray
    born: np.ndarray
    died: np.ndarray
    carries: np.ndarray
    gradient: np.ndarray
    cache: np.ndarray
    flops: np.ndarray
    with_rows: np.ndarray
    moved_bytes: np.ndarray
    moved_part: np.ndarray
    dtypes: tuple[str, ...]
    end: int
    backward_begin: int
    parameter_sizes: np.ndarray
    buffer_sizes: np.ndarray
    trained: tuple[tuple[str, int], ...]
    input_bytes: int
    output_bytes: int

    def part(self, rows: int) -> float:
        """Which part of the batch so many rows are."""
        return rows / self.size

    def bytes_of(self, rows: int, block_bytes: int = 1) -> np.ndarray:
        """[S] bytes of each storage, rounded up to the allocator's blocks."""
        scaled = np.where(self.carries, np.ceil(self.storage_bytes * self.part(rows)), self.storage_bytes)
        return _rounded(scaled, block_bytes)

    def live_bytes(self, rows: int, block_bytes: int = 1) -> np.ndarray:
        """[ops + 1] bytes of inputs and activations at every op and after the last."""
        nbytes, times = self.bytes_of(rows, block_bytes), self.end + 1
        change = np.zeros(times + 1)
        np.add.at(change, self.born, nbytes)
        np.subtract.at(change, np.minimum(self.died, times), nbytes)
        return np.cumsum(change)[:times]


_LATEST = Latest[Rows]()


def by_rows(profile: Profile, batch: BatchAxis) -> Rows:
    """Read off a profile what grows with the rows of the batch."""
    asked = batch, profile.workload, profile.op_bytes
    return _LATEST.of(profile.graph, asked, lambda: _by_rows(profile, batch))


def _by_rows(profile: Profile, batch: BatchAxis) -> Rows:
    graph, columns = profile.graph, columns_of(profile.graph)
    carrying = carriers_of_rows(graph, batch)
    carries = np.zeros(len(graph.values), bool)
    carries[list(carrying)] = True
    of_storage = columns.of_storages(carries, False)
    end, uncounted = len(graph.ops), graph.uncounted
    held = {graph.values[value].storage for value in graph.held}
    state = {graph.values[value].storage for value in graph.state}
    lives = [(s, born, died) for s, born, died in graph.lives() if s.born not in uncounted and s.died > max(s.born, 0)]
    rows = [s for s, _, _ in lives]
    own = [graph.storages[s] for s in dict.fromkeys(tensor.storage for tensor in graph.tensors)]
    flops = np.array([0 if op.index in uncounted else op.flops for op in graph.ops], np.float64)
    small, all_bytes = (columns.touched.sums(columns.value_bytes * mask) for mask in (carries, 1))
    moved = np.array(profile.op_bytes, np.float64)
    outputs = dict.fromkeys(graph.values[value].storage for value in graph.outputs if value in carrying)
    inputs = dict.fromkeys(graph.values[value].storage for value in graph.inputs if value in carrying)
    return Rows(
        size=batch.size,
        storage=np.array([s.index for s in rows], np.int64),
        storage_bytes=np.array([s.nbytes for s in rows], np.float64),
        born=np.array([born for _, born, _ in lives], np.int64),
        died=np.array([died for _, _, died in lives], np.int64),
        carries=np.array([of_storage[s.index] for s in rows], bool),
        gradient=np.array(
            [graph.backward_begin <= s.born and s.died >= end and s.index not in held for s in rows], bool
        ),
        cache=np.array([s.index in state for s in rows], bool),
        flops=flops,
        with_rows=columns.touched.has(carries),
        moved_bytes=moved,
        moved_part=small / np.maximum(all_bytes, 1.0),
        dtypes=profile.op_dtypes,
        end=end,
        backward_begin=graph.backward_begin,
        parameter_sizes=np.array([s.nbytes for s in own if s.kind == "parameter"], np.float64),
        buffer_sizes=np.array([s.nbytes for s in own if s.kind != "parameter"], np.float64),
        trained=tuple(trained_sizes(graph)) if profile.workload.training else (),
        input_bytes=sum(graph.storages[s].nbytes for s in inputs),
        output_bytes=sum(graph.storages[s].nbytes for s in outputs),
    )


def _rounded(nbytes: np.ndarray, block_bytes: int) -> np.ndarray:
    return np.ceil(nbytes / block_bytes) * block_bytes
