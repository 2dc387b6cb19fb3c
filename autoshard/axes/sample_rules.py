# mypy: ignore-errors
"""What each op makes of the samples of its arguments.

    constants            the same for all samples
    element by element   the samples of the arguments together
    views, parts, joins  the op itself, done to the numbers of the samples
    everything else      the rule of the axis algebra: dimensions that it hands on stay, all others are taken together
    without a rule       all elements of all arguments are taken together

An op that nobody thought of therefore mixes samples. What is sound in a way that none of this sees is in `sound`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from autoshard.axes import rules, sample_indices
from autoshard.axes import samples as domain
from autoshard.axes.axis import Axis, leaves, resolve
from autoshard.axes.parts_of_batch import part_dim
from autoshard.axes.reshaping import JOINS, MOVES, PARTS, RESHAPES, WHOLE
from autoshard.axes.rules import RULES, Axes, Context, Rule, Seen, aten, is_pointwise, names
from autoshard.axes.samples import PLACE, SHARED, Samples, combine, fixed, moved, reshaped, samples, uniform
from autoshard.axes.walk import AxisWalk
from autoshard.capture.graph import ModelGraph, Op, name_of

MOST_ELEMENTS = 1 << 24
"""Elements of numbers of samples that are worked on: what has more is taken together."""

FILLED = frozenset({
    "zeros", "ones", "full", "empty", "scalar_tensor", "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like",
    "ones_like", "full_like", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted", "zero_",
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal_", "uniform_", "bernoulli_",
    "exponential_", "normal",
})  # fmt: skip
"""Ops whose elements are one number, or drawn alike for all places."""
SAME = names(rules.same, rules.dropout, rules.noise, rules.rrelu) | {"bernoulli", "requires_grad_"}
SIZED = FILLED | RESHAPES | {"expand", "broadcast_to", "repeat", "tile", "repeat_interleave", "pad", "constant_pad_nd"}
"""Ops to which lists of numbers say how large a tensor is."""


def _attention(walk: Context, *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Any:
    """What is dropped is drawn for each element."""
    args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
    return RULES[aten.scaled_dot_product_attention](walk, *args, **kwargs)


def _recurrent(walk: Context, x: Seen, state: Any, parameters: Any, biases: bool, layers: int, dropout: float,
               train: bool, both: bool, batch_first: bool) -> list[Sequence[Axis | None]] | None:  # fmt: skip
    """(batch, time, …) or (time, batch, …), and states (layers, batch, …); packed sequences are not known."""
    if not isinstance(batch_first, bool) or len(x.shape) != 3:
        return None
    batch, time = (0, 1) if batch_first else (1, 0)
    for given in state if isinstance(state, (list, tuple)) else [state]:
        walk.unify(x.axes[batch], given.axes[1])
    walk.block([x.axes[time], x.axes[2]], "one step follows another")
    rows: list[Axis | None] = [None, None, None]
    rows[batch] = x.axes[batch]
    return [rows, *[(None, x.axes[batch], None)] * 2]


def _loss(walk: Context, x: Seen, target: Seen, weight: Any = None, reduction: int = 1, *args: Any,
          **kwargs: Any) -> list[Axes] | None:  # fmt: skip
    """One loss per target; classes are dimension 1, or the only one."""
    if reduction or x.shape == target.shape or not target.shape:
        return None
    walk.block([x.axes[1]], "normalised along it")
    for d, axis in enumerate(target.axes):
        walk.unify(axis, x.axes[d if d == 0 else d + 1])
    return [target.axes]


TABLE: Mapping[Any, Rule] = {
    **RULES,
    aten.scaled_dot_product_attention: _attention,
    aten.cross_entropy_loss: _loss,
    aten.nll_loss: _loss,
    aten.nll_loss_nd: _loss,
    aten.nll_loss2d: _loss,
    **{getattr(aten, name): _recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}


class OpRules:
    """The samples of the results of ops of one graph.

    `counts`: by value, which of its dimensions are longer for a larger batch.
    """

    def __init__(self, graph: ModelGraph, counts: Mapping[int, Sequence[bool]]) -> None:
        self.graph = graph
        self.counts = counts
        self.contents = sample_indices.Contents(graph, counts)
        self._walk = AxisWalk(graph, table=TABLE)
        self._known: dict[Any, list[Samples]] = {}
        self._kept: list[Samples] = []
        self._equal: dict[Any, Samples] = {}

    def results(self, op: Op, given: Sequence[Samples], numbers: str) -> list[Samples]:
        """The samples of every tensor that an op makes of tensors with these samples.

        `numbers`: its other arguments. The same op on the same is looked up, as equal layers have it; of what is picked
        by index, the indices may be others.
        """
        if name_of(op) in sample_indices.NAMES or not given:
            return self._results(op, given)
        values = self.graph.values
        key = (
            op.target, numbers, tuple(map(id, given)), tuple(map(op.inputs.index, op.inputs)),
            tuple((values[value].dtype, self.counts.get(value)) for value in op.inputs),
            tuple(values[value].shape for value in op.outputs),
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = [self._one_of_equal(item) for item in self._results(op, given)]
            self._kept += given  # so that ids stay theirs
        return self._known[key]

    def _one_of_equal(self, item: Samples) -> Samples:
        """The first of all that are equal to it."""
        key = item.shape, item.varies, tuple(item.owner.shape), item.owner.numpy().tobytes()
        return self._equal.setdefault(key, item)

    def _results(self, op: Op, given: Sequence[Samples]) -> list[Samples]:
        shapes = [self.graph.values[value].shape for value in op.outputs]
        name = name_of(op)
        made: list[Samples] | None = None
        if name in FILLED and not (name in ("normal",) and given):
            return [uniform(shape) for shape in shapes]
        if not given:
            return [fixed(shape) for shape in shapes]
        assert op.node is not None
        if name in ("copy_", "fill_"):
            made = [combine(given[1:], shapes[0])]
        elif name == "expand_as":
            made = [combine(given[:1], shapes[0])]
        elif name in SAME:
            made = [given[0] if shape == given[0].shape else samples(shape, domain.whole(given[0])) for shape in shapes]
        elif name == "view" and shapes[0] == given[0].shape:  # bits as another type
            made = [given[0]]
        elif name in RESHAPES and not any(isinstance(item, torch.dtype) for item in op.node.args[1:]):
            made = [reshaped(given[0], shapes[0], self.counts.get(op.inputs[0], ()))]
        elif name in MOVES:
            made = self._moved(op, given[0], shapes)
        elif name in JOINS:
            made = self._joined(name, op, given, shapes[0])
        elif name in sample_indices.NAMES:
            made = sample_indices.picked(self.contents, name, op, given, shapes[0])
        elif is_pointwise(op.target) and shapes:
            made = [combine(given, shape) for shape in shapes]
        if made is None:
            made = self._by_rule(op, given, shapes)
        return made

    # ---- views and joins

    def _moved(self, op: Op, item: Samples, shapes: Sequence[tuple[int, ...]]) -> list[Samples] | None:
        """The op itself, done to the numbers; strides of 0 tell along what nothing varies."""
        assert op.node is not None
        if any(isinstance(argument, torch.fx.Node) for argument in op.node.args[1:]):
            return None
        strides = [int(flag) for flag in item.varies]
        numbers = op.target(item.full(), *op.node.args[1:], **op.node.kwargs)
        flags = op.target(torch.empty_strided(item.shape, strides, device="meta"), *op.node.args[1:], **op.node.kwargs)
        listed = [numbers] if isinstance(numbers, torch.Tensor) else list(numbers)
        marks = [flags] if isinstance(flags, torch.Tensor) else list(flags)
        name = name_of(op)
        part = part_dim(op, len(item.shape)) if name not in ("select", "unbind") else None
        whole = name in WHOLE or name in PARTS or name == "unbind"
        return [
            samples(
                tuple(made.shape),
                made,
                [
                    stride if whole and stride > 1 and dim != part else stride != 0
                    for dim, stride in enumerate(mark.stride())
                ],
            )
            for made, mark in zip(listed, marks, strict=True)
        ]

    def _joined(self, name: str, op: Op, given: Sequence[Samples], shape: tuple[int, ...]) -> list[Samples] | None:
        assert op.node is not None
        args, kwargs = op.node.args, op.node.kwargs
        if name in ("cat", "concat", "concatenate", "stack"):
            dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(shape)
            return _concatenated(given, dim, shape, stacked=name == "stack")
        x = given[0]
        if name in ("pad", "constant_pad_nd"):
            mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
            if len(given) > 1 or (isinstance(mode, str) and mode != "constant"):
                return None
            return [_padded(x, args[1], shape)]
        if name in ("repeat", "tile"):
            times = (*(1,) * (len(x.shape) - len(args[1])), *args[1])
            left = len(times) - len(x.shape)
            owner = x.owner.reshape((1,) * left + tuple(x.owner.shape))
            if 0 in shape or owner.numel() * max(1, *times) > MOST_ELEMENTS:
                return None
            counts = self.counts.get(op.inputs[0], ())
            flags = [_repeated(x, dim, n, counts) for dim, n in enumerate(times[left:])]
            return [samples(shape, owner.repeat([n if s > 1 else 1 for n, s in zip(times, owner.shape, strict=True)]),
                            [*(False,) * left, *flags])]  # fmt: skip
        if name == "repeat_interleave":
            times, dim = args[1], args[2] if len(args) > 2 else kwargs.get("dim")
            if not isinstance(times, int) or dim is None:
                return None
            dim %= len(shape)
            owner = x.owner.repeat_interleave(times, dim) if x.owner.shape[dim] > 1 else x.owner
            return [samples(shape, owner, [bool(flag) if d == dim else flag for d, flag in enumerate(x.varies)])]
        dims = args[-1] if name == "flip" or len(args) > 2 else kwargs.get("dims")
        if dims is None or dims == []:
            return None
        return [samples(shape, op.target(x.full(), *args[1:], **kwargs), [bool(flag) for flag in x.varies])]

    # ---- the rest

    def _by_rule(self, op: Op, given: Sequence[Samples], shapes: Sequence[tuple[int, ...]]) -> list[Samples]:
        """By the axis algebra, on this op alone."""
        walk = self._walk
        walk.axes.clear()
        walk.blocks.clear()
        walk.contractions.clear()
        walk.run(op)
        taken = {id(leaf) for _, axis in walk.blocks for leaf in leaves(axis)}
        taken |= {id(leaf) for item in walk.contractions for leaf in leaves(item.axis)}
        inputs = [[_key(axis, taken) for axis in walk.of(value)] for value in op.inputs]
        axes = [walk.of(value) for value in op.outputs]
        return [
            self._aligned(op, given, inputs, [_key(axis, taken) for axis in made], shape)
            for made, shape in zip(axes, shapes, strict=True)
        ]

    def _aligned(self, op: Op, given: Sequence[Samples], inputs: Sequence[Sequence[Any]], made: Sequence[Any],
                 shape: tuple[int, ...]) -> Samples:  # fmt: skip
        """The samples of one result, whose dimensions have these keys; None: not a dimension of an argument."""
        parts: list[Samples] = []
        counted = False
        handed: set[int] = set()
        for value, item, keys in zip(op.inputs, given, inputs, strict=True):
            for places in _places(keys, made):
                handed.update(places.values())
                parts.append(moved(item, places, shape))
                gone = [dim for dim, size in enumerate(item.shape) if size != 1 and dim not in places]
                counts = self.counts.get(value, ())
                counted |= any(dim < len(counts) and counts[dim] for dim in gone) and bool((item.owner == SHARED).any())
        together = combine(parts, shape)
        if counted:
            together = combine([together, domain.all_of(shape, PLACE)], shape)
        varies = [flag or dim not in handed for dim, flag in enumerate(together.varies)]
        return samples(shape, together.owner, varies)


def _key(axis: Axis, taken: set[int]) -> tuple[int, ...] | None:
    """What tells an axis from others; None if the op works along it, or of size 1."""
    factors = resolve(axis)
    known = bool(factors) and all(id(leaf) not in taken and not leaf.lost for leaf in leaves(factors))
    return tuple(map(id, factors)) if known else None


def _places(keys: Sequence[Any], made: Sequence[Any]) -> Iterator[dict[int, int]]:
    """Which dimension of the result each dimension of an argument becomes, in as many ways as there are."""
    ways: list[dict[int, int]] = [{}]
    for dim, key in enumerate(keys):
        if key is None or list(keys).count(key) > 1:
            continue
        to = [place for place, other in enumerate(made) if other == key]
        if to:
            ways = [{**way, dim: place} for way in ways for place in to]
    yield from ways


def _concatenated(given: Sequence[Samples], dim: int, shape: tuple[int, ...], *, stacked: bool) -> list[Samples] | None:
    """One after the other, or side by side along a new dimension."""
    if stacked:
        given = [
            Samples(
                shape=(*item.shape[:dim], 1, *item.shape[dim:]), owner=item.owner.unsqueeze(dim),
                varies=(*item.varies[:dim], False, *item.varies[dim:]),
            ) for item in given
        ]  # fmt: skip
    else:
        given = [item for item in given if item.shape != (0,)]
    sizes = [max(item.owner.shape[d] for item in given) for d in range(len(shape))]
    if sum(item.shape[dim] for item in given) * max(1, torch.Size(sizes).numel() // sizes[dim]) > MOST_ELEMENTS:
        return None
    parts = [item.owner.expand([*sizes[:dim], item.shape[dim], *sizes[dim + 1 :]]) for item in given]
    varies = [any(item.varies[d] for item in given) for d in range(len(shape))]
    varies[dim] = len(given) > 1 or varies[dim]
    return [samples(shape, torch.cat(parts, dim), varies)]


def _repeated(x: Samples, dim: int, times: int, counts: Sequence[bool]) -> domain.Varies:
    """How elements differ along a dimension that is repeated so many times."""
    flag = x.varies[dim]
    longer = dim < len(counts) and counts[dim]
    return x.shape[dim] if flag is True and times > 1 and not longer else flag


def _padded(x: Samples, amounts: Sequence[int], shape: tuple[int, ...]) -> Samples:
    owner, varies, wanted = x.owner, list(x.varies), list(amounts)
    for index in range(len(amounts) // 2):
        dim = len(shape) - 1 - index
        before, after = amounts[2 * index], amounts[2 * index + 1]
        if before == after == 0:
            continue
        if max(before, after) <= 0 and owner.shape[dim] == 1:  # only cut off
            wanted[2 * index] = wanted[2 * index + 1] = 0
            continue
        owner = owner.expand([x.shape[d] if d == dim else size for d, size in enumerate(owner.shape)])
        varies[dim] = bool(varies[dim]) or bool((x.owner == SHARED).any())
    return samples(shape, torch.nn.functional.pad(owner, wanted, value=SHARED), varies)
