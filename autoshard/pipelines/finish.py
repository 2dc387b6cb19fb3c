"""What the last stage does with the outputs of the model: the loss of each part, and keeping them for the merge."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.batching import BatchAxis
from autoshard.capture.tape import Opaque
from autoshard.nested import join_leaves, map_tensors, tensor_at, tensors_in
from autoshard.pipelines.prepare import Prepared
from autoshard.runtime.chunks import PLAIN, Part
from autoshard.runtime.losses import Loss, Reduction, call_loss, check_differentiable, check_reduction, sample
from autoshard.runtime.merging import Unmerged, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One batch on its way through the stages: its parts, and per part its target, its way, the factor of its loss.

    `losses`, `returned`: whether the caller wants the losses, and the outputs. `number`: how many steps were before.
    """

    batch: BatchAxis | None
    parts: Sequence[Part]
    targets: list[Any]
    ways: Sequence[Prepared]
    factors: list[float]
    training: bool
    losses: bool
    returned: bool
    number: int


class Finish:
    """Called by the last stage with the outputs of one part after the other.

    Attributes:
        losses: of the parts that had one.
    """

    def __init__(self, loss: Loss | None, pass_: Pass) -> None:
        self.loss, self.pass_ = loss, pass_
        self._made: list[tuple[torch.Tensor, ...]] = [()] * len(pass_.parts)
        self._samples: list[Any] = [None] * len(pass_.parts)
        self._losses: list[torch.Tensor | None] = [None] * len(pass_.parts)
        self._sampled = pass_.training and loss is not None and len(pass_.parts) > 1
        self.device = torch.device("cpu")

    def output(self) -> Any:
        """What the model returns for the whole batch, without history, if it is wanted; for when all parts have run.

        Raises `PlanError` if parts can't be joined.
        """
        pass_ = self.pass_
        if not pass_.returned:
            return None
        made = [_kept(way.output(made)) for way, made in zip(pass_.ways, self._made, strict=True)]
        return made[0] if pass_.batch is None else merge(pass_.batch, made, pass_.parts)

    def check(self, reduction: Reduction) -> None:
        """Raise `PlanError` unless the loss function reduces as was said; for when all parts of a step have run."""
        if self._sampled:
            pass_ = self.pass_
            assert self.loss is not None and pass_.batch is not None
            moved = [self._moved(target) for target in self.pass_.targets]
            check_reduction(pass_.batch, self.loss, reduction, self._samples, moved, pass_.parts, pass_.number)

    @property
    def losses(self) -> list[torch.Tensor]:
        return [loss for loss in self._losses if loss is not None]

    def __call__(self, number: int, made: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return what backward begins with, of shape [1]."""
        pass_ = self.pass_
        self.device = made[0].device if made else self.device
        output = loss = None
        if pass_.training or pass_.losses:
            output = pass_.ways[number].output(made)
            loss = self._loss_of(output, number)
        if pass_.returned:
            self._made[number] = tuple(_copy(tensor) for tensor in made)
        if self._sampled:
            assert pass_.batch is not None
            row = sample(pass_.batch, _kept(output), pass_.parts[number], pass_.number)
            self._samples[number] = map_tensors(row, _copy)
        if loss is None:
            return torch.zeros(1, device=self.device)
        self._losses[number] = loss.detach().clone()
        factor = pass_.factors[number]
        if factor:
            if pass_.training and self.loss is not None:
                check_differentiable(loss)  # torch's stages would leave it out without a word
            return (loss.reshape(1) * factor).float()  # torch can't let go of the history of a view
        # A part without a label has a loss of NaN, and no share in that of the batch.
        floats = [tensor for _, tensor in tensors_in(output) if tensor.requires_grad and tensor is not loss]
        return torch.stack([(tensor * 0).sum().float() for tensor in floats]).sum(0, keepdim=True)

    def _moved(self, target: Any) -> Any:
        return map_tensors(target, lambda tensor: tensor.to(self.device))

    def _loss_of(self, output: Any, number: int) -> torch.Tensor | None:
        if self.loss is None:
            return tensor_at(output, self.pass_.ways[number].loss) if self.pass_.training else tensor_at(output, "loss")
        return call_loss(self.loss, output, self._moved(self.pass_.targets[number]))


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
