"""Replicas in one process: each call of the model runs in parts of its batch, one per device, at the same time.

    call of the root ── RootHook: inputs go to the first device
                     ── Scatter:  replica 1 on cuda:1 (part 1), replica 2 on cuda:2 (part 2) …     only queued there
                     ── forward(part 0)                                     the model itself, on the first device
                     ── outputs become one, where the inputs came from

A replica is made for one call: objects of the same classes whose attributes are those of the model's own modules,
except that modules, parameters and buffers are their counterparts on its device. Nobody sees it: `model.modules()`,
the optimizer and state dicts know the model only.
"""

import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.common.module_paths import find_scripted
from autoshard.common.packed import own_attributes
from autoshard.plan.sharding import shares_of
from autoshard.runtime.around import Around
from autoshard.runtime.chunks import BatchPart
from autoshard.runtime.devices import copy_tensor, current
from autoshard.runtime.hooks import to_device
from autoshard.runtime.microbatches import Divide, run_part
from autoshard.runtime.moves import named_tensors


def why_not_replicable(model: nn.Module) -> str:
    """Why replicas of a model can't be made, "" if they can."""
    if (scripted := find_scripted(model)) is not None:
        return (
            f"{scripted or 'the model'} is compiled by TorchScript, and such a module can't be replicated. "
            "Apply the plan to the module it was compiled from."
        )
    modules = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        for name, value in _uncompiled(module).items():
            if name == "forward" and _compiled_from(module) is not None:
                continue
            if "state_dict" in name:  # hooks that no forward calls
                continue
            if any(_reaches(one, modules, set()) for one in _shared(value, modules)):
                return (
                    f"{path or 'the model'} has a function in {name.strip('_')} that refers to modules of the model, "
                    "and replicas would call those of the model itself. Make it a method, or use strategy='balanced'."
                )
    return ""


def _uncompiled(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, but for what `Module.compile` sets, a function of the very module."""
    return nn.Module.__getstate__(module)


def _compiled_from(module: nn.Module) -> nn.Module | None:
    """The module in what `torch.compile(module)` returned, whose forward is a function of it; None elsewhere."""
    kind = type(module)
    made_by_torch = kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch.")
    return next(module.children()) if made_by_torch else None


def _shared(value: Any, modules: Collection[int]) -> Iterator[Any]:
    """What replicas are handed as it is of the value of an attribute."""
    if type(value) in (list, tuple, dict, OrderedDict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _shared(item, modules)
    elif isinstance(value, types.MethodType):
        if id(value.__self__) not in modules:
            yield value
    elif not isinstance(value, (torch.Tensor, nn.Module, Around)):
        yield value


def _reaches(value: Any, modules: Collection[int], seen: set[int]) -> bool:
    """Whether a function, or another object that can be called, holds a module of the model."""
    if isinstance(value, nn.Module) or id(value) in seen:
        return id(value) in modules
    seen.add(id(value))
    if isinstance(value, (list, tuple, set, dict)):
        held = list(value.values() if isinstance(value, dict) else value)
    elif isinstance(value, types.FunctionType):
        held = [*inspect.getclosurevars(value).nonlocals.values(), value.__defaults__, value.__kwdefaults__]
    elif isinstance(value, functools.partial):
        held = [value.func, value.args, value.keywords]
    elif isinstance(value, types.MethodType):
        held = [value.__func__, value.__self__]
    else:
        held = list(vars(value).values()) if hasattr(value, "__dict__") and callable(value) else []
    return any(_reaches(item, modules, seen) for item in held)


class Scatter(Divide):
    """Around the forward of the root: runs the parts of the batch on replicas, and the first on the model itself."""

    undivided = "on the first device alone"

    def run(self, module: nn.Module, forward: Callable[..., Any], parts: Sequence[BatchPart]) -> list[Any]:
        """The output of each part, all of them where the outputs of the model go."""
        devices = self.division.devices[: len(parts)]
        given = [
            (to_device(part.args, one), to_device(part.kwargs, one)) for part, one in zip(parts, devices, strict=True)
        ]
        outputs, name = [], type(module).__name__
        for device, (args, kwargs) in zip(devices[1:], given[1:], strict=True):
            with current(device):
                outputs.append(run_part(replica_of(module, device).forward, args, kwargs, name))
        outputs.insert(0, run_part(forward, *given[0], name))
        output_device = self.runtime.local.calls[-1] or devices[0]
        return [to_device(one, output_device) for one in outputs]

    def shares(self, rows: int) -> Sequence[int]:
        """Rows of each part, in the proportion of the plan; fewer parts where there are fewer rows than devices."""
        count = min(rows, len(self.division.devices))
        return shares_of(rows, count, self.division.shares[:count])


def replica_of(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on another device; gradients of its parameters are added to those of the model."""
    tensors: dict[int, torch.Tensor] = {}
    for tensor in named_tensors(model).values():
        if id(tensor) not in tensors:
            copied = copy_tensor(tensor, device)
            tensors[id(tensor)] = copied = copied if copied is not tensor else tensor.clone()
            for name, value in own_attributes(tensor).items():  # what users have put on it, a scale, say
                setattr(copied, name, to_device(value, device))
    shells = {id(module): module.__class__.__new__(module.__class__) for module in model.modules()}
    for module in model.modules():
        own = _uncompiled(module)
        around = own.pop("forward", None)
        if isinstance(around, Around):  # of the plan; the replica has what the module had
            around = around.own
        own |= {} if around is None else {"forward": around}
        if (wrapped := _compiled_from(module)) is not None:
            own["forward"] = shells[id(wrapped)].__call__
        vars(shells[id(module)]).update({name: _counterpart(own[name], device, tensors, shells) for name in own})
    return shells[id(model)]


def _counterpart(
    value: Any, device: torch.device, tensors: dict[int, torch.Tensor], shells: dict[int, nn.Module]
) -> Any:
    """An attribute's value with the tensors and modules of a replica in it; other things as they are."""
    if isinstance(value, torch.Tensor):
        return tensors[id(value)] if id(value) in tensors else copy_tensor(value, device)
    if isinstance(value, nn.Module):
        return shells.get(id(value), value)
    if isinstance(value, types.MethodType) and id(value.__self__) in shells:
        return types.MethodType(value.__func__, shells[id(value.__self__)])
    if type(value) in (list, tuple):
        return type(value)(_counterpart(item, device, tensors, shells) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _counterpart(item, device, tensors, shells)) for key, item in value.items())
    return value
