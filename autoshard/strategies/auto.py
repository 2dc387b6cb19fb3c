"""auto: the best of all strategies for the objective, on the fewest devices that reach it, the others to compare."""

from dataclasses import dataclass

from autoshard.choices import Objective
from autoshard.sizes import format_seconds
from autoshard.strategies.balanced import balanced
from autoshard.strategies.chain import Chain
from autoshard.strategies.sequential import sequential
from autoshard.strategies.solve import Solution, value_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that was considered: what it is and its predicted cost."""

    name: str
    solution: Solution


def auto(chain: Chain, objective: Objective = "latency") -> Solution | None:
    """Pick the plan with the best value of the objective. For now that is the exact optimum over contiguous cuts."""
    return balanced(chain, objective)


def alternatives(chain: Chain, objective: Objective) -> list[Alternative]:
    """Price the plans one might choose instead: sequential, and balanced for the other objectives."""
    found: list[Alternative] = []
    other = sequential(chain, objective)
    if other is not None:
        found.append(Alternative(name="sequential", solution=other))
    for goal in ("latency", "throughput", "memory"):
        if goal != objective:
            other = balanced(chain, goal)
            if other is not None:
                found.append(Alternative(name=f"balanced for {goal}", solution=other))
    return found


def describe(alternative: Alternative, objective: Objective) -> str:
    """Say what an alternative would cost, in one sentence."""
    cost, used = alternative.solution.cost, len(set(alternative.solution.assignment))
    figure = {
        "latency": f"{format_seconds(cost.latency)} per pass",
        "throughput": f"{format_seconds(cost.bottleneck)} on the busiest device",
        "memory": f"{cost.load:.0%} of the fullest device's memory",
    }[objective]
    return f"{alternative.name}: {figure} on {used} device{'s' if used > 1 else ''}"


def is_worse(alternative: Alternative, chosen: Solution, objective: Objective) -> bool:
    """Say whether an alternative is plainly worse than what was chosen."""
    return value_of(alternative.solution.cost, objective) > value_of(chosen.cost, objective) * (1 + 1e-9)
