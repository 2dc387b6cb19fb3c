"""The module that torch's pipelining runs for one stage: a program, and on the last stage the loss.

forward(received …, part=[i])  ──▶  what is sent on              torch gives the number of the part, the rank has
                               ──▶  loss of part i, as [1]       its inputs and targets already
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoshard.errors import ApplyError
from autoshard.pipelines.programs import Program
from autoshard.runtime.sharded_stages import run_inside

Finisher = Callable[[int, tuple[torch.Tensor, ...]], torch.Tensor]
"""(part, outputs of the model) -> what backward begins with, of shape [1]; keeps the outputs."""


class StageModule(nn.Module):
    """One stage on the user's own parameters. `programs` and `inputs`, per part, and `finish` are set for each step.

    `engines`: what of it fully_shard gathers as one, the model last; empty where parameters are whole. `split`: whether
    gradients of parameters are computed apart from the others. `earlier`: tensors of stages before it.
    """

    engines: Sequence[nn.Module]  # no modules of this one
    earlier: Sequence[torch.Tensor]  # no parameters of this one

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        recompute: bool,
        split: bool = False,
        engines: Sequence[nn.Module] = (),
        earlier: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self.recompute, self.split = recompute, split
        vars(self).update(engines=tuple(engines), earlier=tuple(earlier))
        self.programs: list[Program] = []
        self.inputs: list[tuple[torch.Tensor, ...]] = []
        self.finish: Finisher | None = None
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"p{index}", parameter)

    def forward(self, *received: torch.Tensor, part: torch.Tensor) -> Any:
        """Run a part of the batch; `part` is [its number]."""
        number = int(part)
        run = self.programs[number].run
        # not the buffers that torch receives into, nor leaves
        arrived = tuple(tensor.view_as(tensor) for tensor in received)
        for tensor in arrived:
            if tensor.requires_grad:
                tensor.register_hook(torch.Tensor.contiguous)  # gradients are sent, which only such can be
        if self.recompute and torch.is_grad_enabled():
            made = checkpoint(run, arrived, self.inputs[number], use_reentrant=False)
        elif self.engines:
            made = run_inside(self.engines[-1], run, arrived, self.inputs[number])
        else:
            made = run(arrived, self.inputs[number])
        if number == 0 and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.earlier):
            _check_reached(arrived, made)
        if self.finish is not None:
            return self.finish(number, made)
        sent = tuple(tensor.contiguous() for tensor in made)
        # torch detaches these in place then, which no view allows, nor what an op of this stage has saved for backward
        return tuple(tensor.clone() for tensor in sent) if self.split else sent


def _check_reached(received: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
    """Raise `ApplyError` where what a stage makes gives no gradient to what it was given: torch would send zeros."""
    ahead = [tensor.grad_fn for tensor in made if tensor.grad_fn is not None]
    seen = set(ahead)
    while ahead:
        new = {one for one, _ in ahead.pop().next_functions if one is not None} - seen
        seen |= new
        ahead += new
    if any(tensor.requires_grad and tensor.grad_fn not in seen for tensor in received):
        raise ApplyError(
            "a stage stops gradients (detach or no_grad) of what it is given, so layers before it would have gradients "
            "of zero in place of none, and weight decay would change them. Freeze what is not trained "
            "(requires_grad_(False)), or train replicas (dp, fsdp)."
        )
