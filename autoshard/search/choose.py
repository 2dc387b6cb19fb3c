"""Choose: whether a request is for one process per device, and if so its plan with the estimate.

Both ways are considered where the devices are another machine's: nothing that runs here says how the model is started.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from autoshard.capture.changed import changed_parameters
from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.topology import computing_devices, unequal_reason, uneven_reason
from autoshard.common.collector import no_collection
from autoshard.common.progress import tell
from autoshard.engine.estimate import Estimate
from autoshard.engine.memory import RecipeEstimate
from autoshard.engine.recipe import Recipe
from autoshard.errors import CaptureError, PlanError, SpecError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.profile.measure import profile_graph
from autoshard.profile.profile import Profile
from autoshard.runtime.collectives import count_processes
from autoshard.search.best import Goal, Searched, SearchTask, alone
from autoshard.search.estimates import estimate_recipe
from autoshard.search.limits import Fixed, parse_mesh
from autoshard.search.processes import Asked, dtype_of, plan_processes
from autoshard.search.traced import Traced, trace, why_undivided


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a user may say about processes, as it is typed.

    Attributes:
        launch: "one-process", "processes" or None: both.
        mesh: such as "fsdp=8,tp=2", or a dict of degrees.
        precision, dtype, compiled, micro_batch, recompute: as in `Asked` and `Fixed`.
    """

    launch: str | None = None
    mesh: str | Mapping[str, int] | None = None
    micro_batch: int | None = None
    recompute: str | None = None
    precision: str = "auto"
    dtype: str = "auto"
    compiled: bool | None = None

    def __post_init__(self) -> None:
        if self.launch not in (None, "one-process", "processes"):
            raise SpecError(f"unknown launch {self.launch!r}: use one-process or processes.")
        if self.recompute not in (None, "none", "selective", "full"):
            raise SpecError(f"unknown recomputation {self.recompute!r}: use none, selective or full.")
        if self.mesh is not None and not isinstance(self.mesh, str | Mapping):
            raise SpecError(f"the mesh is {self.mesh!r}: write degrees such as 'fsdp=8,tp=4', or a dict of them.")
        if self.micro_batch is not None and not isinstance(self.micro_batch, int):
            raise SpecError(f"micro_batch is {self.micro_batch!r}, and must be a whole number.")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise SpecError(f"a micro-batch has at least one sample, not {self.micro_batch}.")

    @property
    def of_processes(self) -> bool:
        """Whether something was said that only plans for processes have."""
        given = self.mesh, self.micro_batch, self.recompute
        return any(one is not None for one in given) or self.precision != "auto" or self.dtype != "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A plan that the engine priced, with everything that is shown of it. `cluster`: the devices that it is for."""

    plan: Plan
    cluster: Cluster
    estimate: Estimate
    profile: Profile
    traced: Traced
    searched: Searched
    task: SearchTask


@no_collection()  # graphs are large and stay: 2 s of 15 for 405 billion parameters
def choose(
    model: nn.Module, inputs: Any, workload: Workload, cluster: Cluster, *, strategy: str, objective: str,
    wishes: Wishes, num_microbatches: int | None = None, schedule: str | None = None,
    assume_independent_rows: bool = False, one_process_alone: str = "",
) -> Chosen | None:  # fmt: skip
    """Plan for processes, or for one device of them; None where one process is asked for, or is what fits the request.

    `one_process_alone`: what was asked for that only plans of one process have, such as pins; "" for nothing. Raises
    `PlanError` and `SpecError` where processes were asked for and can't be planned.
    """
    forced = _asked_for(strategy, wishes, one_process_alone)
    running = not forced and _is_running(cluster, strategy, workload, wishes, one_process_alone)
    stated = workload.batch_size is not None or inputs is not None
    considered = partial(
        _considered, least=1 if workload.new_tokens or (workload.training and stated) else 2, strategy=strategy,
        wishes=wishes, one_process_alone=one_process_alone,
    )  # fmt: skip
    if not forced and not running and not considered(cluster):
        again = partial(
            choose, model, inputs, workload, strategy=strategy, objective=objective, wishes=wishes,
            num_microbatches=num_microbatches, schedule=schedule, assume_independent_rows=assume_independent_rows,
        )  # fmt: skip
        return _on_fastest(cluster, again, considered) if objective == "latency" else None
    if workload.training and not stated:
        raise SpecError(
            "a training step needs a batch: say how many sequences a step of all devices has, for example --batch 64 "
            "(batch_size=64), and their length with --seq."
        )
    traced = _traced(model, inputs, workload, forced)
    if traced is None:
        return None
    asked = Asked(
        strategy=strategy, goal=cast(Goal, objective), dtype=wishes.dtype, compiled=wishes.compiled,
        precision=wishes.precision if forced or len(cluster.devices) > 1 else _as_stored(traced),
        given=_given(wishes, num_microbatches, schedule), assumed=assume_independent_rows,
        why_undivided=why_undivided(traced, assume_independent_rows=assume_independent_rows),
    )  # fmt: skip
    try:
        _refuse_written(traced)
        plan, found, task = plan_processes(traced, cluster, asked)
    except PlanError:
        final = _several_hosts(cluster) or workload.training or _has_no_room(traced.graph, cluster)
        if forced or (final and not running):
            raise
        return None  # what is not divided, or fits with the help of others, is placed, or refused by that search
    single = None if forced or running or workload.training or _several_hosts(cluster) else alone(task, found)
    if single is not None:
        plan, found = _on_one(traced, cluster, asked, task, found, single)
    best = found.best
    assert best is not None
    if _is_plain(best.recipe) and not forced and not task.new_tokens:
        return None  # one process on one device is placed by what counts its bytes exactly
    profile = profile_graph(traced.graph, traced.workload)
    estimate = estimate_recipe(plan, best.recipe, task, cluster)
    return Chosen(
        plan=plan, cluster=cluster, estimate=estimate, profile=profile, traced=traced, searched=found, task=task
    )  # fmt: skip


def _refuse_written(traced: Traced) -> None:
    """Raise `PlanError` for a training whose forward writes into parameters."""
    if traced.workload.training and (changed := changed_parameters(traced.graph)):
        raise PlanError(
            f"{changed}: processes shard what they train, and what a forward writes is lost. Write it after the step, "
            "or make it a buffer."
        )


def _traced(model: nn.Module, inputs: Any, workload: Workload, forced: bool) -> Traced | None:
    """The run that processes are priced by; None where a model can be placed only, if processes were not asked for."""
    try:
        tell("ops", 0)
        return trace(model, inputs, workload)
    except (CaptureError, PlanError):
        if forced:
            raise
        return None  # it can be measured, but not followed


def _asked_for(strategy: str, wishes: Wishes, one_process_alone: str) -> bool:
    """Whether processes were asked for, in words or by a strategy. Raises `SpecError` where one process was, too."""
    forced = wishes.launch == "processes" or wishes.of_processes or strategy in ("ddp", "fsdp", "hybrid")
    if count_processes() > 1 and wishes.launch is None:
        forced = forced or strategy in ("data-parallel", "pipeline")
    if wishes.launch == "one-process" and wishes.of_processes:
        raise SpecError("a mesh, micro-batches, recomputation and precision are for processes: leave out one-process.")
    if forced and one_process_alone:
        raise SpecError(
            f"{one_process_alone} is for one process, and a process per device was asked for. Leave it out."
        )
    return forced


def _is_plain(recipe: Recipe) -> bool:
    """Whether one device runs the whole batch at once and keeps all activations."""
    return recipe.devices == 1 and recipe.recompute == "none" and recipe.num_microbatches == 1


def _fastest(cluster: Cluster) -> Cluster:
    """The devices of the fastest kind; all of them where no kind is the fastest, or something else than cards helps."""
    devices = computing_devices(cluster)
    speeds = [(device.flops("bfloat16"), device.bytes_per_second, device.memory_bytes) for device in devices]
    best = tuple(max(column) for column in zip(*speeds, strict=True)) if devices else ()
    fast = tuple(device for device, speed in zip(devices, speeds, strict=True) if speed == best)
    return replace(cluster, devices=fast) if len(devices) == len(cluster.devices) and len(fast) > 1 else cluster


def _on_fastest(
    cluster: Cluster, plan: Callable[..., Chosen | None], considered: Callable[[Cluster], bool]
) -> Chosen | None:  # fmt: skip
    """Plan for the devices of the fastest kind; None where the model does not fit there, or one of them is enough.

    Devices that take turns are never faster than one of these, so ranks on several of them are, if the model fits.
    """
    fastest = _fastest(cluster)
    if not considered(fastest):
        return None
    try:
        found = plan(cluster=fastest)
    except (PlanError, SpecError):
        return None  # all devices together may do
    return None if found is None or len(found.plan.devices) < 2 else _saying_what_is_left(found, cluster)


def _saying_what_is_left(chosen: Chosen, cluster: Cluster) -> Chosen:
    """Say in the reasons which devices a plan for the fastest ones leaves out, and how to start it without them."""
    used = {device.name for device in chosen.cluster.devices}
    left = [device for device in cluster.devices if device.name not in used]
    kinds = ", ".join(dict.fromkeys(device.kind for device in left))
    several = f"{left[0].name} and {len(left) - 1} more" if len(left) > 1 else left[0].name
    said = f"{several} ({kinds}) are not used: a process per device is planned for equal devices, and these are slower"
    if len({device.host for device in cluster.devices}) == 1 and all(one.startswith("cuda:") for one in used):
        numbers = ",".join(one.removeprefix("cuda:") for one in sorted(used, key=lambda one: int(one[5:])))
        said += f"; show processes the others only: CUDA_VISIBLE_DEVICES={numbers}"
    return replace(chosen, plan=replace(chosen.plan, reasons=(said, *chosen.plan.reasons)))


def _considered(cluster: Cluster, least: int, strategy: str, wishes: Wishes, one_process_alone: str) -> bool:
    """Whether a process per device is looked at by itself: equal known cards that are not here, of an open strategy.

    `least`: so many cards. One is looked at too where it computes a batch in parts, or many tokens one by one.
    """
    if wishes.launch == "one-process" or one_process_alone or strategy not in ("auto", "data-parallel", "hybrid"):
        return False
    cards = computing_devices(cluster)
    known = all(device.kind not in ("generic", "cpu", "disk") and device.name.startswith("cuda") for device in cards)
    return (
        known and len(cards) == len(cluster.devices) >= least and unequal_reason(cluster) is None
        and uneven_reason(cluster) is None and not count_processes() and not torch.cuda.is_available()
    )  # fmt: skip


def _is_running(cluster: Cluster, strategy: str, workload: Workload, wishes: Wishes, one_process_alone: str) -> bool:
    """Whether a process per device runs already, of which all take part where nobody says otherwise."""
    stated = strategy == "auto" and wishes.launch is None and not workload.assumed and not one_process_alone
    return stated and count_processes() > 1 and count_processes() == len(computing_devices(cluster))


def _as_stored(traced: Traced) -> str:
    """The precision of a model that trains as it is, as one does on one card."""
    pure = traced.workload.training and dtype_of(traced.graph) not in ("float32", "float64")
    return "pure" if pure else "auto"


def _has_no_room(graph: ModelGraph, cluster: Cluster) -> bool:
    """Whether what the model stores is more than all devices have: then no placement fits either."""
    stored = {tensor.storage for tensor in graph.tensors}
    return sum(graph.storages[one].nbytes for one in stored) > sum(device.memory_bytes for device in cluster.devices)


def _several_hosts(cluster: Cluster) -> bool:
    return len({device.host for device in cluster.devices}) > 1


def _given(wishes: Wishes, num_microbatches: int | None, schedule: str | None) -> Fixed:
    mesh = wishes.mesh or None if isinstance(wishes.mesh, Mapping) else wishes.mesh
    if isinstance(mesh, Mapping):
        mesh = ",".join(f"{name}={degree}" for name, degree in mesh.items())
    return Fixed(
        mesh={} if mesh is None else parse_mesh(mesh),
        micro_batch=wishes.micro_batch, num_microbatches=num_microbatches, schedule=schedule,
        recompute=wishes.recompute, everyone=count_processes() > 1,
    )  # fmt: skip


def _on_one(
    traced: Traced, cluster: Cluster, asked: Asked, task: SearchTask, found: Searched, alone: RecipeEstimate
) -> tuple[Plan, Searched]:  # fmt: skip
    from autoshard.search.processes import write_plan
    from autoshard.search.reasons import explain

    best = found.best
    assert best is not None
    changed = replace(found, best=alone)
    plan = write_plan(traced, cluster, asked, alone.recipe)
    return replace(plan, reasons=explain(task, changed, instead_of=best)), changed
