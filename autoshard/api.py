"""The calls of autoshard: each chains the rooms below it and adds nothing of its own.

The rooms are imported inside the calls, so that `import autoshard` costs next to nothing beyond torch.
"""

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from autoshard.cluster.cluster import Cluster
from autoshard.errors import PlanError, SpecError
from autoshard.estimate import Estimate
from autoshard.plan import Plan
from autoshard.workload import Workload

if TYPE_CHECKING:
    from autoshard.capture.graph import ModelGraph
    from autoshard.profile.profile import Profile
    from autoshard.strategies.column_parallel import Prove
    from autoshard.verify import Verification


def capture(model: nn.Module, inputs: Any = None, *, workload: Workload | None = None) -> "ModelGraph":
    """Record one run of the model without its weights.

    `inputs`: a tensor, a tuple of positional arguments, a dict of keyword arguments, or a callable returning one of
    these; may be left out for a Hugging Face model. In training mode the backward is recorded too. Raises
    `CaptureError`.
    """
    from autoshard.capture.capture import capture as record

    return record(model, inputs, workload=workload)


def profile(model: nn.Module, inputs: Any = None, *, workload: Workload | None = None) -> "Profile":
    """Measure memory and compute of every module without allocating the model. Raises `CaptureError`."""
    from autoshard.profile.measure import profile_graph

    graph = capture(model, inputs, workload=workload)
    return profile_graph(graph, workload or Workload(assumed=True))


def plan(
    model: nn.Module,
    devices: Any = "auto",
    *,
    inputs: Any = None,
    strategy: str = "auto",
    objective: str = "latency",
    workload: Workload | None = None,
    max_memory: Mapping[Any, Any] | None = None,
    pins: Mapping[str, Any] | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    tp_plan: Mapping[str, str] | None = None,
) -> Plan:
    """Decide where every module goes; the model may be on meta and is not touched.

    `devices`: "auto", a count, names, {name: size}, a spec such as "8xH100-80GB" or "2x24GiB,1x12GiB", a cluster file
    or a `Cluster`. `max_memory`: {device: size}; with devices="auto" exactly the devices it lists are used. `pins`:
    {module path: device}. `num_microbatches` and `schedule` ("gpipe", "1f1b", "interleaved" or "zero-bubble") are for
    pipelines, and chosen where they are not given. `tp_plan`: with "column-parallel", a dict as Transformers has it;
    exactly what it names is cut, once it is proved. Raises `SpecError`, `CaptureError`, or `PlanError` if nothing fits.
    """
    return _planned(
        model, devices, inputs, workload,
        strategy=strategy, objective=objective, max_memory=max_memory, pins=pins,
        num_microbatches=num_microbatches, schedule=schedule, tp_plan=tp_plan,
    )  # fmt: skip


def _planned(
    model: nn.Module, devices: Any, inputs: Any, workload: Workload | None, *,
    max_memory: Mapping[Any, Any] | None, **settings: Any,
) -> Plan:  # fmt: skip
    """Find the devices, profile the model on nothing, and plan; `settings` are those of `plan_measured`."""
    from autoshard.cluster.parse import parse_devices

    if max_memory and isinstance(devices, str) and devices == "auto":
        devices = max_memory
    cluster = parse_devices(devices)
    measured = profile(model, inputs, workload=workload)
    return plan_measured(model, inputs, measured, cluster, max_memory=max_memory, **settings)


def plan_measured(
    model: nn.Module,
    inputs: Any,
    profile: "Profile",
    cluster: Cluster,
    *,
    strategy: str = "auto",
    objective: str = "latency",
    max_memory: Mapping[Any, Any] | None = None,
    pins: Mapping[str, Any] | None = None,
    in_memory: Collection[str] = (),
    num_microbatches: int | None = None,
    schedule: str | None = None,
    tp_plan: Mapping[str, str] | None = None,
) -> Plan:
    """Plan a model whose profile is known, with any strategy.

    "auto" cuts parameters only where there is one process per device: one process is slower at that than predicted.
    `in_memory`: names of parameters that can't be kept on disk.
    """
    if tp_plan is not None and (strategy != "column-parallel" or pins):
        raise SpecError('a tp_plan is carried out with strategy="column-parallel" and without pins.')
    if strategy == "auto" and not pins and _processes() == len(cluster.devices) > 1:
        return _placed_or_cut(model, inputs, profile, cluster, objective, max_memory)
    if strategy in ("pipeline", "data-parallel"):
        if pins:
            raise SpecError(f'modules can\'t be pinned with strategy="{strategy}" yet: use "balanced".')
        limited = _limited(cluster, max_memory)
        return _plan_batched(model, inputs, profile, limited, strategy, objective, num_microbatches, schedule)
    if strategy != "column-parallel":
        settings: dict[str, Any] = {"strategy": strategy, "objective": objective, "in_memory": in_memory}
        return plan_profile(profile, cluster, max_memory=max_memory, pins=pins, **settings)
    if pins:
        raise SpecError('modules can\'t be pinned with strategy="column-parallel": every device has a part of each.')
    if "disk" in cluster.names:
        raise SpecError('"disk" computes nothing: leave it out with strategy="column-parallel", or use "balanced".')
    return _plan_cuts(model, inputs, profile, _limited(cluster, max_memory), objective, tp_plan=tp_plan)


def _plan_batched(
    model: nn.Module, inputs: Any, profile: "Profile", cluster: Cluster, strategy: str, objective: str,
    num_microbatches: int | None, schedule: str | None,
) -> Plan:  # fmt: skip
    """Prove that the batch can be divided, and plan with parts of it."""
    from autoshard.prove.batch import find_batch_axis
    from autoshard.strategies.data_parallel import data_parallel
    from autoshard.strategies.pipeline import pipeline

    batch = find_batch_axis(model, inputs, profile.workload)
    if strategy == "data-parallel":
        return data_parallel(profile, cluster, batch, objective=objective, processes=_processes())
    return pipeline(
        profile, cluster, batch,
        objective=objective, num_microbatches=num_microbatches, schedule=schedule, processes=_processes(),
    )  # fmt: skip


def _placed_or_cut(
    model: nn.Module,
    inputs: Any,
    profile: "Profile",
    cluster: Cluster,
    objective: str,
    max_memory: Mapping[Any, Any] | None,
) -> Plan:
    """Place whole modules or cut parameters, whichever is predicted better; what loses is not proved."""
    from autoshard.prove.prove import unproved
    from autoshard.strategies.compare import better, compared

    limited = _limited(cluster, max_memory)
    placed: Plan | None = None
    try:
        placed = plan_profile(profile, cluster, objective=objective, max_memory=max_memory)
        cut = _plan_cuts(model, inputs, profile, limited, objective, prove=unproved)
        if better(cut, placed, profile, limited):
            cut = _plan_cuts(model, inputs, profile, limited, objective)
    except PlanError:
        if placed is None:  # too large for whole modules
            return _plan_cuts(model, inputs, profile, limited, objective)
        return placed
    return compared(cut, placed, profile, limited)


def _limited(cluster: Cluster, max_memory: Mapping[Any, Any] | None) -> Cluster:
    limits, _ = _limits_and_pins(cluster, max_memory, None)
    return cluster.with_memory({name: min(n, cluster.device(name).memory_bytes) for name, n in limits.items()})


def _processes() -> int:
    """How many processes of torch.distributed run, 0 if it is not in use."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


def _plan_cuts(
    model: nn.Module, inputs: Any, profile: "Profile", cluster: Cluster, objective: str, prove: "Prove | None" = None,
    tp_plan: Mapping[str, str] | None = None,
) -> Plan:  # fmt: skip
    """Find what can be cut, prove it, and choose. `prove`: what proves; by default what runs every distinct block."""
    from autoshard.axes.groups import find_groups
    from autoshard.capture.capture import capture as record
    from autoshard.prove.prove import make_prover
    from autoshard.strategies.column_parallel import column_parallel
    from autoshard.strategies.written_cuts import as_written

    forward = dataclasses.replace(profile.workload, mode="inference", new_tokens=0)
    graph = record(model, inputs, workload=forward, composite=True)
    found = find_groups(graph)
    prove = prove or make_prover(model, inputs, forward, graph, found)
    processes = _processes()
    even = not processes  # one process runs all ranks on the same local shapes
    if tp_plan is not None:
        return as_written(profile, cluster, found, prove, tp_plan, objective=objective, even=even)
    degree = processes if processes > 1 and processes == len(cluster.devices) else None  # all of them run
    return column_parallel(profile, cluster, found, prove, objective=objective, degree=degree, even=even)


def plan_profile(
    profile: "Profile",
    cluster: Cluster,
    *,
    strategy: str = "auto",
    objective: str = "latency",
    max_memory: Mapping[Any, Any] | None = None,
    pins: Mapping[str, Any] | None = None,
    in_memory: Collection[str] = (),
) -> Plan:
    """Plan from a profile that exists already, with limits and pins in the forms people write."""
    from autoshard.strategies import make_plan

    limits, fixed = _limits_and_pins(cluster, max_memory, pins)
    return make_plan(
        profile, cluster, strategy=strategy, objective=objective, max_memory=limits or None, pins=fixed or None,
        in_memory=in_memory,
    )  # fmt: skip


def _limits_and_pins(
    cluster: Cluster, max_memory: Mapping[Any, Any] | None, pins: Mapping[str, Any] | None
) -> tuple[dict[str, int], dict[str, str]]:
    """Limits and pins with the names of the cluster's devices and sizes in bytes."""
    from autoshard.cluster.parse import canonical_name
    from autoshard.sizes import parse_bytes

    limits = {
        _known(canonical_name(name), cluster, "max_memory"): parse_bytes(size)
        for name, size in (max_memory or {}).items()
    }
    fixed = {path: _known(canonical_name(name), cluster, f"the pin of {path!r}") for path, name in (pins or {}).items()}
    return limits, fixed


def estimate(plan: "Plan | Mapping[str, Any]", profile: "Profile", devices: Any = None) -> Estimate:
    """Compute what a plan, or a `device_map`, costs: bytes per device, seconds, transfers or collectives, lower bound.

    `devices`: as in `plan`; None rebuilds the plan's own devices from the hardware table.
    """
    from autoshard.cluster.parse import cluster_of, parse_devices
    from autoshard.cost import estimate as of_placements
    from autoshard.cut_cost import estimate_cuts
    from autoshard.mesh_cost import estimate_mesh
    from autoshard.stream_cost import estimate_streamed

    plan = _as_plan(plan, profile)
    cluster = cluster_of(plan.devices) if devices is None else parse_devices(devices)
    if plan.mesh is not None:
        return estimate_mesh(plan, profile, cluster)
    price = estimate_cuts if plan.cuts else estimate_streamed if plan.streamed else of_placements
    return price(plan, profile, cluster)


def apply(
    model: nn.Module,
    plan: Any = "auto",
    *,
    inputs: Any = None,
    strategy: str = "auto",
    objective: str = "latency",
    workload: Workload | None = None,
    max_memory: Mapping[Any, Any] | None = None,
    pins: Mapping[str, Any] | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
) -> nn.Module:
    """Put the model where the plan says, in place, and return it.

    `plan`: a `Plan`; a `device_map` ({module path: device}); or devices in any form that `plan()` takes, which are then
    planned for with the other arguments. Raises what `plan()` raises, and `ApplyError`; the model is then as it was.
    """
    from autoshard.runtime import apply_device_map, apply_plan

    if is_device_map(plan):
        return apply_device_map(model, plan)
    if not isinstance(plan, Plan):
        settings: dict[str, Any] = {"strategy": strategy, "objective": objective, "workload": workload}
        settings |= {"num_microbatches": num_microbatches, "schedule": schedule}
        plan = _plan(model, plan, inputs=inputs, max_memory=max_memory, pins=pins, **settings)
    return apply_plan(model, plan)


def remove(model: nn.Module) -> nn.Module:
    """Undo `apply`: the same module on one device, bit-equal. Raises `ApplyError` if nothing was applied."""
    from autoshard.runtime import remove as undo

    return undo(model)


def load(
    path: "str | os.PathLike[str]",
    devices: Any = "auto",
    *,
    plan: "Plan | Mapping[str, Any] | None" = None,
    model: "nn.Module | Callable[[], nn.Module] | None" = None,
    inputs: Any = None,
    strategy: str = "auto",
    objective: str = "latency",
    workload: Workload | None = None,
    max_memory: Mapping[Any, Any] | None = None,
    pins: Mapping[str, Any] | None = None,
    num_microbatches: int | None = None,
    schedule: str | None = None,
    dtype: Any = "auto",
    allow: Collection[str] = (),
    trust_remote_code: bool = False,
    local_files_only: bool = True,
    progress: "Callable[[int, int], None] | bool | None" = None,
) -> nn.Module:
    """Read a safetensors checkpoint straight to where a plan has its tensors, apply the plan, and return the model.

    `path`: a directory as Transformers writes it, or the name of one on the hub, which is downloaded only with
    `local_files_only=False`. The plan is made before anything is read, from `devices` and the arguments that `plan()`
    takes, unless `plan` gives a `Plan` or a `device_map`. On the CPU alone nothing is applied. `autoshard.remove`
    brings the model to the CPU.

    `model`: a module to fill, its parameters best on meta, or a function that builds it; then `path` may be any
    safetensors files with its names. `dtype`: as in `from_pretrained`; "auto" is the checkpoint's. `allow`: any of
    "missing", "unexpected" and "mismatched"; otherwise such tensors are errors. `progress`: called with bytes done and
    bytes in all; by default a bar is shown on a terminal, False shows none. Code of the checkpoint runs only with
    `trust_remote_code=True`, and no pickle is read.

    Raises `CheckpointError`, `SpecError`, and what `plan()` and `apply()` raise.
    """
    from autoshard.checkpoint.mapped import not_in_files
    from autoshard.integrations.loading import fill, open_weights

    unfilled = open_weights(
        path, model=model, dtype=dtype, allow=allow,
        trust_remote_code=trust_remote_code, local_files_only=local_files_only,
    )  # fmt: skip
    if plan is None and not _is_for_cpu_alone(unfilled.model, devices, max_memory):
        in_memory = not_in_files(unfilled.model, unfilled.checkpoint, unfilled.sources)
        plan = _planned(
            unfilled.model, devices, inputs, workload,
            strategy=strategy, objective=objective, max_memory=max_memory, pins=pins, in_memory=in_memory,
            num_microbatches=num_microbatches, schedule=schedule,
        )  # fmt: skip
    if progress is None or isinstance(progress, bool):
        from autoshard.integrations.progress import shown_progress

        with shown_progress(progress) as show:
            return fill(unfilled, plan, show)
    return fill(unfilled, plan, progress)


def _is_for_cpu_alone(model: nn.Module, devices: Any, max_memory: Mapping[Any, Any] | None) -> bool:
    """Whether there is nothing to plan: one device, which is where models are anyway, with room for this one."""
    from autoshard.cluster.parse import parse_devices
    from autoshard.integrations.skeleton import parameter_bytes

    cluster = parse_devices(devices)
    return not max_memory and cluster.names == ("cpu",) and parameter_bytes(model) <= cluster.device("cpu").memory_bytes


def save(model: nn.Module, path: "str | os.PathLike[str]", *, max_shard_size: "int | str" = "5GB") -> None:
    """Write a model to a directory as ordinary safetensors files, with its configuration where it has one.

    The files are byte for byte the same whatever plan is applied; of a model cut over processes, all of them call it
    and the first writes. `path` is replaced in one step at the end: if anything fails before, or the process is killed,
    what was there is whole. Other files in it are kept. Needs room for the old and the new one, and memory for the
    largest tensor. Raises `CheckpointError`; on the other ranks `RankError`.
    """
    from autoshard.integrations.saving import save as write

    write(model, path, max_shard_size=max_shard_size)


def verify(
    model: nn.Module,
    plan: "Plan | Mapping[str, Any] | None" = None,
    *,
    inputs: Any = None,
    training: bool | None = None,
    new_tokens: int | None = None,
    tolerance: float = 0.0,
) -> "Verification":
    """Run the original and the applied model on the same inputs and compare; simulated where devices are missing.

    `plan`: a `Plan` or a `device_map`; None if the model is applied already. `training` and `new_tokens` add backward
    and optimizer steps, and cached decoding; by default what the plan's workload says. Returns a report with `.ok`,
    `.max_error` and `.first_difference`. Raises `VerifyError` if there is nothing to compare.
    """
    from autoshard.verify import verify as compare

    return compare(model, plan, inputs, training=training, new_tokens=new_tokens, tolerance=tolerance)


def simulate(devices: Any) -> Any:
    """Enter a context in which the devices of a spec exist: real values, real memory accounting, no GPU."""
    from autoshard.simulate import simulate as enter

    return enter(devices)


def is_device_map(value: Any) -> bool:
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


def _as_plan(plan: "Plan | Mapping[str, Any]", profile: "Profile") -> Plan:
    return plan if isinstance(plan, Plan) else Plan.from_device_map(plan, profile)


def _known(name: str, cluster: Cluster, where: str) -> str:
    if name not in cluster.names:
        raise SpecError(f"{where} names device {name!r}, which is not among the devices: {', '.join(cluster.names)}.")
    return name


# `apply` has an argument of this name.
_plan: Callable[..., Plan] = plan
