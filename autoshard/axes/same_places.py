"""Places along a dimension that hold the same for every sample, as those of class tokens do. Sound by argument.

    x = cat([token.expand(b * t, 1, d), patches], 1)      place 0 depends on no sample
    (x + positions)[:b, 0]                                nor does what is taken there, whichever rows it is of

Argument: a tensor was put there that depends on no sample, and is the same along every dimension that is longer for a
larger batch. What is made element by element with other such tensors is one there again, and so is any part of the
other dimensions. What is taken at these places alone is such a tensor.
"""

from dataclasses import dataclass

from autoshard.axes.axis import fresh
from autoshard.axes.batch_axes import BatchAxes, State
from autoshard.axes.batch_rules import SAME
from autoshard.axes.given import arguments_of, overwritten_by
from autoshard.axes.reshaping import CATS
from autoshard.axes.rules import is_pointwise
from autoshard.capture.graph import Op, name_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Places along a dimension of a value."""

    dim: int
    begin: int
    end: int


class SamePlaces:
    """What is known of values, the first such places of each."""

    def __init__(self, walk: BatchAxes) -> None:
        self.walk = walk
        self._known: dict[int, Range] = {}

    def results(self, op: Op) -> list[State] | None:
        """The state of what is taken at such places alone; None for any other op. To be asked before its rule."""
        for value in overwritten_by(self.walk.graph, op, self._known):
            del self._known[value]
        if op.mutates or len(op.outputs) != 1 or not op.inputs or op.node is None:
            return None
        name, source, made = name_of(op), op.inputs[0], op.outputs[0]
        if name in ("slice", "select") and source in self._known:
            return self._taken(op, name, self._known[source])
        found = self._joined(op) if name in CATS else self._each(op, name)
        if found is not None:
            self._known[made] = found
        return None

    def _joined(self, op: Op) -> Range | None:
        values = self.walk.graph.values
        dim = arguments_of(op)["dim"] % len(values[op.outputs[0]].shape)
        if self.walk.longer(op.outputs[0])[dim] or any(len(values[value].shape) <= dim for value in op.inputs):
            return None
        begin = 0
        for value in op.inputs:
            end = begin + values[value].shape[dim]
            if self.walk.is_the_same(value):
                return Range(dim=dim, begin=begin, end=end)
            begin = end
        return None

    def _each(self, op: Op, name: str) -> Range | None:
        """The places of the tensor that has some, where an op works element by element."""
        known = {self._known[value] for value in op.inputs if value in self._known}
        rest = [value for value in op.inputs if value not in self._known]
        if len(known) != 1 or not (name in SAME or is_pointwise(op.target)) or self.walk.resized(op):
            return None
        made = self.walk.graph.values[op.outputs[0]].shape
        alike = all(self.walk.graph.values[value].shape == made for value in op.inputs if value in self._known)
        return known.pop() if alike and all(map(self.walk.is_the_same, rest)) else None

    def _taken(self, op: Op, name: str, known: Range) -> list[State] | None:
        values, given, made = self.walk.graph.values, arguments_of(op), op.outputs[0]
        shape = values[op.inputs[0]].shape
        dim = given["dim"] % len(shape)
        if dim != known.dim:
            if self.walk.resized(op) and not self.walk.longer(op.inputs[0])[dim]:
                return None
            moved = known.dim - (name == "select" and dim < known.dim)
            self._known[made] = Range(dim=moved, begin=known.begin, end=known.end)
            return None
        if name == "select":
            places = range(given["index"] % shape[dim], given["index"] % shape[dim] + 1)
        else:
            places = range(*slice(given["start"], given["end"], given["step"]).indices(shape[dim]))
        if self.walk.resized(op) or not places or not known.begin <= places[0] <= places[-1] < known.end:
            return None
        sizes, longer = values[made].shape, self.walk.longer(made)
        self.walk.give(made, {dim: fresh(sizes[dim]) for dim, more in enumerate(longer) if more})
        return ["shared"]
