"""One rule per op: how the axes of its results relate to those of its arguments.

A rule gets the walk and the op's arguments, tensors as `Seen`, and returns the axes of every tensor it makes, with None
for a dimension that can't be cut. On the way it unifies axes that are paired element by element, marks those that are
summed over (`contract`), notes random masks (`note_random_call`) and blocks those along which the op mixes or orders
elements. A rule that returns None in place of all, like an op without a rule, blocks everything:
unknown means replicated, never wrong.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from autoshard.axes.axis import Axis, fresh, make_unshardable, unify
from autoshard.axes.given import named
from autoshard.capture.traits import traits_of
from autoshard.torch_private import OpOverload

aten = torch.ops.aten
Axes = tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor argument: which value it is, its shape and what its dimensions are made of.

    `numbers`: its elements, of a short list of integers that the model's code writes down; else None.
    """

    value: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: Axes
    numbers: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contraction:
    """A sum (or mean) over an axis by an op; `addend`: the value that the op adds once to the sum, -1 if none."""

    op: int
    axis: Axis
    mean: bool = False
    addend: int = -1
    lookup: bool = False


@dataclass(slots=True, kw_only=True)
class Context:
    """What a rule may do with axes, and what it may ask about its op.

    `name`: of the op, without overload; `shapes`: of the tensors it makes; `why`: the op and its module, for messages.
    `contractions`, `blocks` and `random_calls` note what was done: sums, (op, axis that it blocked), and (op that draws
    a random mask, value that the mask is for).
    """

    name: str = ""
    why: str = ""
    shapes: Sequence[tuple[int, ...]] = ()
    contractions: list[Contraction] = field(default_factory=list)
    blocks: list[tuple[int, Axis]] = field(default_factory=list)
    random_calls: list[tuple[int, int]] = field(default_factory=list)
    _op: int = -1
    _call: tuple[Any, Sequence[Any], Mapping[str, Any]] = (None, (), {})

    def arguments(self) -> dict[str, Any]:
        """The arguments of the op by name, with its defaults."""
        return named(*self._call)

    def unify(self, left: Axis, right: Axis) -> None:
        unify(left, right, self.why)

    def block(self, axes: Iterable[Axis], what: str = "") -> None:
        for axis in axes:
            if axis:
                self.blocks.append((self._op, axis))
                make_unshardable(axis, f"{self.why}{': ' if what else ''}{what}")

    def contract(self, axis: Axis, *, mean: bool = False, addend: Seen | None = None, lookup: bool = False) -> None:
        if axis:
            value = addend.value if isinstance(addend, Seen) else -1
            self.contractions.append(Contraction(op=self._op, axis=axis, mean=mean, addend=value, lookup=lookup))

    def note_random_call(self, x: Seen) -> None:
        self.random_calls.append((self._op, x.value))

    def paired(self, axis: Axis, index: Seen) -> Sequence[Axis] | None:
        """The axes of an index that picks every slice of a factor of `axis` where it is; None if that is unknown."""
        return None


Rule = Callable[..., Sequence[Sequence[Axis | None]] | None]
RULES: dict[Any, Rule] = {}


def rule(*packets: str, table: dict[Any, Rule] = RULES) -> Callable[[Rule], Rule]:
    """Register a rule for all overloads of ATen ops, by name."""

    def register(function: Rule) -> Rule:
        for name in packets:
            table[getattr(aten, name)] = function
        return function

    return register


def rule_of(target: Any, table: Mapping[Any, Rule] = RULES) -> Rule | None:
    """The rule of an op; ops that a tag of torch says are element by element need no entry of their own."""
    if not isinstance(target, OpOverload):
        return None
    found = table.get(target.overloadpacket)
    return pointwise if found is None and traits_of(target).pointwise else found


def names(*functions: Rule) -> frozenset[str]:
    """The names of the ops that have one of these rules."""
    return frozenset(packet.__name__ for packet, function in RULES.items() if function in functions)


def is_pointwise(target: Any) -> bool:
    """Whether an op computes element by element."""
    return rule_of(target) is pointwise


def unknown(walk: Context, inputs: Iterable[Seen], shapes: Iterable[tuple[int, ...]]) -> list[Axes]:
    """What is done for an op without a rule: nothing that it reads or makes can be cut."""
    for seen in inputs:
        walk.block(seen.axes, "how it could be cut is not known")
    return [unshardable(walk, shape) for shape in shapes]


def unshardable(walk: Context, shape: Iterable[int]) -> Axes:
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
    made = broadcast(walk, [seen.axes for seen in tensors], [seen.shape for seen in tensors])
    return [made] * max(1, len(walk.shapes))


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


# Most have a tag that says so, and need no entry: writing forms and some others lack it.
rule(
    "__irshift__", "abs_", "complex", "copysign_", "eq_", "floor_divide", "floor_divide_", "ge_", "gelu_", "gt_",
    "hardswish", "hardswish_", "le_", "log_sigmoid", "lt_", "mish_", "ne_", "polar", "threshold_", "xlogy_", "rsub",
    "copy_", "masked_fill", "masked_fill_", "fill_", "_prelu_kernel", "where",
)(pointwise)  # fmt: skip


@rule("prelu")
def _prelu(walk: Context, x: Seen, weight: Seen) -> list[Axes]:
    """One slope, or one per channel (dimension 1)."""
    if len(x.shape) > 1 and weight.shape and weight.shape[0] > 1:
        walk.unify(x.axes[1], weight.axes[0])
    return [x.axes]


@rule(
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "soft_margin_loss",
)  # fmt: skip
def loss_of_elements(walk: Context, *args: Any, **kwargs: Any) -> list[Axes] | None:
    """A loss for each element, if it is not summed up to one number."""
    return pointwise(walk, *args, **kwargs) if walk.shapes[0] else None


@rule("isin")
def _isin(walk: Context, x: Any, wanted: Any, **kwargs: Any) -> list[Axes]:
    if isinstance(wanted, Seen):
        walk.block(wanted.axes)
    return [x.axes if isinstance(x, Seen) else ()]


@rule(
    "to", "_to_copy", "alias", "contiguous", "clone", "detach", "detach_", "lift_fresh", "zeros_like", "ones_like",
    "full_like", "empty_like", "_conj", "conj_physical", "zero_",
)  # fmt: skip
def same(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Axes]:
    return [x.axes] * len(walk.shapes)


@rule("dropout", "dropout_", "feature_dropout", "feature_dropout_")
def dropout(walk: Context, x: Seen, p: float, train: bool) -> list[Axes]:
    """The mask is drawn for all of the tensor at once."""
    if train and p:
        walk.note_random_call(x)
    return [x.axes]


@rule("native_dropout", "alpha_dropout", "alpha_dropout_")
def noise(walk: Context, x: Seen, p: float, train: bool | None) -> list[Axes] | None:
    return None if train in (True, None) and p else [x.axes, x.axes]


@rule("rrelu", "rrelu_")
def rrelu(walk: Context, x: Seen, lower: float = 0.125, upper: float = 1 / 3, train: bool = False, *args: Any) -> Any:
    return None if train else [x.axes]
