"""Rules of ops that take the elements along a dimension together: sums, reductions, orders, norms, pools."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from autoshard.axes.axis import Axis, cut, reshape
from autoshard.axes.rules import Axes, Context, Seen, broadcast, dims_of, pointwise, rule, unshardable

# ---- ops that take the elements along some dimensions, or along all, together


@rule("sum", "nansum", "mean")
def _sum(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Sequence[Axis | None]]:
    dims = _dims(walk, x)
    for dim in dims:
        walk.contract(x.axes[dim], mean=walk.name == "mean")
    return _left(walk, x, dims)


@rule(
    "amax", "amin", "max", "min", "argmax", "argmin", "prod", "all", "any", "logsumexp", "median", "nanmedian", "var",
    "std", "var_mean", "std_mean", "aminmax", "count_nonzero", "linalg_vector_norm", "norm", "kthvalue", "topk", "sort",
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumsum_", "cumprod", "logcumsumexp", "cummax",
    "cummin", "flip", "roll", "unfold", "_fft_r2c", "_fft_c2r", "_fft_c2c", "quantile", "nanquantile",
)  # fmt: skip
def _along(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Sequence[Axis | None]]:
    if args and isinstance(args[0], Seen):  # max(x, other)
        return [*pointwise(walk, x, args[0])]
    dims = _dims(walk, x)
    walk.block([x.axes[dim] for dim in dims], "elements along it depend on each other")
    return _left(walk, x, dims)


def _dims(walk: Context, x: Seen) -> list[int]:
    """The dimensions that an op is given by name; all of them where it is given none."""
    given = walk.arguments()
    dims = next((given[name] for name in ("dim", "dims", "dimension") if name in given), None)
    return dims_of(dims, len(x.shape)) if x.shape else []


def _left(walk: Context, x: Seen, dims: Collection[int]) -> list[Sequence[Axis | None]]:
    """The axes of results: some dimensions are gone, or of another size; windows, which `unfold` makes, come last."""
    made: list[Sequence[Axis | None]] = []
    for shape in walk.shapes:
        if len(shape) < len(x.shape):
            made.append([axis for dim, axis in enumerate(x.axes) if dim not in dims])
            continue
        sizes = zip(x.axes, x.shape, shape, strict=False)
        axes = [None if dim in dims and old != new else axis for dim, (axis, old, new) in enumerate(sizes)]
        made.append([*axes, *[None] * (len(shape) - len(axes))])
    return made


@rule("glu")
def _gated(walk: Context, x: Seen, dim: int = -1) -> list[Axes]:
    """The first half, times what the second one gives: a rank has a part of each."""
    d = dim % len(x.shape)
    first, second = cut(x.axes[d], x.shape[d] // 2, walk.why)
    walk.unify(first, second)
    return [(*x.axes[:d], first, *x.axes[d + 1 :])]


@rule("tril", "triu", "tril_", "triu_")
def _triangle(walk: Context, x: Seen, *args: Any) -> list[Axes]:
    walk.block(x.axes[-2:], "a triangle is cut out of it")
    return [x.axes]


@rule("linalg_cross")
def _cross(walk: Context, x: Seen, y: Seen, *, dim: int = -1) -> list[Axes]:
    made = pointwise(walk, x, y)[0]
    walk.block([made[dim]], "a cross product mixes along it")
    return [made]


@rule("cdist")
def _distances(walk: Context, x: Seen, y: Seen, *args: Any) -> list[Axes]:
    walk.block([x.axes[-1], y.axes[-1]], "reduced along it")
    batch = broadcast(walk, [x.axes[:-2], y.axes[:-2]], [x.shape[:-2], y.shape[:-2]])
    return [(*batch, x.axes[-2], y.axes[-2])]


@rule(
    "linalg_solve_triangular", "_linalg_solve_ex", "linalg_inv_ex", "linalg_cholesky_ex", "linalg_lu_factor_ex",
    "linalg_qr", "linalg_matrix_exp", "_linalg_det", "_linalg_slogdet", "_linalg_eigh", "_linalg_svd", "linalg_pinv",
)  # fmt: skip
def _matrices(walk: Context, *args: Any, **kwargs: Any) -> list[Sequence[Axis | None]] | None:
    """Each matrix of a batch for itself. Of what has other dimensions, a solution may be one of vectors: not known."""
    given = [item for item in args if isinstance(item, Seen)]
    if len({len(seen.shape) for seen in given}) != 1 or any(isinstance(item, Seen) for item in kwargs.values()):
        return None
    for seen in given:
        walk.block(seen.axes[-2:], "elements of a matrix depend on each other")
    batch = broadcast(walk, [seen.axes[:-2] for seen in given], [seen.shape[:-2] for seen in given])
    return [(*batch, *[None] * (len(shape) - len(batch))) for shape in walk.shapes]


# ---- norms


@rule("layer_norm", "rms_norm", "_fused_rms_norm", "native_layer_norm")
def _layer_norm(walk: Context, x: Seen, shape: Sequence[int], *parameters: Any, **kwargs: Any) -> list[Axes]:
    """The further results of some, one mean or scale for all that is normalised together, have dimensions of size 1."""
    walk.block(x.axes[-len(shape) :], "normalised along it")
    for parameter in parameters:
        if isinstance(parameter, Seen):
            broadcast(walk, [x.axes, parameter.axes], [x.shape, parameter.shape])
    statistics = (*x.axes[: -len(shape)], *[()] * len(shape))
    return [x.axes, statistics, statistics]


@rule("group_norm")
def _group_norm(walk: Context, x: Seen, groups: int, *parameters: Any, **kwargs: Any) -> list[Axes]:
    _, inner = reshape([x.axes[1]], [groups, x.shape[1] // groups], walk.why)
    walk.block([inner, *x.axes[2:]], "normalised along it")
    return [_per_channel(walk, x, parameters)]


@rule("batch_norm")
def _batch_norm(
    walk: Context, x: Seen, weight: Seen | None, bias: Seen | None, mean: Seen | None, var: Seen | None,
    training: bool, *args: Any,
) -> list[Axes]:  # fmt: skip
    if training:
        walk.block([x.axes[0], *x.axes[2:]], "statistics are taken over it")
    return [_per_channel(walk, x, (weight, bias, mean, var))]


def _per_channel(walk: Context, x: Seen, parameters: Iterable[Any]) -> Axes:
    for parameter in parameters:
        if isinstance(parameter, Seen):
            walk.unify(x.axes[1], parameter.axes[0])
    return x.axes


@rule("_weight_norm")
def _weight_norm(walk: Context, v: Seen, g: Seen, dim: int = 0) -> list[Axes]:
    """Each slice along `dim` is scaled by its own norm; -1 is no dimension: all of it is, by one norm."""
    walk.block([axis for d, axis in enumerate(v.axes) if d != dim], "normalised along it")
    return [broadcast(walk, [v.axes, g.axes], [v.shape, g.shape])]


# ---- pools and the like: everything after the channels is mixed


@rule(
    "max_pool1d", "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
    "adaptive_max_pool2d", "adaptive_max_pool3d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_bicubic2d", "_upsample_bicubic2d_aa", "upsample_trilinear3d",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d",
    "replication_pad3d",
)  # fmt: skip
def _spatial(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Sequence[Axis | None]]:
    """Ops that mix as many of the last dimensions as their names say, into as many of whatever size."""
    dims = next(int(letter) for letter in walk.name if letter.isdigit())
    walk.block(x.axes[-dims:], "elements along it depend on each other")
    return [(*x.axes[:-dims], *[None] * dims)] * len(walk.shapes)


@rule("stft", "istft")
def _spectrum(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Sequence[Axis | None]]:
    """(…, time) -> (…, frequencies, windows), and the other way."""
    ahead = x.axes[: -1 if walk.name == "stft" else -2]
    window = [axis for one in (*args, *kwargs.values()) if isinstance(one, Seen) for axis in one.axes]
    walk.block([*x.axes[len(ahead) :], *window], "windows slide along it")
    return [(*ahead, *[None] * (len(walk.shapes[0]) - len(ahead)))]


@rule("grid_sampler")
def _sampled(walk: Context, x: Seen, grid: Seen, *args: Any) -> list[Sequence[Axis | None]]:
    """(batch, channels, places), read where (batch, new places, coordinates) says."""
    walk.block([*x.axes[2:], grid.axes[-1]], "read by coordinates")
    walk.unify(x.axes[0], grid.axes[0])
    return [(*x.axes[:2], *grid.axes[1:-1])]


@rule("affine_grid_generator")
def _affine_grid(walk: Context, theta: Seen, *args: Any) -> list[Sequence[Axis | None]]:
    """A grid of coordinates per matrix of a batch."""
    walk.block(theta.axes[1:], "elements of a matrix depend on each other")
    return [(theta.axes[0], *[None] * (len(walk.shapes[0]) - 1))]


@rule("im2col")
def _patches(walk: Context, x: Seen, kernel: Sequence[int], *args: Any) -> list[Sequence[Axis | None]]:
    """(..., channels, height, width) -> (..., channels x places of the kernel, positions of it)."""
    walk.block(x.axes[-2:], "windows slide along it")
    places = unshardable(walk, (kernel[0] * kernel[1],))[0]
    return [(*x.axes[:-3], (*x.axes[-3], *places), None)]


@rule("col2im")
def _from_patches(walk: Context, x: Seen, size: Sequence[int], kernel: Sequence[int], *args: Any) -> Any:
    """The other way: (..., channels x places of the kernel, positions of it) -> (..., channels, height, width)."""
    within = kernel[0] * kernel[1]
    channels, places = reshape([x.axes[-2]], [x.shape[-2] // within, within], walk.why)
    walk.block([places, x.axes[-1]], "windows are added along it")
    return [(*x.axes[:-2], channels, None, None)]


# ---- recurrent layers, whose matrices stay whole


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(walk: Context, x: Seen, state: Any, parameters: Any, biases: bool, layers: int, dropout: float,
               train: bool, both: bool, batch_first: bool) -> list[Sequence[Axis | None]] | None:  # fmt: skip
    """(batch, time, …) or (time, batch, …), and states (layers, batch, …); packed sequences are not known."""
    if not isinstance(batch_first, bool) or len(x.shape) != 3:
        return None
    batch, time = (0, 1) if batch_first else (1, 0)
    for given in state if isinstance(state, (list, tuple)) else [state]:
        walk.unify(x.axes[batch], given.axes[1])
        walk.block([given.axes[0], given.axes[2]])
    matrices = [axis for one in parameters for axis in one.axes]
    walk.block([x.axes[time], x.axes[2], *matrices], "one step follows another")
    rows: list[Axis | None] = [None, None, None]
    rows[batch] = x.axes[batch]
    return [rows, *[(None, x.axes[batch], None)] * 2]
