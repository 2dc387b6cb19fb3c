"""Rules of ops that multiply and sum: matrix products, attention, convolutions."""

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import torch

from autoshard.axes.axis import Axis, reshape, size_of
from autoshard.axes.rules import Axes, Context, Seen, broadcast, rule, unshardable


@rule("linear")
def _linear(walk: Context, x: Seen, weight: Seen, bias: Seen | None = None) -> list[Axes]:
    walk.unify(x.axes[-1], weight.axes[-1])
    walk.contract(weight.axes[-1], addend=bias)
    if bias is not None and len(weight.shape) > 1:
        walk.unify(bias.axes[-1], weight.axes[0])
    return [(*x.axes[:-1], *weight.axes[:-1])]


@rule("bilinear")
def _bilinear(walk: Context, x: Seen, y: Seen, weight: Seen, bias: Seen | None = None) -> list[Axes]:
    """Of the weight (made, summed with x, summed with y)."""
    for term, axis in zip((x, y), weight.axes[1:], strict=True):
        walk.unify(term.axes[-1], axis)
        walk.contract(axis, addend=bias)
    if bias is not None:
        walk.unify(bias.axes[0], weight.axes[0])
    batch = broadcast(walk, [x.axes[:-1], y.axes[:-1]], [x.shape[:-1], y.shape[:-1]])
    return [(*batch, weight.axes[0])]


@rule("matmul", "mm", "bmm", "mv", "dot")
def _matmul(walk: Context, x: Seen, y: Seen, *args: Any, **kwargs: Any) -> list[Axes]:
    return [_product(walk, x, y, None)]


def _product(walk: Context, x: Seen, y: Seen, addend: Seen | None) -> Axes:
    summed = y.axes[-2] if len(y.shape) > 1 else y.axes[-1]
    walk.unify(x.axes[-1], summed)
    walk.contract(x.axes[-1], addend=addend)
    batch = broadcast(walk, [x.axes[:-2], y.axes[:-2]], [x.shape[:-2], y.shape[:-2]])
    rows = x.axes[-2:-1] if len(x.shape) > 1 else ()
    columns = y.axes[-1:] if len(y.shape) > 1 else ()
    return (*batch, *rows, *columns)


@rule("addmm", "addmm_", "baddbmm", "baddbmm_", "addmv")
def _addmm(walk: Context, added: Seen, x: Seen, y: Seen, *, beta: float = 1, alpha: float = 1) -> list[Axes]:
    """`beta` times what is added, plus `alpha` times the product; beta 0: it is ignored, whatever it holds."""
    made = _product(walk, x, y, added if beta else None)
    return [broadcast(walk, [made, added.axes], [tuple(map(size_of, made)), added.shape])]


@rule("einsum")
def _einsum(walk: Context, equation: str, operands: Sequence[Seen], **kwargs: Any) -> list[Axes]:
    """A letter that is summed meets every other one in an operand: `bti,btj->bti` sums j for each part of i, and a rank
    that has a part of both would lose what others have.
    """
    terms, result = _spelt_out(equation.replace(" ", ""), [len(seen.shape) for seen in operands])
    named: dict[str, Axis] = {}
    for term, seen in zip(terms, operands, strict=True):
        for letter, axis, size in zip(term, seen.axes, seen.shape, strict=True):
            if size != 1 and named.get(letter):
                walk.unify(named[letter], axis)
            elif size != 1 or letter not in named:
                named[letter] = axis
    for letter, axis in named.items():
        if letter not in result:
            met = {one for term in terms if letter in term for one in term}
            if all(one in met or size_of(other) == 1 for one, other in named.items()):
                walk.contract(axis)
            else:
                walk.block([axis], "is summed without some dimensions of other operands")
    return [tuple(named[letter] for letter in result)]


def _spelt_out(equation: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """The terms and the result of an einsum, with letters for the dimensions under dots: those pair from the right.

    A result that is not said has those under dots first, then all letters that occur once.
    """
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    hidden = [ndim - len(term.replace("...", "")) for term, ndim in zip(terms, ndims, strict=True)]
    free = "".join(letter for letter in ascii_letters if letter not in equation)[: max(hidden)]
    if not arrow:
        result = "..." + "".join(sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1))
    terms = [term.replace("...", free[len(free) - many :]) for term, many in zip(terms, hidden, strict=True)]
    return terms, result.replace("...", free)


@rule("_grouped_mm")
def _grouped(walk: Context, x: Seen, y: Seen, offsets: Seen | None = None, *args: Any, **kw: Any) -> list[Axes] | None:
    """Products of groups. With offsets, they are consecutive rows of x, columns of y, or parts of what is summed."""
    if any(isinstance(item, Seen) for item in (*args, *kw.values())):
        return None
    walk.unify(x.axes[-1], y.axes[-2])
    walk.block(offsets.axes if offsets is not None else (), "a group begins where the one before it ends")
    if len(x.shape) == len(y.shape) == 2:
        walk.block([x.axes[-1]], "is in groups")
        return [(*unshardable(walk, walk.shapes[0][:1]), x.axes[0], y.axes[1])]
    walk.contract(x.axes[-1])
    if len(x.shape) == len(y.shape):
        walk.unify(x.axes[0], y.axes[0])
        return [(x.axes[0], x.axes[1], y.axes[2])]
    rows, columns = x.axes[-2], y.axes[-1]
    if len(x.shape) == 2:
        walk.block([rows, y.axes[0]], "is in groups")
    else:
        walk.block([columns, x.axes[0]], "is in groups")
    return [(rows, columns)]


@rule("scaled_dot_product_attention")
def _attention(
    walk: Context, q: Seen, k: Seen, v: Seen, mask: Seen | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: Any = None, enable_gqa: bool = False,
) -> list[Axes] | None:  # fmt: skip
    """Queries, batches and heads are apart from each other; with `enable_gqa` neighbouring heads of q share one of k,
    and one of v.

    One causal query sees one key, whatever the others do, but a share of the queries would start from key 0 again.
    What is dropped is drawn for the scores, whose leading dimensions are those of q.
    """
    if dropout_p:
        if not enable_gqa and torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]) != q.shape[:-2]:
            return None
        walk.note_random_call(q)
    walk.block([q.axes[-1], k.axes[-1], k.axes[-2], v.axes[-2]], "attention mixes along it")
    if is_causal:
        walk.block([q.axes[-2]], "attention mixes along it")
    if enable_gqa and not q.shape[-3] == k.shape[-3] == v.shape[-3]:
        for shared in (k, v):
            groups, _ = reshape([q.axes[-3]], [shared.shape[-3], q.shape[-3] // shared.shape[-3]], walk.why)
            walk.unify(groups, shared.axes[-3])
        batch = broadcast(walk, [q.axes[:-3], k.axes[:-3], v.axes[:-3]], [q.shape[:-3], k.shape[:-3], v.shape[:-3]])
        batch = (*batch, q.axes[-3])
    else:
        batch = broadcast(walk, [q.axes[:-2], k.axes[:-2], v.axes[:-2]], [q.shape[:-2], k.shape[:-2], v.shape[:-2]])
    if mask is not None:
        walk.block([mask.axes[-1]], "attention mixes along it")
        seen = (*batch, q.axes[-2])
        broadcast(walk, [seen, mask.axes[:-1]], [tuple(map(size_of, seen)), mask.shape[:-1]])
    return [(*batch, q.axes[-2], v.axes[-1])]


@rule("conv1d", "conv2d", "conv3d")
def conv(
    walk: Context, x: Seen, weight: Seen, bias: Seen | None = None, *args: Any, **kwargs: Any
) -> list[Sequence[Axis | None]]:
    """Input channels are groups x channels of a group, of which weight[1] are summed."""
    groups = x.shape[-len(weight.shape) + 1] // weight.shape[1]
    return [_convolved(walk, x, weight.axes[0], weight.axes[1], weight, bias, groups)]


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(
    walk: Context, x: Seen, weight: Seen, bias: Seen | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, *args: Any, **kwargs: Any,
) -> list[Sequence[Axis | None]]:  # fmt: skip
    """Of the weight, dimension 0 is groups x summed channels and dimension 1 what every group makes."""
    group, inner = reshape([weight.axes[0]], [groups, weight.shape[0] // groups], walk.why)
    return [_convolved(walk, x, (*group, *weight.axes[1]), inner, weight, bias, groups)]


def _convolved(
    walk: Context, x: Seen, made: Axis, summed: Axis, weight: Seen, bias: Seen | None, groups: int
) -> Sequence[Axis | None]:
    spatial = len(weight.shape) - 2
    channels = x.axes[-spatial - 1]
    walk.block([*weight.axes[2:], *x.axes[-spatial:]], "a convolution slides along it")
    total = x.shape[-spatial - 1]
    group, inner = reshape([channels], [groups, total // groups], walk.why)
    outer = reshape([made], [groups, size_of(made) // groups], walk.why)[0]
    walk.unify(group, outer)
    walk.unify(inner, summed)
    walk.contract(summed, addend=bias)
    if bias is not None:
        walk.unify(bias.axes[0], made)
    return (*x.axes[: -spatial - 1], made, *[None] * spatial)
