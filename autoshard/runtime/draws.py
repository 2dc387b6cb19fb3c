"""Refuse random numbers that a plan knows nothing about: drawn in training by a block that was planned in evaluation.

A mask of a cut tensor must be a part of the whole tensor's mask. Where the masks are is seen only in training mode, so
a plan made in evaluation has no actions for them; whether anything is drawn shows in the state of the generators.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from autoshard.common.module_paths import is_container, parent
from autoshard.errors import ApplyError
from autoshard.plan.sharding import Cut
from autoshard.runtime.agreement import random_states
from autoshard.runtime.collectives import Ranks
from autoshard.runtime.local_ranks import LocalRanks


def watch_draws(model: nn.Module, cuts: Sequence[Cut], ranks: Ranks) -> list[Any]:
    """Put hooks on the blocks with cuts that were planned in evaluation; returns handles."""
    modules, handles = dict(model.named_modules(remove_duplicate=False)), []
    blocks = {block for cut in cuts if not cut.training for block in cut.blocks}
    for path in sorted(blocks):
        while path and is_container(modules[path]):  # a container, which is never called
            path = parent(path)
        still = _Still(path, modules[path], ranks)
        handles.append(modules[path].register_forward_pre_hook(still.begin))
        handles.append(modules[path].register_forward_hook(still.end))
    return handles


class _Still:
    """Hooks of one block: in training, random generators must be after its forward what they were before."""

    def __init__(self, path: str, block: nn.Module, ranks: Ranks) -> None:
        self.path, self.ranks, self.parts = path, ranks, tuple(block.modules())
        self.before: list[bytes] = []

    def begin(self, module: nn.Module, args: tuple) -> None:
        if not torch.compiler.is_compiling():
            self.before = self._states(module) if any(map(attrgetter("training"), self.parts)) else []

    def end(self, module: nn.Module, args: tuple, result: Any) -> None:
        if self.before and self.before != self._states(module):
            raise ApplyError(
                f"{self.path or 'the model'}{_culprit(module)} draws random numbers in training, and its parameters "
                "were cut by a plan that was made in evaluation, which does not know of them. Plan after model.train()."
            )

    def _states(self, module: nn.Module) -> list[bytes]:
        here = (one.device for one in module.parameters())
        devices = dict.fromkeys(self.ranks.devices if isinstance(self.ranks, LocalRanks) else here)
        return [state.numpy().tobytes() for device in devices for state in random_states(device)]


def _culprit(block: nn.Module) -> str:
    """The first module in a block that drops something, if it is a module that does."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    for path, module in block.named_modules():
        if isinstance(module, kinds) and module.training and module.p > 0:
            return f" (by its {path}: {module})" if path else f" ({module})"
    return ""
