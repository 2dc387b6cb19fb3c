"""What an op's schema says about it, looked up once per op: what it writes, what it returns, how it may be run."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from autoshard.common.schemas import schema_of
from autoshard.errors import CaptureError
from autoshard.torch_private import is_composite

aten = torch.ops.aten

# Kernels that write arguments which their schemas do not mark, while `training` (argument 5) is true.
_UNMARKED_WRITES = dict.fromkeys((aten.native_batch_norm.default, aten.batch_norm.default), (3, 4))
_READS_VALUE = {aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, aten.equal.default}
WHOLE = frozenset({
    "linear", "matmul", "einsum", "bilinear", "cdist", "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "lstm", "gru", "rnn_tanh", "rnn_relu", "max_pool1d",
    "layer_norm", "rms_norm", "_fused_rms_norm", "group_norm", "batch_norm", "softmax", "log_softmax", "log_sigmoid",
    "dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_", "rrelu",
    "rrelu_", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "reshape", "flatten", "contiguous", "to", "one_hot",
    "stft", "istft", "split", "chunk", "unsafe_chunk", "embedding_bag", "grid_sampler", "_weight_norm",
    "repeat_interleave.self_int", "where.Scalar", "where.ScalarSelf", "where.ScalarOther", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "prelu", "quantile.scalar", "nanquantile.scalar",
})  # fmt: skip
"""Composite ops that composite graphs have as one: a rule says more of them than of their parts."""
_UNINITIALISED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")


@dataclass(frozen=True, slots=True)
class Traits:
    """One op's traits.

    Attributes:
        op: the op itself, which so lives as long as what is known of it by its address.
        writes: (position, name) of the arguments it writes.
        unmarked: positions of those it writes besides, in training, without saying so.
        returns: for each return, the index into `writes` of the argument it hands back, or None.
        view: returns memory of its first argument, writes nothing.
        pointwise: output shape is the broadcast of the input shapes.
        random: draws random numbers, or leaves memory uninitialised: its values mean nothing before the real run.
        reads_value: gives Python a number or a bool out of a tensor.
        lift: hands a fresh constant to the dispatcher; nothing is computed.
        prim: no op, but a question of torch's own about a tensor.
        in_parts: also composite graphs have the ops that it is made of in its place.
    """

    op: Any
    writes: tuple[tuple[int, str], ...]
    unmarked: tuple[int, ...]
    returns: tuple[int | None, ...]
    view: bool
    pointwise: bool
    random: bool
    reads_value: bool
    lift: bool
    prim: bool
    in_parts: bool


@cache
def traits_of(func: Any) -> Traits:
    """Read an op's schema. Raises `CaptureError` for an op without one."""
    schema = schema_of(func)
    if schema is None:
        raise CaptureError(
            f"torch can't say what {func} is given and writes, so it can't be recorded. Run it outside of the model, "
            "or write that part with other operations."
        )
    writes: list[tuple[int, str]] = []
    alias_sets: list[set[str]] = []
    reads_alias = False
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None:
            continue
        if info.is_write:
            writes.append((position, argument.name))
            alias_sets.append(set(info.before_set))
        else:
            reads_alias = True
    returns: list[int | None] = []
    for result in schema.returns:
        info = result.alias_info
        match = None
        if info is not None and info.is_write:
            match = next((i for i, names in enumerate(alias_sets) if names & set(info.before_set)), None)
        returns.append(match)
    name = schema.name.split("::")[-1]
    return Traits(
        op=func,
        writes=tuple(writes),
        unmarked=_UNMARKED_WRITES.get(func, ()),
        returns=tuple(returns),
        view=reads_alias and not writes and func.is_view,
        pointwise=torch.Tag.pointwise in func.tags,
        random=torch.Tag.nondeterministic_seeded in func.tags or name in _UNINITIALISED,
        reads_value=func in _READS_VALUE,
        lift=name in ("lift_fresh", "lift_fresh_copy", "lift"),
        prim=func.namespace == "prim",
        in_parts=_in_parts(func, schema, name),
    )


def _in_parts(func: Any, schema: Any, name: str) -> bool:
    whole = name in WHOLE or f"{name}.{schema.overload_name}" in WHOLE or torch.Tag.pointwise in func.tags
    makes_tensors = any("Tensor" in str(result.type) for result in schema.returns)
    return makes_tensors and not whole and is_composite(func)


def written_by(traits: Traits, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors an op writes, those that its schema keeps quiet about included."""
    places = [args[position] if position < len(args) else kwargs.get(name) for position, name in traits.writes]
    if traits.unmarked and args[5]:
        places += [args[position] for position in traits.unmarked]
    return tensors_of(places, {})


def tensors_of(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensor arguments of an op in order; schemas nest them one list deep at most."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def swap_tensors(value: Any, change: Any) -> Any:
    """An op's argument with its tensors replaced; lists become lists, everything else is kept."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [change(item) if isinstance(item, torch.Tensor) else item for item in value]
    return value
