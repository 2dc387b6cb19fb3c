"""Random numbers that do not depend on how many rows there are: every row draws the same, in every run the same.

Parts of a batch draw other numbers than the whole, and could not be compared with it. Nothing is dropped.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from autoshard.common.schemas import name_of_op
from autoshard.nested import leaves_in
from autoshard.torch_private import DispatchMode

PATIENCE = 10_000
"""After so many calls numbers are drawn as ever: code may draw until it finds another one."""


class SameRandomNumbers(DispatchMode):
    """Answers ops that draw random numbers; `count` is how many did."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or self.count >= PATIENCE:
            return func(*args, **kwargs)
        seed, state = _generator((args, kwargs))
        seed(0)  # not by how many calls there were: experts that are not needed draw none
        before = state()
        made = func(*args, **kwargs)
        if torch.equal(state(), before):  # a dropout of nothing
            return made
        self.count += 1
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if func is torch.ops.aten.multinomial.default:  # each row has probabilities of its own
            return made.copy_(args[0].argmax(-1, keepdim=True).expand_as(made))
        if not isinstance(made, torch.Tensor) or not made.dim() or name_of_op(func) == "aten::randperm":
            return made
        name = name_of_op(func).split("::")[1]
        if not made.is_floating_point() and "bernoulli" not in name:  # they have a range: those of the first row
            return made.copy_(made[:1].clone().expand_as(made)) if made.numel() else made
        return made.copy_(_row(name, made, args, kwargs))


def _row(name: str, made: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """What stands in every row: numbers along the last dimension, one number where that is all there is."""
    if "bernoulli" in name:
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if name.endswith("_") else args[0])
        return torch.ones_like(made) * (torch.as_tensor(p, dtype=made.dtype) > 0)
    shape = made.shape[-1:] if made.dim() > 1 else ()  # of whichever distribution: they are uniform here
    uniform = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return uniform.clamp(0.01, 0.99).to(made.dtype)


def _generator(value: Any) -> tuple[Callable[[int], Any], Callable[[], torch.Tensor]]:
    """How the generator of the device where an op draws is seeded, and how its state is read."""
    named = [leaf for _, leaf in leaves_in(value) if isinstance(leaf, (torch.Tensor, torch.device))]
    devices = [leaf.device if isinstance(leaf, torch.Tensor) else leaf for leaf in named]
    device = next((device for device in devices if device.type not in ("cpu", "meta")), None)
    if device is None:
        return torch.default_generator.manual_seed, torch.get_rng_state
    module = torch.get_device_module(device)
    return module.manual_seed, partial(module.get_rng_state, device)
