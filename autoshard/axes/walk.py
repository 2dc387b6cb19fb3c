"""The walk over the ops of one region: every tensor gets axes, and what is summed over or looked up is noted."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoshard.axes import mixing, products, reshaping, rules  # noqa: F401 - they register their rules
from autoshard.axes.axis import Axis, Factor, factors_of, fresh, resolve, size_of, unify, whole
from autoshard.axes.given import with_tensors
from autoshard.axes.rules import RULES, Axes, Seen
from autoshard.capture.graph import ModelGraph, Op, name_of

MOST_NUMBERS = 16
"""Longer lists of integers are not taken apart."""


@dataclass(slots=True)
class AxisWalk(rules.Context):
    """The axes of the values of one region, and what its ops do along them.

    `table`: the rules; `ops`: those that were walked.
    """

    graph: ModelGraph
    table: Mapping[Any, rules.Rule] = field(default_factory=lambda: RULES)
    axes: dict[int, Axes] = field(default_factory=dict)
    ops: set[int] = field(default_factory=set)
    _values: dict[Factor, set[int]] | None = None  # what `values_with` returns, if it is known

    def of(self, value: int) -> Axes:
        """The axes of a value; one that comes from outside gets fresh ones."""
        if value not in self.axes:
            self.axes[value] = tuple(fresh(size) for size in self.graph.values[value].shape)
            self._values = None
        return self.axes[value]

    def run(self, op: Op) -> None:
        """Apply the rule of one op."""
        self.ops.add(op.index)
        self._values = None
        values = self.graph.values
        self.name, self.why = name_of(op), where(self.graph, op)
        self._op, self.shapes = op.index, [values[value].shape for value in op.outputs]
        seen = [Seen(value, values[value].shape, values[value].dtype, self.of(value)) for value in op.inputs]
        rule = rules.rule_of(op.target, self.table)
        made = self._ruled(rule, op, seen) if rule is not None and op.node is not None else None
        if made is None or not _fit(made, self.shapes):
            made = rules.unknown(self, seen, self.shapes)
        for value, axes in zip(op.outputs, made, strict=False):
            self._give(value, axes)

    def _ruled(self, rule: rules.Rule, op: Op, seen: list[Seen]) -> Sequence[Sequence[Axis | None]] | None:
        """What the rule says; None if it was not written for these arguments."""
        rest = iter(seen)
        args, kwargs = with_tensors(op, lambda node: _with_numbers(next(rest), node))
        self._call = op.target, args, kwargs
        try:
            return rule(self, *args, **kwargs)
        except (TypeError, ValueError, IndexError, ArithmeticError, AttributeError):
            return None

    def _give(self, value: int, axes: Sequence[Axis | None]) -> None:
        """Enter the axes of a result; one that was there before (written in place) must be the same."""
        sizes = zip(self.graph.values[value].shape, axes, strict=True)
        made = [whole(size, self.why) if axis is None else axis for size, axis in sizes]
        if value in self.axes:
            for old, new in zip(self.axes[value], made, strict=True):
                unify(old, new, self.why)
        else:
            self.axes[value] = tuple(made)

    def mixing(self, factor: Factor) -> set[int]:
        """Ops that may not work on each slice of a factor by itself, or draw random numbers for all of them."""
        acted = [*self.blocks, *((one.op, one.axis) for one in self.contractions)]
        return {op for op, axis in acted if factor in factors_of(axis)} | {op for op, _ in self.random_calls}

    def values_with(self, factor: Factor) -> Set[int]:
        """The values that have the factor in a dimension, once all ops were walked."""
        if self._values is None:
            self._values = {}
            for value, axes in self.axes.items():
                for one in (one for axis in axes for one in factors_of(axis)):
                    self._values.setdefault(one, set()).add(value)
        return self._values.get(factor, frozenset())

    def cut_dims(self, value: int, factor: Factor) -> list[int]:
        """Dimensions of a value that have the factor in them."""
        if self._values is not None and value not in self.values_with(factor):
            return []
        return [dim for dim, axis in enumerate(self.axes.get(value, ())) if factor in factors_of(axis)]

    def works_on(self, op: int, factor: Factor) -> bool:
        """Whether an op reads or makes a tensor that has the factor."""
        row = self.graph.ops[op]
        return not self.values_with(factor).isdisjoint((*row.inputs, *row.outputs))

    def resolve_all(self) -> None:
        """Replace all axes by what is known at the end."""
        self.axes = {value: tuple(map(resolve, axes)) for value, axes in self.axes.items()}
        self._values = None


def walk_over(graph: ModelGraph, ops: Iterable[Op], table: Mapping[Any, rules.Rule] = RULES) -> AxisWalk:
    """Give axes to every value that some ops read or make."""
    walk = AxisWalk(graph, table=table)
    for op in ops:
        walk.run(op)
    walk.resolve_all()
    return walk


def where(graph: ModelGraph, op: Op) -> str:
    """An op for people: its name and its module."""
    return f"{name_of(op)} in {graph.calls[op.call].path or 'the model itself'}"


def _fit(made: Sequence[Sequence[Axis | None]], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether axes are those of tensors of these shapes."""
    return len(made) >= len(shapes) and all(
        len(axes) == len(shape)
        and all(axis is None or size_of(axis) == size for axis, size in zip(axes, shape, strict=True))
        for axes, shape in zip(made, shapes, strict=False)
    )


def _with_numbers(seen: Seen, node: torch.fx.Node) -> Seen:
    content = node.meta.get("content") if node.op == "placeholder" and node.meta.get("kind") == "constant" else None
    if content is None or content.dim() != 1 or content.dtype != torch.int64 or len(content) > MOST_NUMBERS:
        return seen
    return replace(seen, numbers=tuple(content.tolist()))
