"""Where a verification runs: the devices of the plan, or simulated ones."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from autoshard.cluster.parse import cluster_of
from autoshard.errors import ApplyError
from autoshard.plan import Plan, PlanDevice
from autoshard.plan.placement import resolve_execution_devices
from autoshard.runtime.collectives import count_processes
from autoshard.runtime.devices import resolve_device
from autoshard.simulate import SimulatedDevices, active_devices, simulate

UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDevices:
    """The devices to run on: `plan` with the names they have here, and by these their `original_names`."""

    plan: Plan
    simulated: SimulatedDevices | None
    original_names: dict[str, str]


@contextlib.contextmanager
def devices_of(plan: Plan) -> Iterator[RunDevices]:
    """Provide the devices a plan uses: those that are here, or simulated ones of the plan's sizes.

    What the plan keeps on disk is kept in CPU memory instead: copies of the model are not in a file.
    """
    plan = replace(plan, offloaded=dict.fromkeys(plan.offloaded, "cpu"))
    if runs_in_processes(plan):  # each on its own device
        yield RunDevices(plan=plan, simulated=None, original_names={})
        return
    used = devices_used(plan)
    names = [device.name for device in plan.devices if device.name in used]
    names += sorted(used - set(names))
    active = active_devices()
    if active is not None and used <= {*active, "cpu"}:
        yield RunDevices(plan=plan, simulated=active, original_names={name: name for name in names})
    elif active is None and all(is_here(name) for name in names):
        yield RunDevices(plan=plan, simulated=None, original_names={name: name for name in names})
    else:
        known = {device.name: device for device in plan.devices}
        parts = [known.get(name) or PlanDevice(name=name, memory_bytes=0) for name in names]
        sized = [replace(part, memory_bytes=part.memory_bytes or UNLIMITED_BYTES) for part in parts]
        with simulate(cluster_of(sized)) as simulated:
            new_names = dict(zip(names, simulated, strict=True))
            here = renamed(replace(plan, devices=tuple(sized), pins={}), new_names)
            originals = {new: old for old, new in new_names.items()}
            yield RunDevices(plan=here, simulated=simulated, original_names=originals)


def renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """The plan with other names for its devices."""
    return replace(
        plan,
        placements={path: names[name] for path, name in plan.placements.items()},
        devices=tuple(replace(device, name=names[device.name]) for device in plan.devices),
    )


def devices_used(plan: Plan) -> set[str]:
    """Names of devices that have anything: all of them where parameters are cut or the model is replicated."""
    replicated = plan.mesh is not None and plan.mesh.data > 1
    return {device.name for device in plan.devices} if plan.cuts or replicated else set(plan.placements.values())


def is_here(name: str) -> bool:
    """Whether torch can use a device; "cpu:1" outside of a simulation is only another name for the CPU."""
    if name.startswith("cpu") and name != "cpu":
        return False
    try:
        resolve_device(name)
    except ApplyError:
        return False
    return True


def is_divided(plan: Plan) -> bool:
    """Whether calls of a model run in parts of their batch under a plan."""
    return plan.batch is not None and (plan.num_microbatches > 1 or (plan.mesh is not None and plan.mesh.data > 1))


def runs_in_processes(plan: Plan) -> bool:
    """Whether every rank of a plan is one of several processes."""
    return bool(plan.cuts) and count_processes() > 1


def device_of(stage: RunDevices, model: nn.Module) -> torch.device:
    """Return the device of the root, where inputs belong."""
    if runs_in_processes(stage.plan):
        name = stage.plan.devices[dist.get_rank()].name
        return torch.device(name if is_here(name) else "cpu")  # what is missing is told when the plan is applied
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    input_devices = resolve_execution_devices(
        stage.plan.placements, [path for path, _ in model.named_modules()], tensors
    ).devices
    return torch.device(input_devices[""])


def accelerators_of(stage: RunDevices) -> list[torch.device]:
    """The devices that are used, but for CPUs; over processes that of this one."""
    cut = runs_in_processes(stage.plan)
    names = {str(device_of(stage, nn.Module()))} if cut else devices_used(stage.plan)
    return [device for device in map(torch.device, sorted(names)) if device.type != "cpu"]
