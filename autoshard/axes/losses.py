"""Logits that stay in parts until their loss is known: each rank has some classes, or some tokens.

    hidden ─▶ head, cut over classes ─▶ logits, in parts ─▶ float, view, … ─▶ cross_entropy ─▶ loss, the same everywhere
                                               └──────────── put together where the model gives them out

Without it every rank has all logits in float32, their softmax and the gradients of both, which no other rank needs:
16 bytes per logit where 2 are enough for what the model gives. Between the head and the loss every op reads the logits
alone, and works on each of them by itself or moves them: so the code there may be given a `DTensor`.

    last block ─▶ norm ─▶ head ─▶ logits, in parts ─▶ float, view, … ─▶ cross_entropy ─▶ loss, the same everywhere
        part       part    part         └──────────── put together where the model gives them out

Where ranks divide tokens (context parallelism), norm and head are divided as well: without it every rank computes them,
and the loss, of all tokens. Between the last block and the head every op works on each token by itself, and nobody else
reads what it gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from autoshard.axes.axis import Factor, resolve
from autoshard.axes.communication import CommunicationPoints, Lookup, Unplaceable
from autoshard.axes.groups import AxisGroup, AxisGroups, group_of
from autoshard.axes.regions import CLASS_LOSS, OUTSIDE, Region
from autoshard.axes.walk import AxisWalk, walk_over
from autoshard.capture.graph import Call, ModelGraph, Op, name_of
from autoshard.common.module_paths import above, is_below, join, relative
from autoshard.plan.sharding import Action, Cut, Part, Results

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


# ---- of divided tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The losses (ops) of logits whose tokens may stay divided.

    Attributes:
        call, output, dim: of the head, which of its outputs the logits are, and their dimension of tokens.
        summed: parameters between the last block and the logits, by name.
    """

    call: Call
    output: int
    dim: int
    losses: tuple[int, ...]
    summed: tuple[str, ...]


def token_loss(lookup: Lookup, value: int, dim: int) -> TokenLoss | None:
    """The losses that alone are made of a value divided along `dim`; None where anything else reads all of its tokens.

    `lookup`: of a graph that was captured with `composite=True`.
    """
    graph = lookup.graph
    reached, closure = {value}, []
    for op in graph.ops:
        if not op.backward and not reached.isdisjoint(op.inputs):
            closure.append(op)
            reached.update(op.outputs)
    for logits in sorted(reached - {value}):
        between, losses = read_until_losses(lookup, logits)
        if losses:
            break
    else:
        return None
    calls = [call for call in graph.calls if logits in call.outputs and call.end <= losses[0].index]
    made_at = graph.values[logits].op
    before = [op for op in closure if op.index <= made_at]
    walk = walk_over(graph, [*before, *between])
    axis = resolve(walk.of(value)[dim])
    factor = axis[0] if len(axis) == 1 else None
    if not calls or not isinstance(factor, Factor) or factor.unshardable:
        return None
    leaving = {*graph.outputs, *graph.alive_after, *(measured for measured, _ in graph.measured)}
    divided = {value, *(one for op in before for one in op.outputs)} - {logits}
    summed = _parameters(lookup, walk, before, divided, factor)
    if summed is None or divided & leaving:
        return None
    if not all(is_plain(graph, op) and _has_tokens(walk, op, factor) for op in losses):
        return None
    call = max(calls, key=lambda one: one.begin)  # the innermost
    return TokenLoss(
        call=call, output=call.outputs.index(logits), dim=walk.cut_dims(logits, factor)[0],
        losses=tuple(op.index for op in losses), summed=summed,
    )  # fmt: skip


def _parameters(
    lookup: Lookup, walk: AxisWalk, ops: Sequence[Op], divided: set[int], factor: Factor
) -> tuple[str, ...] | None:
    """Names of the parameters that divided tokens meet in some ops; None where tokens meet each other, or other code.

    `divided`: what the ops read and make, but for the logits.
    """
    inside = {op.index for op in ops}
    if walk.mixing(factor) & inside or any(op.mutates for op in ops):
        return None
    found: list[str] = []
    for op in ops:
        for made in op.outputs:
            dims = walk.cut_dims(made, factor)
            if len(dims) != 1 or resolve(walk.of(made)[dims[0]]) != (factor,):
                return None
        for one in set(op.inputs) - divided:
            if walk.cut_dims(one, factor) or (one in lookup.differentiable and one not in lookup.tensors):
                return None
            if one in lookup.differentiable:
                if not inside.issuperset(lookup.readers[one]):
                    return None
                found.append(lookup.tensors[one][0])
    read = {index for one in divided for index in lookup.readers.get(one, ()) if not lookup.graph.ops[index].backward}
    return tuple(dict.fromkeys(found)) if read <= inside else None


def _has_tokens(walk: AxisWalk, op: Op, factor: Factor) -> bool:
    """Whether a loss is of logits in which each place of one dimension, beside that of the classes, is a token."""
    dims = walk.cut_dims(op.inputs[0], factor)
    return len(dims) == 1 and dims[0] != min(1, len(walk.of(op.inputs[0])) - 1)


def divide_losses(lookup: Lookup, cuts: Sequence[Cut]) -> tuple[tuple[Cut, ...], tuple[Results, ...]]:
    """Return the cuts of divided tokens with norm, head and loss divided as well, where that can be.

    With them, which modules give each rank a part then.
    """
    made: list[Cut] = []
    results: list[Results] = []
    for cut in cuts:
        joins = [action for action in cut.actions if action.kind == "join"]
        end = _tokens_divided(lookup, cut, joins[0]) if joins == list(cut.actions) and joins else ()
        if end:
            module, part = end[-1].blocks[0], Part(path="", dim=joins[0].dim, axis=joins[0].axis, cut=len(made))
            inner = tuple(path for path in above(cut.blocks[0]) if path != module and is_below(path, module))
            results += [Results(modules=inner, tensors=(), parts=(part,))] if inner else []
        made += end or [cut]
    return tuple(made), tuple(results)


def _tokens_divided(lookup: Lookup, cut: Cut, join: Action) -> tuple[Cut, ...]:
    """The cuts of the head and of the losses, instead of the one that puts tokens together before; () for none."""
    (call,) = (one for one in lookup.graph.calls if one.path == cut.blocks[0])
    loss = token_loss(lookup, call.outputs[call.output_paths.index(join.argument)], join.dim)
    action = loss_action(lookup, loss.losses, join.axis) if loss is not None else None
    if loss is None or action is None:
        return ()
    if not all(is_below(path, action.module) for path in (loss.call.path, cut.blocks[0], *loss.summed)):
        return ()
    logits = Action(
        kind="spread_tokens", module="", argument=loss.call.output_paths[loss.output], dim=loss.dim,
        dims=len(lookup.graph.values[loss.call.outputs[loss.output]].shape), axis=join.axis,
    )  # fmt: skip
    names = tuple(relative(name, action.module) for name in loss.summed)
    return (
        replace(cut, blocks=(loss.call.path,), actions=(logits,), title="logits of divided tokens"),
        replace(
            cut, blocks=(action.module,), actions=(replace(action, module=""),), summed=names,
            title="losses of divided tokens",
        ),
    )  # fmt: skip
