"""Plans for one process per device on the command line: choose one, open one again, and study it."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autoshard.cli.console import errors, step
from autoshard.cli.steps import capturing, check_same_model, devices_of, load
from autoshard.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from autoshard.cli.target import Target
    from autoshard.cluster.cluster import Cluster
    from autoshard.plan import Plan
    from autoshard.plan.workload import Workload
    from autoshard.profile.profile import Profile
    from autoshard.search.choose import Chosen
    from autoshard.search.study import Study
    from autoshard.search.traced import Traced


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedProcesses:
    """A plan for processes with the model that it is for, as it was run, and its devices."""

    plan: "Plan"
    loaded: "Target"
    traced: "Traced"
    profile: "Profile"
    cluster: "Cluster"

    def study(self, *, sizes: bool = True) -> "Study":
        """Search again around the plan."""
        from autoshard.search.study import study

        with step("pricing other recipes"):
            return study(self.plan, self.traced, self.cluster, sizes=sizes)


def choose_processes(
    loaded: "Target", workload: "Workload", cluster: "Cluster", settings: dict[str, Any],
    wishes: dict[str, Any] | None = None,
) -> "Chosen | None":  # fmt: skip
    """The plan for processes, where they are asked for or worth it, of the workload as it was typed."""
    from autoshard.search.asked import chosen_for

    batch = workload.batch_size  # without one, derived inputs have one sample, which is no wish for a step of training
    asked = replace(loaded.workload, batch_size=batch)
    with capturing(loaded):
        return chosen_for(loaded.model, loaded.inputs, asked, cluster, wishes=wishes, **settings)


def open_chosen(chosen: "Chosen", loaded: "Target", target: str) -> OpenedProcesses:
    """A plan that was just made."""
    plan = replace(chosen.plan, target=target)
    return OpenedProcesses(
        plan=plan, loaded=loaded, traced=chosen.traced, profile=chosen.profile, cluster=chosen.cluster
    )  # fmt: skip


def open_processes(plan: "Plan", plan_file: str, target: str, devices: str = "auto") -> OpenedProcesses:
    """Find the model of a plan for processes again. Raises `PlanError` for another model, and what capturing raises."""
    from autoshard.cluster.parse import cluster_of
    from autoshard.profile.measure import profile_graph
    from autoshard.search.traced import trace

    cluster = cluster_of(plan.devices) if devices == "auto" else devices_of(devices, {})
    loaded = load(target, plan.workload)
    with capturing(loaded):
        traced = trace(loaded.model, loaded.inputs, plan.workload)
    profile = profile_graph(traced.graph, traced.workload)
    check_same_model(plan, profile, plan_file)
    names = [device.name for device in plan.devices]
    if any(name not in cluster.names for name in names):
        raise PlanError(f"the plan is for {len(names)} devices, and {len(cluster.devices)} are named.")
    return OpenedProcesses(plan=plan, loaded=loaded, traced=traced, profile=profile, cluster=cluster)


def process_page(opened: OpenedProcesses, *, sizes: bool) -> str:
    """The page of a plan for processes."""
    from autoshard.report.page.processes import make_process_page

    found = opened.study(sizes=sizes)
    with step("drawing"):
        notes = (*opened.loaded.notes, *opened.cluster.notes)
        return make_process_page(found, opened.profile, opened.cluster, title=opened.loaded.title, notes=notes)


def plan_largest_processes(
    target: str, workload: "Workload", cluster: "Cluster", batch: bool, settings: dict[str, Any],
    wishes: dict[str, Any],
) -> "tuple[Chosen, Target] | None":  # fmt: skip
    """The plan for processes with the largest batch or sequence that fits; None where one process is planned.

    A step of training with several micro-batches has no largest batch, so its batch is one micro-batch per replica
    unless their number is given. Raises what planning raises for the first size.
    """
    from autoshard.search.largest import largest

    count = settings.get("num_microbatches")
    if batch and workload.training and count is None:
        settings = {**settings, "num_microbatches": 1}
    vary = "batch_size" if batch else "sequence_length"
    step_size = (len(cluster.devices) if workload.training else 1) * (count or 1) if batch else 1

    def planned(size: int) -> "tuple[Chosen | None, Target]":
        asked = replace(workload, **{vary: size, "assumed": False})  # type: ignore[arg-type]
        loaded = load(target, asked)
        return choose_processes(loaded, asked, cluster, settings, wishes), loaded

    start = max(1, -(-(getattr(workload, vary) or (1 if batch else 512)) // step_size)) * step_size
    first, _ = planned(start)
    if first is None:
        return None
    first_chosen = first

    def make(size: int) -> tuple[int, float]:
        if batch:
            return size, _fullness_of(first_chosen, size)
        chosen, _ = planned(size)
        if chosen is None:
            raise PlanError(f"sequences of {size} tokens are planned for one process.")
        return size, chosen.estimate.fullest.peak_bytes / max(1, chosen.estimate.fullest.memory_bytes)

    found = largest(make, start=start, step=step_size, tried=tell_size(vary.replace("_", " ")))
    chosen, loaded = planned(found.size)
    assert chosen is not None
    shown = f"{vary.replace('_', ' ')} {found.size} is the largest that fits: of {len(found.trials)} that were tried "
    reasons = (*chosen.plan.reasons[:-1], f"{shown}no larger one did", chosen.plan.reasons[-1])
    return replace(chosen, plan=replace(chosen.plan, reasons=reasons)), loaded


def _fullness_of(chosen: "Chosen", batch: int) -> float:
    """How full the fullest device is with another batch. Raises `PlanError` where no recipe fits."""
    from autoshard.search.best import search
    from autoshard.search.reasons import used_bytes

    task = replace(chosen.task, limits=replace(chosen.task.limits, samples=batch))
    best = search(task).best
    if best is None:
        raise PlanError(f"no recipe fits with a batch of {batch}.")
    return used_bytes(best) / max(1, chosen.estimate.fullest.memory_bytes)


def tell_size(what: str) -> "Callable[[int, float | None], None]":
    """Say of every size that is tried whether it fits."""

    def tried(size: int, load: float | None) -> None:
        said = "does not fit" if load is None else f"fits, the fullest device is {load:.0%} full"
        errors().print(f"{what} {size} {said}", style="bright_black", soft_wrap=True)

    return tried
