"""Logits that stay in parts until their loss is known: each rank has some classes, and cross entropy needs no more.

    hidden ─▶ head, cut over classes ─▶ logits, in parts ─▶ float, view, … ─▶ cross_entropy ─▶ loss, the same everywhere
                                               └──────────── put together where the model gives them out

Without it every rank has all logits in float32, their softmax and the gradients of both, which no other rank needs:
16 bytes per logit where 2 are enough for what the model gives. Between the head and the loss every op reads the logits
alone, and works on each of them by itself or moves them: so the code there may be given a `DTensor`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from autoshard.axes.axis import Factor
from autoshard.axes.communication import CommunicationPoints, Lookup, Unplaceable
from autoshard.axes.groups import AxisGroup, AxisGroups, group_of
from autoshard.axes.regions import CLASS_LOSS, OUTSIDE, Region
from autoshard.axes.walk import walk_over
from autoshard.capture.graph import Call, ModelGraph, Op, name_of
from autoshard.common.module_paths import above, join
from autoshard.plan.sharding import Action, Cut

FUNCTION = "cross_entropy"


def spread_logits(graph: ModelGraph, found: AxisGroups, cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """Return the cuts with logits left in parts between heads and losses, or as they are where nothing allows it.

    `graph`: captured with `composite=True`; `found`: its axis groups; `cuts`: some of them, over the same ranks.
    """
    lookup = Lookup(graph)
    made: list[Cut] = []
    for cut in cuts:
        group = group_of(found, cut)
        found_loss = cut_loss(lookup, group) if group is not None and cut.size % cut.degree == 0 else None
        made += [cut] if found_loss is None else _spread(lookup, cut, *found_loss)
    return tuple(made)


def cut_loss(lookup: Lookup, group: AxisGroup) -> tuple[Call, tuple[int, ...]] | None:
    """The call of a head whose logits a group cuts along their classes and puts together, and the losses (ops).

    None where anything but losses reads the logits.
    """
    graph = lookup.graph
    gathers = [action for action in group.actions if action.kind == "gather"]
    if len(gathers) != 1 or len(group.blocks) != 1 or gathers[0].function or gathers[0].axis != f"*{group.size}":
        return None
    path, dim = join(group.blocks[0], gathers[0].module), gathers[0].dim
    calls = [call for call in graph.calls if call.path == path]
    if len(calls) != 1 or gathers[0].argument not in calls[0].output_paths:
        return None
    logits = calls[0].outputs[calls[0].output_paths.index(gathers[0].argument)]
    between, losses = read_until_losses(lookup, logits)
    if not losses:
        return None
    walk = walk_over(graph, between)
    axis = walk.of(logits)[dim]
    factor = axis[0] if len(axis) == 1 else None
    if not isinstance(factor, Factor) or factor.unshardable or any(factor in one.axis for one in walk.contractions):
        return None
    for op in losses:
        shape = graph.values[op.inputs[0]].shape
        if walk.of(op.inputs[0])[min(1, len(shape) - 1)] != (factor,) or not is_plain(graph, op):
            return None
    return calls[0], tuple(op.index for op in losses)


def read_until_losses(lookup: Lookup, logits: int) -> tuple[list[Op], list[Op]]:
    """The ops between logits and losses, and the losses; none where something else reads or keeps them as well."""
    graph = lookup.graph
    between: dict[int, Op] = {}
    losses: dict[int, Op] = {}
    ahead = [logits]
    while ahead:
        value = ahead.pop()
        for index in lookup.readers.get(value, ()):
            op = graph.ops[index]
            if op.backward or index in between or index in losses:
                continue
            if name_of(op) == CLASS_LOSS and op.inputs[0] == value:
                losses[index] = op
            elif len(op.inputs) == 1 and not op.mutates:
                between[index] = op
                ahead += op.outputs
            else:
                return [], []
    moving = {logits, *(value for op in between.values() for value in op.outputs)}
    if not moving.isdisjoint({*graph.alive_after} - {*graph.outputs}):
        return [], []
    return [between[index] for index in sorted(between)], list(losses.values())


def is_plain(graph: ModelGraph, op: Op) -> bool:
    """Whether a loss is of classes by number, all of which weigh the same."""
    return len(op.inputs) == 2 and graph.values[op.inputs[1]].dtype == torch.int64


def _spread(lookup: Lookup, cut: Cut, head: Call, losses: Sequence[int]) -> tuple[Cut, ...]:
    """The cut with logits left in parts, and the cut of the losses, in the module that calls the head and all of them.

    The cut alone where there is no such module.
    """
    action = loss_action(lookup, losses, f"*{cut.size}")
    if action is None or action.module not in above(head.path):
        return (cut,)
    spread = [replace(one, kind="spread") if one.kind == "gather" else one for one in cut.actions]
    of_losses = replace(
        cut, blocks=(action.module,), shards=(), actions=(replace(action, module=""),), scales=(), summed=(),
        training=True, title="losses of cut logits",
    )  # fmt: skip
    return replace(cut, actions=tuple(spread)), of_losses


def loss_action(lookup: Lookup, losses: Sequence[int], axis: str) -> Action | None:
    """The action around some losses, all of which one module calls; None where there is no such module."""
    walk = walk_over(lookup.graph, ())
    places = CommunicationPoints(lookup, Region(path=OUTSIDE, ops=(), paths=(OUTSIDE,)), walk, frozenset())
    try:
        found = [places.call_at("loss", op, axis) for op in losses]
    except Unplaceable:
        return None
    action, *others = {replace(one, occurrence=-1, calls=0, line="") for one in found}
    return None if others or action.function != FUNCTION else action
