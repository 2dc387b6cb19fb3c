"""What the last stage does with the outputs of the model: the loss of each part, and keeping them for the merge."""

from collections.abc import Sequence
from typing import Any

import torch

from autoshard.nested import join_leaves, map_tensors, tensor_at, tensors_in
from autoshard.pipelines.prepare import Prepared
from autoshard.runtime.chunks import PLAIN, Unmerged
from autoshard.runtime.losses import Loss, call_loss


class Finish:
    """Called by the last stage with the outputs of one part after the other.

    Attributes:
        losses: of the parts that had one.
    """

    def __init__(
        self, loss: Loss | None, ways: Sequence[Prepared], targets: list, factors: list[float], training: bool,
        wanted: bool,
    ) -> None:  # fmt: skip
        self.loss, self.ways, self.targets, self.factors = loss, ways, targets, factors
        self.training, self.wanted = training, wanted
        self._made: list[tuple[torch.Tensor, ...]] = [()] * len(targets)
        self._losses: list[torch.Tensor | None] = [None] * len(targets)
        self.device = torch.device("cpu")

    def outputs(self) -> list[Any]:
        """Per part what the model returns, without history; for when all have run."""
        return [_kept(way.output(made)) for way, made in zip(self.ways, self._made, strict=True)]

    @property
    def losses(self) -> list[torch.Tensor]:
        return [loss for loss in self._losses if loss is not None]

    def __call__(self, number: int, made: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return what backward begins with, of shape [1]."""
        self.device = made[0].device if made else self.device
        output = loss = None
        if self.training or self.wanted:
            output = self.ways[number].output(made)
            loss = self._loss_of(output, number)
        # cloned: a view would keep what it is part of, and what a module has for itself is written to in the next part
        self._made[number] = tuple(tensor.detach().clone() for tensor in made)
        if loss is None:
            return torch.zeros(1, device=self.device)
        self._losses[number] = loss.detach().clone()
        factor = self.factors[number]
        if factor:
            return (loss.reshape(1) * factor).float()  # torch can't let go of the history of a view
        # A part without a label has a loss of NaN, and no share in that of the batch.
        floats = [tensor for _, tensor in tensors_in(output) if tensor.requires_grad and tensor is not loss]
        return torch.stack([(tensor * 0).sum().float() for tensor in floats]).sum(0, keepdim=True)

    def moved(self, target: Any) -> Any:
        """A target on the device of the outputs."""
        return map_tensors(target, lambda tensor: tensor.to(self.device))

    def _loss_of(self, output: Any, number: int) -> torch.Tensor | None:
        if self.loss is None:
            return tensor_at(output, self.ways[number].loss) if self.training else tensor_at(output, "loss")
        return call_loss(self.loss, output, self.moved(self.targets[number]))


def _kept(output: Any) -> Any:
    """The output, in which objects with state say that they belong to one part."""

    def light(path: str, leaves: list[Any]) -> Any:
        leaf = leaves[0]
        known = isinstance(leaf, (torch.Tensor, *PLAIN, Unmerged))
        return leaf if known else Unmerged(path, type(leaf).__name__)

    return join_leaves([output], light)
