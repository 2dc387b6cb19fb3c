"""The numbers: a whole block against its ranks, outputs and gradients.

Sums over ranks are made in another order than in the whole block, so results agree to rounding and not bit for bit.
What is wrongly cut differs by the size of the values themselves: the two are four orders of magnitude apart. Where a
block blows rounding up (long chains, gradients at kinks) its differences lie between; then double precision decides.
"""

import copy
import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.nested import map_tensors, tensors_in
from autoshard.prove.ranks import OwnDraws, ThreadRanks, run_ranks
from autoshard.prove.sample import Sample
from autoshard.runtime.cuts import apply_cuts, cut_record
from autoshard.runtime.slices import merge
from autoshard.sharding import Cut

TOLERANCE = 2e-4
"""Largest difference relative to the largest value of a tensor, in single precision."""
DOUBLE_TOLERANCE = 1e-9
"""The same in double precision, where single precision is in doubt."""
DOUBT = 0.1
"""A larger relative difference is no rounding."""
NOISE = 0.05
"""The part of the largest value of all that counts as the size of a tensor, too: a gradient that is zero but for
rounding (that of a bias which a softmax takes out again, say) has no size of its own to compare with."""


class Unequal(Exception):
    """The ranks together do not give what the whole block gives."""


class InDoubt(Unequal):
    """They differ by more than rounding does as a rule, and by little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one call of a block gave: outputs, and gradients of arguments and parameters, by name."""

    tensors: dict[str, torch.Tensor]
    differentiable: bool


def check_equal(sample: Sample, cuts: tuple[Cut, ...]) -> str:
    """Compare a block with its ranks on all calls of the sample; say whether gradients could be compared too, and how.

    Raises `Unequal`, or what a rank raises.
    """
    try:
        return _checked(sample, cuts, TOLERANCE)
    except InDoubt as doubt:
        try:
            return f"{_checked(_doubled(sample), cuts, DOUBLE_TOLERANCE)}, in double precision"
        except Exception:  # code of the block may insist on single precision
            raise doubt from None


def _doubled(sample: Sample) -> Sample:
    def double(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        return tensor.detach().double().requires_grad_(tensor.requires_grad)

    return Sample(block=copy.deepcopy(sample.block).double(), calls=map_tensors(sample.calls, double))


def _checked(sample: Sample, cuts: tuple[Cut, ...], tolerance: float) -> str:
    differentiable = True
    for args, kwargs in sample.calls:
        before = torch.get_rng_state()
        whole, gradients = _whole(sample, args, kwargs)
        draws = not torch.equal(torch.get_rng_state(), before)
        if draws:
            torch.set_rng_state(before)
            with OwnDraws(before):
                whole, gradients = _whole(sample, args, kwargs)
        differentiable &= whole.differentiable

        def work(
            ranks: ThreadRanks,
            args: tuple = args,
            kwargs: dict[str, Any] = kwargs,
            state: torch.Tensor | None = before if draws else None,
        ) -> Run:
            local = copy.deepcopy(sample.block)
            apply_cuts(local, cuts, ranks)
            with nullcontext() if state is None else OwnDraws(state):
                return _run(local, args, kwargs, ranks)

        with torch.set_grad_enabled(gradients):
            for rank, found in enumerate(run_ranks(work, cuts[0].degree)):
                _compare(rank, whole, found, tolerance)
    return "forward and backward" if differentiable else "forward"


def _whole(sample: Sample, args: tuple, kwargs: dict[str, Any]) -> tuple[Run, bool]:
    """Run the whole block, with gradients if it can, and say whether it could."""
    try:
        with torch.enable_grad():
            return _run(copy.deepcopy(sample.block), args, kwargs, None), True
    except Exception:  # some blocks refuse gradients; what fails without them as well is an error of its own
        with torch.no_grad():
            return _run(copy.deepcopy(sample.block), args, kwargs, None), False


def _run(block: nn.Module, args: tuple, kwargs: dict[str, Any], ranks: ThreadRanks | None) -> Run:
    """One forward, and a backward from random gradients if there is anything to differentiate."""
    args, kwargs = copy.deepcopy((args, kwargs))  # a cache among them is filled by every run
    random.seed(0)
    output = block(*args, **kwargs)
    tensors = {f"output {path}": tensor.detach() for path, tensor in tensors_in(output)}
    roots = [tensor for _, tensor in tensors_in(output) if tensor.requires_grad]
    if roots:
        generator = torch.Generator().manual_seed(1)
        loss = sum(
            (root * torch.randn(root.shape, generator=generator)).sum() for root in roots if not root.is_complex()
        )
        if isinstance(loss, torch.Tensor):
            loss.backward()
        tensors.update(_gradients(block, args, kwargs, ranks))
    return Run(tensors=tensors, differentiable=bool(roots))


def _gradients(
    block: nn.Module, args: tuple, kwargs: dict[str, Any], ranks: ThreadRanks | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for path, tensor in tensors_in((args, kwargs)):
        if tensor.is_leaf and tensor.grad is not None:  # torch warns where others are asked
            yield f"the gradient of argument {path}", tensor.grad
    record = cut_record(block) if ranks is not None else None
    for name, parameter in block.named_parameters():
        if parameter.grad is not None:
            cut = record.tensors.get(name) if record is not None else None
            gradient = parameter.grad if ranks is None else merge(parameter.grad, cut, ranks)
            yield f"the gradient of {name}", gradient


def _compare(rank: int, whole: Run, found: Run, tolerance: float) -> None:
    missing = set(whole.tensors) ^ set(found.tensors)
    if missing:
        raise Unequal(f"{min(missing)} exists only {'in the whole' if min(missing) in whole.tensors else 'on ranks'}")
    largest = {kind: max((_size(t) for n, t in whole.tensors.items() if (n[:6] == "output") is kind), default=0.0)
               for kind in (True, False)}  # fmt: skip
    for name, wanted in whole.tensors.items():
        tensor = found.tensors[name]
        if tensor.shape != wanted.shape:
            raise Unequal(f"{name} has shape {tuple(tensor.shape)} on rank {rank}, {tuple(wanted.shape)} in the whole")
        if not wanted.is_floating_point():
            if not torch.equal(tensor, wanted):
                raise Unequal(f"{name} differs on rank {rank}")
            continue
        if not math.isfinite(wanted.sum().item()) and not torch.equal(wanted.isfinite(), tensor.isfinite()):
            raise Unequal(f"{name} is not finite in the same places on rank {rank}")
        scale, off = _size(wanted), _size(tensor - wanted)
        size = scale + NOISE * largest[name[:6] == "output"]
        if off > tolerance * size:
            kind = InDoubt if off <= DOUBT * size else Unequal
            raise kind(f"{name} differs by {off:.2g} on rank {rank}, of values up to {scale:.2g}")


def _size(tensor: torch.Tensor) -> float:
    """The largest finite absolute value."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    largest = tensor.abs().max().item()
    if math.isfinite(largest):
        return largest
    values = tensor[tensor.isfinite()]
    return values.abs().max().item() if values.numel() else 0.0
