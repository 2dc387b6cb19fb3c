"""What has to be known of an op before simulated devices run it."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from autoshard import torch_private
from autoshard.common.schemas import arguments_of_op

aten = torch.ops.aten

MIXING = {aten.copy_, aten.copy, aten._to_copy, aten._foreach_copy_, aten.set_}
"""Ops whose arguments may be on different devices: they are how tensors travel."""

CPU_ARGUMENTS: dict[Any, tuple[int, ...]] = {
    aten.index: (1,),
    aten._unsafe_index: (1,),
    aten.index_put: (1,),
    aten.index_put_: (1,),
    aten._index_put_impl_: (1,),
    aten._unsafe_index_put: (1,),
    aten._pack_padded_sequence: (1,),
    aten._pack_padded_sequence_backward: (2,),
    aten._ctc_loss: (2, 3),
    aten._ctc_loss_backward: (3, 4),
}
"""Positions where GPUs take (or insist on) ordinary CPU tensors of any size."""

CPU_RESULTS: dict[Any, tuple[int, ...]] = {aten._pack_padded_sequence: (1,)}
"""Results that GPUs leave on the CPU."""

RESHAPING = {aten.resize_, aten.resize_as_, aten.set_}
"""Ops besides the tagged ones after which the tensor written to has another shape or storage."""


@dataclass(frozen=True, slots=True)
class OpTraits:
    """What has to be known of an op before it runs."""

    composite: bool
    mixing: bool
    rowwise: bool  # takes lists whose i-th tensors belong together
    reshapes: bool
    written: tuple[int, ...]
    cpu_arguments: tuple[int, ...]
    cpu_results: tuple[int, ...]


@cache
def traits_of(func: Any) -> OpTraits:
    """Read an op's schema."""
    packet, arguments = getattr(func, "overloadpacket", None), arguments_of_op(func)
    has_out = any(argument.is_out for argument in arguments)
    return OpTraits(
        composite=isinstance(func, torch_private.OpOverload) and torch_private.is_composite(func),
        mixing=packet in MIXING,
        rowwise=str(packet).startswith("aten._foreach_"),
        reshapes=has_out or packet in RESHAPING or torch.Tag.inplace_view in getattr(func, "tags", ()),
        written=tuple(
            position
            for position, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write and not argument.kwarg_only
        ),
        cpu_arguments=CPU_ARGUMENTS.get(packet, ()),
        cpu_results=CPU_RESULTS.get(packet, ()),
    )
