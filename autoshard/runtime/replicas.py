"""Replicas in one process: each call of the model runs in parts of its batch, one per device, at the same time.

    call of the root ── RootHook: inputs go to the first device
                     ── Scatter:  replica 1 on cuda:1 (part 1), replica 2 on cuda:2 (part 2) …     only queued there
                     ── forward(part 0)                                     the model itself, on the first device
                     ── Together: outputs become one, where the inputs came from
                     ── Leave

A replica is made for one call: objects of the same classes whose attributes are those of the model's own modules,
except that modules, parameters and buffers are their counterparts on its device. Nobody sees it: `model.modules()`,
the optimizer and state dicts know the model only. Gradients of all replicas are added in a fixed order.

Without gradients, copies of parameters stay from call to call, until a weight is written or gradients are wanted.
"""

import functools
import types
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.errors import ApplyError
from autoshard.module_paths import find_scripted
from autoshard.packed import own_attributes, stored_tensors
from autoshard.runtime.devices import copy_tensor, current_index, is_accelerator, set_current
from autoshard.runtime.given import Given
from autoshard.runtime.hooks import to_device
from autoshard.runtime.microbatches import OF_PARTS, Divide, Together
from autoshard.runtime.moves import named_tensors
from autoshard.runtime.state import Division, Runtime
from autoshard.sharding import shares_of

_COMPILED = "_compiled_call_impl"
"""What `Module.compile` sets: a function of the very module, so that its replicas run as they are written."""
Kept = dict[int, tuple[torch.Tensor, Any, list[torch.Tensor]]]
"""id of a parameter -> (the parameter, its version, its copies)."""


def hook_replicas(model: nn.Module, runtime: Runtime, division: Division) -> list[Any]:
    """Hook the root of an applied model, behind the hook that moves its inputs; returns handles.

    Raises `ApplyError` for a model of which replicas can't be made.
    """
    if (scripted := find_scripted(model)) is not None:
        raise ApplyError(
            f"{scripted or 'the model'} is compiled by TorchScript, and such a module can't be replicated. "
            "Apply the plan to the module it was compiled from."
        )
    together = Together(runtime, division)
    return [
        model.register_forward_pre_hook(Scatter(runtime, division, together), with_kwargs=True),
        model.register_forward_hook(together, prepend=True, always_call=True),
    ]


class Scatter(Divide):
    """Pre-hook of the root: runs the parts of the batch on their replicas, and leaves the first part to the call."""

    __slots__ = ("kept",)
    undivided = "on the first device alone"

    def __init__(self, runtime: Runtime, division: Division, together: Any) -> None:
        super().__init__(runtime, division, together)
        self.kept: Kept = {}

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        call, *around = reversed(self.runtime.local.calls)
        if any(other.parts is not None for other in around) or torch_private.autograd_node() is not None:
            return None
        parts = self.parts(module, args, kwargs)
        if len(parts) < 2 or not self.is_next_to_forward(module):
            return None
        devices = self.division.devices[1 : len(parts)]
        given = [
            (to_device(part.args, device), to_device(part.kwargs, device))
            for part, device in zip(parts[1:], devices, strict=True)
        ]
        outputs, replica = [], module
        copies = copies_of(module, self.division.devices, self.kept)
        for index, (device, (own_args, own_kwargs)) in enumerate(zip(devices, given, strict=True)):
            replica = replica_of(module, device, {source: made[index] for source, made in copies.items()})
            known = Given(own_args, own_kwargs)
            with _current(device):
                outputs.append(replica.forward(*own_args, **own_kwargs))
            known.check(type(module).__name__, OF_PARTS)
        call.parts = parts, outputs, functools.partial(_keep_written, module, replica, self.division)
        return parts[0].args, parts[0].kwargs

    def shares(self, rows: int) -> Sequence[int]:
        """Rows of each part, in the proportion of the plan; fewer parts where there are fewer rows than devices."""
        count = min(rows, len(self.division.devices))
        return shares_of(rows, count, self.division.shares[:count])

    def __setstate__(self, state: tuple[Runtime, Division, Any]) -> None:
        super().__setstate__(state)
        self.kept = {}


def _keep_written(model: nn.Module, last: nn.Module, division: Division) -> None:
    """Give the model the buffers that the last part has written."""
    for name in division.batch.written:
        path, _, leaf = name.rpartition(".")
        own, source = model.get_submodule(path), last.get_submodule(path)._buffers[leaf]
        target = own._buffers[leaf]
        if source is None or target is None or source.shape != target.shape:
            own._buffers[leaf] = None if source is None else copy_tensor(source.detach(), division.devices[0])
        else:
            with torch.no_grad():
                target.copy_(source)


def copies_of(model: nn.Module, devices: Sequence[torch.device], kept: Kept) -> dict[int, Sequence[torch.Tensor]]:
    """id of every parameter and buffer -> its counterparts on the devices but the first, which is where it is.

    `kept`: what was copied for a call before, without gradients; it is brought up to date.
    """
    gradients = torch.is_grad_enabled()
    made: dict[int, Sequence[torch.Tensor]] = {}
    before = {} if gradients else dict(kept)
    kept.clear()
    for tensor in {id(one): one for one in named_tensors(model).values()}.values():
        source, seen, copies = before.get(id(tensor), (None, None, []))
        version = tensor._version, stored_tensors(tensor)[0].data_ptr()
        if source is not tensor or seen != version:
            with torch.inference_mode(False), torch.no_grad():
                copies = [fresh(tensor.detach(), device) for device in devices[1:]]
            if tensor.requires_grad and tensor.is_leaf:  # torch reads it when it chooses how to multiply
                copies = [one.requires_grad_() for one in copies]
        if not gradients and isinstance(tensor, nn.Parameter):  # what a forward writes is copied for each call
            kept[id(tensor)] = tensor, version, copies
        tracked = gradients and tensor.requires_grad and tensor.is_leaf
        made[id(tensor)] = Spread.apply(tensor, tuple(copies)) if tracked else copies
        for counterpart, device in zip(made[id(tensor)], devices[1:], strict=True):
            for name in own_attributes(counterpart):
                delattr(counterpart, name)
            for name, value in own_attributes(tensor).items():  # what users have put on it, a scale, say
                setattr(counterpart, name, to_device(value, device))
    return made


def fresh(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that shares no memory, also on the device where the tensor is."""
    copied = copy_tensor(tensor, device)
    return copied.clone() if copied is tensor else copied


def replica_of(model: nn.Module, device: torch.device, tensors: dict[int, torch.Tensor]) -> nn.Module:
    """The model on another device; `tensors`: id of a parameter or buffer -> its counterpart there."""
    shells = {id(module): module.__class__.__new__(module.__class__) for module in model.modules()}
    for module in model.modules():
        own = {name: value for name, value in vars(module).items() if name != _COMPILED}
        vars(shells[id(module)]).update({name: _counterpart(own[name], device, tensors, shells) for name in own})
    return shells[id(model)]


def _counterpart(
    value: Any, device: torch.device, tensors: dict[int, torch.Tensor], shells: dict[int, nn.Module]
) -> Any:
    """An attribute's value with the tensors and modules of a replica in it; other things as they are."""
    if isinstance(value, torch.Tensor):
        if id(value) not in tensors:  # no parameter or buffer
            tensors[id(value)] = copy_tensor(value, device)
        return tensors[id(value)]
    if isinstance(value, nn.Module):
        return shells.get(id(value), value)
    if isinstance(value, types.MethodType) and id(value.__self__) in shells:
        return types.MethodType(value.__func__, shells[id(value.__self__)])
    if type(value) in (list, tuple):
        return type(value)(_counterpart(item, device, tensors, shells) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _counterpart(item, device, tensors, shells)) for key, item in value.items())
    return value


class Spread(torch.autograd.Function):
    """Hand out aliases of a tensor's copies (in a tuple, unseen by autograd) whose gradients go to it, added up."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, copies: tuple[torch.Tensor, ...]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.device = source.device
        return tuple(one.detach() for one in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        sums = [gradient for gradient in gradients if gradient is not None]
        step = 1
        while step < len(sums):  # 1 to 0, 3 to 2, …; then 2 to 0, 6 to 4, …
            for index in range(0, len(sums) - step, 2 * step):
                sums[index] = sums[index] + copy_tensor(sums[index + step], sums[index].device)
            step *= 2
        return copy_tensor(sums[0], ctx.device) if sums else None, None


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Inside, an accelerator is the current one."""
    before = current_index(device) if is_accelerator(device) else None
    if before is None or before == device.index:
        yield
        return
    set_current(device, device.index)
    try:
        yield
    finally:
        set_current(device, before)
