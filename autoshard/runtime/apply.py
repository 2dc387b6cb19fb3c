"""Apply a plan to a model, in place, and undo it.

place:       check everything  ──▶  move tensors, all or none  ──▶  hook the boundaries
remove:      unhook            ◀──  move tensors back, with the values they have now
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoshard.common.fingerprint import fingerprint
from autoshard.common.module_paths import find_scripted
from autoshard.errors import ApplyError, PlanError
from autoshard.plan import Plan, check_placements
from autoshard.plan.placement import check_known, resolve_execution_devices
from autoshard.runtime.around import layers_of
from autoshard.runtime.boundaries import find_boundaries, hook_boundaries, unhook
from autoshard.runtime.devices import check_copies, resolve_device
from autoshard.runtime.hooks import Hook, RootHook
from autoshard.runtime.microbatches import division_of
from autoshard.runtime.moves import check_filled, move_tensors, named_tensors, tied_groups
from autoshard.runtime.recompute import recomputed_in
from autoshard.runtime.resting import check_offloaded, make_streams, offloaded_module, resting
from autoshard.runtime.state import Record, Runtime


def remove(model: nn.Module) -> nn.Module:
    """Move every tensor back to where it was before apply, with its present value, and take the hooks off.

    Raises `ApplyError` if nothing is applied, or if there is no room where the model was.
    """
    runtime = find_runtime(model)
    if runtime is None:
        raise ApplyError(
            "nothing to remove: no plan is applied to this model. autoshard.apply(model, plan) applies one."
        )
    runtime.streams.close()
    tensors = named_tensors(model)
    runtime.copies.clear()
    move_tensors(tensors, _originals(tensors, runtime.record))
    unhook(model, runtime)
    return model


def find_runtime(model: nn.Module) -> Runtime | None:
    """What is shared by the hooks of the plan that is applied to this very module, None if none is."""
    return next((hook.runtime for hook in layers_of(model) if isinstance(hook, RootHook)), None)


def place(model: nn.Module, plan: Plan, *, conservative: bool = False) -> nn.Module:
    """Put every tensor of the model on its device and hook the boundaries; returns the same object.

    Applying over an applied model is as removing first. `conservative`: the plan knows nothing of the model's flow, so
    torch calls are watched for tensors of several devices throughout, and what a module writes into its arguments is
    brought back. Raises `PlanError` if the plan does not belong to the model and `ApplyError` if it can't be carried
    out here; the model is then as it was.
    """
    check_placements(plan.placements)
    tensors = named_tensors(model)
    before = find_runtime(model)
    if before is not None:
        before.streams.close()
    _check_tensors(tensors)
    _check_modules(model, before)
    check_belongs(model, plan, tensors)
    check_offloaded(model, plan)
    originals = {name: tensor.device for name, tensor in tensors.items()}
    known = originals if before is None else _originals(tensors, before.record)
    record = _record(model, plan, tensors, known, conservative)
    streams = make_streams(model, tensors, record.devices, plan.offloaded)
    check_copies([*record.placed, *originals.values()])
    if before is not None:
        before.copies.clear()
    runtime = Runtime(record, streams, model)
    boundaries = find_boundaries(model, runtime)
    undo = move_tensors(tensors, resting(tensors, record.devices, plan.offloaded))
    try:
        streams.pin()
        if before is not None:
            unhook(model, before)
        hook_boundaries(model, runtime, boundaries)
    except BaseException:  # also an interrupt: half a plan must never stay
        unhook(model, runtime)
        undo()
        if before is not None and find_runtime(model) is None:
            hook_boundaries(model, before, find_boundaries(model, before))
        raise
    return model


def _record(
    model: nn.Module, plan: Plan, tensors: Mapping[str, torch.Tensor], originals: Mapping[str, torch.device],
    conservative: bool,
) -> Record:  # fmt: skip
    """Work out where everything lives; nothing is moved yet."""
    execution_devices = resolve_execution_devices(plan.placements, [path for path, _ in model.named_modules()], tensors)
    names = dict.fromkeys(
        [*plan.placements.values(), *execution_devices.entries.values(), execution_devices.devices[""]]
    )
    devices = _devices(tensors, execution_devices.entries)
    staying = {name: device for name, device in devices.items() if offloaded_module(name, plan.offloaded) is None}
    by_size = sorted((name for name in staying if tensors[name].numel()), key=lambda name: -tensors[name].numel())
    smallest = {staying[name]: name for name in by_size}
    return Record(
        plan=plan,
        placements=dict(execution_devices.entries),
        devices=devices,
        originals=originals,
        execution_devices=execution_devices.devices,
        conservative=conservative,
        division=division_of(plan),
        recomputed=recomputed_in(plan, model),
        placed=tuple(dict.fromkeys(map(resolve_device, names))),
        sentinels=tuple((name, tensors[name], device) for device, name in smallest.items()),
    )


def _devices(tensors: Mapping[str, torch.Tensor], placements: Mapping[str, str]) -> dict[str, torch.device]:
    """Name -> device it lives on: its own, or, for tied tensors, that of the first of their names."""
    resolved = {name: resolve_device(name) for name in dict.fromkeys(placements.values())}
    return {name: resolved[placements[names[0]]] for names in tied_groups(tensors) for name in names}


def _originals(tensors: Mapping[str, torch.Tensor], record: Record) -> dict[str, torch.device]:
    """Name -> device before apply; for tensors that are new under their name, where most of the model was."""
    known = list(record.originals.values())
    usual = max(dict.fromkeys(known), key=known.count) if known else None
    return {name: record.originals.get(name) or usual or tensor.device for name, tensor in tensors.items()}


def _check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise ApplyError(f"{name} has no shape yet: it is lazy. Run the model once, then apply the plan.")
    check_filled(tensors)


def _check_modules(model: nn.Module, own: Runtime | None) -> None:
    if (scripted := find_scripted(model)) is not None:
        raise ApplyError(
            f"{scripted or 'the model'} is TorchScript, whose weights can't be moved one by one. Apply the plan to the "
            "module as it was before torch.jit.script or torch.jit.trace."
        )
    for path, module in model.named_modules():
        for hook in layers_of(module):
            if isinstance(hook, Hook) and hook.runtime is not own:
                where = f"its part {path!r}" if path else "it"
                raise ApplyError(
                    f"can't apply a plan to this model: another one is applied to {where} or to a model around it. "
                    "Call autoshard.remove on that model first."
                )


def check_belongs(model: nn.Module, plan: Plan, tensors: Mapping[str, torch.Tensor], known: str = "") -> None:
    """Raise `PlanError` unless the plan names this model's modules and tensors; `known`: the model's fingerprint."""
    modules = dict(model.named_modules(remove_duplicate=False))
    check_known(plan.placements, modules, tensors, type(model).__name__)
    if plan.fingerprint and plan.fingerprint != (known or fingerprint(model)):
        largest = sorted(tensors, key=lambda name: -tensors[name].numel())[:4]
        shapes = ", ".join(f"{name} {list(tensors[name].shape)} {tensors[name].dtype}" for name in largest)
        raise PlanError(
            "this plan was made for another model: the names, shapes, dtypes or ties of its tensors are not those of "
            f"this {type(model).__name__} (its largest tensors: {shapes.replace('torch.', '')}). Make a new plan."
        )
