"""The batch among the axes of all tensors of one run, op by op, in the order in which they ran.

    tokens [b, S] ─▶ embedding ─▶ [b, S, d] ─▶ … ─▶ logits [b, S, V]      one factor b: every slice of it is a sample's

A tensor with the factor has it once, and each slice depends on that sample alone. What an op does along it (`block`,
`contract`, a part of it, a pairing with what differs from place to place) mixes samples, and what is made of that is
mixed. All other axes from outside are unshardable: of a tensor without samples, an axis that is not unshardable is one
along which it is the same everywhere. Two runs of the same ops are followed, of which one has more samples: sizes tell
in both whether the factor is where it is said to be. No value of a weight, a buffer or an activation is asked.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoshard.axes.axis import Axis, Cat, Factor, factors_of, local_size, make_unshardable, size_of, times
from autoshard.axes.batch_axes import BatchAxes, State
from autoshard.axes.batch_merges import CLASSES, LOSSES, Merges
from autoshard.axes.batch_rules import FILLED, SIZED
from autoshard.axes.contents import has_constant_bound, part_dim
from autoshard.axes.given import arguments_of, is_sized_by_values, plain
from autoshard.axes.rules import Axes, Rule
from autoshard.axes.sound import Sound
from autoshard.capture.graph import ModelGraph, Op, name_of

CONVOLUTIONS = frozenset(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3))


class BatchWalk(BatchAxes):
    """The walk itself, op by op.

    Attributes:
        merges: how values that several samples decide are made of those of parts, where that is known.
        sized: ops that make tensors whose sizes depend on values of the batch, which Python may look at.
        placed: ops that write into a part of the batch by its place in it.
        written: (op, value) of parameters, buffers and inputs that were written with what depends on the batch.
    """

    def __init__(
        self, graph: ModelGraph, other: ModelGraph, inputs: Mapping[int, Axes], batch: Factor, rows: tuple[int, int],
        table: Mapping[Any, Rule],
    ) -> None:  # fmt: skip
        super().__init__(graph, other, inputs, batch, rows, table)
        self.sized: list[int] = []
        self.placed: list[int] = []
        self.written: list[tuple[int, int]] = []
        self._parts: set[int] = set()
        self.sound = Sound(self)
        self.merges = Merges(self)

    def step(self, op: Op) -> None:
        """Follow one op."""
        given = [self.state(value) for value in op.inputs]
        states = self.sound.results(op)
        if states is None:
            states = self._ruled(op, given)
            if is_sized_by_values(self.graph, op) and any(state != "shared" for state in given):
                self.sized.append(op.index)
        losses = {value for value in op.inputs if self._is_loss(value)}
        before = [self.cause[value] for value in op.inputs if value in self.cause and value not in losses]
        self.merges.step(op, given, states)
        places = {self.graph.values[value].storage for value in self._parts.intersection(op.inputs)}
        self._parts.update(value for value in op.outputs if self.graph.values[value].storage in places)
        if not self._parts.isdisjoint(op.mutates):
            self.placed.append(op.index)
        for value in op.mutates:
            if value not in op.outputs:
                self._write(op, value, "mixed" if any(state != "shared" for state in given) else "shared")
        for value, state in zip(op.outputs, states, strict=True):
            if state == "mixed" and (value not in self.cause or value in losses):
                self.cause[value] = before[0] if before else op.index
            if value in op.mutates:
                self._write(op, value, state)
            else:
                self._enter(value, state)

    def _is_loss(self, value: int) -> bool:
        """Whether a value is a mean over losses, which are put together: what is done to it then is the cause."""
        return value in self.merges.known and name_of(self.graph.ops[self.cause[value]]) in LOSSES | CLASSES

    def _ruled(self, op: Op, given: Sequence[State]) -> list[State]:
        """The states of what an op makes, by the rule of its axes."""
        walk, name = self.walk, name_of(op)
        walk.blocks.clear()
        walk.contractions.clear()
        walk.known.clear()
        placed = self._is_by_place(op)  # asked before the op may bind axes
        resized = self._resized(op, name)
        mixed = self.mixes(lambda: walk.run(op))
        if name in FILLED and (name != "normal" or not given):
            return ["mixed" if resized else "shared"] * len(op.outputs)
        if placed:
            self._parts.update(op.outputs)
        asked = list(zip(op.inputs, given, strict=True))
        if name in ("copy_", "fill_"):
            asked = asked[1:]
        states = {state for value, state in asked if not walk.known.get(value)}
        if mixed or resized or placed or "mixed" in states or self._works_on_all(op):
            return ["mixed"] * len(op.outputs)
        return [self.made("apart" in states, value) for value in op.outputs]

    def _works_on_all(self, op: Op) -> bool:
        """Whether an op works along a dimension that is longer for a larger batch, or sums over the batch."""
        acted = [axis for _, axis in self.walk.blocks] + [one.axis for one in self.walk.contractions]
        touched = {factor for axis in acted for factor in factors_of(axis)}
        longer = {
            factor
            for value in op.inputs if value in self.counts
            for axis, more in zip(self.axes(value), self.counts[value], strict=True)
            if more and not times(axis)
            for factor in factors_of(axis)
        }  # fmt: skip
        return not touched.isdisjoint({*self.rigid, *longer})

    def _is_by_place(self, op: Op) -> bool:
        """Whether an op takes a part of what is longer for a larger batch by its place in it."""
        if not op.inputs or op.inputs[0] not in self.counts:
            return False
        source = op.inputs[0]
        axes, counts = self.axes(source), self.longer(source)
        dim = part_dim(op, len(axes))
        if dim is None or not counts[dim]:
            return False
        has = times(axes[dim], self.batch) > 0
        if not has:
            return not self.is_same_along(source, dim)
        return (not self.resized(op) and has_constant_bound(op, counts)) or not self._begins_alike(op, axes[dim])

    def _begins_alike(self, op: Op, axis: Axis) -> bool:
        """Whether a part of a concatenation with the batch begins at the same segment in both runs."""
        if name_of(op) not in ("slice", "select") or not any(isinstance(one, Cat) for one in axis):
            return True
        slices, starts = {self.batch: self.other_rows}, []
        for one, size in zip((op, self.other.ops[op.index]), (size_of(axis), local_size(axis, slices)), strict=True):
            at = arguments_of(one).get("index" if name_of(op) == "select" else "start") or 0
            starts.append(at + size if at < 0 else min(at, size))
        major, minor = axis[0], size_of(axis[1:])
        if not isinstance(major, Cat) or times(axis[1:]) or starts[0] % minor:
            return False
        at = its = 0
        for segment in major.segments:
            if at >= starts[0] // minor:
                break
            at, its = at + size_of(segment), its + local_size(segment, slices)
        return at * minor == starts[0] and its * minor == starts[1]

    def _resized(self, op: Op, name: str) -> bool:
        """Whether an op is given other numbers for a larger batch that are no sizes and no ends of parts."""
        if not self.resized(op):
            return False
        alike = _scalars(plain(op)) == _scalars(plain(self.other.ops[op.index]))
        if name in SIZED and (alike or name == "repeat_interleave"):
            return False
        if name in CONVOLUTIONS and _ungrouped(op) == _ungrouped(self.other.ops[op.index]):
            return False
        dim = part_dim(op, len(self.graph.values[op.inputs[0]].shape)) if op.inputs else None
        if dim is None:
            return True
        source = op.inputs[0]
        if self.state(source) == "shared":
            return not self.is_same_along(source, dim)
        mine, its = arguments_of(op), arguments_of(self.other.ops[op.index])
        along = times(self.axes(source)[dim], self.batch) > 0
        return not along and (name != "slice" or mine["start"] != its["start"] or mine["step"] != its["step"])

    # ---- memory that is shared

    def _write(self, op: Op, value: int, state: State) -> None:
        """Enter what a value is after it was written, and what others are that share its memory."""
        graph = self.graph
        storage = graph.values[value].storage
        depends = state != "shared" or any(self.state(one) != "shared" for one in op.inputs if one != value)
        if graph.storages[storage].kind in ("parameter", "buffer", "input") and depends:
            self.written.append((op.index, value))
        mine = {factor for axis in self.axes(value) for factor in factors_of(axis)}
        for other in self._sharing.get(storage, ()):
            if other == value or graph.values[other].died <= op.index:
                continue
            for axis in self.axes(other):
                for factor in factors_of(axis):
                    if factor not in mine and not factor.rigid:
                        make_unshardable((factor,), "a part of it is written")
            if self._mixes_other(value, state, other):
                self._states[other] = "mixed"
                self.cause.setdefault(other, self.cause.get(value, op.index))
            elif state == "apart" and self._states[other] == "shared":
                self._states[other] = "apart"
        self._enter(value, state)

    def _mixes_other(self, value: int, state: State, other: int) -> bool:
        """Whether a write into one value mixes samples in another one of the same memory: one sample's place in it may
        be another's in what was written, as on a diagonal."""
        if state == "apart":
            return self.made(True, other) == "mixed"
        return state == "mixed" or (self._states[other] == "apart" and not self.has_batch(value))


def _ungrouped(op: Op) -> list[Any]:
    """The arguments of a convolution but for the number of groups, which the sizes of its tensors say as well."""
    given = plain(op)
    return given[:6] + given[7:]


def _scalars(numbers: Iterable[Any]) -> list[Any]:
    return [item for item in numbers if not isinstance(item, list)]
