"""Parameters without a dimension, which fully_shard can't divide: every rank has them, and gradients are averaged.

rank 0   backward: its gradient a  ┐
rank 1   backward: its gradient b  ┴▶  at the end of each backward (a + b) / 2, on both

A backward that an error ended is noticed here, too.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.errors import ApplyError
from autoshard.nested import flat_tensors
from autoshard.runtime.exchanges import MeanOfReplicas


class Scalars:
    """Hook of a model that averages the gradients of its scalars when a backward of what it returned is over.

    Those of earlier backwards are equal on all ranks, so that gradients may be added up. Where no rank has one there is
    none afterwards. `means`: over the ranks of a replica, and over replicas.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], means: Sequence[MeanOfReplicas]) -> None:
        self.parameters, self.means = parameters, means
        self.new = False  # whether there are gradients that were not averaged
        self.unfinished = False  # whether a backward has begun and did not end

    def __call__(self, module: nn.Module, args: tuple, result: Any) -> None:
        """Forward hook of the model."""
        tensors = [one for one in flat_tensors(result) if one.requires_grad]
        if tensors:
            torch.autograd.graph.register_multi_grad_hook(tensors, self._begin, mode="any")

    def check_finished(self, module: nn.Module, args: tuple) -> None:
        """Pre-hook of the model: raise `ApplyError` after a backward that an error ended.

        fully_shard would take gradients of that one for those of the next, which would be wrong and differ by rank.
        """
        if self.unfinished and torch.is_grad_enabled() and torch_private.autograd_node() is None:
            raise ApplyError(
                "the last backward ended with an error, and gradients that were being averaged would get into the "
                "next. End all ranks and go on from a checkpoint; or call autoshard.remove(model), apply the plan "
                "again, and make a new optimizer."
            )

    def watch(self) -> list[Any]:
        """Note gradients from now on, also of parameters that are trained later only; returns handles."""
        handles = []
        for one in (one for one in self.parameters if one.is_floating_point() or one.is_complex()):
            trained = one.requires_grad
            one.requires_grad_()  # torch takes no hook for others
            handles.append(one.register_post_accumulate_grad_hook(self._note))
            one.requires_grad_(trained)
        return handles

    def average(self, *_: Any) -> None:
        """Average the gradients; all ranks call it."""
        trained = [one for one in self.parameters if one.requires_grad]
        if not trained:
            return
        dtype = functools.reduce(torch.promote_types, (one.dtype for one in trained), torch.float32)
        with torch.no_grad():
            grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in trained]
            there = torch.tensor([one.grad is not None for one in trained], dtype=dtype, device=grads[0].device)
            values = torch.cat([torch.stack([grad.to(dtype) for grad in grads]), there])
            for mean in self.means:
                mean(values)
            averaged, used = values.chunk(2)
            for one, grad, value, count in zip(trained, grads, averaged, used.tolist(), strict=True):
                one.grad = grad.copy_(value) if count else None
        self.new = False

    def check(self, stepped: set[int]) -> None:
        """Raise `ApplyError` before a step of an optimizer with gradients that only this rank has."""
        if self.new and any(id(one) in stepped for one in self.parameters):
            raise ApplyError(
                "a parameter without a dimension has a gradient that was not averaged over ranks: backward did not go "
                "through what the model returned. Let the loss depend on the model's outputs."
            )

    def _begin(self, gradient: torch.Tensor) -> None:
        self.unfinished = True
        torch_private.after_backward(self._end)

    def _end(self) -> None:
        self.unfinished = False
        self.average()

    def _note(self, parameter: torch.Tensor) -> None:
        self.new = True


def choose_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Choose kernels for single tensors where parameters of a group are sharded in different ways.

    Those for lists of tensors take parameters of one mesh: experts that are divided have their own, scalars have none.
    """
    for group in optimizer.param_groups:
        if len({getattr(one, "device_mesh", None) for one in group["params"]}) < 2:
            continue
        if group.get("foreach") or group.get("fused"):
            raise ApplyError(
                f"this {type(optimizer).__name__} was told to use foreach or fused for parameters that are sharded in "
                "different ways. Give those without a dimension, and divided experts, groups of their own "
                '([{"params": …}, {"params": …}]), or leave foreach and fused as they are.'
            )
        if group.get("foreach", False) is None:
            group["foreach"] = False
