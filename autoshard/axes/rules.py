"""One rule per op: how the axes of its results relate to those of its arguments.

A rule gets the walk and the op's arguments, tensors as `Seen`, and returns the axes of every tensor it makes, with None
for a dimension that can't be cut. On the way it unifies axes that are paired element by element, marks those that are
summed over (`contract`) and blocks those along which the op mixes or orders elements. A rule that returns None in place
of all, like an op without a rule, blocks everything: unknown means replicated, never wrong.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

import torch

from autoshard.axes.axis import Axis, fresh, reshape, size_of

aten = torch.ops.aten
Axes = tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor argument: which value it is, its shape and what its dimensions are made of."""

    value: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: Axes


class Context(Protocol):
    """What a rule may do with axes, and what it may ask about its op.

    `name`: of the op, without overload; `shapes`: of the tensors it makes; `why`: the op and its module, for messages.
    """

    name: str
    why: str
    shapes: Sequence[tuple[int, ...]]

    def unify(self, left: Axis, right: Axis) -> None: ...

    def block(self, axes: Iterable[Axis], what: str = "") -> None: ...

    def contract(self, axis: Axis, *, mean: bool = False, addend: Seen | None = None) -> None: ...

    def lookup(self, axis: Axis) -> None: ...


Rule = Callable[..., Sequence[Sequence[Axis | None]] | None]
RULES: dict[Any, Rule] = {}


def rule(*packets: str) -> Callable[[Rule], Rule]:
    """Register a rule for all overloads of ATen ops, by name."""

    def register(function: Rule) -> Rule:
        for name in packets:
            RULES[getattr(aten, name)] = function
        return function

    return register


def unknown(walk: Context, inputs: Iterable[Seen], shapes: Iterable[tuple[int, ...]]) -> list[Axes]:
    """What is done for an op without a rule: nothing that it reads or makes can be cut."""
    for seen in inputs:
        walk.block(seen.axes)
    return [lost(walk, shape) for shape in shapes]


def lost(walk: Context, shape: Iterable[int]) -> Axes:
    """Axes of a tensor that can't be cut."""
    axes = tuple(fresh(size) for size in shape)
    walk.block(axes)
    return axes


def dims_of(dim: Any, ndim: int) -> list[int]:
    """A `dim` argument as dimensions from 0; None means all."""
    if dim is None or dim == []:
        return list(range(ndim))
    return sorted({d % max(ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)})


# ---- element by element


def pointwise(walk: Context, *args: Any, **kwargs: Any) -> list[Axes]:
    """Dimensions pair from the right; one of size 1 is spread and has no axis."""
    tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, Seen)]
    return [broadcast(walk, [seen.axes for seen in tensors], [seen.shape for seen in tensors])]


def broadcast(walk: Context, axes: Sequence[Axes], shapes: Sequence[tuple[int, ...]]) -> Axes:
    """The axes of tensors that are paired element by element, unified."""
    made: list[Axis] = []
    columns = zip_longest(
        *(zip(reversed(a), reversed(s), strict=True) for a, s in zip(axes, shapes, strict=True)), fillvalue=((), 1)
    )
    for column in columns:
        found = [axis for axis, size in column if size != 1]
        for axis in found[1:]:
            walk.unify(found[0], axis)
        made.append(found[0] if found else ())
    return tuple(reversed(made))


@rule("copy_", "masked_fill", "masked_fill_", "fill_", "expand_as", "type_as", "dropout_", "lerp", "where")
def _written(walk: Context, *args: Any, **kwargs: Any) -> list[Axes] | None:
    """`where` with a condition alone says how many elements are true."""
    return pointwise(walk, *args) if len(args) > 1 or walk.name != "where" else None


@rule(
    "to", "_to_copy", "alias", "contiguous", "clone", "detach", "detach_", "dropout", "feature_dropout", "lift_fresh",
    "resolve_conj", "resolve_neg", "zeros_like", "ones_like", "full_like", "empty_like", "conj", "zero_",
    "requires_grad_", "native_dropout", "_conj", "pin_memory", "positive", "alpha_dropout",
)  # fmt: skip
def _same(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Axes]:
    return [x.axes, x.axes]


# ---- products


@rule("linear")
def _linear(walk: Context, x: Seen, weight: Seen, bias: Seen | None = None) -> list[Axes]:
    if len(weight.shape) == 1:
        walk.unify(x.axes[-1], weight.axes[0])
        walk.contract(weight.axes[0], addend=bias)
        return [x.axes[:-1]]
    walk.unify(x.axes[-1], weight.axes[1])
    walk.contract(weight.axes[1], addend=bias)
    if bias is not None:
        walk.unify(bias.axes[-1], weight.axes[0])
    return [(*x.axes[:-1], weight.axes[0])]


@rule("matmul", "mm", "bmm", "mv", "dot", "inner")
def _matmul(walk: Context, x: Seen, y: Seen, **kwargs: Any) -> list[Axes]:
    return [_product(walk, x, y, None)]


def _product(walk: Context, x: Seen, y: Seen, addend: Seen | None) -> Axes:
    walk.unify(x.axes[-1], y.axes[-2] if len(y.shape) > 1 else y.axes[-1])
    walk.contract(x.axes[-1], addend=addend)
    batch = broadcast(walk, [x.axes[:-2], y.axes[:-2]], [x.shape[:-2], y.shape[:-2]])
    rows = x.axes[-2:-1] if len(x.shape) > 1 else ()
    columns = y.axes[-1:] if len(y.shape) > 1 else ()
    return (*batch, *rows, *columns)


@rule("addmm", "baddbmm", "addmv", "addbmm")
def _addmm(walk: Context, added: Seen, x: Seen, y: Seen, *args: Any, **kwargs: Any) -> list[Axes]:
    made = _product(walk, x, y, added)
    shape = (*x.shape[:-1], *y.shape[-1:]) if len(y.shape) > 1 else x.shape[:-1]
    return [broadcast(walk, [made, added.axes], [shape, added.shape])]


@rule("einsum")
def _einsum(walk: Context, equation: str, operands: Sequence[Seen], **kwargs: Any) -> list[Axes] | None:
    equation = equation.replace(" ", "")
    terms, arrow, result = equation.partition("->")
    if "." in equation:
        return None
    named: dict[str, Axis] = {}
    for term, seen in zip(terms.split(","), operands, strict=True):
        for letter, axis, size in zip(term, seen.axes, seen.shape, strict=True):
            if size != 1 and named.get(letter):
                walk.unify(named[letter], axis)
            elif size != 1 or letter not in named:
                named[letter] = axis
    if not arrow:
        letters = terms.replace(",", "")
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    for letter, axis in named.items():
        if letter not in result:
            walk.contract(axis)
    return [tuple(named[letter] for letter in result)]


@rule("_grouped_mm")
def _grouped(walk: Context, x: Seen, y: Seen, offsets: Any = None, *args: Any, **kwargs: Any) -> list[Axes]:
    """Rows of x are grouped; group g is multiplied by y[g]."""
    walk.unify(x.axes[-1], y.axes[-2])
    if len(x.shape) == 2 and len(y.shape) == 2:  # groups of columns
        walk.block([x.axes[-1]])
        return [(*lost(walk, (offsets.shape[0],)), x.axes[0], y.axes[1])]
    walk.contract(x.axes[-1])
    if len(x.shape) == 3 and len(y.shape) == 3:
        walk.unify(x.axes[0], y.axes[0])
        return [(x.axes[0], x.axes[1], y.axes[2])]
    walk.block([x.axes[-2], *y.axes[:-2], *x.axes[:-2]])
    return [(x.axes[-2], y.axes[-1])]


@rule("scaled_dot_product_attention")
def _attention(
    walk: Context, q: Seen, k: Seen, v: Seen, mask: Seen | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: Any = None, enable_gqa: bool = False,
) -> list[Axes]:  # fmt: skip
    walk.block([q.axes[-1], k.axes[-1], k.axes[-2], v.axes[-2]], "attention mixes along it")
    if is_causal:
        walk.block([q.axes[-2]], "attention mixes along it")
    k_axes, k_shape, v_axes, v_shape = k.axes[:-2], k.shape[:-2], v.axes[:-2], v.shape[:-2]
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        groups, _ = reshape([q.axes[-3]], [k.shape[-3], q.shape[-3] // k.shape[-3]], walk.why)
        walk.unify(groups, k.axes[-3])
        walk.unify(k.axes[-3], v.axes[-3])
        k_axes, k_shape, v_axes, v_shape = k_axes[:-1], k_shape[:-1], v_axes[:-1], v_shape[:-1]
        batch = broadcast(walk, [q.axes[:-3], k_axes, v_axes], [q.shape[:-3], k_shape, v_shape])
        batch = (*batch, q.axes[-3])
    else:
        batch = broadcast(walk, [q.axes[:-2], k_axes, v_axes], [q.shape[:-2], k_shape, v_shape])
    if isinstance(mask, Seen):
        if mask.shape[-1] != 1:
            walk.block([mask.axes[-1]])
        sizes = tuple(1 if not axis else 0 for axis in batch)
        shape = tuple(size or full for size, full in zip(sizes, q.shape[:-2], strict=True))
        broadcast(walk, [(*batch, q.axes[-2]), mask.axes[:-1]], [(*shape, q.shape[-2]), mask.shape[:-1]])
    return [(*batch, q.axes[-2], v.axes[-1])]


@rule("conv1d", "conv2d", "conv3d", "convolution", "_convolution")
def _conv(
    walk: Context, x: Seen, weight: Seen, bias: Seen | None = None, *args: Any, **kwargs: Any
) -> list[Sequence[Axis | None]]:
    """Input channels are groups x channels of a group, of which weight[1] are summed."""
    groups = x.shape[-len(weight.shape) + 1] // weight.shape[1]
    return [_convolved(walk, x, weight.axes[0], weight.axes[1], weight, bias, groups)]


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(
    walk: Context, x: Seen, weight: Seen, bias: Seen | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, *args: Any,
) -> list[Sequence[Axis | None]]:  # fmt: skip
    group, inner = reshape([weight.axes[0]], [groups, weight.shape[0] // groups], walk.why)
    return [_convolved(walk, x, (*group, *weight.axes[1]), inner, weight, bias, groups)]


def _convolved(walk: Context, x: Seen, made: Axis, summed: Axis, weight: Seen, bias: Seen | None, groups: int) -> Axes:
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
    return (*x.axes[: -spatial - 1], made, *(None for _ in range(spatial)))


# ---- sums and other reductions


@rule("sum", "nansum")
def _sum(walk: Context, x: Seen, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> list[Axes]:
    return _reduced(walk, x, dim, keepdim, lambda axis: walk.contract(axis))


@rule("mean")
def _mean(walk: Context, x: Seen, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> list[Axes]:
    if isinstance(dim, bool):
        dim = None
    return _reduced(walk, x, dim, keepdim, lambda axis: walk.contract(axis, mean=True))


@rule(
    "amax", "amin", "max", "min", "argmax", "argmin", "prod", "all", "any", "logsumexp", "median", "var", "std",
    "var_mean", "std_mean", "aminmax", "count_nonzero", "nanmedian",
)  # fmt: skip
def _reduction(walk: Context, x: Seen, dim: Any = None, *args: Any, **kwargs: Any) -> list[Axes]:
    if isinstance(dim, Seen):
        return pointwise(walk, x, dim)
    keepdim = kwargs.get("keepdim", next((item for item in reversed(args) if isinstance(item, bool)), False))
    if isinstance(dim, bool):  # var(x, unbiased)
        dim = None
    return _reduced(walk, x, dim, keepdim, lambda axis: walk.block([axis])) * 2


@rule("linalg_vector_norm", "norm")
def _norm(walk: Context, x: Seen, order: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> list[Axes]:
    return _reduced(walk, x, dim, keepdim, lambda axis: walk.block([axis]))


def _reduced(walk: Context, x: Seen, dim: Any, keepdim: bool, act: Callable[[Axis], None]) -> list[Axes]:
    gone = dims_of(dim, len(x.shape))
    for d in gone:
        if x.shape:
            act(x.axes[d])
    if keepdim:
        return [tuple(() if d in gone else axis for d, axis in enumerate(x.axes))]
    return [tuple(axis for d, axis in enumerate(x.axes) if d not in gone)]


# ---- ops that order or mix elements along a dimension


@rule(
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "cumsum_", "logcumsumexp", "cummax",
    "flip", "argsort", "roll", "sort", "glu", "renorm", "diff",
)  # fmt: skip
def _along(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Sequence[Axis | None]]:
    """The dimension is the first argument that looks like one; `roll` and `diff` have it second."""
    given = [item for item in args if isinstance(item, (int, list)) and not isinstance(item, bool)]
    second = walk.name in ("roll", "diff")
    dim = kwargs.get("dim", kwargs.get("dims", given[second] if len(given) > second else -1))
    gone = dims_of(dim, len(x.shape))
    walk.block([x.axes[d] for d in gone if x.shape], "elements along it depend on each other")
    if walk.name in ("glu", "diff"):
        return [tuple(None if d in gone else axis for d, axis in enumerate(x.axes))]
    return [x.axes, x.axes]


@rule("topk", "kthvalue")
def _topk(walk: Context, x: Seen, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> list[Axes]:
    d = dim % max(len(x.shape), 1)
    walk.block([x.axes[d]])
    made = tuple(lost(walk, (k,))[0] if i == d else axis for i, axis in enumerate(x.axes))
    return [made, made]


@rule("tril", "triu", "tril_", "triu_")
def _triangle(walk: Context, x: Seen, *args: Any) -> list[Axes]:
    walk.block(x.axes[-2:], "a triangle is cut out of it")
    return [x.axes]


@rule("layer_norm", "rms_norm", "_fused_rms_norm", "native_layer_norm")
def _layer_norm(walk: Context, x: Seen, shape: Sequence[int], *parameters: Any, **kwargs: Any) -> list[Axes] | None:
    walk.block(x.axes[-len(shape) :], "normalised along it")
    for parameter in parameters:
        if isinstance(parameter, Seen):
            broadcast(walk, [x.axes, parameter.axes], [x.shape, parameter.shape])
    return [x.axes]


@rule("group_norm")
def _group_norm(walk: Context, x: Seen, groups: int, *parameters: Any, **kwargs: Any) -> list[Axes]:
    _, inner = reshape([x.axes[1]], [groups, x.shape[1] // groups], walk.why)
    walk.block([inner, *x.axes[2:]], "normalised along it")
    return [_per_channel(walk, x, parameters)]


@rule("batch_norm", "native_batch_norm", "instance_norm")
def _batch_norm(walk: Context, x: Seen, *parameters: Any, **kwargs: Any) -> list[Axes]:
    training = parameters[4] if len(parameters) > 4 else kwargs.get("training", True)
    if training or walk.name == "instance_norm":
        walk.block([x.axes[0], *x.axes[2:]], "statistics are taken over it")
    return [_per_channel(walk, x, parameters)]


def _per_channel(walk: Context, x: Seen, parameters: Iterable[Any]) -> Axes:
    for parameter in parameters:
        if isinstance(parameter, Seen):
            walk.unify(x.axes[1], parameter.axes[0])
    return x.axes


@rule("_weight_norm")
def _weight_norm(walk: Context, v: Seen, g: Seen, dim: int = 0) -> list[Axes]:
    walk.block([axis for d, axis in enumerate(v.axes) if d != dim % len(v.shape)], "normalised along it")
    return [broadcast(walk, [v.axes, g.axes], [v.shape, g.shape])]


@rule(
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d", "upsample_bilinear2d", "upsample_nearest2d",
    "upsample_nearest1d", "upsample_linear1d", "upsample_bicubic2d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa", "upsample_trilinear3d", "upsample_nearest3d", "max_pool2d_with_indices",
)  # fmt: skip
def _spatial(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Sequence[Axis | None]] | None:
    """Everything after the channels is mixed; results have as many dimensions as x, of whatever size."""
    digits = [int(c) for c in walk.name if c.isdigit()]
    if not digits:
        return None
    walk.block(x.axes[-digits[-1] :], "elements along it depend on each other")
    made = (*x.axes[: -digits[-1]], *((None,) * digits[-1]))
    return [made, made]
