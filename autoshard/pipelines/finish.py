"""What the last stage does with the outputs of the model: the loss of each part, and keeping them for the merge."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.capture.call_log import Opaque
from autoshard.nested import join_leaves, map_tensors, tensor_at, tensors_in
from autoshard.pipelines.prepare import Prepared
from autoshard.plan.batching import BatchAxis
from autoshard.runtime.chunks import PLAIN, BatchPart
from autoshard.runtime.devices import CPU
from autoshard.runtime.losses import (
    Loss,
    Reduction,
    call_loss,
    check_differentiable,
    check_reduction,
    row_losses,
    sample,
)
from autoshard.runtime.merging import Unmerged, merge


@dataclass(slots=True, kw_only=True, eq=False)
class Finish:
    """One batch on its way through the stages, and what the last stage makes of it: called part after part.

    Attributes:
        loss: the user's function, None if the model computes its own.
        parts, targets, ways, factors: per part its rows, target, way, and the factor of its loss.
        wants_losses, wants_outputs: of the caller. `number`: how many steps were before.
    """

    loss: Loss | None
    batch: BatchAxis | None
    parts: Sequence[BatchPart]
    targets: list[Any]
    prepared_parts: Sequence[Prepared]
    factors: list[float]
    training: bool
    wants_losses: bool
    wants_outputs: bool
    number: int
    device: torch.device = CPU
    _made: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    _samples: dict[int, tuple[Any, list[torch.Tensor]]] = field(default_factory=dict)
    _losses: dict[int, torch.Tensor] = field(default_factory=dict)

    def output(self) -> Any:
        """What the model returns for the whole batch, without history, if it is wanted; for when all parts have run.

        Raises `PlanError` if parts can't be joined.
        """
        if not self.wants_outputs:
            return None
        made = [_kept(prepared.output(self._made[part])) for part, prepared in enumerate(self.prepared_parts)]
        return made[0] if self.batch is None else merge(self.batch, made, self.parts)

    def check(self, reduction: Reduction) -> None:
        """Raise `PlanError` unless the loss function reduces as was said; for when all parts of a step have run."""
        if self._sampled:
            assert self.loss is not None and self.batch is not None
            moved = [self._moved(target) for target in self.targets]
            samples, rows = zip(*(self._samples[part] for part in range(len(self.parts))), strict=True)
            check_reduction(
                self.batch, self.loss, reduction, samples, moved, self.parts, self.number, self.losses, rows
            )

    @property
    def losses(self) -> list[torch.Tensor]:
        """The losses of the parts that had one, in order."""
        return [self._losses[part] for part in sorted(self._losses)]

    @property
    def _sampled(self) -> bool:
        return self.training and self.loss is not None and len(self.parts) > 1

    def __call__(self, number: int, made: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return what backward begins with, of shape [1]."""
        self.device = made[0].device if made else self.device
        output = loss = None
        if self.training or self.wants_losses:
            output = self.prepared_parts[number].output(made)
            loss = self._loss_of(output, number)
        if self.wants_outputs:
            self._made[number] = tuple(_copy(tensor) for tensor in made)
        if self._sampled:
            assert self.batch is not None and self.loss is not None and loss is not None
            kept, part, target = _kept(output), self.parts[number], self._moved(self.targets[number])
            row = map_tensors(sample(self.batch, kept, part, self.number), _copy)
            self._samples[number] = row, row_losses(self.batch, self.loss, kept, target, part, loss)
        if loss is None:
            return torch.zeros(1, device=self.device)
        self._losses[number] = loss.detach().clone()
        factor = self.factors[number]
        if factor:
            if self.training and self.loss is not None:
                check_differentiable(loss)  # torch's stages would leave it out without a word
            return (loss.reshape(1) * factor).float()  # torch can't let go of the history of a view
        # A part without a label has a loss of NaN, and no share in that of the batch.
        floats = [tensor for _, tensor in tensors_in(output) if tensor.requires_grad and tensor is not loss]
        return torch.stack([(tensor * 0).sum().float() for tensor in floats]).sum(0, keepdim=True)

    def _moved(self, target: Any) -> Any:
        return map_tensors(target, lambda tensor: tensor.to(self.device))

    def _loss_of(self, output: Any, number: int) -> torch.Tensor | None:
        if self.loss is None:
            return tensor_at(output, self.prepared_parts[number].loss if self.training else "loss")
        return call_loss(self.loss, output, self._moved(self.targets[number]))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # a view would keep what it is part of, and what a module has for itself is written to in the next part
    return tensor.detach().clone()


def _kept(output: Any) -> Any:
    """The output, in which objects with state say that they belong to one part."""

    def light(path: str, leaves: list[Any]) -> Any:
        leaf = leaves[0]
        known = isinstance(leaf, (torch.Tensor, *PLAIN, Unmerged))
        kind = leaf.kind if isinstance(leaf, Opaque) else type(leaf)
        return leaf if known else Unmerged(path, kind.__name__)

    return join_leaves([output], light)
