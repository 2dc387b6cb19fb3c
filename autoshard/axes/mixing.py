"""Rules of ops that take the elements along a dimension together: sums, reductions, orders, norms, pools."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from autoshard.axes.axis import Axis, cut, reshape
from autoshard.axes.rules import Axes, Context, Seen, broadcast, dims_of, pointwise, rule, unshardable

# ---- sums and other reductions


@rule("sum", "nansum", "mean")
def _sum(walk: Context, x: Seen, dim: Any = None, *args: Any, **kwargs: Any) -> list[Axes]:
    return _reduced(walk, x, dim, lambda axis: walk.contract(axis, mean=walk.name == "mean"))


@rule(
    "amax", "amin", "max", "min", "argmax", "argmin", "prod", "all", "any", "logsumexp", "median", "var", "std",
    "var_mean", "std_mean", "aminmax", "count_nonzero", "nanmedian",
)  # fmt: skip
def _reduction(walk: Context, x: Seen, dim: Any = None, *args: Any, **kwargs: Any) -> list[Axes]:
    if isinstance(dim, Seen):  # max(x, other)
        return pointwise(walk, x, dim)
    if isinstance(dim, bool):  # var(x, unbiased)
        dim = None
    return _reduced(walk, x, dim, lambda axis: walk.block([axis], "reduced along it"))


@rule("linalg_vector_norm", "linalg_matrix_norm", "linalg_norm", "norm", "kthvalue", "quantile", "nanquantile")
def _norm(walk: Context, x: Seen, order: Any = 2, dim: Any = None, *args: Any, **kwargs: Any) -> list[Axes] | None:
    """The dimension is the second argument; quantiles of several numbers are not known here."""
    if isinstance(order, Seen):
        return None
    if dim is None:
        dim = {"kthvalue": -1, "linalg_matrix_norm": (-2, -1)}.get(walk.name)
    return _reduced(walk, x, dim, lambda axis: walk.block([axis], "reduced along it"))


def _reduced(walk: Context, x: Seen, dim: Any, act: Callable[[Axis], None]) -> list[Axes]:
    """`act` on what goes away. Whether it stays as dimensions of size 1 is seen from the shape of the result."""
    gone = dims_of(dim, len(x.shape))
    for d in gone:
        if x.shape:
            act(x.axes[d])
    if len(walk.shapes[0]) == len(x.shape):
        made = tuple(() if d in gone else axis for d, axis in enumerate(x.axes))
    else:
        made = tuple(axis for d, axis in enumerate(x.axes) if d not in gone)
    return [made] * len(walk.shapes)


# ---- ops that order or mix elements along a dimension


@rule(
    "softmax", "_softmax", "log_softmax", "_log_softmax", "special_softmax", "special_log_softmax", "cumsum", "cumsum_",
    "cumprod", "logcumsumexp", "cummax", "cummin", "argsort", "sort", "flip",
)  # fmt: skip
def _along(walk: Context, x: Seen, dim: Any = -1, *args: Any, dims: Any = None, **kwargs: Any) -> list[Axes]:
    _mixed(walk, x, dim if dims is None else dims)
    return [x.axes] * len(walk.shapes)


@rule("roll")
def _rolled(walk: Context, x: Seen, shifts: Any, dims: Any = None) -> list[Axes]:
    """Without dimensions, as if there were one."""
    _mixed(walk, x, dims)
    return [x.axes]


@rule("fft_fftshift", "fft_ifftshift")
def _shifted(walk: Context, x: Seen, dim: Any = None) -> list[Axes]:
    _mixed(walk, x, dim)
    return [x.axes]


@rule("tensor_split")
def _split_at(walk: Context, x: Seen, where: Any, dim: int = 0) -> list[Sequence[Axis | None]] | None:
    """At places, or into as many parts, of which the first may be larger."""
    return None if isinstance(where, Seen) else [_resized(x, _mixed(walk, x, dim))] * len(walk.shapes)


@rule("glu")
def _gated(walk: Context, x: Seen, dim: int = -1) -> list[Axes]:
    """The first half, times what the second one gives: a rank has a part of each."""
    d = dim % len(x.shape)
    first, second = cut(x.axes[d], x.shape[d] // 2, walk.why)
    walk.unify(first, second)
    return [(*x.axes[:d], first, *x.axes[d + 1 :])]


@rule("diff")
def _differences(
    walk: Context, x: Seen, n: int = 1, dim: int = -1, prepend: Seen | None = None, append: Seen | None = None
) -> list[Sequence[Axis | None]]:
    """Of neighbours; what comes before and after is as large in all other dimensions."""
    mixed = _mixed(walk, x, dim)
    for seen in (prepend, append):
        for d, axis in enumerate(seen.axes if seen is not None else ()):
            walk.block([axis]) if d in mixed else walk.unify(x.axes[d], axis)
    return [_resized(x, mixed)]


@rule("unfold")
def _unfolded(walk: Context, x: Seen, dim: int, size: int, step: int) -> list[Sequence[Axis | None]]:
    """Windows that slide along a dimension; what is inside of one comes last."""
    return [(*_resized(x, _mixed(walk, x, dim)), None)]


@rule(
    "fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft", "fft_fft2", "fft_ifft2", "fft_rfft2",
    "fft_irfft2", "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn",
)  # fmt: skip
def _fourier(
    walk: Context, x: Seen, sizes: Any = None, dim: Any = ..., *args: Any
) -> list[Sequence[Axis | None]] | None:
    """Sizes without dimensions are those of the last ones: not known."""
    if dim is ...:
        dim = {"2": (-2, -1), "n": None}.get(walk.name[-1], -1)
    return None if sizes is not None and dim is None else [_resized(x, _mixed(walk, x, dim))]


@rule("topk")
def _topk(walk: Context, x: Seen, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> list[Sequence[Axis | None]]:
    return [_resized(x, _mixed(walk, x, dim))] * 2


def _mixed(walk: Context, x: Seen, dim: Any) -> list[int]:
    """Block dimensions; returns which."""
    dims = dims_of(dim, len(x.shape))
    walk.block([x.axes[d] for d in dims if x.shape], "elements along it depend on each other")
    return dims


def _resized(x: Seen, dims: Iterable[int]) -> Sequence[Axis | None]:
    """The axes of a tensor of which some dimensions have another size."""
    return tuple(None if d in dims else axis for d, axis in enumerate(x.axes))


@rule("tril", "triu", "tril_", "triu_")
def _triangle(walk: Context, x: Seen, *args: Any) -> list[Axes]:
    walk.block(x.axes[-2:], "a triangle is cut out of it")
    return [x.axes]


@rule("cosine_similarity")
def _cosine(walk: Context, x: Seen, y: Seen, dim: int = 1, eps: float = 1e-8) -> list[Axes]:
    both = pointwise(walk, x, y)[0]
    d = dim % len(both)
    walk.block([both[d]], "normalised along it")
    return [(*both[:d], *both[d + 1 :])]


@rule("pairwise_distance")
def _distance(walk: Context, x: Seen, y: Seen, *args: Any, **kwargs: Any) -> list[Axes]:
    both = pointwise(walk, x, y)[0]
    walk.block(both[-1:], "reduced along it")
    return [(*both[:-1], *[()] * (1 + len(walk.shapes[0]) - len(both)))]


@rule("cross", "linalg_cross")
def _cross(walk: Context, x: Seen, y: Seen, dim: int | None = None) -> list[Axes]:
    """Without a dimension, one of the two looks for one of size 3, and the other takes the last one."""
    made = pointwise(walk, x, y)[0]
    if walk.name == "linalg_cross" and dim is None:
        dim = -1
    walk.block(made if dim is None else [made[dim]], "a cross product mixes along it")
    return [made]


@rule("cdist")
def _distances(walk: Context, x: Seen, y: Seen, *args: Any) -> list[Axes]:
    walk.block([x.axes[-1], y.axes[-1]], "reduced along it")
    batch = broadcast(walk, [x.axes[:-2], y.axes[:-2]], [x.shape[:-2], y.shape[:-2]])
    return [(*batch, x.axes[-2], y.axes[-2])]


@rule(
    "linalg_solve_triangular", "_linalg_solve_ex", "linalg_inv_ex", "linalg_cholesky_ex", "linalg_lu_factor_ex",
    "linalg_qr", "linalg_matrix_exp", "_linalg_det", "_linalg_slogdet", "_linalg_eigh", "_linalg_svd", "linalg_solve",
    "linalg_inv", "inverse", "linalg_cholesky", "linalg_det", "det", "linalg_slogdet", "slogdet", "logdet",
    "linalg_eigh", "linalg_eigvalsh", "linalg_svd", "linalg_svdvals", "svd", "linalg_pinv", "pinverse",
    "linalg_matrix_power", "matrix_power", "matrix_exp",
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


@rule("histc", "bincount")
def _counted(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Axes]:
    """How many elements there are of each kind; what it is made of can't be cut, nor can the kinds."""
    walk.block(x.axes, "counted along it")
    return [unshardable(walk, walk.shapes[0])]


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


@rule("instance_norm")
def _instance_norm(
    walk: Context, x: Seen, weight: Seen | None, bias: Seen | None, mean: Seen | None, var: Seen | None, *args: Any
) -> list[Axes]:
    """Running statistics are means over the batch."""
    walk.block([*x.axes[2:], *([x.axes[0]] if mean is not None else [])], "statistics are taken over it")
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


def _spatial(dims: int) -> Callable[..., list[Sequence[Axis | None]]]:
    """The rule for ops that mix the last `dims` dimensions into as many of whatever size."""

    def mixed(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Sequence[Axis | None]]:
        walk.block(x.axes[-dims:], "elements along it depend on each other")
        return [(*x.axes[:-dims], *[None] * dims)] * len(walk.shapes)

    return mixed


rule(
    "avg_pool1d", "max_pool1d", "max_pool1d_with_indices", "adaptive_avg_pool1d", "adaptive_max_pool1d",
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d", "reflection_pad1d", "replication_pad1d",
)(_spatial(1))  # fmt: skip
rule(
    "avg_pool2d", "max_pool2d", "max_pool2d_with_indices", "adaptive_avg_pool2d", "_adaptive_avg_pool2d",
    "adaptive_max_pool2d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_bicubic2d", "_upsample_bicubic2d_aa", "reflection_pad2d", "replication_pad2d",
)(_spatial(2))  # fmt: skip
rule(
    "avg_pool3d", "max_pool3d", "max_pool3d_with_indices", "adaptive_avg_pool3d", "_adaptive_avg_pool3d",
    "adaptive_max_pool3d", "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d",
    "reflection_pad3d", "replication_pad3d",
)(_spatial(3))  # fmt: skip


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
    walk.block([x.axes[time], x.axes[2], *_all_axes(parameters)], "one step follows another")
    rows: list[Axis | None] = [None, None, None]
    rows[batch] = x.axes[batch]
    return [rows, *[(None, x.axes[batch], None)] * 2]


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _cell(walk: Context, x: Seen, state: Any, *parameters: Any) -> list[Sequence[Axis | None]] | None:
    """One step: (batch, numbers), and states alike."""
    if len(x.shape) != 2:
        return None
    states = state if isinstance(state, (list, tuple)) else [state]
    for given in states:
        walk.unify(x.axes[0], given.axes[0])
    matrices = _all_axes([item for item in parameters if isinstance(item, Seen)])
    walk.block([*(given.axes[1] for given in (x, *states)), *matrices], "it is multiplied by a matrix")
    return [(x.axes[0], None)] * len(walk.shapes)


def _all_axes(seen: Iterable[Seen]) -> list[Axis]:
    return [axis for one in seen for axis in one.axes]
