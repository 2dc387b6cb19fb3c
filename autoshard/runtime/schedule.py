"""A training step of a model that this process runs: the call divides its own batch, and the loss is that of all of it.

Where stages are on several processes see `pipelines/schedule.py`, which takes the same arguments.
"""

from typing import Any

import torch
from torch import nn

from autoshard.errors import ApplyError
from autoshard.nested import tensors_in
from autoshard.runtime.dispatch import is_applied
from autoshard.runtime.hooks import to_device
from autoshard.runtime.losses import Loss, Reduction, call_loss, check_arguments, check_differentiable, own_loss
from autoshard.runtime.merging import without_history


class LocalSchedule:
    """Steps of a model to which a plan is applied in this process; see `autoshard.schedule`."""

    def __init__(self, model: nn.Module, loss: Loss | None = None, reduction: Reduction = "mean") -> None:
        check_arguments(loss, reduction)
        self.model = model
        self.loss = loss
        self._check_applied()

    def step(
        self, *args: Any, target: Any = None, losses: list | None = None, return_outputs: bool = True, **kwargs: Any
    ) -> Any:
        """Run forward and backward on a batch, which adds to `.grad` what one call and `loss.backward()` would.

        `target`: given to the loss function with the output. `losses`: a list to which the loss is appended. Returns
        the output without its history; with `return_outputs=False` None.
        """
        self._check_applied()
        output = self.model(*args, **kwargs)
        loss = own_loss(output) if self.loss is None else self._loss_of(self.loss, output, target)
        check_differentiable(loss)
        output = without_history(output) if return_outputs else None
        loss.backward()
        if losses is not None:
            losses.append(loss.detach())
        return output

    def eval(
        self, *args: Any, target: Any = None, losses: list | None = None, return_outputs: bool = True, **kwargs: Any
    ) -> Any:
        """Run the forward only, without gradients; arguments and result as of `step`."""
        self._check_applied()
        with torch.no_grad():
            output = self.model(*args, **kwargs)
            if losses is not None:
                known = dict(tensors_in(output)).get("loss")
                loss = known if self.loss is None else self._loss_of(self.loss, output, target)
                losses += [] if loss is None else [loss]
        return output if return_outputs else None

    def _loss_of(self, loss: Loss, output: Any, target: Any) -> torch.Tensor:
        device = next((tensor.device for _, tensor in tensors_in(output)), None)
        return call_loss(loss, output, target if target is None or device is None else to_device(target, device))

    def _check_applied(self) -> None:
        if not is_applied(self.model):
            raise ApplyError(
                "a schedule runs a model to which a plan is applied: call autoshard.apply(model, plan) first, with "
                'strategy="pipeline".'
            )
