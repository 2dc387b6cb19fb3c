"""What calls and commands ask for, as they are given: devices, a model to profile, a plan or a device map."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

from autoshard.common.collector import no_collection
from autoshard.errors import SpecError
from autoshard.nested import tensors_in
from autoshard.plan import Plan
from autoshard.plan.batching import ASSUMED
from autoshard.plan.choices import check_choices, strategy_named
from autoshard.plan.workload import Workload
from autoshard.search.planning import part_sizes, plan_measured

if TYPE_CHECKING:
    from autoshard.cluster.cluster import Cluster
    from autoshard.cluster.parse import Devices
    from autoshard.plan.choices import DeviceMap, Size
    from autoshard.profile.profile import Profile
    from autoshard.search.choose import Chosen


OF_PROCESSES = ("launch", "mesh", "micro_batch", "recompute", "precision", "dtype", "compiled", "divided_outputs")
"""What may be said of a plan that only plans for processes have."""


def profile_model(model: nn.Module, inputs: Any, workload: Workload | None) -> "Profile":
    """Measure memory and compute of every module without allocating the model. Raises `CaptureError`."""
    from autoshard.capture.capture import capture
    from autoshard.profile.measure import profile_graph

    graph = capture(model, inputs, workload=workload)
    with no_collection():
        return replace(profile_graph(graph, workload or Workload(assumed=True)), source=(model, inputs))


def plan_asked(
    model: nn.Module, devices: Any, inputs: Any, workload: Workload | None, known: "Profile | None" = None, *,
    max_memory: "Mapping[Any, Size] | None", wishes: Mapping[str, Any] | None = None, **settings: Any,
) -> Plan:  # fmt: skip
    """Find the devices, profile the model without allocating it, and plan; `settings` are those of `plan_measured`.

    `known`: the profile, where it was taken already.
    """
    from autoshard.runtime.dispatch import check_whole

    settings["strategy"] = strategy_named(settings["strategy"])
    check_choices(**{name: settings[name] for name in ("strategy", "objective", "schedule")})
    check_whole(model)
    if known is not None:  # what it was taken for is asked for
        workload = workload or known.workload
        inputs = known.source[1] if inputs is None and known.source is not None else inputs
    cluster = cluster_for(devices, max_memory)
    chosen = chosen_for(
        model, inputs, workload or Workload(assumed=True), cluster, max_memory=max_memory, wishes=wishes, **settings
    )
    if chosen is not None:
        return chosen.plan
    inputs = in_size(model, inputs, workload)
    measured = measured_for(model, inputs, workload, known)
    from autoshard.cluster.parse import limited_to
    from autoshard.search.fewer_bits import with_hint

    made = partial(plan_measured, model, inputs, measured, cluster, max_memory=max_memory, **settings)
    return with_hint(made, measured, limited_to(cluster, max_memory))


def chosen_for(
    model: nn.Module, inputs: Any, workload: Workload, cluster: "Cluster", *,
    max_memory: "Mapping[Any, Size] | None" = None, pins: "DeviceMap | None" = None,
    tp_plan: Mapping[str, str] | None = None, in_memory: Collection[str] = (),
    wishes: Mapping[str, Any] | None = None, **settings: Any,
) -> "Chosen | None":  # fmt: skip
    """Plan for one process per device where that is asked for or worth it; None where one process is planned.

    `wishes` and `settings`: fields of `Asked`, the second those that plans of one process have, too.
    """
    from autoshard.cluster.parse import limited_to
    from autoshard.search.choose import choose
    from autoshard.search.limits import Asked

    alone = "a pin" if pins else "a tp_plan" if tp_plan is not None else ""
    asked = Asked(**settings, **(wishes or {}), one_process_alone=alone)
    return choose(model, inputs, workload, limited_to(cluster, max_memory), asked)


def largest_asked(
    model: nn.Module, devices: Any, vary: str, inputs: Callable[..., Any] | None, workload: Workload, *,
    strategy: str = "auto", objective: str = "latency", max_memory: "Mapping[Any, Size] | None" = None, **settings: Any,
) -> Plan:  # fmt: skip
    """Plan for the largest batch or sequence, for processes or for one; see `autoshard.largest`."""
    from autoshard.search.largest import largest_chosen
    from autoshard.search.planning import check_varied, largest_plan

    check_varied(vary)
    cluster, count = cluster_for(devices, max_memory), settings.pop("num_microbatches", None)
    wishes = {name: settings.pop(name) for name in OF_PROCESSES if name in settings}
    settings |= {"strategy": strategy_named(strategy), "objective": objective, "max_memory": max_memory}

    def made(asked: Workload) -> Any:
        return None if inputs is None else inputs(**{vary: getattr(asked, vary)})

    def planned(asked: Workload, **changed: Any) -> "tuple[None, Chosen | None]":
        return None, chosen_for(model, made(asked), asked, cluster, wishes=wishes, **settings | changed)

    def measured(asked: Workload) -> "tuple[nn.Module, Any, Profile]":
        given = made(asked)
        return model, given, profile_model(model, given, asked)

    grown = largest_chosen(vary, workload, planned, cluster, count)
    if grown is not None:
        return grown[1].plan
    return largest_plan(vary, workload, measured, cluster, num_microbatches=count, **settings)


def measured_for(model: nn.Module, inputs: Any, workload: Workload | None, known: "Profile | None") -> "Profile":
    """Return the profile: `known`, where it was taken already. Raises `SpecError` if it is of something else."""
    if known is not None:
        _check_measured(known, model, workload)
    return known or profile_model(model, inputs, workload)


def cluster_for(devices: "Devices | Plan", max_memory: "Mapping[Any, Size] | None" = None) -> "Cluster":
    """Return the devices that are meant, or that a plan has, with the links between processes where some run.

    With "auto" and `max_memory` they are those that it lists. With "auto" where several processes run and torch sees no
    accelerator, each process is a device, with an equal part of the memory.
    """
    from autoshard.cluster.parse import cluster_of, parse_devices
    from autoshard.runtime.collectives import count_processes

    if max_memory and isinstance(devices, str) and devices == "auto":
        devices = max_memory
    cluster = cluster_of(devices.devices) if isinstance(devices, Plan) else parse_devices(devices)
    count = count_processes()
    if count > 1 and devices == "auto" and [device.name for device in cluster.devices] == ["cpu"]:
        cluster = parse_devices({f"cpu:{rank}": cluster.devices[0].memory_bytes // count for rank in range(count)})
    return cluster.between_processes() if count > 1 else cluster


def _check_measured(profile: "Profile", model: nn.Module, workload: Workload | None) -> None:
    """Refuse a profile of another model or for another workload."""
    from autoshard.common.fingerprint import fingerprint

    if fingerprint(model) != profile.graph.fingerprint:
        raise SpecError(
            "the profile was taken of another model: names, shapes or dtypes differ. "
            "Leave profile out, or profile this model."
        )
    if workload is not None and workload != profile.workload:
        raise SpecError(
            f"the profile was taken for {profile.workload}, and the plan is asked for {workload}: "
            "leave workload out, or profile the model for it."
        )


def completed(model: nn.Module, plan: Plan, inputs: Any, *, assume_independent_rows: bool = False) -> Plan:
    """A plan with what is found by its processes, if it was made before they ran: cuts, and how a batch is divided.

    `assume_independent_rows`: divide the batch on the user's word, as where the plan itself was made so.
    """
    from autoshard.runtime import launched
    from autoshard.runtime.dispatch import check_whole

    cut, spread, long = (launched.is_divided_here(plan, degree) for degree in ("tp", "ep", "cp"))
    staged = launched.is_staged_here(plan)
    if cut or staged or spread or long or launched.answers_in_stages(plan):
        launched.check_launched(plan)
        check_whole(model)
    if spread or long:
        from autoshard.check.cuts import find_context
        from autoshard.check.experts import find_experts
        from autoshard.search.traced import trace

        mesh = plan.mesh
        assert mesh is not None
        traced = trace(model, inputs, plan.workload)
        if spread:
            plan = replace(plan, cuts=find_experts(model, traced.graph, mesh.ep))
        else:
            cuts, results = find_context(model, traced.graph, traced.inputs, plan.workload, mesh.cp)
            plan = replace(plan, cuts=cuts, results=results)
    if staged:
        from autoshard.check.batch import find_batch

        if plan.workload.training:
            launched.check_stored(model, plan)
        assumed = assume_independent_rows or ASSUMED in plan.reasons
        batch, check_parts = find_batch(model, inputs, plan.workload, assume_independent_rows=assumed)
        plan = launched.with_batch(plan, replace(batch, assumed=assumed))
        check_parts({plan.micro_batch, *part_sizes(plan, batch.size)})
    if cut:
        assert plan.mesh is not None
        found = plan_measured(
            model, inputs, profile_model(model, inputs, plan.workload), cluster_for(launched.of_first_replica(plan)),
            strategy="column-parallel", objective="memory", stages=[stage.paths for stage in plan.stages],
            divides_tokens=plan.workload.training and plan.sequence_parallel,
        )  # fmt: skip
        plan = launched.with_cuts(plan, found)
    if launched.answers_in_stages(plan):
        from autoshard.check.stages import check_apart, find_alike
        from autoshard.runtime.answering import stage_modules
        from autoshard.search.traced import trace

        assert plan.mesh is not None
        modules = stage_modules(model, plan.stages, plan.mesh.pp)
        graph = trace(model, inputs, plan.workload).graph
        check_apart(graph, modules)
        plan = replace(plan, alike=find_alike(graph, modules))
    return launched.with_divided_outputs(plan) if plan.divided_outputs else plan


def in_size(model: nn.Module, inputs: Any, workload: Workload | None) -> Any:
    """The inputs with as many samples as the workload says: the first of them, or those given again and again.

    Raises `SpecError` for sequences of another length.
    """
    if not isinstance(workload, Workload) or inputs is None:  # capture says what a workload is
        return inputs
    if workload.batch_size is None and workload.sequence_length is None:
        return inputs
    from autoshard.search.traced import arguments, found_batch_dim, repeated, sizes_of

    given = arguments(model, inputs, workload)[0]
    shapes = [tuple(tensor.shape) for _, tensor in tensors_in(given)]
    batch, length = workload.batch_size, workload.sequence_length
    if length is not None and not any(length in shape for shape in shapes):
        raise SpecError(
            f"the workload has sequence_length={length}, and no input has that size, of {', '.join(map(str, shapes))}. "
            "Give inputs of that length, or leave sequence_length out."
        )
    if batch is None or any(batch in shape[:2] for shape in shapes):
        return inputs
    dim = found_batch_dim(model, inputs, workload)
    rows, _ = sizes_of(given, workload, dim)
    return repeated(given, rows, batch, least_dims=2 if rows == 1 or dim else 1, dim=dim)


def is_device_map(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Tell {module path: device} from {device: size}: the keys of the second are device names."""
    from autoshard.cluster.parse import canonical_name

    if not isinstance(value, Mapping):
        return False
    for key in value:
        try:
            canonical_name(key)
        except SpecError:
            return True
    return False


def as_plan(plan: "Plan | DeviceMap", profile: "Profile") -> Plan:
    """Return the plan, that of a `device_map` where one was given; an old one over a mesh as one for processes."""
    from autoshard.search.processes import as_launched

    return as_launched(plan if isinstance(plan, Plan) else Plan.from_device_map(plan, profile), profile.graph)
