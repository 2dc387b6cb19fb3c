"""The plan that a command works on, of any kind, with its model: made for TARGET, or read from PLAN."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.cli.console import errors, step
from autoshard.cli.steps import capturing, check_same_model, devices_of, load, loading_for, profile_of
from autoshard.common.sizes import format_seconds
from autoshard.errors import AutoshardError, PlanError, SpecError
from autoshard.plan import PLAN_FORMAT, Plan

if TYPE_CHECKING:
    from autoshard.cli.target import Target
    from autoshard.cluster.cluster import Cluster
    from autoshard.engine.estimate import Estimate
    from autoshard.plan.workload import Workload
    from autoshard.profile.profile import Profile
    from autoshard.search.choose import Chosen
    from autoshard.search.study import Study
    from autoshard.search.traced import Traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A plan with the model that it is for, profiled for its workload, and its devices.

    `traced`: of a plan for processes, the run that it is priced by. `known`: its estimate, where there is one already.
    """

    plan: Plan
    loaded: "Target"
    profile: "Profile"
    cluster: "Cluster"
    traced: "Traced | None" = None
    known: "Estimate | None" = None

    def estimate(self) -> "Estimate":
        """What the plan costs."""
        from autoshard.api import estimate
        from autoshard.search.estimates import estimate_processes

        if self.known is not None:
            return self.known
        with step("estimating"):
            if self.traced is not None:
                return estimate_processes(self.plan, self.traced, self.cluster)
            return estimate(self.plan, self.profile, self.cluster)

    def study(self, *, sizes: bool = True) -> "Study | None":
        """Search again around a plan for processes; None of one for one process."""
        from autoshard.search.study import study

        if self.traced is None:
            return None
        with step("pricing other recipes"):
            return study(self.plan, self.traced, self.cluster, sizes=sizes)


# ---- plans that are made


def make_plan(
    target: str,
    workload: "Workload",
    cluster: "Cluster",
    settings: dict[str, Any],
    wishes: dict[str, Any] | None = None,
) -> Opened:
    """Plan TARGET, for processes or for one; `settings` are those of `chosen_for`."""
    from autoshard.cluster.parse import limited_to
    from autoshard.search.fewer_bits import with_hint
    from autoshard.search.planning import plan_measured

    loaded = load(target, workload)
    chosen = choose(loaded, workload, cluster, settings, wishes)
    if chosen is not None:
        return _of_processes(chosen, loaded, target)
    profile = profile_of(loaded)
    made_plan = partial(plan_measured, loaded.model, loaded.inputs, profile, cluster, **settings)
    with capturing(loaded, "planning"):
        plan = with_hint(made_plan, profile, limited_to(cluster, settings["max_memory"]))
    made = _of_one(plan, loaded, profile, cluster, target)
    return made if wishes is None else _saying_processes(made, workload, cluster, settings, wishes)


def _saying_processes(
    made: Opened, workload: "Workload", cluster: "Cluster", settings: dict[str, Any], wishes: dict[str, Any]
) -> Opened:
    """The plan, and how much faster a process per device would be, on cards of which only the memory is known."""
    from autoshard.search.processes import WORTH_SAYING
    from autoshard.search.reasons import shown_mesh

    cards = [device for device in cluster.devices if device.name.startswith("cuda")]
    several = len(cards) > 1 and all(card.kind == "generic" for card in cards)
    free = settings["strategy"] == "auto" and settings["objective"] == "latency" and not settings["pins"]
    open_wishes = all(wish in (None, "auto", False) for wish in wishes.values())
    if not (several and free and open_wishes) or made.plan.workload.assumed:
        return made
    try:
        with step("pricing processes"):
            other = choose(made.loaded, workload, cluster, settings, wishes | {"launch": "processes"})
    except AutoshardError:
        return made
    assert other is not None and other.searched.best is not None
    made = replace(made, known=made.estimate())  # it is shown, too
    seconds, best = made.estimate().latency_seconds, other.searched.best
    if best.seconds > WORTH_SAYING * seconds:
        return made
    words = (
        f"a process per device would be {seconds / best.seconds:.3g} times as fast (--launch processes): "
        f"{shown_mesh(best.recipe)}, {format_seconds(best.seconds)}"
    )
    return replace(made, plan=replace(made.plan, reasons=(*made.plan.reasons, words)))


def choose(
    loaded: "Target", workload: "Workload", cluster: "Cluster", settings: dict[str, Any],
    wishes: dict[str, Any] | None = None,
) -> "Chosen | None":  # fmt: skip
    """The plan for processes, where they are asked for or worth it, of the workload as it was typed."""
    from autoshard.search.asked import chosen_for

    batch = workload.batch_size  # without one, derived inputs have one sample, which is no wish for a step of training
    asked = replace(loaded.workload, batch_size=batch)
    with capturing(loaded):
        return chosen_for(loaded.model, loaded.inputs, asked, cluster, wishes=wishes, **settings)


def _of_processes(chosen: "Chosen", loaded: "Target", target: str) -> Opened:
    return Opened(
        plan=replace(chosen.plan, target=target), loaded=loaded, profile=chosen.profile, cluster=chosen.cluster,
        traced=chosen.traced, known=chosen.estimate,
    )  # fmt: skip


def _of_one(plan: Plan, loaded: "Target", profile: "Profile", cluster: "Cluster", target: str) -> Opened:
    limited = cluster.with_memory({row.name: row.memory_bytes for row in plan.devices})  # the limits are in them
    return Opened(plan=replace(plan, target=target), loaded=loaded, profile=profile, cluster=limited)


def make_largest(
    target: str, workload: "Workload", cluster: "Cluster", vary: str, settings: dict[str, Any], wishes: dict[str, Any]
) -> Opened:
    """Plan TARGET for the largest batch ("batch_size") or sequence ("sequence_length") that fits."""
    from autoshard.search.largest import largest_chosen
    from autoshard.search.planning import largest_plan

    measured: dict[int, tuple[Target, Profile]] = {}

    def planned(asked: "Workload", **changed: Any) -> "tuple[Target, Chosen | None]":
        loaded = load(target, asked)
        return loaded, choose(loaded, asked, cluster, settings | changed, wishes)

    def measure(asked: "Workload") -> "tuple[Any, Any, Profile]":
        loaded = load(target, asked)
        profile = profile_of(loaded)
        measured.clear()
        measured[getattr(asked, vary)] = loaded, profile
        return loaded.model, loaded.inputs, profile

    tried = _tell_size(vary.replace("_", " "))
    grown = largest_chosen(vary, workload, planned, cluster, settings["num_microbatches"], tried)
    if grown is not None:
        return _of_processes(grown[1], grown[0], target)
    plan = largest_plan(vary, workload, measure, cluster, tried=tried, **settings)
    return _of_one(plan, *measured[getattr(plan.workload, vary)], cluster, target)


def _tell_size(what: str) -> Callable[[int, float | None], None]:
    """Say of every size that is tried whether it fits."""

    def tried(size: int, load: float | None) -> None:
        said = "does not fit" if load is None else f"fits, the fullest device is {load:.0%} full"
        errors().print(f"{what} {size} {said}", style="bright_black", soft_wrap=True)

    return tried


# ---- plans that are read


def open_plan(
    plan_file: str, target: str | None = None, devices: str | None = None,
    change: "Callable[[Workload], Workload] | None" = None, *, memory_known: bool = True,
) -> Opened:  # fmt: skip
    """Read a plan and find the model again: `target`, or what the plan was made for.

    `change`: another workload than the plan's. `memory_known`: refuse a plan whose devices have no memory given. Raises
    `SpecError`, `PlanError` for another model, and what reading and capturing raise.
    """
    from autoshard.cluster.parse import cluster_of
    from autoshard.profile.measure import profile_graph
    from autoshard.search.processes import for_workload
    from autoshard.search.sizes import for_size
    from autoshard.search.traced import trace

    plan = read_plan(plan_file)
    wanted = model_of(plan, plan_file, target)
    planned = plan.workload
    asked = change(planned) if change is not None else planned
    if asked != planned:
        plan = for_workload(plan, asked) if plan.launch else for_size(plan, asked)
        plan = replace(plan, reasons=("planned for another workload, and not again for what is priced here",))
    unknown = [device.name for device in plan.devices if not device.memory_bytes]
    if unknown and devices is None and memory_known:
        raise SpecError(
            f"{plan_file} does not say how much memory {', '.join(unknown)} have. Name the devices, for example with "
            f"--devices '{len(unknown)}x24GiB'."
        )
    cluster = cluster_of(plan.devices) if devices is None else devices_of(devices, {})
    traced = None
    with loading_for(plan_file, planned, asked):
        loaded = load(wanted, asked)
    if plan.launch:
        with capturing(loaded):
            traced = trace(loaded.model, loaded.inputs, asked)
        profile = profile_graph(traced.graph, traced.workload)
    else:
        profile = profile_of(loaded)
    check_same_model(plan, profile, plan_file)
    if plan.launch and any(device.name not in cluster.names for device in plan.devices):
        raise PlanError(f"the plan is for {len(plan.devices)} devices, and {len(cluster.devices)} are named.")
    return Opened(plan=plan, loaded=loaded, profile=profile, cluster=cluster, traced=traced)


def model_of(plan: Plan, plan_file: str, target: str | None) -> str:
    """Return where the model of a plan is: `target`, or what the plan says. Raises `SpecError` where neither tells."""
    wanted = target or plan.target
    if not wanted:
        raise SpecError(f"{plan_file} does not say which model it is for. Name it as well: model.py, or a config.json.")
    if target is None and not _is_here(wanted):
        raise SpecError(f"{plan_file} was made for {wanted}, which is not here. Name where the model is now.")
    return wanted


def _is_here(target: str) -> bool:
    """Whether a plan's target is a path here, or a model in the Hugging Face cache."""
    if any(Path(path).exists() for path in (target, target.rpartition(":")[0] or target)):
        return True
    from autoshard.integrations.huggingface import cached_config

    return cached_config(target) is not None


def read_plan(text: str) -> Plan:
    """Return the plan in a file; that of a device_map has an assumed workload. Raises `SpecError` or `PlanError`."""
    path = Path(text)
    if not path.is_file():
        raise SpecError(f"{text[:200]!r} does not exist; PLAN is a file written by `autoshard plan … -o plan.json`.")
    data = _json(path)
    return Plan.from_device_map(data) if data is not None and _is_device_map(data) else Plan.load(path)


def is_plan(text: str) -> bool:
    """Whether a text names a file with a plan or a device_map, not a model."""
    path = Path(text)
    data = _json(path) if path.suffix != ".py" and path.is_file() else None
    return data is not None and (data.get("format") == PLAN_FORMAT or _is_device_map(data))


def _json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is none: `Plan.load` says what is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _is_device_map(data: dict[str, Any]) -> bool:
    """Whether an object is path: device and nothing else."""
    plain = all(isinstance(value, (str, int)) and not isinstance(value, bool) for value in data.values())
    return bool(data) and "format" not in data and plain
