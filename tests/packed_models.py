"""A packed tensor of our own, so that nothing is tested on one library's alone, and small models that hold packed ones.

`Scaled` is the plainest there can be: int8 rows with a scale each, unpacked for every op that reads it.
"""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


class Scaled(torch.Tensor):
    """A matrix as int8 rows and a scale for each row."""

    rows: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, rows: torch.Tensor, scales: torch.Tensor) -> "Scaled":
        made = torch.Tensor._make_wrapper_subclass(cls, rows.shape, dtype=scales.dtype, device=rows.device)
        made.rows, made.scales = rows, scales
        return made

    @classmethod
    def pack(cls, weight: torch.Tensor) -> "Scaled":
        scales = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scales).round().to(torch.int8), scales)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["rows", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> "Scaled":
        return Scaled(inner["rows"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (aten.detach.default, aten.clone.default):
            made = Scaled(func(args[0].rows), func(args[0].scales))
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        whole = [arg.rows.to(arg.dtype) * arg.scales if isinstance(arg, Scaled) else arg for arg in args]
        return func(*whole, **(kwargs or {}))


def pack_linears(model: nn.Module) -> nn.Module:
    """Pack the weight of every linear in the model."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Scaled.pack(module.weight), requires_grad=False)
    return model


class Blocks(nn.Module):
    """Tokens in, tokens' scores out; the first and the last block share their first weight."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.norm(hidden) @ self.embed.weight.T
