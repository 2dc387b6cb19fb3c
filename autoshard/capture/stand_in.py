"""Put stand-ins in place of a model's parameters and buffers for the time of a capture; `Reachable` puts all back."""

from collections.abc import Callable

import torch
from torch import nn

Make = Callable[[torch.Tensor, str], torch.Tensor]
"""Makes the stand-in of one tensor; told "parameter", "buffer" or "attribute"."""


def put_stand_ins(model: nn.Module, make: Make) -> None:
    """Replace every parameter, buffer and tensor attribute below `model` by `make(tensor, kind)`.

    One tensor object gets one stand-in, so ties stay ties.
    """
    made: dict[int, torch.Tensor] = {}

    def stand_in(tensor: torch.Tensor, kind: str) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = make(tensor, kind)
        return made[id(tensor)]

    for module in list(model.modules()):
        for table, kind in ((module._parameters, "parameter"), (module._buffers, "buffer")):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = stand_in(tensor, kind)  # type: ignore[assignment]
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                vars(module)[name] = stand_in(value, "attribute")
