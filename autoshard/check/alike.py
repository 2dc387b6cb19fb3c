"""Runs of a model with other numbers of samples beside each other: do they run the same ops, with numbers in line?

two runs      as many samples, or more        other ops; sizes that are no multiples of the samples and a rest
three runs    just so many, few, and many     an op, or a number of one, that only this many samples have
"""

from typing import Any

import torch

from autoshard.axes.given import arguments_of, literals, plain
from autoshard.capture.graph import ModelGraph, Op, name_of, written_storages


def first_difference(graph: ModelGraph, other: ModelGraph) -> tuple[int, str] | None:
    """(op, what is there for a larger batch) where two runs part; None if they run the same ops."""
    for mine, its in zip(graph.ops, other.ops, strict=False):
        if mine.target != its.target or mine.inputs != its.inputs:
            return mine.index, name_of(its)
    if len(graph.ops) != len(other.ops):
        return min(len(graph.ops), len(other.ops)) - 1, "more of them" if len(graph.ops) < len(other.ops) else "the end"
    return None


def is_same(graph: ModelGraph, other: ModelGraph) -> bool:
    """Whether two runs of as many samples do the same, with the same numbers."""
    if first_difference(graph, other) is not None:
        return False
    mine, its = literals(graph), literals(other)
    numbers = all(repr(plain(one)) == repr(plain(two)) for one, two in zip(graph.ops, other.ops, strict=True))
    return numbers and mine.keys() == its.keys() and all(torch.equal(mine[value], its[value]) for value in mine)


def first_uneven(graph: ModelGraph, other: ModelGraph, rows: tuple[int, int]) -> int | None:
    """The first op whose sizes are no multiples of the rows and a rest, so that code looks how many there are.

    `rows`: of the two runs of the same ops. 3 and 1,024 are sizes of them, 2 and 1,023 are; 4 and 16 are not.
    """
    for mine, its in zip(graph.ops, other.ops, strict=True):
        if not _are_even(plain(mine), plain(its), rows):
            return mine.index
    return None


def _are_even(first: Any, second: Any, rows: tuple[int, int]) -> bool:
    """Whether two arguments are the same multiples. Others than integers are seen to differ by who follows the runs."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(
            _are_even(mine, its, rows) for mine, its in zip(first, second, strict=True)
        )
    if any(not isinstance(item, int) or isinstance(item, bool) for item in (first, second)):
        return True
    each, left = divmod(second - first, rows[1] - rows[0])
    rest = first - each * rows[0]
    return not left and (each <= 0 or rest >= -each)  # a square of the rows has a rest far below 0


def first_out_of_line(run: ModelGraph, few: ModelGraph, many: ModelGraph, rows: tuple[int, int, int]) -> int | None:
    """The first op of a run that is another one than in two others, or is given numbers out of line there.

    `few`, `many`: two runs of the same ops; `rows`: of all three. A number that is `max(rows, 3)`, say, is out of line.
    """
    repeated = own = _repeats(few, rows[1]) & _repeats(many, rows[2])
    if [op.target for op in run.ops] != [op.target for op in few.ops]:
        own = _repeats(run, rows[0])
    steps = [_steps(run, own), _steps(few, repeated), _steps(many, repeated)]
    for (a, reads), (b, its), (c, _) in zip(*steps, strict=False):
        given = [list(arguments_of(op).values()) for op in (a, b, c)]
        if a.target != b.target or reads != its or not _on_line(given[0], given[1], given[2], rows):
            return b.index
    if len(steps[0]) != len(steps[1]):
        return len(few.ops) - 1
    contents = [list(literals(one).items()) for one in (run, few, many)]
    for (_, first), (value, second), (_, third) in zip(*contents, strict=False):
        if second.equal(third) and not second.equal(first):
            return next((op.index for op in few.ops if value in op.inputs), None)
    return None


def _repeats(graph: ModelGraph, rows: int) -> set[int]:
    """The ops that repeat what is the same for all rows, once for each: one row alone does without."""
    found = set()
    for op in graph.ops:
        if name_of(op) == "expand":
            before, after = (graph.values[value].shape for value in (op.inputs[0], op.outputs[0]))
            longer = [sizes for sizes in zip(before, after, strict=False) if sizes[0] != sizes[1]]
            if len(before) == len(after) and all(sizes == (1, rows) for sizes in longer):
                found.add(op.index)
    return found


def _steps(graph: ModelGraph, repeats: set[int]) -> list[tuple[Op, list[Any]]]:
    """The ops of a run, each with names for what it reads; without copies and repeats that one row does not need."""
    names: dict[int, Any] = {value: ("input", at) for at, value in enumerate(graph.inputs)}
    names |= {tensor.value: tensor.name for tensor in graph.tensors}
    written = written_storages(graph)
    steps: list[tuple[Op, list[Any]]] = []
    for op in graph.ops:
        reads = [names.setdefault(value, ("outside", len(steps), at)) for at, value in enumerate(op.inputs)]
        needless = op.index in repeats or name_of(op) == "contiguous"
        if needless and graph.values[op.outputs[0]].storage not in written:
            names[op.outputs[0]] = reads[0]
            continue
        for at, value in enumerate(op.outputs):
            names.setdefault(value, (len(steps), at))
        steps.append((op, reads))
    return steps


def _on_line(first: Any, second: Any, third: Any, rows: tuple[int, int, int]) -> bool:
    """Whether an argument of three runs, with so many rows, grows evenly with them, or is the same."""
    if all(isinstance(item, (list, tuple)) for item in (first, second, third)):
        alike = len(first) == len(second) == len(third)
        return alike and all(map(_on_line, first, second, third, [rows] * len(first)))
    if isinstance(second, torch.fx.Node):
        return isinstance(first, torch.fx.Node)
    if all(type(item) is int for item in (first, second, third)):
        return (second - first) * (rows[2] - rows[1]) == (third - second) * (rows[1] - rows[0])
    # others that differ: who follows the runs has seen them
    return repr(first) == repr(second) or repr(second) != repr(third)
