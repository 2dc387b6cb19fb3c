"""What Python asks about all elements of a tensor, and errors that a model raises for an answer: sound by argument.

    if (lengths > limit).any(): raise …          no element of any row is above the limit
    assert x.min() >= -5                          none is below
    assert x.max().item() <= limit                none is above a number that is the same for any number of rows

Argument: the question is whether all elements of a tensor are true, or none is, and every element belongs to one row at
most. The whole batch passes if and only if every row does, so if and only if every part does: where the model would
have raised an error, the part with that row raises it. The answer decides nothing else (see `capture.guards`), and
nobody catches the error: that is tried. Any other number that is compared (a mean, a sum) may differ from part to part.
"""

import torch

from autoshard.axes.given import origin
from autoshard.axes.reshaping import COPIES
from autoshard.capture.call_log import Ref, ValueGuard
from autoshard.capture.graph import ModelGraph, Op, name_of, sole_maker

_LEAST, _LARGEST = ("min", "amin"), ("max", "amax")
_ABOVE, _BELOW = ("ge", "gt"), ("le", "lt")


def read_values(reading: ValueGuard) -> list[int]:
    """The values that Python read."""
    return [item.value for item in reading.args if isinstance(item, Ref)]


def asked_of_all(graph: ModelGraph, value: int) -> tuple[int, bool] | None:
    """(tensor, True or False) if a value says whether all elements of a tensor are true, or false; else None."""
    op = sole_maker(graph, origin(graph, value, *COPIES))
    if op is None or op.node is None:
        return None
    name = name_of(op)
    if name in ("all", "_is_all_true", "any", "_is_any_true") and not graph.values[op.outputs[0]].shape:
        return op.inputs[0], "all" in name
    if name == "eq" and len(op.inputs) == 1:  # mask.sum() == mask.numel()
        source = sole_maker(graph, op.inputs[0])
        if source is not None and name_of(source) == "sum" and len(source.inputs) == 1:
            row = graph.values[source.inputs[0]]
            if row.dtype is torch.bool and op.node.args[1] == torch.Size(row.shape).numel():
                return source.inputs[0], True
    return None


def number_asked_for(graph: ModelGraph, value: int) -> tuple[int, int] | None:
    """(place in `graph.inputs`, number) if a tensor says where a number stands in an input, say padding in tokens."""
    op = sole_maker(graph, origin(graph, value, *COPIES))
    if op is None or op.node is None or name_of(op) not in ("eq", "ne") or len(op.inputs) != 1:
        return None
    number, source = op.node.args[1], origin(graph, op.inputs[0], *COPIES)
    if source not in graph.inputs:
        return None
    whole = not graph.values[source].dtype.is_floating_point and graph.values[source].dtype is not torch.bool
    known = isinstance(number, int) and not isinstance(number, bool) and whole
    return (graph.inputs.index(source), number) if known else None  # type: ignore[return-value]


def asked_of_each(graph: ModelGraph, value: int) -> tuple[bool, list[int]] | None:
    """(answer, tensors): the answer is given if and only if each single element of the tensors fulfils something."""
    value = origin(graph, value, *COPIES)
    op = sole_maker(graph, value)
    if op is None or op.node is None or op.mutates:
        return None
    name = name_of(op)
    if name in ("logical_not", "bitwise_not"):
        inner = asked_of_each(graph, op.inputs[0])
        return None if inner is None else (not inner[0], inner[1])
    if name in ("logical_and", "bitwise_and", "logical_or", "bitwise_or") and len(op.inputs) == 2:
        both = [asked_of_each(graph, one) for one in op.inputs]
        answer = "and" in name
        return (answer, [t for one in both if one for t in one[1]]) if _all_say(both, answer) else None
    if name in ("all", "_is_all_true", "any", "_is_any_true") and not graph.values[op.inputs[0]].shape:
        return asked_of_each(graph, op.inputs[0])
    if name in _ABOVE or name in _BELOW:
        return _extreme(graph, op, above=name in _ABOVE)
    asked = asked_of_all(graph, value)
    return None if asked is None else (asked[1], [asked[0]])


def number_of_each(graph: ModelGraph, value: int, *, largest: bool) -> int | None:
    """The tensor of which a value is the largest element, or the smallest; None if it is not."""
    op = sole_maker(graph, origin(graph, value, *COPIES))
    if op is None or len(op.inputs) != 1 or len(op.outputs) != 1 or graph.values[op.outputs[0]].shape:
        return None
    return op.inputs[0] if name_of(op) in (_LARGEST if largest else _LEAST) else None


def _all_say(both: list[tuple[bool, list[int]] | None], answer: bool) -> bool:
    return all(one is not None and one[0] is answer for one in both)


def _extreme(graph: ModelGraph, op: Op, *, above: bool) -> tuple[bool, list[int]] | None:
    """`x.min() >= 0` says that each element is, `x.max() > 1` that some element is."""
    source = sole_maker(graph, op.inputs[0])
    if source is None or source.node is None or op.node is None:
        return None
    name, numbers = name_of(source), op.node.args[1:]
    whole = len(source.inputs) == len(source.outputs) == 1 and not graph.values[source.outputs[0]].shape
    alone = len(op.inputs) == 1 and len(numbers) == 1 and isinstance(numbers[0], (int, float))
    if not whole or not alone or name not in (*_LEAST, *_LARGEST):
        return None
    return (name in _LEAST) is above, [source.inputs[0]]
