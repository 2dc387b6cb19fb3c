"""make_plan: pose the problem, let a strategy solve it, check the answer exactly, and say why."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.cost import estimate, tensor_units, weight_bytes
from autoshard.errors import PlanError, SpecError
from autoshard.estimate import Estimate
from autoshard.flow import Flow, flow
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units, find_units
from autoshard.strategies.auto import auto
from autoshard.strategies.balanced import balanced, balanced_low_0
from autoshard.strategies.chain import Chain
from autoshard.strategies.levels import coarsen, cut_depths
from autoshard.strategies.offload import Offloaded, offload
from autoshard.strategies.offload_words import explain_offload, may_stream, offload_refusal, why_not_streamed
from autoshard.strategies.paths import collapse, pins_of_units
from autoshard.strategies.problem import device_kinds
from autoshard.strategies.reasons import explain
from autoshard.strategies.refusal import refusal
from autoshard.strategies.sequential import sequential
from autoshard.strategies.solve import Objective, Solution, can_fit
from autoshard.strategies.units import chain_from_profile
from autoshard.stream_cost import compute_devices

Strategy = Callable[[Chain, Objective], Solution | None]
STRATEGIES: dict[str, Strategy] = {
    "auto": auto, "sequential": sequential, "balanced": balanced, "balanced_low_0": balanced_low_0,
}  # fmt: skip
PROVED = ("column-parallel", "pipeline", "data-parallel", "hybrid")
"""Strategies that need the model itself: its cuts, or its batch, are proved on it."""
OBJECTIVES = ("latency", "throughput", "memory")
_TRIES = 8
"""Most rounds of solving, checking exactly and giving a device that came out too full less to hold (2 above room 1)."""
_SAME = 1e-9
"""Relative difference of rounding. Of plans that cost the same the one with cuts between larger modules is taken.

Nothing is given away for that: else more memory could make a plan worse, if the better one it allows is less clean.
"""
_MANY_KINDS = 8
"""Kinds of devices above which almost equal memory is treated as equal first."""
_MANY_STAGES = 2_000
"""Units times devices up to which more memory than the chain has is tried even where a plan is known already."""
_MANY_CUTS = 400
"""balanced_low_0 solves many times; it looks at deeper cuts only up to here once it has a plan."""
_ROOM = (1.0, 1.1, 1.3, 1.7)
"""Factors on the capacity of the chain: its memory is the sum of what may be live, the exact figure can be less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A solution of the whole chain with its placements and exact consequences; `chain` is the one that was solved."""

    solution: Solution
    chain: Chain
    placements: Mapping[str, str]
    flow: Flow
    estimate: Estimate


def make_plan(
    profile: Profile,
    cluster: Cluster,
    *,
    strategy: str = "auto",
    objective: str = "latency",
    max_memory: Mapping[str, int] | None = None,
    pins: Mapping[str, str] | None = None,
    in_memory: Collection[str] = (),
    advise: bool = True,
) -> Plan:
    """Plan the placement of a profiled model on a cluster.

    `max_memory`: device -> most bytes to use. `pins`: module or tensor path -> device. `in_memory`: names of parameters
    that can't be kept on disk, since no file has them as they are. `advise`: look for a change that works if nothing
    fits. The plan fits by the exact estimate. Raises `SpecError` for an unknown strategy, objective, device or path,
    `PlanError` if nothing fits.
    """
    _check_names(strategy, objective, cluster)
    unknown = sorted(set(max_memory or {}) - set(cluster.names))
    if unknown:
        raise SpecError(f"max_memory names {', '.join(unknown)}; the devices are {', '.join(cluster.names)}.")
    limits = {name: min(size, cluster.device(name).memory_bytes) for name, size in (max_memory or {}).items()}
    every = cluster.with_memory(limits)
    computing = _computing(profile, every)
    limited = replace(every, devices=tuple(every.device(name) for name in computing))
    units = find_units(profile)
    fixed = pins_of_units(pins or {}, units.paths, profile.graph, limited.names)
    goal = cast(Objective, objective)
    chain = chain_from_profile(profile, limited, pins=fixed, units=units)
    found = place(profile, limited, units, chain, strategy, goal)
    if may_stream(profile, every) and (found is None or _leaves_accelerators(found, objective)):
        streamed = offload(
            profile, every, units, fixed,
            computing=computing, strategy=strategy, objective=goal, in_memory=in_memory,
        )  # fmt: skip
        if found is None and not isinstance(streamed, Offloaded):
            raise PlanError(offload_refusal(streamed, every, computing))
        if isinstance(streamed, Offloaded) and (found is None or streamed.value < _value(found, goal)):
            reasons = explain_offload(profile, every, streamed, None if found is None else _value(found, goal))
            return _plan(profile, every, strategy, objective, pins, streamed, reasons)
    if found is None:

        def works(larger: Cluster) -> bool:
            posed = chain_from_profile(profile, larger, pins=fixed, units=units)
            return place(profile, larger, units, posed, strategy, goal) is not None

        raise PlanError(refusal(chain, limited, works if advise else None) + why_not_streamed(profile, every))
    reasons = explain(strategy, goal, chain, found.chain, found.solution, found.estimate)
    return _plan(profile, every, strategy, objective, pins, found, reasons)


def _computing(profile: Profile, cluster: Cluster) -> tuple[str, ...]:
    """Devices that compute: training needs every parameter where it is, so "cpu" then always does."""
    if profile.workload.training:
        names = tuple(name for name in cluster.names if name != "disk")
    else:
        names = compute_devices(cluster)
    if not names:
        raise SpecError('"disk" computes nothing. Give a device that does, as in {"cpu": "4GiB", "disk": "100GiB"}.')
    return names


def _leaves_accelerators(found: "Checked", objective: Objective | str) -> bool:
    """Whether a plan computes on the CPU what accelerators had no room for; then streaming may be faster."""
    used = set(found.placements.values())
    return objective != "memory" and "cpu" in used and set(found.chain.devices) != {"cpu"}


def _plan(
    profile: Profile, cluster: Cluster, strategy: str, objective: str, pins: Mapping[str, str] | None,
    found: "Checked | Offloaded", reasons: tuple[str, ...],
) -> Plan:  # fmt: skip
    """Write down what was decided."""
    return Plan(
        strategy=strategy,
        objective=objective,
        workload=profile.workload,
        devices=tuple(plan_device(d) for d in cluster.devices),
        placements=dict(found.placements),
        aligned=found.flow.aligned,
        unfolded=found.flow.unfolded,
        written_back=found.flow.written_back,
        reasons=reasons,
        fingerprint=profile.graph.fingerprint,
        pins=dict(pins or {}),
        streamed=dict(found.streamed) if isinstance(found, Offloaded) else {},
    )


def _check_names(strategy: str, objective: str, cluster: Cluster) -> None:
    if strategy in PROVED:
        raise SpecError(
            f'strategy="{strategy}" proves on the model what it divides; a profile alone is not enough. '
            "Use autoshard.plan(model, devices, inputs=…)."
        )
    if strategy not in STRATEGIES:
        raise SpecError(f"unknown strategy {strategy!r}: use one of {', '.join((*STRATEGIES, *PROVED))}.")
    if objective not in OBJECTIVES:
        raise SpecError(f"unknown objective {objective!r}: use one of {', '.join(OBJECTIVES)}.")


def place(
    profile: Profile, cluster: Cluster, units: Units, chain: Chain, strategy: str, objective: Objective
) -> Checked | None:
    """Find the best plan by the exact estimate among those with cuts at every depth; None if none fits."""
    budget = np.array([device.budget_bytes for device in cluster.devices], float)
    limits = [np.maximum(budget * room, 0.0) for room in _ROOM]
    if len(set(device_kinds(chain))) > _MANY_KINDS:
        limits.insert(0, _alike(limits[0]))
    seeks_least = strategy not in ("sequential", "balanced_low_0") and objective != "memory"
    seeks_least = seeks_least and bool(chain.seconds.any())
    seeks_least = seeks_least and chain.num_units * chain.num_devices <= _MANY_STAGES
    best: Checked | None = None
    for limit in limits:
        posed = replace(chain, capacity_bytes=limit)
        if best is None and not can_fit(posed):
            continue
        finest = (sequential if strategy == "sequential" else balanced)(posed, objective)
        if finest is None or (best is not None and finest.value >= best.solution.value * (1 - _SAME)):
            continue
        tries = _TRIES if limit is limits[0] else 2
        found = _over_depths(profile, cluster, units, posed, finest, strategy, objective, tries)
        if found is not None and (best is None or _is_better(found, best, strategy, objective)):
            best = found
        if best is not None and not seeks_least:
            break
    return best


def _over_depths(
    profile: Profile, cluster: Cluster, units: Units, chain: Chain, finest: Solution, strategy: str,
    objective: Objective, tries: int,
) -> Checked | None:  # fmt: skip
    """Find the best plan by the exact estimate with cuts between ever smaller modules; `finest` has cuts everywhere."""
    depths = cut_depths(chain.paths)
    best: Checked | None = None
    for depth in sorted(set(depths[1:].tolist())) or [0]:
        cuts = depths <= depth
        if best is not None and strategy == "balanced_low_0" and cuts.sum() > _MANY_CUTS:
            break
        found = _fit(profile, cluster, units, chain, cuts, strategy, objective, tries)
        if found is None:
            continue
        found = replace(found, solution=replace(found.solution, bound=finest.bound))
        if best is None or strategy == "sequential" or _is_better(found, best, strategy, objective):
            best = found
        if _good_enough(best, finest, strategy, objective):
            break
    return best


def _alike(capacity: np.ndarray) -> np.ndarray:
    """Round capacities that differ by 2 % at most down to the same figure: free memory is never quite equal.

    Devices that are otherwise equal then need not be told apart, which makes all their orders one.
    """
    rounded = capacity.copy()
    order = np.argsort(-capacity, kind="stable")
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or capacity[order[end]] < 0.98 * capacity[order[start]]:
            rounded[order[start:end]] = capacity[order[end - 1]]
            start = end
    return rounded


def _is_better(found: Checked, best: Checked, strategy: str, objective: Objective) -> bool:
    if strategy == "balanced_low_0":
        model = sum(device.peak_bytes for device in best.estimate.devices)
        return found.estimate.devices[0].peak_bytes < best.estimate.devices[0].peak_bytes - model / 100
    return _value(found, objective) < _value(best, objective) * (1 - _SAME)


def _good_enough(found: Checked, finest: Solution, strategy: str, objective: Objective) -> bool:
    """True if deeper cuts can't help: the devices that should be used are, or the lower bound is next to it."""
    if strategy == "sequential":
        return set(found.solution.assignment) == set(finest.assignment)
    if strategy == "balanced_low_0":
        return 0 not in found.solution.assignment
    return found.solution.value <= finest.bound * (1 + _SAME)


def _value(found: Checked, objective: Objective) -> float:
    figures = found.estimate
    if objective == "memory":
        return max(device.peak_bytes / device.memory_bytes for device in figures.devices)
    return figures.bottleneck_seconds if objective == "throughput" else figures.latency_seconds


def _fit(
    profile: Profile, cluster: Cluster, units: Units, chain: Chain, cuts: np.ndarray, strategy: str,
    objective: Objective, tries: int,
) -> Checked | None:  # fmt: skip
    """Solve with some cuts allowed, check exactly, and take from a device what it turns out to lack until it fits."""
    capacity, kinds = np.array(chain.capacity_bytes, float), np.array(device_kinds(chain))
    weights, budget = weight_bytes(profile, units), np.array([d.budget_bytes for d in cluster.devices], float)
    for _ in range(_TRIES):
        # as long as equal devices stay equal the solver need not tell them apart
        even = np.array([capacity[kinds == kind].min() for kind in kinds])
        for allowed in (even, capacity):
            joined, group = coarsen(replace(chain, capacity_bytes=allowed), cuts)
            solution = STRATEGIES[strategy](joined, objective)
            if solution is not None:
                break
        if solution is None:
            return None
        assignment = tuple(np.array(solution.assignment)[group].tolist())
        held = np.array(solution.cost.memory_bytes)
        over = np.bincount(assignment, weights, len(budget)) - budget
        if (over > 0).any():  # too full with the weights alone
            capacity = np.where(over > 0, np.maximum(np.minimum(capacity, held) - over, 0.0), capacity)
            continue
        if not tries:
            return None
        tries -= 1
        found = check(profile, cluster, units, joined, replace(solution, assignment=assignment), objective)
        over = np.array([-device.free_bytes for device in found.estimate.devices], float)
        if (over <= 0).all():
            return found
        capacity = np.where(over > 0, np.maximum(np.minimum(capacity, held) - over, 0.0), capacity)
    return None


def check(
    profile: Profile, cluster: Cluster, units: Units, chain: Chain, solution: Solution, objective: Objective
) -> Checked:
    """Work out placements and their exact consequences."""
    of_tensor = tensor_units(profile.graph, units)
    device_of = {name: chain.devices[solution.assignment[unit]] for name, unit in of_tensor.items()}
    placements = collapse(device_of, profile.graph) or {"": chain.devices[solution.assignment[0]]}
    moves = flow(profile.graph, placements)
    draft = Plan(strategy="draft", objective=objective, workload=profile.workload, devices=(), placements=placements)
    figures = estimate(draft, profile, cluster, flow_of_plan=moves, lower_bound_seconds=0.0)
    return Checked(solution=solution, chain=chain, placements=placements, flow=moves, estimate=figures)
