"""make_plan as a whole: more memory or another device does not make the objective worse by more than 5 %.

Of the chain that the search is given this holds exactly where copies cost the same from everywhere.
The plan is the best by the exact estimate among the solutions of several chains.
"""

import pytest

from autoshard.cluster.parse import parse_devices
from autoshard.engine.pricer import price
from autoshard.errors import PlanError
from autoshard.profile.profile import Profile
from autoshard.strategies import make_plan
from tests.strategies.test_make_plan import profile_of


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    return {mode: profile_of(mode) for mode in ("inference", "training")}


def value(profile: Profile, sizes: list[int], objective: str) -> float:
    """The objective of the plan for devices of these sizes, by the exact estimate; inf if nothing fits."""
    cluster = parse_devices({f"cpu:{k}": n for k, n in enumerate(sizes)})
    try:
        figures = price(make_plan(profile, cluster, strategy="balanced", objective=objective), profile, cluster)
    except PlanError:
        return float("inf")
    return figures.bottleneck_seconds if objective == "throughput" else figures.latency_seconds


@pytest.mark.parametrize(
    ("mode", "objective", "sizes", "larger"),
    [
        ("inference", "throughput", [94559, 74674], [116061, 74674]),
        ("training", "throughput", [417196, 169871], [502228, 169871]),
        ("training", "latency", [195405, 406949], [257500, 406949]),
        ("inference", "latency", [90820, 83018], [60012, 90820, 83018]),
    ],
)
def test_memory_that_the_chain_counts_twice_does_not_cost_a_better_plan(
    profiles, mode: str, objective: str, sizes: list[int], larger: list[int]
) -> None:
    """With less memory only a plan that the chain thinks too large fits; with more, one it allows must be as good."""
    before = value(profiles[mode], sizes, objective)
    assert value(profiles[mode], larger, objective) <= before * 1.05 < float("inf")
