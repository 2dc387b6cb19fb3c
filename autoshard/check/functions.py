"""Whether the backward of a user's autograd function keeps samples apart, as far as a recorded run shows.

backward(grad)   -scale * grad       each sample's gradient from its own, and twice of twice as much
                 grad.t() @ x        of a weight: the sum over samples
                 grad.clamp(-1, 1)   refused: parts of a batch have larger gradients, of which the mean is taken
"""

from collections.abc import Collection

from autoshard.axes.axis import times
from autoshard.axes.batch_merges import LINEAR, Merged
from autoshard.axes.batch_rules import FILLED
from autoshard.axes.batch_walk import BatchWalk
from autoshard.axes.given import arguments_of
from autoshard.capture.call_log import LoggedCall, Ref
from autoshard.capture.graph import ModelGraph, Op, name_of
from autoshard.nested import leaves_in

PRODUCTS = frozenset({"mul", "mul_", "matmul", "mm", "bmm", "mv", "einsum", "linear"})
"""Linear in each tensor, if it is in one."""


def keeps_apart(walk: BatchWalk, call: LoggedCall) -> bool:
    """Whether each sample's gradients are made of its own alone, and all are linear in what backward is given."""
    if call.gradients is None:
        return False
    given, made = call.gradients
    outputs = [leaf.value for _, leaf in leaves_in(call.output) if isinstance(leaf, Ref)]
    if call.kwargs or any(walk.state(value) != "apart" for value in outputs):
        return False
    linear = _linear(walk.graph, call.end, call.end_backward, given)
    return linear is not None and all(
        gradient is None or (gradient in linear and isinstance(arg, Ref) and _belongs(walk, arg.value, gradient))
        for arg, gradient in zip(call.args, made, strict=False)
    )


def _belongs(walk: BatchWalk, value: int, gradient: int) -> bool:
    """Whether a gradient has samples where its tensor has them, or is their sum where that has none."""
    states = walk.state(value), walk.state(gradient)
    if states == ("apart", "apart"):
        mine, its = ([times(axis, walk.batch) for axis in walk.axes(one)] for one in (value, gradient))
        return mine == its
    return states == ("shared", "mixed") and walk.merges.known.get(gradient) == Merged(how="sum")


def _linear(graph: ModelGraph, begin: int, end: int, given: Collection[int]) -> set[int] | None:
    """Values that are linear in the given ones; None if an op makes anything else of them."""
    linear = set(given)
    for op in graph.ops[begin:end]:
        count = sum(value in linear for value in op.inputs)
        if count and name_of(op) not in FILLED:
            whole = any(not graph.values[value].dtype.is_floating_point for value in op.outputs)
            if whole or not _is_linear(op, count, op.inputs[0] in linear):
                return None
            linear.update(op.outputs)
        elif not linear.isdisjoint(op.mutates):
            return None
    return linear


def _is_linear(op: Op, count: int, first: bool) -> bool:
    """Whether what an op makes is linear in `count` of its tensors; `first`: whether the first is one of them."""
    name, arguments = name_of(op), arguments_of(op)
    if name in ("add", "add_", "sub", "sub_"):
        return count == len(op.inputs) == 2
    if name in ("div", "div_"):
        return first and count == 1 and not arguments.get("rounding_mode")
    if name in ("masked_fill", "masked_fill_"):
        return first and count == 1 and arguments["value"] == 0
    if name == "where" and len(op.inputs) < 3:
        return not first and count == 1 and 0 in (arguments.get("self"), arguments.get("other"))
    if name in PRODUCTS:
        return count == 1 and (name != "linear" or len(op.inputs) == 2)
    return name in LINEAR and count == len(op.inputs)
