"""The calls of autoshard: each chains the packages below it and adds nothing of its own.

The packages are imported inside the calls, so that `import autoshard` costs next to nothing beyond torch.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from autoshard.common.progress import shown_progress
from autoshard.engine.estimate import Estimate
from autoshard.errors import PlanError, SpecError
from autoshard.plan import Plan
from autoshard.plan.choices import (
    Launch,
    Objective,
    PrecisionName,
    Recompute,
    ScheduleName,
    Strategy,
    WeightDtype,
)
from autoshard.plan.workload import Workload
from autoshard.search.asked import (
    as_plan,
    cluster_for,
    completed,
    in_size,
    is_device_map,
    largest_asked,
    plan_asked,
    profile_model,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from autoshard.capture.graph import ModelGraph
    from autoshard.cluster.cluster import Cluster
    from autoshard.cluster.parse import Devices
    from autoshard.pipelines.schedule import RankSchedule
    from autoshard.plan.choices import DeviceMap, Inputs, Size
    from autoshard.profile.profile import Profile
    from autoshard.runtime.losses import Loss, Reduction
    from autoshard.runtime.schedule import LocalSchedule
    from autoshard.simulate.devices import SimulatedDevices
    from autoshard.verify import Verification


def capture(model: nn.Module, inputs: "Inputs | None" = None, *, workload: Workload | None = None) -> "ModelGraph":
    """Record one run of the model without its weights.

    `inputs`: a tensor, a tuple of positional arguments, a dict of keyword arguments, or a callable returning one of
    these; may be left out for a Hugging Face model. In training mode the backward is recorded too. Raises
    `CaptureError`.
    """
    from autoshard.capture.capture import capture as record

    return record(model, inputs, workload=workload)


def profile(model: nn.Module, inputs: "Inputs | None" = None, *, workload: Workload | None = None) -> "Profile":
    """Measure memory and compute of every module without allocating the model. Raises `CaptureError`."""
    return profile_model(model, in_size(model, inputs, workload), workload)


def plan(
    model: nn.Module,
    devices: "Devices" = "auto",
    *,
    inputs: "Inputs | None" = None,
    strategy: Strategy = "auto",
    objective: Objective = "latency",
    workload: Workload | None = None,
    profile: "Profile | None" = None,
    max_memory: "Mapping[Any, Size] | None" = None,
    pins: "DeviceMap | None" = None,
    num_microbatches: int | None = None,
    schedule: ScheduleName | None = None,
    tp_plan: Mapping[str, str] | None = None,
    assume_independent_rows: bool = False,
    launch: Launch | None = None,
    mesh: "str | Mapping[str, int] | None" = None,
    micro_batch: int | None = None,
    recompute: Recompute | None = None,
    precision: PrecisionName = "auto",
    dtype: WeightDtype = "auto",
    compiled: bool | None = None,
    divided_outputs: bool = False,
) -> Plan:
    """Decide where every module goes; the model may be on meta and is not touched.

    `devices`: "auto", a count, names, {name: size}, a spec such as "8xH100-80GB" or "2x24GiB,1x12GiB", a cluster file
    or a `Cluster`. `max_memory`: {device: size}; with devices="auto" exactly the devices it lists are used. `pins`:
    {module path: device}. `num_microbatches` and `schedule` ("gpipe", "1f1b", "interleaved" or "zero-bubble") are for
    pipelines, and chosen where they are not given. `tp_plan`: with "column-parallel", a dict as Transformers has it;
    exactly what it names is cut, once it was checked. `assume_independent_rows`: divide the batch though the check
    refuses it, on your word that no row depends on another; the plan says so. `profile`: what `profile()` gave for this
    model and these inputs; saves taking it again for every set of devices.

    With a process per device (torchrun): `launch`: "processes", "one-process", or None for both where the devices are
    another machine's. `mesh`: degrees such as "fsdp=8,tp=2" or {"fsdp": 8, "tp": 2}; then only the rest is chosen.
    `micro_batch`: samples that a replica computes at once. `recompute`: "none", "selective" or "full". `precision` of
    training: "mixed", "pure", "master" or "full". `dtype` of weights: a torch dtype's name, "int8" or "int4".
    `compiled`: the modules will be compiled; by default only where tokens are generated. `divided_outputs`: logits of
    which ranks compute the loss in parts, in training, are given out as a `DTensor` (`.full_tensor()` on all ranks puts
    it together): of long sequences they are most of the memory. Raises `SpecError`, `CaptureError`, or `PlanError` if
    nothing fits.
    """
    return plan_asked(
        model, devices, inputs, workload, profile,
        strategy=strategy, objective=objective, max_memory=max_memory, pins=pins,
        num_microbatches=num_microbatches, schedule=schedule, tp_plan=tp_plan,
        assume_independent_rows=assume_independent_rows,
        wishes={"launch": launch, "mesh": mesh, "micro_batch": micro_batch, "recompute": recompute,
                "precision": precision, "dtype": dtype, "compiled": compiled, "divided_outputs": divided_outputs},
    )  # fmt: skip


def largest(
    model: nn.Module,
    devices: "Devices" = "auto",
    vary: Literal["batch_size", "sequence_length"] = "batch_size",
    *,
    inputs: "Inputs | None" = None,
    workload: Workload | None = None,
    **settings: Any,
) -> Plan:
    """Plan for the largest batch ("batch_size") or sequence ("sequence_length") with which the model fits.

    `inputs`: None for a Hugging Face model, else a function of `batch_size` or `sequence_length` that makes them.
    `settings` are those of `plan`. Every size that is tried is profiled and planned; the plan's workload says which one
    it is, and the next one does not fit. Raises what `plan()` raises for the first size: that of `workload`, or 1.
    """
    if inputs is not None and not callable(inputs):
        raise SpecError(f"inputs of one size can't grow: give a function of {vary} that makes them.")
    return largest_asked(model, devices, vary, inputs, workload or Workload(), **settings)


def estimate(plan: "Plan | DeviceMap", profile: "Profile", devices: "Devices | None" = None) -> Estimate:
    """Compute what a plan, or a `device_map`, costs: bytes per device, seconds, transfers or collectives, lower bound.

    `devices`: as in `plan`; None rebuilds the plan's own devices from the hardware table. Under torchrun replicas and
    stages are priced as ranks of a mesh, as they run there.
    """
    from autoshard.engine.pricer import price

    plan = as_plan(plan, profile)
    cluster = cluster_for(plan if devices is None else devices)
    if plan.launch:
        return _estimate_processes(plan, profile, cluster)
    return price(plan, profile, cluster)


def _estimate_processes(plan: Plan, profile: "Profile", cluster: "Cluster") -> Estimate:
    from autoshard.search.estimates import estimate_processes
    from autoshard.search.traced import trace

    if profile.source is None:
        raise SpecError("this profile does not have its model any more: take it again with autoshard.profile().")
    return estimate_processes(plan, trace(*profile.source, plan.workload), cluster)


def apply(
    model: nn.Module,
    plan: "Plan | DeviceMap | Devices" = "auto",
    *,
    inputs: "Inputs | None" = None,
    strategy: Strategy = "auto",
    objective: Objective = "latency",
    workload: Workload | None = None,
    max_memory: "Mapping[Any, Size] | None" = None,
    pins: "DeviceMap | None" = None,
    num_microbatches: int | None = None,
    schedule: ScheduleName | None = None,
    assume_independent_rows: bool = False,
    check_first_batch: bool = False,
) -> nn.Module:
    """Put the model where the plan says, in place, and return it.

    `plan`: a `Plan`; a `device_map` ({module path: device}); or devices in any form that `plan()` takes, which are then
    planned for with the other arguments. `check_first_batch`: the first call whose batch is divided, or that runs on
    cut parameters, also runs on copies of the model, once as planned and once in one piece; outputs and buffers are
    compared, gradients are not, and `VerifyError` is raised if they differ. Later calls cost nothing. Only for plans
    that this one process carries out. A plan that was made for processes elsewhere (`plan.launch`) runs in them, if its
    mesh is carried out (docs/limits.md): each replica calls the model with samples of its own, as under torch's
    fully_shard, and gradients are means over replicas; the processes of one replica (tp, pp, cp) have the same samples.
    Where to cut, and how a batch is divided for stages, is found here, with `inputs` like the plan's unless it is a
    Hugging Face model; stages are trained by `schedule(model).step(…)`. Raises what `plan()` raises, and `ApplyError`;
    the model is then as it was.
    """
    from autoshard.runtime.dispatch import apply_device_map, apply_plan

    if is_device_map(plan):
        return apply_device_map(model, plan)
    if isinstance(plan, Plan):
        if check_first_batch and plan.launch:
            raise PlanError(
                f"check_first_batch does not handle plans for one process per device ({plan.strategy}). Leave it out, "
                "and compare with autoshard.verify(model, plan, inputs=…) on all ranks."
            )
        plan = completed(model, plan, inputs, assume_independent_rows=assume_independent_rows)
    else:
        settings: dict[str, Any] = {"strategy": strategy, "objective": objective, "workload": workload}
        settings |= {"num_microbatches": num_microbatches, "schedule": schedule}
        settings |= {"assume_independent_rows": assume_independent_rows, "launch": _launched()}
        plan = _plan(model, plan, inputs=inputs, max_memory=max_memory, pins=pins, **settings)
        plan = completed(model, plan, inputs, assume_independent_rows=assume_independent_rows)
    if not check_first_batch:
        return apply_plan(model, plan)
    from autoshard.verify.first_batch import check_at_first_call, refuse_unless_checkable

    refuse_unless_checkable(model, plan)
    return check_at_first_call(apply_plan(model, plan))


def remove(model: nn.Module) -> nn.Module:
    """Undo `apply`: the same module on one device, bit-equal. Raises `ApplyError` if nothing was applied."""
    from autoshard.runtime.dispatch import remove as undo

    return undo(model)


def schedule(
    model: nn.Module, loss: "Loss | None" = None, *, reduction: "Reduction" = "mean"
) -> "LocalSchedule | RankSchedule":
    """Return what trains an applied model in micro-batches; over processes, in the order that its plan names.

    `.step(*args, target=None, losses=None, return_outputs=True, **kwargs)` runs forwards and backwards; gradients are
    those of the whole batch in one piece. Returns the outputs put together; `return_outputs=False` keeps none, which
    saves memory where there is a large vocabulary. `losses` is a list that gets the loss of each micro-batch, in one
    process that of the batch.
    `.eval(…)` runs forwards only. Where stages are on several processes, all call it with the same batch; the one with
    the last stage gets outputs and losses. `loss`: a function of the output and the target; None takes the model's own
    loss. `reduction`: how it is made of the losses of micro-batches: "mean" over rows, "sum", or a function that gives
    the weight of a micro-batch from its target (how many labels count); over processes it is needed, and every step
    compares the losses of parts and rows with it. Raises `ApplyError` if nothing is applied, and `SpecError`.
    """
    from autoshard.runtime.pipeline_record import pipeline_record
    from autoshard.runtime.schedule import LocalSchedule

    if pipeline_record(model) is None:
        return LocalSchedule(model, loss, reduction)
    from autoshard.pipelines.schedule import RankSchedule

    return RankSchedule(model, loss, reduction)


def load(
    path: "str | os.PathLike[str]",
    devices: "Devices" = "auto",
    *,
    plan: "Plan | DeviceMap | None" = None,
    model: "nn.Module | Callable[[], nn.Module] | None" = None,
    inputs: "Inputs | None" = None,
    strategy: Strategy = "auto",
    objective: Objective = "latency",
    workload: Workload | None = None,
    max_memory: "Mapping[Any, Size] | None" = None,
    pins: "DeviceMap | None" = None,
    num_microbatches: int | None = None,
    schedule: ScheduleName | None = None,
    dtype: "torch.dtype | str" = "auto",
    allow: Collection[Literal["missing", "unexpected", "mismatched"]] = (),
    assume_independent_rows: bool = False,
    trust_remote_code: bool = False,
    local_files_only: bool = True,
    mapped: bool = True,
    progress: "Callable[[int, int], None] | bool | None" = None,
) -> nn.Module:
    """Read a safetensors checkpoint straight to where a plan has its tensors, apply the plan, and return the model.

    `path`: a directory as Transformers writes it, or the name of one on the hub, which is downloaded only with
    `local_files_only=False`. The plan is made before anything is read, from `devices` and the arguments that `plan()`
    takes, unless `plan` gives a `Plan` or a `device_map`. Where processes share the parameters, each reads and has only
    its part. On the CPU alone nothing is applied. `autoshard.remove` brings the model to the CPU.

    `model`: a module to fill, its parameters best on meta, or a function that builds it; then `path` may be any
    safetensors files with its names. `dtype`: as in `from_pretrained`; "auto" is the checkpoint's. `allow`: any of
    "missing", "unexpected" and "mismatched"; otherwise such tensors are errors. `mapped`: weights that stay on the CPU
    as the files have them are the files themselves, mapped: what is written to them stays in memory, and the files must
    not be changed in place while the model lives; False reads them into memory. `progress`: called with bytes done and
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
        plan = plan_asked(
            unfilled.model, devices, inputs, workload,
            strategy=strategy, objective=objective, max_memory=max_memory, pins=pins, in_memory=in_memory,
            num_microbatches=num_microbatches, schedule=schedule, assume_independent_rows=assume_independent_rows,
            wishes={"launch": _launched()},
        )  # fmt: skip
    if isinstance(plan, Plan):
        plan = completed(unfilled.model, plan, inputs, assume_independent_rows=assume_independent_rows)
    with shown_progress("loading", progress):
        return fill(unfilled, plan, mapped=mapped)


def _launched() -> "Launch | None":
    """What is planned for where a plan is applied at once: the processes that run, else this one."""
    from autoshard.runtime.collectives import count_processes

    return None if count_processes() > 1 else "one-process"


def _is_for_cpu_alone(model: nn.Module, devices: Any, max_memory: "Mapping[Any, Size] | None") -> bool:
    """Whether there is nothing to plan: one device, which is where models are anyway, with room for this one."""
    from autoshard.cluster.parse import parse_devices
    from autoshard.integrations.skeleton import parameter_bytes

    cluster = parse_devices(devices)
    return not max_memory and cluster.names == ("cpu",) and parameter_bytes(model) <= cluster.device("cpu").memory_bytes


def save(
    model: nn.Module,
    path: "str | os.PathLike[str]",
    *,
    max_shard_size: "int | str" = "5GB",
    progress: bool | None = None,
) -> None:
    """Write a model to a directory as ordinary safetensors files, with its configuration where it has one.

    The files hold the same whatever plan is applied; of a model cut over processes, all of them call it and the first
    writes. `path` is replaced in one step at the end: if anything fails before, or the process is killed, what was
    there is whole. Other files in it are kept. Needs room for the old and the new one, and memory for one file
    (`max_shard_size`). `progress`: whether a bar is shown; by default on a terminal. Raises `CheckpointError`; on the
    other ranks `RankError`.
    """
    from autoshard.integrations.saving import save as write

    with shown_progress("saving", progress):
        write(model, path, max_shard_size=max_shard_size)


def clip_grad_norm_(
    parameters: "nn.Module | Iterable[torch.Tensor]", max_norm: float, norm_type: float = 2.0, *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Scale gradients so that the norm of those of the whole model is at most `max_norm`; returns that norm.

    As `torch.nn.utils.clip_grad_norm_`, for a model under any plan: where ranks have parts, all call it, and every part
    counts once. `parameters`: a model, or some of its parameters.
    """
    from autoshard.runtime.clipping import clip_gradients

    return clip_gradients(parameters, max_norm, norm_type, error_if_nonfinite)


def save_checkpoint(
    path: "str | os.PathLike[str]", model: nn.Module, optimizer: "Optimizer | None" = None, *, state: Any = None
) -> None:
    """Write weights, optimizer state, random generators and `state` so that training goes on from there.

    All processes call it, and each writes what it holds. `path` is a directory that all see; the checkpoint in it is
    replaced in one step at the end, so a run killed meanwhile finds the old one. `state`: numbers, texts, tensors and
    containers of them, such as {"step": 100, "scheduler": scheduler.state_dict()}; rank 0's counts. Raises
    `CheckpointError`; `RankError` where another process is the reason.
    """
    from autoshard.checkpoint.training import save_checkpoint as write

    write(path, model, optimizer, state)


def load_checkpoint(path: "str | os.PathLike[str]", model: nn.Module, optimizer: "Optimizer | None" = None) -> Any:
    """Read what `save_checkpoint` wrote into a model and its optimizer, and return its `state`.

    The plan, the strategy and the number of processes may be others than when it was written: every process reads what
    it holds now. Random generators are set where there are as many processes as then. The directory has a pickle of
    torch's in it: read only your own. Raises `CheckpointError` if it is of another model.
    """
    from autoshard.checkpoint.training import load_checkpoint as read

    return read(path, model, optimizer)


def verify(
    model: nn.Module,
    plan: "Plan | DeviceMap | None" = None,
    *,
    inputs: "Inputs | None" = None,
    training: bool | None = None,
    new_tokens: int | None = None,
    tolerance: float = 0.0,
) -> "Verification":
    """Run the original and the applied model on the same inputs and compare; simulated where devices are missing.

    `plan`: a `Plan` or a `device_map`; None if the model is applied already. `training` and `new_tokens` add backward
    and optimizer steps, and cached decoding; by default what the plan's workload says. A plan for processes is verified
    in them: all call it, and `autoshard verify` starts them. Returns a report with `.ok`,
    `.max_error` and `.first_difference`. Raises `VerifyError` if there is nothing to compare, or the plan refuses the
    call.
    """
    from autoshard.verify.processes import OWN_PRECISION, in_own_precision, without_cache
    from autoshard.verify.verify import verify as compare

    run: dict[str, Any] = {"training": training, "new_tokens": new_tokens, "tolerance": tolerance}
    if not isinstance(plan, Plan) or plan.launch != "processes":
        return compare(model, plan, inputs, **run)
    own, inputs = in_own_precision(model, plan), without_cache(model, plan, inputs)
    found = compare(model, completed(model, own, inputs), inputs, **run)
    return found if own == plan else replace(found, notes=(*found.notes, OWN_PRECISION))


def simulate(devices: "Devices") -> "contextlib.AbstractContextManager[SimulatedDevices]":
    """Enter a context in which the devices of a spec exist: real values, real memory accounting, no GPU."""
    from autoshard.simulate import simulate as enter

    return enter(devices)


# `apply` has an argument of this name.
_plan: Callable[..., Plan] = plan
