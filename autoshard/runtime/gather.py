"""Run one layer whose tensors are on several devices as if they were all at its home: on copies, for one forward.

Needed for layers that compute in one fused torch op, which knows one device only, unless they are watched. The copies
come from the memo, so they stay for the next forward.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoshard.runtime.state import Runtime


@dataclass(slots=True)
class Gathered:
    """What was exchanged: (a module's own dict, name, tensor, copy, version of the copy), and hooks put to sleep."""

    tensors: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor, int]] = field(default_factory=list)
    hooks: list[tuple[Any, torch.device | None, Any]] = field(default_factory=list)


def is_inference(module: nn.Module) -> bool:
    """Whether this forward is one that fused layers are made for: eval mode, and nothing to differentiate."""
    if module.training:
        return False
    return not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in module.parameters())


def gather(module: nn.Module, home: torch.device, runtime: Runtime) -> Gathered:
    """Give the module copies of its tensors at `home` and let the hooks inside it do nothing, until `scatter`."""
    runtime.gathering.acquire()  # the module itself is changed: one thread at a time
    done = Gathered()
    for part in module.modules():
        stores: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for store in stores:
            for name, tensor in store.items():
                if tensor is not None and tensor.device != home:
                    copy = runtime.copies.get(tensor, home)
                    done.tensors.append((store, name, tensor, copy, copy._version))
    for store, name, _, copy, _ in done.tensors:
        store[name] = copy
    for part in module.modules():
        hook = runtime.hook_on(part)
        if hook is not None and part is not module:
            done.hooks.append((hook, hook.home, hook.guard))
            hook.home, hook.guard = home, None
    return done


def scatter(done: Gathered, runtime: Runtime) -> None:
    """Undo `gather`; what the forward wrote into buffers is kept."""
    for store, name, tensor, copy, version in done.tensors:
        store[name] = tensor
        if copy._version != version:
            runtime.copies.write_back(tensor, copy)
    for hook, home, guard in done.hooks:
        hook.home, hook.guard = home, guard
    runtime.gathering.release()
