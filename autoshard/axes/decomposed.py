"""Rules for ops into which an ordinary capture has taken composite ones apart, and for their backward.

They follow axes through a run, for estimates. Cuts are never found by them: nothing here blocks an axis.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from autoshard.axes.axis import fresh
from autoshard.axes.products import conv, conv_transpose
from autoshard.axes.rules import Axes, Context, Rule, Seen, broadcast, rule

DECOMPOSED: dict[Any, Rule] = {}
_rule = partial(rule, table=DECOMPOSED)


def _filled(walk: Context, made: Sequence[Axes]) -> list[Axes]:
    """The axes of the first results, with fresh ones for the rest and for what has other dimensions than they say."""
    shapes = list(walk.shapes)
    found = [tuple(fresh(size) for size in shape) for shape in shapes]
    for index, (axes, shape) in enumerate(zip(made, shapes, strict=False)):
        if len(axes) == len(shape):
            found[index] = axes
    return found


def _like(*places: int) -> Rule:
    """The rule for ops whose first results have the axes of their arguments at these places."""

    def made(walk: Context, *args: Any, **kwargs: Any) -> list[Axes]:
        return _filled(walk, [args[place].axes for place in places])

    return made


@_rule(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math_for_mps",
)  # fmt: skip
def _attention(walk: Context, q: Seen, k: Seen, v: Seen, *args: Any, **kwargs: Any) -> list[Axes]:
    batch = broadcast(walk, [x.axes[:-2] for x in (q, k, v)], [x.shape[:-2] for x in (q, k, v)])
    rows = (*batch, q.axes[-2])
    return _filled(walk, [(*rows, v.axes[-1]), rows])


_rule(
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
)(_like(1, 2, 3))  # fmt: skip
_rule("native_layer_norm", "_fused_rms_norm", "native_layer_norm_backward", "_fused_rms_norm_backward")(_like(0))


@_rule("convolution", "_convolution")
def _convolution(walk: Context, x: Seen, weight: Seen, bias: Seen | None, *args: Any) -> Any:
    """Of the arguments behind the bias, number 3 is whether it is transposed, and number 5 how many groups it has."""
    return conv_transpose(walk, x, weight, bias, groups=args[5]) if args[3] else conv(walk, x, weight, bias)


@_rule("convolution_backward")
def _convolution_backward(walk: Context, gradient: Seen, x: Seen, weight: Seen, *args: Any) -> list[Axes]:
    return _filled(walk, [x.axes, weight.axes, gradient.axes[1:2]])


@_rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "native_group_norm")
def _channel_norm(walk: Context, x: Seen, *parameters: Any) -> list[Axes]:
    for parameter in parameters:
        if isinstance(parameter, Seen) and len(parameter.shape) == 1:
            walk.unify(x.axes[1], parameter.axes[0])
    return _filled(walk, [x.axes])


@_rule("native_batch_norm_backward", "native_group_norm_backward")
def _channel_norm_backward(walk: Context, gradient: Seen, x: Seen, *args: Any) -> list[Axes]:
    return _filled(walk, [x.axes, x.axes[1:2], x.axes[1:2]])


@_rule("_softmax_backward_data", "_log_softmax_backward_data", "native_dropout_backward")
def _pointwise_backward(walk: Context, gradient: Seen, result: Seen, *args: Any) -> list[Axes]:
    return _filled(walk, [broadcast(walk, [gradient.axes, result.axes], [gradient.shape, result.shape])])


@_rule("embedding_dense_backward")
def _embedding_backward(walk: Context, gradient: Seen, *args: Any) -> list[Axes]:
    return [(fresh(walk.shapes[0][0]), gradient.axes[-1])]
