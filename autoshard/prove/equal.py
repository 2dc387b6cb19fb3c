"""The numbers: a whole block against all of its ranks in one process, outputs and gradients.

Sums over ranks are made in another order than in the whole block, so results agree to rounding and not bit for bit.
What is wrongly cut differs by the size of the values themselves. Everything runs in double precision where the code
takes it: what is left then is the rounding of parts that insist on single precision.
"""

import copy
import random
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from autoshard.nested import map_tensors, tensors_in
from autoshard.prove.differences import off_by
from autoshard.prove.sample import Sample
from autoshard.runtime.cuts import apply_cuts, cut_record
from autoshard.runtime.local_ranks import LocalRanks
from autoshard.runtime.rank_tensor import RankTensor
from autoshard.runtime.slices import merge
from autoshard.sharding import Cut

TOLERANCE = 2e-4
"""Largest difference relative to the largest value of a tensor."""
NOISE = 0.05
"""The part of the largest value of all that counts as the size of a tensor, too: a gradient that is zero but for
rounding (that of a bias which a softmax takes out again, say) has no size of its own to compare with."""
Results = dict[str, torch.Tensor]
"""Outputs, and gradients of arguments and parameters, by name."""
Arguments = tuple[tuple, dict[str, Any]]


class Unequal(Exception):
    """The ranks together do not give what the whole block gives."""


def check_equal(sample: Sample, cuts: tuple[Cut, ...]) -> str:
    """Compare a block with its ranks on all calls of the sample; say whether gradients could be compared too.

    The shares must be even, since all ranks are in this process. Raises `Unequal`, or what a rank raises.
    """
    differentiable = True
    for call in sample.calls:
        state = torch.get_rng_state()
        block, given, gradients, whole = _whole(sample, call)
        torch.set_rng_state(state)
        ranks = LocalRanks.of(["cpu"] * cuts[0].degree)
        found = _run(apply_cuts(copy.deepcopy(block), cuts, ranks), given, gradients)
        _compare(whole, found)
        differentiable &= any(name.startswith("the gradient") for name in whole)
    return "forward and backward" if differentiable else "forward"


def _whole(sample: Sample, call: Arguments) -> tuple[nn.Module, Arguments, bool, Results]:
    """Run the whole block in the first way that its code takes: (block, arguments, whether with gradients, results)."""

    def double(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        return tensor.detach().double().requires_grad_(tensor.requires_grad)

    doubled = copy.deepcopy(sample.block).double()
    state = torch.get_rng_state()
    for gradients in (True, False):  # some blocks refuse gradients
        for block, given in ((doubled, map_tensors(call, double)), (sample.block, call)):  # and some double precision
            torch.set_rng_state(state)
            with suppress(Exception):
                return block, given, gradients, _run(copy.deepcopy(block), given, gradients)
    torch.set_rng_state(state)
    return sample.block, call, False, _run(copy.deepcopy(sample.block), call, False)  # raises what it raises


def _run(block: nn.Module, given: Arguments, gradients: bool) -> Results:
    """One forward, and a backward from random gradients if there is anything to differentiate."""
    args, kwargs = copy.deepcopy(given)  # a cache among them is filled by every run
    random.seed(0)
    with torch.set_grad_enabled(gradients):
        output = block(*args, **kwargs)
        found = {f"output {path}": tensor.detach() for path, tensor in tensors_in(output)}
        roots = [tensor for _, tensor in tensors_in(output) if tensor.requires_grad and not tensor.is_complex()]
        if not roots:
            return found
        generator = torch.Generator().manual_seed(1)
        parts = [(root * torch.randn(root.shape, generator=generator)).sum().double() for root in roots]
        torch.stack(parts).sum().backward()
    for path, tensor in tensors_in((args, kwargs)):
        if tensor.is_leaf and tensor.grad is not None:  # torch warns where others are asked
            found[f"the gradient of argument {path}"] = tensor.grad
    record = cut_record(block)
    for name, parameter in block.named_parameters():
        if parameter.grad is not None:
            cut = None if record is None else record.tensors.get(name)
            gradient = parameter.grad
            if record is not None and cut is not None:
                gradient = merge(gradient, cut, record.ranks)
            found[f"the gradient of {name}"] = gradient
    return found


def _compare(whole: Results, found: Results) -> None:
    """Hold the tensors of all ranks against those of the whole. Raises `Unequal`."""
    missing = set(whole) ^ set(found)
    if missing:
        raise Unequal(f"{min(missing)} exists only {'in the whole' if min(missing) in whole else 'on ranks'}")
    sizes = {name: off_by(tensor, tensor)[1] for name, tensor in whole.items()}
    for name, wanted in whole.items():
        tensor = found[name]
        largest = max(size for other, size in sizes.items() if other[:6] == name[:6])
        for rank, part in enumerate(tensor.parts if isinstance(tensor, RankTensor) else (tensor,)):
            off, _ = off_by(wanted, part)
            if off > TOLERANCE * (sizes[name] + NOISE * largest):
                raise Unequal(f"{name} differs by {off:.2g} on rank {rank}, of values up to {sizes[name]:.2g}")
