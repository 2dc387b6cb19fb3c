"""What `fully_shard` has whole, and when: parameters of the block that runs, what they are gathered into, gradients.

    forward                                            backward
    block 0    block 1    outside (head, loss)         block 1          block 0
    ├ used 0 ┤ ├ used 1 ┤                              ├ used 1 ───────┤├ used 0 ───────┤
    ├ gathered 0 ┤                                    1┤                │gradients of 0  ▂▄▆█┤
               ├ gathered 1 ─────────────┤             ├ gathered 0 ────┤
                                                       │gradients of 1  ▂▄▆█┤
                                                                        ├ scattered from 1 ─┤├ from 0 …
    ├ used: what is outside of blocks, to the end of backward ────────────────────────────────────────┤

In forward a block's gathered copy stays until the next block is in use; in backward it is let go once it is copied,
and the block that comes next is gathered meanwhile. After a block's backward its gradients are copied together to be
scattered, and that copy stays until the next block is as far. See FSDPParamGroup in torch.distributed.fsdp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoshard.axes.regions import element_of
from autoshard.capture.graph import ModelGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What `fully_shard` gathers as one: bytes of its parameters, and of those that get a gradient."""

    path: str
    parameter_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Whole:
    """Bytes beside activations. Times are twice those of the graph: 2 i while op i runs, 2 i + 1 after it.

    Attributes:
        used: [times] parameters in use, gradients before they are scattered, and what they are scattered from.
        gathered: [times] what parameters are gathered into.
        scattered: [times] gradients of which every replica has its part; bytes of all parts.
        gradients: storages of the gradients that are counted here.
    """

    used: np.ndarray
    gathered: np.ndarray
    scattered: np.ndarray
    gradients: np.ndarray

    def beside(self, *, accelerator: bool) -> np.ndarray:
        """[times] bytes that are whole. Accelerators gather on a stream of its own, whose memory no other one gets."""
        return self.used + (self.gathered.max(initial=0) if accelerator else self.gathered)


def blocks_of(graph: ModelGraph, paths: Sequence[str]) -> tuple[Block, ...]:
    """Bytes of the blocks at some module paths, in order, and last those of what lies outside of them."""
    trained = {name for name, _ in graph.gradients}
    rows = {path: [0, 0] for path in (*paths, "")}
    for tensor in {tensor.storage: tensor for tensor in reversed(graph.tensors)}.values():
        if tensor.kind == "parameter":
            path = element_of(tensor.name, rows)
            rows[path][0] += tensor.nbytes
            rows[path][1] += tensor.nbytes * (tensor.name in trained or (not trained and tensor.trainable))
    return tuple(Block(path=path, parameter_bytes=row[0], gradient_bytes=row[1]) for path, row in rows.items())


def find_whole(graph: ModelGraph, blocks: Sequence[Block]) -> Whole:
    """Work out what is whole when; `blocks` as `blocks_of` returns them."""
    found = _Timeline(graph, blocks)
    found.forward()
    if graph.backward_begin < len(graph.ops):
        found.backward()
    used, gathered, scattered = (np.cumsum(change)[: found.end + 2] for change in found.changes)
    storages = np.array(sorted(found.gradients), np.int64)
    return Whole(used=used, gathered=gathered, scattered=scattered, gradients=storages)


_USED, _GATHERED, _SCATTERED = range(3)


class _Timeline:
    """Spans of bytes in the making. `end`: the time of what happens when all ops are done."""

    def __init__(self, graph: ModelGraph, blocks: Sequence[Block]) -> None:
        self.graph, self.outside, self.end = graph, blocks[-1], 2 * len(graph.ops)
        self.blocks = {block.path: block for block in blocks[:-1]}
        self.changes = np.zeros((3, self.end + 3), np.int64)
        self.gradients = {graph.values[value].storage: name for name, value in graph.gradients}
        self.around = [element_of(call.path, self.blocks) for call in graph.calls]

    def add(self, kind: int, first: int, last: int, nbytes: int) -> None:
        """Count bytes from one time to another, which is the last."""
        if last >= first:
            self.changes[kind, max(first, 0)] += nbytes
            self.changes[kind, last + 1] -= nbytes

    def forward(self) -> None:
        calls = [call for call in self.graph.calls if not call.backward and call.begin < call.end]
        training = self.graph.backward_begin < len(self.graph.ops)
        last = self.end - 1 if training else self.end + 1
        self.add(_USED, 0, last, self.outside.parameter_bytes)
        for number, root in enumerate(call for call in calls if not call.path):
            inside = [call for call in calls if call.path in self.blocks and root.begin <= call.begin < root.end]
            for call in inside:
                self.add(_USED, 2 * call.begin - 1, 2 * call.end - 2, self.blocks[call.path].parameter_bytes)
            # What is outside of blocks stays whole: without a backward, from the first forward on.
            gathered = [(call.begin, self.blocks[call.path]) for call in inside]
            if not number:
                gathered.insert(0, (root.begin, self.outside))
            ends = [*(2 * begin - 1 for begin, _ in gathered[1:]), 2 * root.end - 2]
            for (begin, block), end in zip(gathered, ends, strict=False):
                self.add(_GATHERED, 2 * begin - 1, end, block.parameter_bytes)

    def backward(self) -> None:
        ran = self._ran_back()
        before = 2 * self.graph.backward_begin - 1
        made = dict.fromkeys(ran, self.end) | {path: 2 * last + 1 for path, (_, last) in ran.items()}
        for path, (first, last) in ran.items():
            block = self.blocks[path]
            self.add(_GATHERED, before, 2 * first - 1, block.parameter_bytes)
            self.add(_USED, 2 * first, 2 * last, block.parameter_bytes)
            before = 2 * first
            self.add(_SCATTERED, 2 * last + 2, self.end + 1, block.gradient_bytes)
        done = sorted((2 * last + 1, path) for path, (_, last) in ran.items())
        for (at, path), (then, _) in pairwise([*done, (self.end, "")]):
            self.add(_USED, at, then - 1, self.blocks[path].gradient_bytes)
        self.add(_USED, self.end, self.end, self.outside.gradient_bytes)
        self.add(_SCATTERED, self.end + 1, self.end + 1, self.outside.gradient_bytes)
        for storage, name in self.gradients.items():
            row = self.graph.storages[storage]
            self.add(_USED, 2 * row.born, made.get(element_of(name, ran), self.end), row.nbytes)

    def _ran_back(self) -> dict[str, tuple[int, int]]:
        """Block -> its first and last op in backward, in the order in which they begin."""
        found: dict[str, tuple[int, int]] = {}
        for op in self.graph.ops[self.graph.backward_begin :]:
            path = self.around[op.call]
            if path:
                found[path] = found.get(path, (op.index, 0))[0], op.index
        return found
