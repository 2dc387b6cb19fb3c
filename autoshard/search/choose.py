"""Choose: whether a request is for one process per device, and if so its plan with the estimate.

Both ways are considered where the devices are another machine's: nothing that runs here says how the model is started.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.capture.changed import changed_parameters
from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.cluster.topology import computing_devices, unequal_reason, uneven_reason
from autoshard.common.collector import no_collection
from autoshard.common.progress import tell
from autoshard.common.sizes import format_seconds
from autoshard.engine.estimate import Estimate
from autoshard.errors import CaptureError, PlanError, SpecError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.profile.measure import profile_graph
from autoshard.profile.profile import Profile
from autoshard.runtime.collectives import count_processes
from autoshard.search.best import WORTH_STARTING, Searched, SearchTask, alone
from autoshard.search.estimates import estimate_recipe
from autoshard.search.limits import Asked
from autoshard.search.processes import WORTH_SAYING, dtype_of, plan_processes, write_plan
from autoshard.search.reasons import explain, shown_mesh
from autoshard.search.traced import Traced, trace, why_undivided


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A plan that the engine priced, with everything that is shown of it. `cluster`: the devices that it is for."""

    plan: Plan
    cluster: Cluster
    estimate: Estimate
    traced: Traced
    searched: Searched
    task: SearchTask

    @property
    def profile(self) -> Profile:
        """Of the run that the plan is priced by."""
        return profile_graph(self.traced.graph, self.traced.workload)


@no_collection()  # graphs are large and stay: 2 s of 15 for 405 billion parameters
def choose(model: nn.Module, inputs: Any, workload: Workload, cluster: Cluster, asked: Asked) -> Chosen | None:
    """Plan for processes, or for one device of them; None where one process is asked for, or is what fits the request.

    Raises `PlanError` and `SpecError` where processes were asked for and can't be planned.
    """
    forced = _asked_for(asked)
    running = not forced and _is_running(cluster, workload, asked)
    stated = workload.batch_size is not None or inputs is not None
    least = 1 if workload.new_tokens or (workload.training and stated) else 2
    hosts = {device.host for device in cluster.devices}
    stages = asked.strategy == "pipeline" and workload.new_tokens > 0 and len(hosts) == 1  # one process does the same
    equal = forced or running or (not stages and _considered(cluster, least, asked))
    if not equal and not (_one_by_one(workload, asked) and _considered(cluster, least, asked, unequal=True)):
        return None
    if workload.training and not stated:
        if not equal:
            return None
        raise SpecError(
            "a training step needs a batch: say how many sequences a step of all devices has, for example --batch 64 "
            "(batch_size=64), and their length with --seq."
        )
    traced = _traced(model, inputs, workload, forced)
    if traced is None:
        return None
    why_not = asked.why_undivided
    if why_not is None:
        why_not = why_undivided(traced, assume_independent_rows=asked.assume_independent_rows)
    asked = replace(asked, everyone=count_processes() > 1, why_undivided=why_not)
    if equal:
        return _planned(traced, cluster, asked, forced=forced, running=running)
    return _on_unequal(traced, cluster, asked, least)


def _planned(
    traced: Traced, cluster: Cluster, asked: Asked, *, forced: bool = False, running: bool = False
) -> Chosen | None:  # fmt: skip
    """The plan for ranks that share equally; None where one process does as well. `forced`: processes were asked for.

    `running`: they run already, and place the model where it can't be divided.
    """
    training = traced.workload.training
    if not forced and len(cluster.devices) == 1:
        pure = training and dtype_of(traced.graph) not in ("float32", "float64")  # as one trains on one card
        asked = replace(asked, precision="pure" if pure else "auto")
    try:
        _refuse_written(traced)
        plan, found, task = plan_processes(traced, cluster, asked)
    except PlanError:
        final = _several_hosts(cluster) or training or _has_no_room(traced.graph, cluster)
        if forced or (final and not running):
            raise
        return None  # what is not divided, or fits with the help of others, is placed, or refused by that search
    one_may_do = not (forced or running or training or asked.named)
    single = alone(task, found) if one_may_do else None
    if single is not None:
        found, several = replace(found, best=single), found.best
        plan = write_plan(traced, cluster, asked, single.recipe)
        plan = replace(plan, reasons=explain(task, found, instead_of=several))
    best = found.best
    assert best is not None
    plain = best.recipe.devices == 1 and best.recipe.recompute == "none" and best.recipe.num_microbatches == 1
    if plain and not forced and not task.new_tokens:
        return None  # one process on one device is placed by what counts its bytes exactly
    estimate = estimate_recipe(plan, best.recipe, task, cluster)
    return Chosen(plan=plan, cluster=cluster, estimate=estimate, traced=traced, searched=found, task=task)


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


def _asked_for(asked: Asked) -> bool:
    """Whether processes were asked for, in words or by a strategy. Raises `SpecError` where one process was, too."""
    forced = asked.launch == "processes" or asked.of_processes or asked.strategy in ("ddp", "fsdp", "hybrid")
    if count_processes() > 1 and asked.launch is None:
        forced = forced or asked.strategy in ("data-parallel", "pipeline")
    if asked.launch == "one-process" and asked.of_processes:
        raise SpecError("a mesh, micro-batches, recomputation and precision are for processes: leave out one-process.")
    if forced and asked.one_process_alone:
        raise SpecError(
            f"{asked.one_process_alone} is for one process, and a process per device was asked for. Leave it out."
        )
    return forced


def _alike(cluster: Cluster) -> list[Cluster]:
    """Sets of devices that may be ranks, equally many on each host: of the fastest kind, of the two fastest, and so on.

    The first three kinds, and all of them.
    """
    cards = computing_devices(cluster)
    speeds = {card.name: (card.flops("bfloat16"), card.bytes_per_second, card.memory_bytes) for card in cards}
    kinds = sorted(set(speeds.values()), reverse=True)
    sets: list[Cluster] = []
    for least in [*kinds[:3], *kinds[3:][-1:]]:
        hosts: dict[str, list[Device]] = {}
        for card in cards:
            if speeds[card.name] >= least:
                hosts.setdefault(card.host, []).append(card)
        for count in sorted({len(own) for own in hosts.values()}, reverse=True):
            devices = tuple(device for own in hosts.values() if len(own) >= count for device in own[:count])
            sets.append(replace(cluster, devices=devices))
    return sets


def _one_by_one(workload: Workload, asked: Asked) -> bool:
    """Whether passes follow one another, so that devices in turns are no faster than the fastest of them."""
    return asked.objective == "latency" or (asked.objective == "throughput" and workload.training)


def _on_unequal(traced: Traced, cluster: Cluster, asked: Asked, least: int) -> Chosen | None:
    """Plan for ranks on some of the devices, as they share equally; None if one of the fastest is as fast alone.

    Devices that take turns are never faster than one of the fastest with all the memory. Ranks on several equal devices
    of the fastest kind are faster than that, if the model fits; ranks on unequal ones have to show it. Where one device
    answers, ranks have to be as much faster as on equal devices.
    """
    sets = _alike(cluster)
    fastest = replace(cluster, devices=sets[0].devices[:1])
    single = None if traced.workload.training else _tried(traced, fastest, asked, forced=True)
    equal = [devices for devices in sets if _considered(devices, max(2, least), asked)]
    found = [one for devices in equal if (one := _tried(traced, devices, asked)) is not None]
    best = min((one for one in found if _several(one)), key=lambda one: one.estimate.latency_seconds, default=None)
    if single is not None:  # of several of its kind: it says what more of them would do
        single = next((one for one in found if not _several(one)), single)
    first = best or single
    if first is None:
        whole = sum(device.memory_bytes for device in cluster.devices)
        alone = (replace(sets[0].devices[0], memory_bytes=whole),)
        first = _tried(traced, replace(cluster, devices=alone), asked, forced=True)
    limit = float("inf") if first is None else first.estimate.latency_seconds
    for devices in sets:
        one = None if devices in equal else _tried(traced, devices, asked, forced=True)
        if one is not None and _several(one) and one.estimate.latency_seconds < WORTH_SAYING * limit:
            best, limit = one, one.estimate.latency_seconds
    if single is not None and single.estimate.latency_seconds <= WORTH_STARTING * limit:
        return _saying_what_is_left(single, cluster, instead_of=best) if traced.workload.new_tokens else None
    return None if best is None else _saying_what_is_left(best, cluster)


def _tried(traced: Traced, cluster: Cluster, asked: Asked, *, forced: bool = False) -> Chosen | None:
    """A plan for some of the devices, None where it can't be made: all together may do."""
    try:
        return _planned(traced, cluster, asked, forced=forced)
    except (PlanError, SpecError):
        return None


def _several(chosen: Chosen) -> bool:
    """Whether a plan has several ranks."""
    return len(chosen.plan.devices) > 1


def _saying_what_is_left(chosen: Chosen, cluster: Cluster, *, instead_of: Chosen | None = None) -> Chosen:
    """Say in the reasons which devices a plan leaves out, and how to start it without them.

    `instead_of`: ranks that are faster, not by enough to be worth starting.
    """
    used = {device.name for device in chosen.cluster.devices}
    left = [device for device in computing_devices(cluster) if device.name not in used]
    if not left:
        return chosen
    kinds = ", ".join(dict.fromkeys(device.kind for device in left))
    several = f"{left[0].name} and {len(left) - 1} more" if len(left) > 1 else left[0].name
    slower = {device.kind for device in left} - {device.kind for device in chosen.cluster.devices}
    why = "every host has equally many ranks"
    if instead_of is not None and instead_of.searched.best is not None:
        mesh, seconds = shown_mesh(instead_of.searched.best.recipe), format_seconds(instead_of.estimate.latency_seconds)
        why = f"{mesh} would take {seconds}, less than {WORTH_STARTING:g} times as fast; ask for it with --mesh"
    elif slower:
        why = "ranks have equal parts, and with these it would take longer, or not fit"
    said = f"{several} ({kinds}) {'are' if left[1:] else 'is'} not used: {why}"
    if len({device.host for device in cluster.devices}) == 1 and all(one.startswith("cuda:") for one in used):
        numbers = ",".join(one.removeprefix("cuda:") for one in sorted(used, key=lambda one: int(one[5:])))
        said += f"; show processes the others only: CUDA_VISIBLE_DEVICES={numbers}"
    return replace(chosen, plan=replace(chosen.plan, reasons=(said, *chosen.plan.reasons)))


def _considered(cluster: Cluster, least: int, asked: Asked, *, unequal: bool = False) -> bool:
    """Whether a process per device is looked at by itself: equal known cards that are not here, of an open strategy.

    `least`: so many cards. One is looked at too where it computes a batch in parts, or many tokens one by one.
    `unequal`: cards may differ, hosts have unequally many, and a CPU or disk may be there for what has no room. Stages
    and cuts of one process fit unequal cards better than those of ranks, which have equal parts.
    """
    one_process = asked.launch == "one-process" or asked.one_process_alone
    of_equal = () if unequal else ("column-parallel", "pipeline")
    if one_process or asked.strategy not in ("auto", "data-parallel", "hybrid", *of_equal):
        return False
    cards = computing_devices(cluster)
    known = all(device.kind not in ("generic", "cpu", "disk") and device.name.startswith("cuda") for device in cards)
    alike = len(cards) == len(cluster.devices) and not (unequal_reason(cluster) or uneven_reason(cluster))
    elsewhere = not count_processes() and not torch.cuda.is_available()
    return known and elsewhere and len(cards) >= least and (unequal or alike)


def _is_running(cluster: Cluster, workload: Workload, asked: Asked) -> bool:
    """Whether a process per device runs already, of which all take part where nobody says otherwise."""
    free = asked.strategy == "auto" and asked.launch is None and not asked.one_process_alone
    return (
        free and not workload.assumed and count_processes() > 1 and count_processes() == len(computing_devices(cluster))
    )


def _has_no_room(graph: ModelGraph, cluster: Cluster) -> bool:
    """Whether what the model stores is more than all devices have: then no placement fits either."""
    stored = {tensor.storage for tensor in graph.tensors}
    return sum(graph.storages[one].nbytes for one in stored) > sum(device.memory_bytes for device in cluster.devices)


def _several_hosts(cluster: Cluster) -> bool:
    return len({device.host for device in cluster.devices}) > 1
