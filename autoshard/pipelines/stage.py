"""The module that torch's pipelining runs for one stage: a program, and on the last stage the loss.

forward(received …, part=[i])  ──▶  what is sent on              torch gives the number of the part, the rank has
                               ──▶  loss of part i, as [1]       its inputs and targets already
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoshard.pipelines.programs import Program
from autoshard.runtime.sharded_stages import run_inside

Finisher = Callable[[int, tuple[torch.Tensor, ...]], torch.Tensor]
"""(part, outputs of the model) -> what backward begins with, of shape [1]; keeps the outputs."""


class StageModule(nn.Module):
    """One stage on the user's own parameters. `programs` and `inputs`, per part, and `finish` are set for each step.

    `engines`: what of it fully_shard gathers as one, the model last; empty where parameters are whole. `split`: whether
    gradients of parameters are computed apart from the others.
    """

    engines: Sequence[nn.Module]  # no modules of this one

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        recompute: bool,
        split: bool = False,
        engines: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        self.recompute, self.split = recompute, split
        vars(self)["engines"] = tuple(engines)
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
        if self.finish is not None:
            return self.finish(number, made)
        sent = tuple(tensor.contiguous() for tensor in made)
        # torch detaches these in place then, which no view allows, nor what an op of this stage has saved for backward
        return tuple(tensor.clone() for tensor in sent) if self.split else sent
