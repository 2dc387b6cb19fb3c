"""Compare: the best plan of every strategy on the same devices, what each would cost, and which is taken.

What is compared, lower is better:

    latency       seconds of one pass
    throughput    seconds of the busiest device, since passes can overlap; in training those of a step: steps can't
    memory        part of its memory that the fullest device uses
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.cluster.cluster import Cluster
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import Estimate
from autoshard.engine.placed import lower_bound
from autoshard.engine.pricer import Pricer
from autoshard.errors import PlanError, SpecError
from autoshard.plan import Plan
from autoshard.profile.profile import Profile

_SAME = 1e-9
"""Relative difference of rounding: plans that differ by less cost the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy to look at: `make` plans with it, or raises `PlanError` or `SpecError`.

    `usable`: whether its plan can be carried out as the model is run now.
    """

    name: str
    make: Callable[[], Plan]
    usable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Alternative:
    """The best plan of one strategy and what it costs; without a plan `refused` says why there is none.

    `value`: what is compared; infinite without a plan.
    """

    name: str
    plan: Plan | None = None
    estimate: Estimate | None = None
    value: float = float("inf")
    refused: str = ""
    usable: bool = True

    def __repr__(self) -> str:
        if self.plan is None or self.estimate is None:
            return f"<{self.name}: not possible: {self.refused}>"
        full = max(device.peak_bytes / max(device.memory_bytes, 1) for device in self.estimate.devices)
        return (
            f"<{self.name}: {format_seconds(self.estimate.latency_seconds)} per pass on {_counted(self)}, "
            f"the fullest {full:.0%} full{'' if self.usable else ', with a process per device (torchrun)'}>"
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """The best plan of every strategy, in the order in which they were tried, and the row that is taken.

    `bound`: no plan of any strategy on these devices has a lower value. `peers`: what the maps of other tools cost.
    """

    objective: str
    training: bool
    alternatives: tuple[Alternative, ...]
    chosen: Alternative
    bound: float
    peers: tuple[Alternative, ...] = ()

    def __str__(self) -> str:
        lines = [f"Strategies for {self.objective}, {'training' if self.training else 'inference'}:"]
        for row in (*sorted(self.alternatives, key=lambda row: row.value), *self.peers):
            lines.append(f"  {'*' if row is self.chosen else ' '} {repr(row)[1:-1]}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.alternatives)} strategies for {self.objective}: {self.chosen.name} is best>"

    @property
    def gap(self) -> float:
        """(value - bound) / bound of what is taken."""
        return max(0.0, self.chosen.value / self.bound - 1) if self.bound > 0 else 0.0


def compare(
    candidates: Sequence[Candidate], profile: Profile, cluster: Cluster, objective: str, *, price: Pricer | None = None
) -> Comparison:
    """Plan with every strategy, price the plans, and take the best one that can be carried out.

    `price`: what the strategies priced their plans with. Raises what the first strategy raised if none gives a plan.
    """
    price = price or Pricer(profile, cluster)
    training = profile.workload.training
    rows: list[Alternative] = []
    first_error: PlanError | SpecError | None = None
    for candidate in candidates:
        try:
            rows.append(_priced(candidate, candidate.make(), price, objective))
        except (PlanError, SpecError) as error:
            first_error = first_error or error
            rows.append(Alternative(name=candidate.name, refused=str(error), usable=candidate.usable))
    best = _best_of(rows)
    if best is None:
        assert first_error is not None
        raise first_error
    bound = lowest(profile, cluster, objective)
    return Comparison(
        objective=objective, training=training, alternatives=tuple(rows), chosen=rows[best], bound=bound,
    )  # fmt: skip


def _priced(candidate: Candidate, plan: Plan, price: Pricer, objective: str) -> Alternative:
    estimate = price(plan)
    if not estimate.fits:
        worst = min(estimate.devices, key=lambda device: device.free_bytes)
        raise PlanError(f"{worst.name} would need {format_bytes(-worst.free_bytes)} more than it has.")
    value = value_of(estimate, objective, price.profile.workload.training)
    return Alternative(name=candidate.name, plan=plan, estimate=estimate, value=value, usable=candidate.usable)


def _best_of(rows: Sequence[Alternative]) -> int | None:
    """The place of the best that can be carried out; of those that cost the same, what uses the fewest devices."""
    able = [place for place, row in enumerate(rows) if row.usable and row.plan is not None]
    least = min((rows[place].value for place in able), default=0.0)
    same = [place for place in able if rows[place].value <= least * (1 + _SAME)]
    return min(same, key=lambda place: (devices_used(rows[place]), place), default=None)


def value_of(estimate: Estimate, objective: str, training: bool) -> float:
    """Return what an objective compares; see the module docstring."""
    if objective == "memory":
        return max(device.peak_bytes / max(device.memory_bytes, 1) for device in estimate.devices)
    if objective == "throughput" and not training:
        return estimate.bottleneck_seconds
    return estimate.latency_seconds


def lowest(profile: Profile, cluster: Cluster, objective: str) -> float:
    """Return a value that no plan of any strategy on these devices goes below: see `placed.lower_bound`.

    For memory, what is held anyway is spread over all devices in proportion to their memory.
    """
    if objective != "memory":
        return lower_bound(profile, cluster, divided=True)
    graph = profile.graph
    held = {t.storage: graph.storages[t.storage].nbytes for t in graph.tensors}
    state = profile.optimizer_bytes if profile.workload.training else 0
    return (sum(held.values()) + state) / max(sum(device.memory_bytes for device in cluster.devices), 1)


def explained(comparison: Comparison) -> Plan:
    """The plan that is taken, with what the others would cost in its reasons."""
    chosen = comparison.chosen
    assert chosen.plan is not None
    reasons = [*chosen.plan.reasons]
    for row in comparison.alternatives:
        if row is chosen:
            continue
        if row.plan is None:
            wrong = row.refused.split(". ")[0].rstrip(".")  # without what could be done about it
            reasons.append(f"{row.name} is not possible: {wrong}")
        else:
            reasons.append(f"not chosen: {row.name}: {_figure(row, comparison)}")
    reasons.append(f"chosen: {chosen.name}: {_figure(chosen, comparison)}")
    return replace(chosen.plan, reasons=tuple(reasons))


def _figure(row: Alternative, comparison: Comparison) -> str:
    assert row.plan is not None
    return f"{_shown(row.value, comparison.objective, _answers(row))} on {_counted(row)}"


def _answers(row: Alternative) -> bool:
    """Whether what is priced is a whole answer."""
    return row.estimate is not None and row.estimate.prompt_seconds > 0


def _counted(row: Alternative) -> str:
    used = devices_used(row)
    return f"{used} device{'s' if used > 1 else ''}"


def devices_used(row: Alternative) -> int:
    """How many devices an alternative works on."""
    assert row.plan is not None
    if row.plan.mesh is not None:
        return row.plan.mesh.size
    return len(row.plan.devices) if row.plan.cuts else len(set(row.plan.placements.values()))


def _shown(value: float, objective: str, answers: bool) -> str:
    if objective == "memory":
        return f"{value:.2%} of the fullest device's memory"
    each, between = ("per answer", "between answers") if answers else ("per pass", "between passes")
    return f"{format_seconds(value)} {each if objective == 'latency' else between}"
