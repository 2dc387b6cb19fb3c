"""A case: how to build a model and inputs for it, and what to expect of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.nested import tensors_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model of the zoo.

    Attributes:
        build: makes the model; call `model()` instead, which also seeds and energises it.
        inputs: (batch size, length) -> keyword arguments of the forward.
        train_mode: the model is used in train mode even for the plain forward.
        shapes: the (batch size, length) pairs it accepts; the first one is planned for.
        refused: it can't be captured; a line of its forward that the refusal must point at.
        generates: has `generate()`; `layers` names the container whose elements are cut apart then.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Any]]
    train_mode: bool = False
    shapes: tuple[tuple[int, int], ...] = ((2, 6),)
    refused: str = ""
    generates: bool = False
    layers: str = ""

    def model(self, seed: int = 0) -> nn.Module:
        """A fresh model; the same seed gives the same weights."""
        torch.manual_seed(seed)
        model = energise(self.build(), seed)
        return model.train(self.train_mode)

    def example(self, shape: tuple[int, int] | None = None, seed: int = 1) -> dict[str, Any]:
        """Fresh keyword inputs of one of the shapes (the first by default)."""
        torch.manual_seed(seed)
        return self.inputs(*(shape or self.shapes[0]))


def energise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every tensor of the model values that matter: matrices scaled by fan-in, nothing left at 0 or 1.

    Default initialisation hides faults: a skipped bias of zeros or a norm weight of ones changes nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    seen = set()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if id(tensor) in seen or not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            seen.add(id(tensor))
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            if name.endswith("running_var"):
                tensor.copy_(1 + 0.3 * noise.abs())
            elif name.endswith("running_mean"):
                tensor.copy_(0.2 * noise)
            elif isinstance(tensor, nn.Parameter) and tensor.dim() > 1:
                tensor.copy_(noise / max(1, tensor[0].numel()) ** 0.5)
            elif isinstance(tensor, nn.Parameter) and float(tensor.float().std(unbiased=False)) == 0:
                tensor.add_(0.2 * noise)
    return model


def same(left: Any, right: Any) -> bool:
    """Whether two nested outputs hold the same tensors bit for bit (NaN equals NaN), under the same paths."""
    ours, theirs = list(tensors_in(left)), list(tensors_in(right))
    if [path for path, _ in ours] != [path for path, _ in theirs]:
        return False
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for (_, a), (_, b) in zip(ours, theirs, strict=True)
    )
