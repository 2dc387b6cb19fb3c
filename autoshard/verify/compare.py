"""The comparison of two runs: one rule of what passes, and the first result that does not."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.common.schemas import name_of_op
from autoshard.torch_private import DispatchMode
from autoshard.verify.report import Difference, Verification
from autoshard.verify.run import RunResult, Work, largest, rounding_of

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # the one with the fewest digits last
_COPIES = {"aten::_to_copy": 0, "aten::clone": 0, "aten::copy_": 1}  # which argument of each is copied
NOISE = 0.1
"""Errors in a gradient up to this part of what rounding makes of the largest of all gradients are noise."""


class CoarsestType(DispatchMode):
    """Notes in which types something is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    @property
    def dtype(self) -> torch.dtype | None:
        """The type with the fewest digits: of half precision, or single precision beside double; None for no such."""
        coarsest = max(self.types, key=_FLOATS.index, default=torch.float64)
        least = torch.float32 if torch.float64 in self.types else torch.float16
        return coarsest if _FLOATS.index(coarsest) >= _FLOATS.index(least) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype in _FLOATS and not func.is_view:
            copied = _COPIES.get(name_of_op(func))
            source = None if copied is None else args[copied]
            if source is None or source.dtype != made.dtype:  # a copy rounds nothing
                self.types.add(made.dtype)
        return made


@dataclass(slots=True)
class Errors:
    """The largest errors so far, and the first result beyond the tolerance."""

    largest: float = 0.0
    relative: float = 0.0
    first: Difference | None = None
    beyond: float = 0.0  # the largest error, in tolerances


def stopped(during: str, message: str, module: str = "", output: str = "") -> Errors:
    """The errors of a run that could not be compared, or not any further."""
    first = Difference(during=during, module=module, output=output, max_error=math.inf, message=message)
    return Errors(math.inf, math.inf, first, math.inf)


def verification(errors: Errors, work: Work, notes: list[str], **simulated: Any) -> Verification:
    """The outcome of a comparison; `simulated`: fields of `Verification` about simulated devices."""
    return Verification(
        ok=errors.first is None, max_error=errors.largest, max_relative_error=errors.relative,
        first_difference=errors.first, compared=work.compared, notes=tuple(notes), **{"simulated": False, **simulated},
    )  # fmt: skip


def compare(expected: list[RunResult], found: list[RunResult], tolerance: float, work: Work) -> Errors:
    """Compare two runs of some work result by result; they must have the same results in the same order.

    `tolerance`: the largest absolute error that passes. Where sums are reordered what rounding makes of it passes as
    well, as are those of gradients wherever a tensor is used on several devices; what is cut may also be there in part.
    """
    errors = Errors()
    noise = _noise(expected, work.coarsest)
    for ours, theirs in zip(found, expected, strict=False):
        if (ours.module, ours.output) != (theirs.module, theirs.output):
            message = f"the original has {theirs.output!r} of {theirs.module!r} here"
            return _until(errors, stopped(ours.during, message, ours.module, ours.output))
        passes = tolerance
        if work.reordered or ours.during in ("backward", "optimizer step"):
            passes += max(rounding_of(theirs.value, work.coarsest) * largest(theirs.value), noise[theirs.during])
        _compare_one(theirs, ours, passes, errors, work.cut)
    if len(expected) != len(found):
        longer = max(expected, found, key=len)[min(len(expected), len(found))]
        who = "applied model has" if len(found) > len(expected) else "original has"
        return _until(errors, stopped(longer.during, f"only the {who} it", longer.module, longer.output))
    return errors


def _until(errors: Errors, end: Errors) -> Errors:
    end.first = errors.first or end.first
    return end


def _compare_one(expected: RunResult, found: RunResult, tolerance: float, errors: Errors, cut: bool) -> None:
    left, right, message = expected.value, found.value, ""
    if cut and left.shape != right.shape:
        left, right = _matched(left, found.parts or (right,))
    if left.shape != right.shape or left.dtype != right.dtype:
        error = relative = math.inf
        message = f"{left.dtype} {list(left.shape)} became {right.dtype} {list(right.shape)}"
    else:
        error, relative = _distance(left, right)
    errors.largest, errors.relative = max(errors.largest, error), max(errors.relative, relative)
    if error > tolerance:
        errors.beyond = max(errors.beyond, error / tolerance if tolerance else math.inf)
        errors.first = errors.first or Difference(
            during=found.during, module=found.module, output=found.output, max_error=error, message=message
        )


def _noise(results: list[RunResult], coarsest: torch.dtype | None) -> dict[str, float]:
    """What a gradient that is zero but for rounding may be: it has no size of its own to compare with."""
    noise = dict.fromkeys((result.during for result in results), 0.0)
    for result in results:
        if result.during == "backward":
            rounding = rounding_of(result.value, coarsest) * largest(result.value)
            noise["backward"] = max(noise["backward"], NOISE * rounding)
    return noise


def _distance(left: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """The largest difference, and that as a part of the largest value of `left`.

    Equal infinities and NaNs are equal, other NaNs are infinitely far.
    """
    if left.numel() == 0 or torch.equal(left, right):
        return 0.0, 0.0
    wide = torch.complex128 if left.is_complex() else torch.float64
    left, right = left.to(wide), right.to(wide)
    same = (left == right) | (left.isnan() & right.isnan())
    apart = float(torch.where(same, 0.0, (left - right).abs()).nan_to_num(nan=math.inf, posinf=math.inf).max())
    size = float(left.abs().nan_to_num(0.0, 0.0).max())
    return apart, apart / size if size else math.inf if apart else 0.0


def _matched(whole: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
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
