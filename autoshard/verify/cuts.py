"""What is different where the applied model is cut over ranks: whole tensors, tensors that stay cut, and rounding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoshard.plan import Plan
from autoshard.runtime.collectives import count_processes
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.rank_tensor import RankTensor
from autoshard.runtime.slices import merge
from autoshard.torch_private import DispatchMode

_ROUNDING = {torch.float64: 1e-12, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten.copy_.default}
REORDERED = (
    "sums over devices are made in another order than in one matrix, so results are equal to rounding: what passes is "
    "1e-5 of the largest value of a tensor in float32 (1e-2 in float16, 5e-2 in bfloat16)"
)


COARSE = (
    "the original computes in {}, so {} of the largest value of a tensor passes in tensors of every type: a smaller "
    "fault is not seen"
)


class CoarsestType(DispatchMode):
    """Notes in which type of half precision something is computed inside, the one with the fewest digits."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype in (torch.float16, torch.bfloat16) and not func.is_view:
            source = args[1 if func is torch.ops.aten.copy_.default else 0] if func in _COPIES else None
            if source is None or source.dtype != made.dtype:  # a copy rounds nothing
                self.dtype = max(filter(None, (self.dtype, made.dtype)), key=_ROUNDING.__getitem__)
        return made


def rounding_of(tensor: torch.Tensor, coarsest: torch.dtype | None = None) -> float:
    """Errors up to this fraction of the largest value can come from adding in another order.

    `coarsest`: a type in which something on the way to it may have been computed.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return max(_ROUNDING.get(tensor.dtype, 1e-5), 0.0 if coarsest is None else _ROUNDING[coarsest])


def whole_tensors(model: nn.Module) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return what makes the whole of a parameter, buffer or gradient with a name; all ranks call it.

    Where ranks that should have the same have not, it makes NaNs, which equal nothing.
    """
    record = cut_record(model)
    if record is None:
        return lambda name, tensor: tensor

    def whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
        cut = record.tensors.get(name)
        if cut is None and isinstance(tensor, RankTensor):
            first, *others = (part.detach().cpu() for part in tensor.parts)
            rtol = rounding_of(first)
            for part in others:
                if not torch.allclose(part, first, rtol=rtol, atol=rtol * _largest(first), equal_nan=True):
                    return torch.full_like(first, torch.nan, dtype=None if first.is_floating_point() else torch.float32)
        return merge(tensor, cut, record.ranks)

    return whole


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def matched(whole: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor and its parts on ranks (a cache stays cut) in the same order: each slice by the nearest one.

    Which slices a rank has is not known here. Where there is one part, that of this process, it is held against the
    slices of the whole that are nearest. Where it can't be a part, both come back as they are.
    """
    first = parts[0]
    dims = [dim for dim in range(whole.dim()) if first.dim() == whole.dim() and first.shape[dim] != whole.shape[dim]]
    if len(dims) != 1 or whole.numel() == 0 or first.numel() == 0:
        return whole, first
    slices = whole.movedim(dims[0], 0).flatten(1)
    pieces = torch.cat(parts, dims[0]).movedim(dims[0], 0).flatten(1)
    if len(parts) == 1:
        return slices[_nearest(slices, pieces)], pieces
    return slices, pieces[_nearest(pieces, slices)]


def _nearest(rows: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """For each row of one matrix, which of the other is nearest."""
    return torch.stack([(rows.double() - row.double()).abs().amax(1).argmin() for row in to])


def runs_in_processes(plan: Plan) -> bool:
    """Whether every rank of a plan is one of several processes."""
    return bool(plan.cuts) and count_processes() > 1
