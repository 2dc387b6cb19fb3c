"""A training step of a pipeline in one process: forwards and backwards of micro-batches in the order of the plan.

    gpipe    F0 F1 F2 F3 B0 B1 B2 B3        the activations of all parts are there at once
    1f1b     F0 F1 B0 F2 B1 F3 B2 B3        those of as many parts as there are stages (2 here)

Each B is the backward through all stages. Devices work at the same time because kernels are only queued.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.batching import BatchAxis
from autoshard.errors import ApplyError, PlanError
from autoshard.nested import tensors_in
from autoshard.runtime.apply import adopt
from autoshard.runtime.chunks import Part, split, split_rows
from autoshard.runtime.dispatch import is_applied
from autoshard.runtime.hooks import RootHook, to_device
from autoshard.runtime.losses import (
    Loss,
    Reduction,
    call_loss,
    check_arguments,
    check_differentiable,
    check_reduction,
    factors_of,
    own_factors,
    own_loss,
    sample,
)
from autoshard.runtime.merging import merge, without_history
from autoshard.runtime.microbatches import Written, why_whole
from autoshard.runtime.state import Division, Runtime

_WHOLE = BatchAxis(size=1, inputs=(), outputs=())
"""A batch that is not divided."""


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One batch on its way: its parts, and what they have made so far. `factors`: see `losses.py`.

    `losses`, `returned`: whether the caller wants the losses, and the outputs.
    """

    parts: list[Part]
    targets: list[Any]
    factors: list[float]
    training: bool
    losses: bool
    returned: bool
    outputs: list[Any] = field(default_factory=list)
    values: list[torch.Tensor | None] = field(default_factory=list)


class LocalSchedule:
    """Steps of a model to which a plan is applied in this process; see `autoshard.schedule`.

    `check`: look in every step whether the loss function reduces as was said.
    """

    def __init__(
        self, model: nn.Module, loss: Loss | None = None, reduction: Reduction = "mean", *, check: bool = True
    ) -> None:
        check_arguments(loss, reduction)
        self.model = model
        self.loss = loss
        self.reduction = reduction
        self.check = check
        self._steps = 0
        self._runtime()

    def step(
        self, *args: Any, target: Any = None, losses: list | None = None, return_outputs: bool = True, **kwargs: Any
    ) -> Any:
        """Run forward and backward on a batch, which adds to `.grad` what one call and `loss.backward()` would.

        `target`: divided along its first dimension and given to the loss function with the output. `losses`: a list to
        which the loss of each micro-batch is appended. Returns the outputs put together, where the last stage made
        them; with `return_outputs=False` None, and no output is kept. Raises `PlanError` for a batch that can't be
        divided and for a loss that does not reduce as was said.
        """
        return self._run(args, kwargs, target, losses, return_outputs, training=True)

    def eval(
        self, *args: Any, target: Any = None, losses: list | None = None, return_outputs: bool = True, **kwargs: Any
    ) -> Any:
        """Run the forwards only, without gradients; arguments and result as of `step`."""
        with torch.no_grad():
            return self._run(args, kwargs, target, losses, return_outputs, training=False)

    def _run(
        self, args: tuple, kwargs: dict[str, Any], target: Any, losses: list | None, returned: bool, training: bool
    ) -> Any:
        runtime = self._runtime()
        if runtime.tree is None or runtime.tree.changed:  # all parts must run in the same way
            adopt(self.model)
        if runtime.before_first is not None:
            runtime.before_first(self.model, args, kwargs)
        division = runtime.record.division
        if division is not None and division.devices:  # replicas divide each call by themselves
            division = None
        parts = self._parts(division, args, kwargs)
        if training and len(parts) > 1:
            _check_not_hooked(self.model)
        targets = split_rows(target, parts, "target") if target is not None else [None] * len(parts)
        factors = factors_of(self.reduction, parts, targets) if self.loss is not None else []
        pass_ = _Pass(
            parts=parts, targets=targets, factors=factors, training=training, losses=losses is not None,
            returned=returned,
        )  # fmt: skip
        ahead = len(parts) if division is None or division.schedule != "1f1b" else min(division.stages, len(parts))
        batch = _WHOLE if division is None else division.batch
        written = Written(batch.written, self.model)
        with runtime.copies.joined(), closing(written):
            for kind, index in _order(len(parts), ahead):
                if kind == "F":
                    written.begin()
                    self._forward(runtime, pass_, index)
                elif training:
                    if index == 0:
                        self._before_backward(division, pass_)
                    _backward(pass_, index)
        self._steps += 1
        if losses is not None:
            losses.extend(value.detach() for value in pass_.values if value is not None)
        if not returned:
            return None
        return pass_.outputs[0] if division is None else merge(division.batch, pass_.outputs, parts)

    def _runtime(self) -> Runtime:
        for hook in torch_private.forward_pre_hooks(self.model):
            if isinstance(hook, RootHook):
                return hook.runtime
        if is_applied(self.model):
            raise ApplyError(
                "the plan that is applied to this model has no micro-batches here. Call the model and loss.backward() "
                "as without a plan."
            )
        raise ApplyError(
            "a schedule runs a model to which a plan is applied: call autoshard.apply(model, plan) first, with "
            'strategy="pipeline".'
        )

    def _parts(self, division: Division | None, args: tuple, kwargs: dict[str, Any]) -> list[Part]:
        if division is None:
            return [Part(args=args, kwargs=kwargs, rows=1, labels={})]
        problem = why_whole(division.batch, self.model)
        if problem:
            raise PlanError(f"this batch can't be divided: {problem}. Set it back, or plan again as it is.")
        return split(division.batch, self.model, args, kwargs, division.count)

    def _forward(self, runtime: Runtime, pass_: _Pass, index: int) -> None:
        """Run the model on one part; its output stays where it was made, on several devices it goes to the last."""
        part = pass_.parts[index]
        runtime.local.stepping = True
        try:
            output = self.model(*part.args, **part.kwargs)
        finally:
            runtime.local.stepping = False
        if len({tensor.device for _, tensor in tensors_in(output)}) > 1:
            output = to_device(output, runtime.record.placed[-1])
        wanted = pass_.training or pass_.losses
        pass_.values.append(self._loss_of(output, pass_.targets[index]) if wanted else None)
        pass_.outputs.append(output if pass_.training else _left(pass_, output))

    def _loss_of(self, output: Any, target: Any) -> torch.Tensor | None:
        if self.loss is None:
            return own_loss(output)[1] if torch.is_grad_enabled() else dict(tensors_in(output)).get("loss")
        if target is not None:
            device = next((tensor.device for _, tensor in tensors_in(output)), None)
            target = target if device is None else to_device(target, device)
        return call_loss(self.loss, output, target)

    def _before_backward(self, division: Division | None, pass_: _Pass) -> None:
        """Know the factors of the losses, by the parts that have run before the first backward."""
        outputs = pass_.outputs
        if self.loss is None:
            path, _ = own_loss(outputs[0])
            pass_.factors = [1.0] if division is None else own_factors(division.batch, path, pass_.parts)
        elif self.check and division is not None and len(outputs) > 1:
            device = next((tensor.device for _, tensor in tensors_in(outputs[0])), None)
            targets = [target if device is None else to_device(target, device) for target in pass_.targets]
            rows = [
                sample(division.batch, output, part, self._steps)
                for output, part in zip(outputs, pass_.parts, strict=False)
            ]
            check_reduction(division.batch, self.loss, self.reduction, rows, targets, pass_.parts, self._steps)


def _check_not_hooked(model: nn.Module) -> None:
    """Raise `ApplyError` for a hook on the gradient of a parameter: it would be called once for each micro-batch."""
    for name, parameter in model.named_parameters():
        if torch_private.gradient_hooks(parameter) or torch_private.has_accumulation_hooks(parameter):
            raise ApplyError(
                f"{name} has a hook on its gradient, which a schedule would call for each micro-batch and not for the "
                "whole batch. Take the hook off, or call the model and loss.backward(), which call it once."
            )


def _backward(pass_: _Pass, index: int) -> None:
    value, factor = pass_.values[index], pass_.factors[index]
    pass_.outputs[index] = _left(pass_, pass_.outputs[index])
    assert value is not None
    if factor:  # a part without a label has a loss of NaN, and no share in that of the batch
        check_differentiable(value)
        torch.autograd.backward(value, torch.full_like(value, factor))
    pass_.values[index] = value.detach()


def _left(pass_: _Pass, output: Any) -> Any:
    """What is kept of the output of a part that is done."""
    return without_history(output) if pass_.returned else None


def _order(count: int, ahead: int) -> Iterator[tuple[str, int]]:
    """Forwards and backwards of `count` parts, of which at most `ahead` are between the two."""
    for index in range(count + ahead):
        if index >= ahead:
            yield "B", index - ahead
        if index < count:
            yield "F", index
