"""Rules of ops for the axis of the batch, where they say more than those for cuts, and kinds of ops.

A cut has to draw a mask once for all ranks, and knows no shares of a loss; parts of a batch draw their own.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from autoshard.axes import mixing, products, rules  # noqa: F401 - they register their rules
from autoshard.axes.axis import Axis, Cat, Factor, whole
from autoshard.axes.reshaping import RESHAPES, constant, reshaped
from autoshard.axes.rules import RULES, Axes, Context, Rule, Seen, aten, broadcast, names, pointwise
from autoshard.plan.sharding import Product, parse_axis

FILLED = frozenset({
    "zeros", "ones", "full", "empty", "scalar_tensor", "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like",
    "ones_like", "full_like", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted", "zero_",
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal_", "uniform_", "bernoulli_",
    "exponential_", "normal",
})  # fmt: skip
"""Ops whose elements are one number, or drawn alike for all places."""
SAME = names(rules.same, rules.dropout, rules.noise, rules.rrelu) | {"bernoulli", "requires_grad_"}
SIZED = FILLED | RESHAPES | {"expand", "repeat", "repeat_interleave", "constant_pad_nd", "affine_grid_generator"}
"""Ops to which lists of numbers say how large a tensor is."""


def _filled(walk: Context, *args: Any, **kwargs: Any) -> Any:
    """One number, or numbers that are drawn in the same way for each place: not around those of a tensor."""
    return None if walk.name == "normal" and args and isinstance(args[0], Seen) else constant(walk)


def _drawn_places(walk: Context, x: Seen, *args: Any) -> list[Sequence[Axis | None]]:
    """Places along the last dimension, drawn for each row by itself."""
    walk.block([x.axes[-1]], "drawn along it")
    return [(*x.axes[:-1], None)]


def _attention(walk: Context, *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Any:
    """What is dropped is drawn for each element."""
    args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
    return RULES[aten.scaled_dot_product_attention](walk, *args, **kwargs)


def _diagonal(walk: Context, x: Seen, offset: int = 0, dim1: int = 0, dim2: int = 1) -> list[Sequence[Axis | None]]:
    gone = {dim1 % len(x.shape), dim2 % len(x.shape)}
    walk.block([x.axes[d] for d in gone], "its diagonal is taken")
    return [(*(axis for d, axis in enumerate(x.axes) if d not in gone), None)]


def _index_put(walk: Context, x: Seen, indices: Sequence[Seen | None], source: Seen, *args: Any) -> Any:
    """What is the same for all places of which a mask is true is written element by element."""
    mask = indices[0]
    if len(indices) > 1 or mask is None or mask.dtype is not torch.bool:
        return RULES[aten.index_put](walk, x, indices, source, *args)
    more = len(x.shape) - len(mask.shape)
    ahead = max(0, len(source.shape) - more)
    if prod(source.shape[:ahead]) != 1:
        return RULES[aten.index_put](walk, x, indices, source, *args)
    given = [(x.axes, x.shape), ((*mask.axes, *[()] * more), (*mask.shape, *[1] * more))]
    axes, shapes = zip(*given, (source.axes[ahead:], source.shape[ahead:]), strict=True)
    return [broadcast(walk, axes, shapes)]


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
    **{getattr(aten, name): rules.same for name in SAME},
    **{getattr(aten, name): rules.same if name.endswith("_") else _filled for name in FILLED},
    **{getattr(aten, name): _index_put for name in ("index_put", "index_put_", "_index_put_impl_")},
    **{getattr(aten, name): _loss for name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")},
    aten.scaled_dot_product_attention: _attention,
    aten.diagonal: _diagonal,
    aten.multinomial: _drawn_places,
    aten.copy_: pointwise,
}
FOR_REPLICAS: Mapping[Any, Rule] = {**TABLE, aten.squeeze: reshaped}
"""Where each replica runs the model as it is: of one sample, too, code may squeeze the dimension, as it always does."""


def axis_of(text: str, starred: Factor) -> Axis:
    """The axis that a plan writes "2x*8x3" or "(*8x2|*8)", with `starred` at the stars; all else can't be cut."""
    return _made(parse_axis(text), starred)


def _made(product: Product, starred: Factor) -> Axis:
    made: list[Factor | Cat] = []
    for term in product:
        if isinstance(term, tuple):
            made.append(Cat(_made(part, starred) for part in term))
        elif term < 0:
            made.append(starred)
        else:
            made += whole(term, "it is no dimension of the batch")
    return tuple(made)
