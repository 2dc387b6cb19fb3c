"""Where a verification runs: copies of the model, the same random numbers each time, the devices of the plan."""

import contextlib
import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import nn

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.parse import cluster_of
from autoshard.errors import first_line
from autoshard.packed import stored_bytes
from autoshard.plan import Plan, PlanDevice
from autoshard.runtime import is_applied, remove
from autoshard.runtime.moves import move_tensors, named_tensors
from autoshard.simulate import SimulatedDevices, active_devices, simulate
from autoshard.verify.cuts import runs_in_processes

COPY_BYTES = 4 << 30
"""Models up to this size are verified on deep copies; larger ones are used themselves and put back."""
UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The devices to run on: `plan` with the names they have here, and by these their `original_names`."""

    plan: Plan
    simulated: SimulatedDevices | None
    original_names: dict[str, str]


@contextlib.contextmanager
def same_start(devices: list[torch.device]) -> Iterator[Callable[[], None]]:
    """Give a function that puts all random number generators where they are now; they are there at the end.

    Inside, torch's encoder layers take no fused path, which rounds otherwise and which layers with hooks leave.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    numpy_state, python_state, cpu_state = numpy.random.get_state(), random.getstate(), torch.get_rng_state()
    accelerators = [
        (torch.get_device_module(device), device, torch.get_device_module(device).get_rng_state(device))
        for device in devices
        if device.type != "cpu"
    ]

    def restart() -> None:
        numpy.random.set_state(numpy_state)
        random.setstate(python_state)
        torch.set_rng_state(cpu_state)
        for module, device, state in accelerators:
            module.set_rng_state(state, device)

    try:
        yield restart
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        restart()


@contextlib.contextmanager
def fresh_models(model: nn.Module, notes: list[str], training: bool) -> Iterator[Callable[[], nn.Module]]:
    """Give a function that returns the model as it is now, time and again; the user's own is left, or put back, as is.

    Small models are copied each time. Others, and those that can't be copied, are handed out themselves, with what a
    run changes restored: buffers, gradients, attributes, and in training the parameters.
    """
    reason = "it takes more than 4 GiB"
    if sum(map(stored_bytes, _tensors(model))) <= COPY_BYTES:
        try:
            copy.deepcopy(model)
        except Exception as error:  # whatever the model's attributes raise
            reason = f"it can't be copied ({first_line(error)})"
        else:
            left: weakref.WeakSet[nn.Module] = weakref.WeakSet()

            def copied() -> nn.Module:
                if left:  # modules with reference cycles (quantised ones have them) hold their memory until then
                    gc.collect()
                made = copy.deepcopy(model)
                left.update(made.modules())
                return made

            try:
                yield copied
            finally:
                if left:
                    gc.collect()
            return
    notes.append(f"the model itself was used, not a copy of it, because {reason}; it was put back after each run")
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    restore = _snapshot(model, training)

    def fresh() -> nn.Module:
        restore()
        for parameter in model.parameters():
            parameter.grad = None  # as in a copy; or applying a plan would move the user's gradients along
        return model

    try:
        yield fresh
    finally:
        restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _snapshot(model: nn.Module, training: bool) -> Callable[[], None]:
    """Return a function that undoes what running the model, or applying a plan to it, changes."""
    applied = is_applied(model)
    devices = {name: tensor.device for name, tensor in named_tensors(model).items()}
    attributes = [(module, _attributes(module)) for module in model.modules()]
    saved = list(_tensors(model)) if training else list(model.buffers())
    values = [(tensor, tensor.detach().clone()) for tensor in saved]

    def restore() -> None:
        if is_applied(model) and not applied:
            remove(model)
        move_tensors(named_tensors(model), devices)
        for module, own in attributes:
            vars(module).clear()
            vars(module).update(
                {name: copy.copy(value) if name in _REGISTRIES else value for name, value in own.items()}
            )
        with torch.no_grad():
            for tensor, value in values:
                if not _same_bits(tensor, value):
                    tensor.copy_(value)

    return restore


_REGISTRIES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: copy.copy(value) if name in _REGISTRIES else value for name, value in vars(module).items()}


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.nan_to_num(), right.nan_to_num()) and torch.equal(left.isnan(), right.isnan())


@contextlib.contextmanager
def devices_of(plan: Plan) -> Iterator[Stage]:
    """Provide the devices a plan uses: those that are here, or simulated ones of the plan's sizes.

    What the plan keeps on disk is kept in CPU memory instead: copies of the model are not in a file.
    """
    plan = replace(plan, streamed=dict.fromkeys(plan.streamed, "cpu"))
    if runs_in_processes(plan):  # each on its own device
        yield Stage(plan=plan, simulated=None, original_names={})
        return
    used = devices_used(plan)
    names = [device.name for device in plan.devices if device.name in used]
    names += sorted(used - set(names))
    active = active_devices()
    if active is not None and used <= {*active, "cpu"}:
        yield Stage(plan=plan, simulated=active, original_names={name: name for name in names})
    elif active is None and all(is_here(name) for name in names):
        yield Stage(plan=plan, simulated=None, original_names={name: name for name in names})
    else:
        known = {device.name: device for device in plan.devices}
        parts = [known.get(name) or PlanDevice(name=name, memory_bytes=0) for name in names]
        sized = [replace(part, memory_bytes=part.memory_bytes or UNLIMITED_BYTES) for part in parts]
        with simulate(cluster_of(sized)) as simulated:
            renamed = dict(zip(names, simulated, strict=True))
            here = replace(
                plan,
                placements={path: renamed[name] for path, name in plan.placements.items()},
                devices=tuple(replace(part, name=renamed[part.name]) for part in sized),
                pins={},
            )
            yield Stage(plan=here, simulated=simulated, original_names={new: old for old, new in renamed.items()})


def devices_used(plan: Plan) -> set[str]:
    """Names of devices that have anything: all of them where parameters are cut or the model is replicated."""
    replicated = plan.mesh is not None and plan.mesh.data > 1
    return {device.name for device in plan.devices} if plan.cuts or replicated else set(plan.placements.values())


def is_here(name: str) -> bool:
    """Whether torch can use a device; "cpu:1" outside of a simulation is only another name for the CPU."""
    if name == "disk" or (name.startswith("cpu") and name != "cpu"):
        return False
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):  # torch raises all four, by backend
        return False
    return True


def cluster_here(stage: Stage) -> Cluster:
    """The cluster of the stage's devices, as they are counted here."""
    return stage.simulated.cluster if stage.simulated is not None else cluster_of(stage.plan.devices)
