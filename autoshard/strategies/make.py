"""make_plan: pose the problem, let a strategy solve it, check the answer exactly, and say why."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autoshard.cluster.cluster import Cluster
from autoshard.cost import estimate, tensor_units
from autoshard.errors import PlanError, SpecError
from autoshard.estimate import Estimate
from autoshard.flow import Flow, flow
from autoshard.plan import Plan, PlanDevice
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units, find_units
from autoshard.strategies.auto import auto
from autoshard.strategies.balanced import balanced, balanced_low_0
from autoshard.strategies.chain import Chain, cost_of
from autoshard.strategies.paths import collapse, pins_of_units
from autoshard.strategies.reasons import explain, refusal
from autoshard.strategies.sequential import sequential
from autoshard.strategies.solve import Objective, Solution
from autoshard.strategies.units import chain_from_profile

Strategy = Callable[[Chain, Objective], Solution | None]
STRATEGIES: dict[str, Strategy] = {
    "auto": auto, "sequential": sequential, "balanced": balanced, "balanced_low_0": balanced_low_0,
}  # fmt: skip
LATER = {
    "pipeline": 'Use "balanced" with objective="throughput": it makes the slowest stage as fast as it can be.',
    "column-parallel": 'Use "balanced": it places whole modules.',
    "data-parallel": 'Use "balanced" for one copy of the model, and torch\'s own DistributedDataParallel for several.',
}
OBJECTIVES = ("latency", "throughput", "memory")
_TRIES = 8
"""Most rounds of solving, checking exactly and giving a device that came out too full less to hold."""
_ROOM = (1.0, 1.1, 1.3, 1.7)
"""Factors on the capacity the chain is given. Its memory figure is the sum of what may be live; the exact one can be less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A solution with its placements and the exact consequences."""

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
) -> Plan:
    """Plan the placement of a profiled model on a cluster.

    `max_memory`: device -> most bytes to use. `pins`: module or tensor path -> device. The plan fits by the exact
    estimate. Raises `SpecError` for an unknown strategy, objective, device or path, `PlanError` if nothing fits.
    """
    _check_names(strategy, objective, cluster)
    limits = {name: min(size, cluster.device(name).memory_bytes) for name, size in (max_memory or {}).items()}
    limited = cluster.with_memory(limits)
    units = find_units(profile)
    fixed = pins_of_units(pins or {}, units.paths, profile.graph, cluster.names)
    chain = chain_from_profile(profile, limited, pins=fixed, units=units)
    found = place(profile, limited, units, chain, strategy, objective)  # type: ignore[arg-type]
    if found is None:
        raise PlanError(
            refusal(chain, limited, lambda larger, on: place(profile, larger, units, on, strategy, objective) is not None)  # type: ignore[arg-type]
        )
    return Plan(
        strategy=strategy,
        objective=objective,
        workload=profile.workload,
        devices=tuple(
            PlanDevice(name=d.name, memory_bytes=d.memory_bytes, kind=d.kind, host=d.host) for d in limited.devices
        ),
        placements=dict(found.placements),
        aligned=found.flow.aligned,
        written_back=found.flow.written_back,
        reasons=explain(strategy, objective, chain, found.chain, found.solution, found.estimate),  # type: ignore[arg-type]
        fingerprint=profile.graph.fingerprint,
        pins=dict(pins or {}),
    )


def _check_names(strategy: str, objective: str, cluster: Cluster) -> None:
    if strategy in LATER:
        raise SpecError(f'the strategy "{strategy}" is not there yet. {LATER[strategy]}')
    if strategy not in STRATEGIES:
        raise SpecError(f"unknown strategy {strategy!r}: use one of {', '.join(STRATEGIES)}.")
    if objective not in OBJECTIVES:
        raise SpecError(f"unknown objective {objective!r}: use one of {', '.join(OBJECTIVES)}.")
    if "disk" in cluster.names:
        raise SpecError(
            'modules cannot be kept on "disk" yet. Leave it out of the devices; "cpu" can take what accelerators can\'t.'
        )


def place(
    profile: Profile, cluster: Cluster, units: Units, chain: Chain, strategy: str, objective: Objective
) -> Checked | None:
    """Solve, check exactly, and take from a device what it turns out to lack, until the plan fits; None if none does."""
    budget = np.array([device.budget_bytes for device in cluster.devices], float)
    for room in _ROOM:
        capacity = np.maximum(budget * room, 0.0)
        for _ in range(_TRIES):
            posed = replace(chain, capacity_bytes=capacity)
            solution = STRATEGIES[strategy](posed, objective)
            if solution is None:
                break
            found = check(profile, cluster, units, posed, solution, objective)
            over = np.array([-device.free_bytes for device in found.estimate.devices], float)
            if (over <= 0).all():
                return found
            held = np.array(cost_of(posed, solution.assignment).memory_bytes)
            capacity = np.where(over > 0, np.minimum(capacity, held) - over, capacity)
            if (capacity < 0).any():
                capacity = np.maximum(capacity, 0.0)
    return None


def check(
    profile: Profile, cluster: Cluster, units: Units, chain: Chain, solution: Solution, objective: Objective
) -> Checked:
    """Work out placements and their exact consequences."""
    of_tensor = tensor_units(profile.graph, units)
    device_of = {name: chain.devices[solution.assignment[unit]] for name, unit in of_tensor.items()}
    placements = collapse(device_of, profile.graph) or {"": chain.devices[solution.assignment[0]]}
    moves = flow(profile.graph, placements)
    draft = Plan(
        strategy="draft", objective=objective, workload=profile.workload, devices=(), placements=placements
    )
    figures = estimate(draft, profile, cluster, flow_of_plan=moves, lower_bound_seconds=0.0)
    return Checked(solution=solution, chain=chain, placements=placements, flow=moves, estimate=figures)
