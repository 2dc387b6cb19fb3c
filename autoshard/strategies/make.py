"""make_plan: pose the problem, let a strategy solve it, check the answer exactly, and say why."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import cast

from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.engine.offloaded import compute_devices, streaming_bound
from autoshard.errors import PlanError, SpecError
from autoshard.plan import Plan
from autoshard.plan.choices import Objective, check_choices
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units, find_units
from autoshard.strategies.chain import Chain, chain_from_profile
from autoshard.strategies.cold import cold_pins, explain_cold
from autoshard.strategies.compare import value_of
from autoshard.strategies.offload import Offloaded, offload
from autoshard.strategies.offload_words import (
    explain_offload,
    may_stream,
    not_on_disk,
    offload_refusal,
    why_not_offloaded,
)
from autoshard.strategies.paths import pins_of_units
from autoshard.strategies.placing import STRATEGIES, Checked, place
from autoshard.strategies.reasons import explain
from autoshard.strategies.refusal import refusal


def make_plan(
    profile: Profile,
    cluster: Cluster,
    *,
    strategy: str = "auto",
    objective: str = "latency",
    pins: Mapping[str, str] | None = None,
    in_memory: Collection[str] = (),
    advise: bool = True,
) -> Plan:
    """Plan the placement of a profiled model on a cluster, whose devices have the memory that may be used.

    `pins`: module or tensor path -> device. `in_memory`: names of parameters that can't be kept on disk, since no file
    has them as they are. `advise`: look for a change that works if nothing fits. The plan fits by the exact estimate.
    Raises `SpecError` for an unknown strategy, objective, device or path, `PlanError` if nothing fits.
    """
    check_choices(strategy=strategy, objective=objective)
    if strategy not in STRATEGIES:
        raise SpecError(
            f'strategy="{strategy}" checks on the model what it divides; a profile alone is not enough. '
            "Use autoshard.plan(model, devices, inputs=…)."
        )
    computing = _computing(profile, cluster)
    limited = replace(cluster, devices=tuple(cluster.device(name) for name in computing))
    units = find_units(profile)
    fixed = pins_of_units(pins or {}, units.paths, profile.graph, limited.names)
    goal = cast(Objective, objective)
    chain = chain_from_profile(profile, limited, pins=fixed, units=units)
    found, cold = _placed(profile, limited, units, chain, strategy, goal)
    # What accelerators had no room for, and the CPU computes, may be faster brought.
    left = found is not None and "cpu" in found.placements.values() and set(limited.names) != {"cpu"}
    streams = may_stream(profile, cluster) and (found is None or (left and goal != "memory"))
    if streams and (found is None or streaming_bound(profile, cluster, goal, computing) < _value(found, goal)):
        offloaded = offload(
            profile, cluster, units, fixed,
            computing=computing, objective=goal, in_memory=in_memory,
        )  # fmt: skip
        if found is None and not isinstance(offloaded, Offloaded):
            raise PlanError(offload_refusal(offloaded, cluster, computing) + not_on_disk(in_memory, cluster))
        if isinstance(offloaded, Offloaded) and (found is None or offloaded.value < _value(found, goal)):
            reasons = explain_offload(profile, cluster, offloaded, None if found is None else _value(found, goal))
            return _plan(profile, cluster, strategy, objective, pins, offloaded, reasons)
    if found is None:

        def works(larger: Cluster) -> bool:
            wider = chain_from_profile(profile, larger, pins=fixed, units=units)
            return place(profile, larger, units, wider, strategy, goal, any_will_do=True) is not None

        said = refusal(chain, limited, profile.graph, works if advise else None)
        raise PlanError(f"{said}{why_not_offloaded(profile, cluster)}")
    reasons = cold or explain(strategy, goal, chain, found.solution)
    return _plan(profile, cluster, strategy, objective, pins, found, reasons)


def _value(found: Checked, goal: Objective) -> float:
    return value_of(found.estimate, goal, training=False)


def _placed(
    profile: Profile, cluster: Cluster, units: Units, chain: Chain, strategy: str, goal: Objective
) -> tuple[Checked | None, tuple[str, ...]]:  # fmt: skip
    """The best plan that streams nothing, and its reasons where its cold parts are on the CPU."""
    pins = cold_pins(chain) if strategy == "auto" and goal != "memory" else None
    if pins is None:
        return place(profile, cluster, units, chain, strategy, goal), ()
    colder = place(profile, cluster, units, replace(chain, pins=pins), strategy, goal)
    beat = None if colder is None else _value(colder, goal)
    found = place(profile, cluster, units, chain, strategy, goal, beat=beat)
    instead = None if found is None else _value(found, goal)
    if colder is None or (instead is not None and instead <= _value(colder, goal)):
        return found, ()
    return colder, explain_cold(chain, colder.solution.assignment, _value(colder, goal), instead)


def _computing(profile: Profile, cluster: Cluster) -> tuple[str, ...]:
    """Devices that compute: training needs every parameter where it is, so "cpu" then always does."""
    if profile.workload.training:
        names = tuple(name for name in cluster.names if name != "disk")
    else:
        names = compute_devices(cluster)
    if not names:
        raise SpecError('"disk" computes nothing. Give a device that does, as in {"cpu": "4GiB", "disk": "100GiB"}.')
    return names


def _plan(
    profile: Profile, cluster: Cluster, strategy: str, objective: str, pins: Mapping[str, str] | None,
    found: Checked | Offloaded, reasons: tuple[str, ...],
) -> Plan:  # fmt: skip
    """Write down what was decided."""
    return Plan(
        strategy=strategy,
        objective=objective,
        workload=profile.workload,
        devices=tuple(plan_device(d) for d in cluster.devices),
        placements=dict(found.placements),
        mixed_device=found.flow.mixed_device,
        written_back=found.flow.written_back,
        reasons=reasons,
        fingerprint=profile.graph.fingerprint,
        pins=dict(pins or {}),
        offloaded=dict(found.offloaded) if isinstance(found, Offloaded) else {},
    )
