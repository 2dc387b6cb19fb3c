"""One run of a model, reduced to what can be compared, and the comparison."""

import copy
import math
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.capture.backward import training_loss
from autoshard.nested import map_tensors, tensors_in
from autoshard.packed import named_stored
from autoshard.runtime.rank_tensor import RankTensor
from autoshard.verify.cuts import COARSE, CoarsestType, matched, rounding_of, whole_tensors
from autoshard.verify.report import Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One tensor that a run produced, on the CPU: when, where (module path, or ""), which, and its values.

    `parts`: of a tensor that ranks have different parts of, all of them.
    """

    during: str
    module: str
    output: str
    value: torch.Tensor
    parts: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a run does: a forward, or training steps with an optimizer, and then a cached greedy decode.

    Attributes:
        cut: the applied model is cut over ranks. divided: it runs in parts of its batch. Results of either are equal to
            rounding.
        coarsest: a type of half precision that the original computes in, None if it does in none.
        staying_cut: paths of outputs that ranks keep parts of (caches), which no loss can be made of.
    """

    args: tuple
    kwargs: dict[str, Any]
    training: bool
    optimizer: str
    new_tokens: int
    cut: bool = False
    divided: bool = False
    coarsest: torch.dtype | None = None
    staying_cut: frozenset[str] = frozenset()

    @property
    def reordered(self) -> bool:
        """Whether sums are made in another order than by the original."""
        return self.cut or self.divided

    @property
    def compared(self) -> tuple[str, ...]:
        stages = ["forward"]
        if self.training:
            stages += ["backward"] if self.optimizer == "none" else ["backward", "optimizer step"]
        return tuple([*stages, "decode"] if self.new_tokens else stages)


def run(
    model: nn.Module,
    work: Work,
    device: torch.device | None = None,
    measure: Callable[[], None] | None = None,
    results: list[Result] | None = None,
) -> list[Result]:
    """Run the model on copies of the inputs, placed on `device` (None: where they are).

    `results`, if given, is what results are added to, so that they are there if the run stops in between.
    `measure`, if given, is called before the pass whose peak counts: the decode if there is one, else a second pass or
    step, since that is what the estimate is of.
    """
    measure_pass = None if work.new_tokens else measure
    results = [] if results is None else results
    if work.training:
        results += list(_train(model, work, device, measure_pass))
    else:
        with torch.no_grad():
            results += list(_forward(model, work, device, measure_pass))
    if work.new_tokens:
        args, kwargs = _copied((work.args, work.kwargs), device)
        if measure is not None:
            measure()
        tokens = model.generate(*args, **kwargs, max_new_tokens=work.new_tokens, do_sample=False)  # type: ignore[operator]
        results += results_of("decode", "", "tokens", tokens)
    return results


def _copied(value: Any, device: torch.device | None) -> Any:
    """Copy arguments, so that a run that writes into them leaves the user's alone, and tensors to a device."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.detach().clone() if device is None else tensor.detach().to(device, copy=True)
        return moved.requires_grad_(tensor.requires_grad)

    detached = map_tensors(value, lambda tensor: tensor if tensor.is_leaf else tensor.detach())
    return map_tensors(copy.deepcopy(detached), move)


def _forward(
    model: nn.Module, work: Work, device: torch.device | None, measure: Callable[[], None] | None
) -> Iterator[Result]:
    """Take a pass to compare and, if peaks are measured, another: by then all copies that are kept are there."""
    args, kwargs = _copied((work.args, work.kwargs), device)
    output = _listed(model(*args, **kwargs))
    yield from results_of("forward", "", "output", output)
    yield from results_of("forward", "", "argument", [*args, *kwargs.values()])
    yield from _buffers(model)
    if measure is not None:
        del args, kwargs, output
        args, kwargs = _copied((work.args, work.kwargs), device)
        measure()
        _listed(model(*args, **kwargs))


def _train(
    model: nn.Module, work: Work, device: torch.device | None, measure: Callable[[], None] | None
) -> Iterator[Result]:
    """Take a step to compare and, if peaks are measured, another: by then all optimizer state is there."""
    optimizer = optimizer_of(work.optimizer, [parameter for parameter in model.parameters() if parameter.requires_grad])
    whole = whole_tensors(model)
    model.zero_grad()
    args, kwargs = _copied((work.args, work.kwargs), device)
    output = _listed(model(*args, **kwargs))
    loss = _weighted_loss(output, type(model).__name__, work.staying_cut)
    loss.backward()
    yield from results_of("forward", "", "output", output)
    yield from results_of("backward", "", "loss", loss)
    gradients = list(_gradients(model, args, kwargs))
    yield from gradients
    yield from _buffers(model)
    del args, kwargs, output, loss
    if optimizer is not None:
        soften(optimizer, max((_scale(result.value) for result in gradients), default=0.0))
        del gradients
        optimizer.step()
        for name, parameter in model.named_parameters():
            module = name.rpartition(".")[0]
            yield from results_of("optimizer step", module, f"parameter {name}", whole(name, parameter))
    if measure is not None:
        model.zero_grad()
        args, kwargs = _copied((work.args, work.kwargs), device)
        measure()
        output = _listed(model(*args, **kwargs))
        loss = training_loss(output, type(model).__name__)
        loss.backward()
        if optimizer is not None:
            optimizer.step()


def _weighted_loss(output: Any, name: str, left_out: frozenset[str]) -> torch.Tensor:
    """The output's own `.loss`, else the differentiable tensors in it summed with unequal weights.

    A plain sum would do for memory, but its gradient is one number expanded, which a copy between devices makes dense,
    and kernels may round the two otherwise; and all that normalises would hide errors behind a gradient of zero.
    """
    found = {
        id(tensor): tensor
        for path, tensor in tensors_in(output)
        if tensor.requires_grad and tensor.is_floating_point() and path not in left_out
    }
    if not found or _own_loss(output) is not None:
        return training_loss(output, name)
    parts = []
    for tensor in found.values():
        weights = torch.arange(tensor.numel(), dtype=torch.float32).cos().view(tensor.shape)
        parts.append((tensor * weights.to(tensor.device, tensor.dtype)).sum().to("cpu", torch.float32))
    return torch.stack(parts).sum()


def _own_loss(output: Any) -> torch.Tensor | None:
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return own if isinstance(own, torch.Tensor) and own.requires_grad else None


def _gradients(model: nn.Module, args: tuple, kwargs: dict) -> Iterator[Result]:
    """Yield gradients from last to first, the order in which backward reaches them."""
    whole = whole_tensors(model)
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None:
            gradient = whole(name, parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
            yield from results_of("backward", name.rpartition(".")[0], f"gradient of {name}", gradient)
    for path, tensor in tensors_in((args, kwargs)):
        if tensor.is_leaf and tensor.grad is not None:
            yield from results_of("backward", "", f"gradient of argument {path}", tensor.grad)


def _buffers(model: nn.Module) -> Iterator[Result]:
    whole = whole_tensors(model)
    for name, buffer in model.named_buffers():
        yield from results_of("forward", name.rpartition(".")[0], f"buffer {name}", whole(name, buffer))


def soften(optimizer: torch.optim.Optimizer, largest: float) -> None:
    """Keep Adam from dividing gradients that are but rounding by themselves, which makes whole steps of them."""
    for group in optimizer.param_groups:
        if "eps" in group and largest:
            group["eps"] = largest


def optimizer_of(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimizer that a workload names, with a small step; None for "none", or where there is nothing to train."""
    makers: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=1e-3),
        "momentum": lambda: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        "adam": lambda: torch.optim.Adam(parameters, lr=1e-3),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-3),
    }
    return makers[name]() if name in makers and parameters else None


def _listed(output: Any) -> Any:
    return list(output) if isinstance(output, types.GeneratorType) else output


def results_of(during: str, module: str, what: str, value: Any) -> Iterator[Result]:
    found = [
        (f"{path}.{name}".strip("."), part) for path, whole in tensors_in(value) for name, part in named_stored(whole)
    ]
    for path, tensor in found:
        parts = tensor.parts if isinstance(tensor, RankTensor) else (tensor,)
        values = tuple(part.detach().to("cpu", copy=True) for part in parts)
        yield Result(
            during=during,
            module=module,
            output=f"{what} {path}".strip(),
            value=values[0],
            parts=values if isinstance(tensor, RankTensor) else (),
        )


def coarsened(work: Work, types: CoarsestType | None, notes: list[str]) -> Work:
    """The work with the coarsest type that its original was seen to compute in, and a note of what that lets pass."""
    if types is None or types.dtype is None:
        return work
    notes.append(COARSE.format(str(types.dtype).removeprefix("torch."), rounding_of(torch.empty(0), types.dtype)))
    return replace(work, coarsest=types.dtype)


NOISE = 0.1
"""Errors in a gradient up to this part of what rounding makes of the largest of all gradients are noise."""


@dataclass(slots=True)
class Errors:
    """The largest errors so far, and the first result beyond the tolerance."""

    largest: float = 0.0
    relative: float = 0.0
    first: Difference | None = None
    beyond: float = 0.0  # the largest error, in tolerances


def compare(expected: list[Result], found: list[Result], tolerance: float, work: Work) -> Errors:
    """Compare two runs of some work result by result; they must have the same results in the same order.

    `tolerance`: the largest absolute error that passes. Where sums are reordered what rounding makes of it passes as
    well, as are those of gradients wherever a tensor is used on several devices; what is cut may also be there in part.
    """
    errors = Errors()
    noise = _noise(expected, work.coarsest)
    for ours, theirs in zip(found, expected, strict=False):
        if (ours.module, ours.output) != (theirs.module, theirs.output):
            message = f"the original has {theirs.output!r} of {theirs.module!r} here"
            difference = Difference(
                during=ours.during, module=ours.module, output=ours.output, max_error=math.inf, message=message
            )
            return Errors(math.inf, math.inf, errors.first or difference, math.inf)
        passes = tolerance
        if work.reordered or ours.during in ("backward", "optimizer step"):
            passes += max(rounding_of(theirs.value, work.coarsest) * _scale(theirs.value), noise[theirs.during])
        _compare_one(theirs, ours, passes, errors, work.cut)
    if len(expected) != len(found):
        longer = max(expected, found, key=len)[min(len(expected), len(found))]
        who = "applied model has" if len(found) > len(expected) else "original has"
        message = f"only the {who} it"
        difference = Difference(
            during=longer.during, module=longer.module, output=longer.output, max_error=math.inf, message=message
        )
        return Errors(math.inf, math.inf, errors.first or difference, math.inf)
    return errors


def _compare_one(expected: Result, found: Result, tolerance: float, errors: Errors, cut: bool) -> None:
    left, right, message = expected.value, found.value, ""
    if cut and left.shape != right.shape:
        left, right = matched(left, found.parts or (right,))
    if left.shape != right.shape or left.dtype != right.dtype:
        error = relative = math.inf
        message = f"{left.dtype} {list(left.shape)} became {right.dtype} {list(right.shape)}"
    else:
        error, relative = _distance(left, right)
    errors.largest, errors.relative = max(errors.largest, error), max(errors.relative, relative)
    if error > tolerance:
        errors.beyond = max(errors.beyond, error / tolerance if tolerance else math.inf)
    if error > tolerance and errors.first is None:
        errors.first = Difference(
            during=found.during, module=found.module, output=found.output, max_error=error, message=message
        )


def _noise(results: list[Result], coarsest: torch.dtype | None) -> dict[str, float]:
    """What a gradient that is zero but for rounding may be: it has no size of its own to compare with."""
    noise = dict.fromkeys((result.during for result in results), 0.0)
    for result in results:
        if result.during == "backward":
            rounding = rounding_of(result.value, coarsest) * _scale(result.value)
            noise["backward"] = max(noise["backward"], NOISE * rounding)
    return noise


def _scale(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0


def _distance(left: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """Largest absolute and relative difference; equal infinities and NaNs are equal, other NaNs are infinitely far."""
    if left.numel() == 0 or torch.equal(left, right):
        return 0.0, 0.0
    wide = torch.complex128 if left.is_complex() else torch.float64
    left, right = left.to(wide), right.to(wide)
    apart = (left - right).abs()
    same = (left == right) | (left.isnan() & right.isnan())
    apart = torch.where(same, 0.0, apart).nan_to_num(nan=math.inf, posinf=math.inf)
    relative = torch.where(same, 0.0, apart / left.abs().clamp(min=torch.finfo(torch.float64).tiny))
    return float(apart.max()), float(relative.nan_to_num(nan=math.inf, posinf=math.inf).max())
