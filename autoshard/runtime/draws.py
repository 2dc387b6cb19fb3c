"""Refuse random numbers that a plan knows nothing about: drawn in training by a block that was planned in evaluation.

A mask of a cut tensor must be a part of the whole tensor's mask. Where the masks are is seen only in training mode, so
a plan made in evaluation has no actions for them; whether anything is drawn shows in the state of the generators.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from autoshard.common.module_paths import is_container
from autoshard.errors import ApplyError
from autoshard.plan.sharding import Cut

_training: Callable[[nn.Module], bool] = attrgetter("training")


class Unplanned:
    """The blocks with cuts that were planned in evaluation; watched from the first forward in training mode on."""

    def __init__(self, model: nn.Module, cuts: Sequence[Cut]) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self.blocks: dict[str, nn.Module] = {}
        for path in dict.fromkeys(block for cut in cuts if not cut.training for block in cut.blocks):
            while path and is_container(modules[path]):  # a container, which is never called
                path = path.rpartition(".")[0]
            self.blocks[path] = modules[path]
        self.parts = tuple({id(part): part for block in self.blocks.values() for part in block.modules()}.values())

    def watch(self, model: nn.Module, devices: Callable[[], Sequence[torch.device]], handles: list[Any]) -> None:
        """Put hooks on the blocks if anything in them is in training mode; the forward of `model` is about to run."""
        if self.blocks and any(map(_training, self.parts)):
            for path, block in self.blocks.items():
                still = _Still(path, devices())
                handles.append(block.register_forward_pre_hook(still.begin))
                handles.append(block.register_forward_hook(still.end))
                if block is model:  # torch has listed the hooks to run before it
                    still.begin(block, ())
            self.blocks = {}


class _Still:
    """Hooks of one block: in training, random generators must be after its forward what they were before."""

    def __init__(self, path: str, devices: Sequence[torch.device]) -> None:
        self.path = path
        self.devices = [device for device in dict.fromkeys(devices) if device.type not in ("cpu", "meta")]
        self.before: list[bytes] = []

    def begin(self, module: nn.Module, args: tuple) -> None:
        if not torch.compiler.is_compiling() and any(map(_training, module.modules())):
            self.before = self._states()

    def end(self, module: nn.Module, args: tuple, result: Any) -> None:
        before, self.before = self.before, []
        if before and before != self._states():
            raise ApplyError(
                f"{self.path or 'the model'}{_culprit(module)} draws random numbers in training, and its parameters "
                "were cut by a plan that was made in evaluation, which does not know of them. Plan after model.train()."
            )

    def _states(self) -> list[bytes]:
        own = [torch.get_device_module(device).get_rng_state(device) for device in self.devices]
        return [state.numpy().tobytes() for state in (torch.get_rng_state(), *own)]


def _culprit(block: nn.Module) -> str:
    """The first module in a block that drops something, if it is a module that does."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    for path, module in block.named_modules():
        if isinstance(module, kinds) and module.training and module.p > 0:
            return f" (by its {path}: {module})" if path else f" ({module})"
    return ""
