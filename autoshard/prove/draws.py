"""Random numbers that do not depend on how many rows there are: every row draws the same, in every run the same.

Whether rows mix can't be seen where each run draws other numbers. Nothing is dropped.
"""

import math
from typing import Any

import torch

from autoshard.torch_private import TorchDispatchMode

aten = torch.ops.aten
_DROPOUTS = {aten.native_dropout.default}


class SteadyDraws(TorchDispatchMode):
    """Answers ops that draw random numbers; `count` is how many did."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without this, the first use imports all of the compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        torch.manual_seed(0)  # not by how many draws there were: experts that are not needed draw none
        before = torch.get_rng_state()
        made = func(*args, **kwargs)
        if torch.equal(torch.get_rng_state(), before):
            return made
        self.count += 1
        if func in _DROPOUTS:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if not isinstance(made, torch.Tensor) or not made.is_floating_point():
            return made
        return made.copy_(self._row(func._schema.name.split("::")[1], made, args, kwargs))

    def _row(self, name: str, made: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What stands in every row: numbers along the last dimension, one number where that is all there is."""
        torch.manual_seed(0)
        shape = made.shape[-1:] if made.dim() > 1 else ()
        uniform = torch.rand(shape, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
        if "bernoulli" in name:
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if name.endswith("_") else args[0])
            return torch.ones_like(made) * (torch.as_tensor(p, dtype=made.dtype) > 0)
        if "exponential" in name:
            return (-uniform.log()).to(made.dtype)
        if "normal" in name or "randn" in name:
            return (torch.erfinv(2 * uniform - 1) * math.sqrt(2)).to(made.dtype)
        return uniform.to(made.dtype)
