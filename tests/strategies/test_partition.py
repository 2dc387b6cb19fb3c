"""The search against brute force: every assignment of many small random chains; what each strategy promises."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import PlanError
from autoshard.strategies.chain import Chain, cost_of, join, tie_choices
from autoshard.strategies.partition import Room, Solution, balanced, balanced_low_0, sequential
from autoshard.strategies.placing import levels
from autoshard.strategies.stage_costs import StageCosts
from tests.strategies.brute import all_assignments, price_all
from tests.strategies.random_chains import random_chain, with_devices

OBJECTIVES = ("latency", "throughput", "memory")
FOUR = {"max_units": 6, "max_devices": 4, "per_pair": False}


def solve(chain: Chain, objective: str = "latency", strategy: Callable = balanced) -> Solution | None:
    """The best with tied units apart or together; its cost is that of the whole chain."""
    found = [
        (solution, group)
        for one, group in tie_choices(chain)
        if (solution := strategy(StageCosts(one), Room.of(one.capacity_bytes), objective)) is not None
    ]
    if not found:
        return None
    solution, group = min(found, key=lambda pair: pair[0].value)
    assignment = tuple(np.array(solution.assignment)[group].tolist())
    cost = cost_of(chain, assignment)
    assert cost.latency == pytest.approx(solution.cost.latency) and cost.feasible
    return Solution(assignment=assignment, cost=cost, value=solution.value)


def best_of_all(chain: Chain, objective: str) -> float:
    place = all_assignments(chain, "any")
    return float(price_all(chain, place)[objective].min()) if len(place) else np.inf


def exact(chain: Chain) -> bool:
    """Whether the search promises the optimum: copies cost the same from everywhere, and there is one tie at most."""
    same = all(
        len(np.unique(np.delete(links[:, d], d))) <= 1
        for links in (chain.link_seconds, chain.link_bytes_per_second)
        for d in range(chain.num_devices)
    )
    return same and len(chain.ties) < 2 and bool(chain.seconds.any())


def test_equal_to_brute_force_where_that_is_promised_and_near_elsewhere() -> None:
    """Nothing that fits is missed; with links that differ, or several ties, few are worse by more than 5 %."""
    worse, elsewhere = 0, 0
    seen = dict.fromkeys(("plans", "refusals", "ties", "pins", "per pair", "skips", "loops", "several"), 0)
    for seed in range(1_040):
        chain, objective = random_chain(seed, **FOUR if seed >= 1_000 else {}), OBJECTIVES[seed % 3]
        best, found = best_of_all(chain, objective), solve(chain, objective)
        seen["refusals" if found is None else "plans"] += 1
        if found is None:
            assert best == np.inf, f"seed {seed}: no plan found, the best has {best}"
            continue
        assert found.value >= best * (1 - 1e-9) or not chain.seconds.any(), seed
        if exact(chain):
            assert found.value == pytest.approx(best, rel=1e-6, abs=1e-9), f"seed {seed}, {objective}"
        elif seed < 1_000:
            elsewhere += 1
            worse += bool(chain.seconds.any()) and found.value > best * 1.05
        makers = chain.tensor_unit[chain.edge_tensor]
        seen["ties"] += bool(chain.ties)
        seen["pins"] += bool(chain.pins)
        seen["per pair"] += chain.num_devices > 2 and len(np.unique(chain.link_seconds)) > 1
        seen["skips"] += bool((chain.edge_unit > makers + 1).any())
        seen["loops"] += bool((chain.edge_unit < makers).any())
        seen["several"] += len(set(found.assignment)) > 1
    assert all(count >= 30 for count in seen.values()), f"a feature was hardly tried: {seen}"
    assert elsewhere > 100 and worse <= 0.1 * elsewhere, (worse, elsewhere)


def test_a_device_that_only_has_pinned_units_counts_in_the_bottleneck() -> None:
    chain = random_chain(17602)
    assert solve(chain, "throughput").value == pytest.approx(best_of_all(chain, "throughput"))


def test_brute_force_prices_like_the_cost_model() -> None:
    for seed in range(60):
        chain = random_chain(seed)
        place = all_assignments(chain, "any")
        for row, figures in zip(place[:20], zip(*price_all(chain, place[:20]).values(), strict=True), strict=True):
            cost = cost_of(chain, row)
            expected = (cost.latency, cost.bottleneck, cost.load) if cost.feasible else (np.inf,) * 3
            assert figures == pytest.approx(expected), seed


@given(seed=st.integers(0, 10**9), objective=st.sampled_from(OBJECTIVES))
def test_more_memory_or_another_device_never_makes_it_worse(seed: int, objective: str) -> None:
    chain = random_chain(seed, max_devices=4, per_pair=False)
    extra = np.random.default_rng(seed).integers(0, 20, chain.num_devices)
    keep = range(chain.num_devices - 1)
    smaller = [with_devices(chain, keep=keep)] if keep and all(d in keep for d in chain.pins.values()) else []
    larger = with_devices(chain, capacity_bytes=chain.capacity_bytes + extra)
    for before, after in [(chain, larger), *((one, chain) for one in smaller)]:
        less, more = solve(before, objective), solve(after, objective)
        assert less is None or (more is not None and more.value <= less.value * (1 + 1e-6) + 1e-9)


@given(seed=st.integers(0, 10**9), cuts=st.lists(st.booleans(), min_size=7, max_size=7))
def test_a_coarser_chain_prices_the_same(seed: int, cuts: list[bool]) -> None:
    chain = random_chain(seed)
    starts = np.array([True, *cuts[1 : chain.num_units]])
    group = np.cumsum(starts) - 1
    joined = join(chain, group)
    found = solve(joined) if joined is not None else None
    if found is not None:
        cost = cost_of(chain, np.array(found.assignment)[group])
        assert cost.feasible
        assert (cost.latency, cost.bottleneck, cost.load) == pytest.approx(
            (found.cost.latency, found.cost.bottleneck, found.cost.load)
        )


def long_chain(units: int, devices: int, **more) -> Chain:
    """Equal layers of four units each, 1 byte and 1 second a unit, one tensor of a byte from each to the next."""
    values = {
        "paths": tuple((f"layers.{unit // 4}.part{unit % 4}",) for unit in range(units)),
        "devices": tuple(f"cuda:{d}" for d in range(devices)),
        "seconds": np.ones((devices, units)), "resident_bytes": np.ones(units, int), "transient_bytes": np.zeros(units),
        "tensor_unit": np.arange(units), "tensor_bytes": np.ones(units), "tensor_copies": np.ones(units),
        "edge_tensor": np.arange(units), "edge_unit": np.arange(1, units + 1),
        "capacity_bytes": np.full(devices, units), "link_seconds": np.zeros((devices, devices)),
        "link_bytes_per_second": np.ones((devices, devices)),
    }  # fmt: skip
    return Chain(**values | more)


def test_many_units_are_joined_until_a_table_is_small() -> None:
    chain = long_chain(20_000, 8)
    room = Room.of(np.full(8, 2_600))
    for posed in levels(chain, room):
        costs = posed[0].costs
        assert costs.size <= 1_000
        for objective in OBJECTIVES:
            found = balanced(costs, room, objective)
            assert found is not None and found.cost.feasible
            assert max(found.cost.memory_bytes) <= 2_600 and found.cost.bottleneck <= 2_600 + 2
        even = balanced(costs, room, "memory")
        assert max(even.cost.memory_bytes) <= 1.02 * 2_500


def test_a_dozen_devices_may_all_differ() -> None:
    for count in (12, 16):
        chain = long_chain(60, count, seconds=np.linspace(1, 2, count)[:, None] * np.ones((count, 60)))
        capacity = np.arange(count) + 4
        if count > 12:
            with pytest.raises(PlanError, match="too many orders"):
                balanced(StageCosts(chain), Room.of(capacity), "latency")
            continue
        found = balanced(StageCosts(chain), Room.of(capacity), "latency")
        assert found is not None and found.cost.feasible
        fastest = np.repeat(chain.seconds[:, 0], capacity)[:60]  # full devices, the fastest first
        assert found.cost.latency <= 1.1 * fastest.sum() + 12


def plain_chain(sizes, capacities, **more) -> Chain:
    """Units of these sizes on devices of these capacities, between which copies cost nothing."""
    own = {"resident_bytes": np.array(sizes), "capacity_bytes": np.array(capacities)}
    return long_chain(len(sizes), len(capacities), **{"tensor_bytes": np.zeros(len(sizes)), **own, **more})


@pytest.mark.parametrize("strategy", [sequential, balanced, balanced_low_0])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_plan_is_found_whenever_there_is_one(strategy, objective) -> None:
    for sizes, capacities in (
        ([1] * 20 + [40], [6] * 7 + [45]),  # a huge last leaf among eight devices
        ([40] + [1] * 20, [6] * 7 + [45]),  # a huge first leaf that only the last device can hold
        ([50, 4, 4, 4], [12, 52]),  # a first layer larger than the first device
        ([1, 1, 50, 1, 1, 1], [3, 51, 3]),  # one giant layer in the middle
        ([9, 9, 9] + [1] * 9, [20, 20]),  # big first layers, so not the same number of layers each
        ([1] * 48, [24, 24, 12]),
        ([3, 3, 2, 4], [4, 6, 4]),  # filled greedily, the second has 6 and leaves 5 for the last one, which holds 4
    ):
        found = solve(plain_chain(sizes, capacities), objective, strategy)
        assert found is not None and found.cost.feasible, sizes
        assert all(need <= has for need, has in zip(found.cost.memory_bytes, capacities, strict=True))
    assert solve(plain_chain([5, 50, 5], [40, 40, 40]), objective, strategy) is None


def test_sequential_fills_in_order_and_leaves_room_for_what_only_a_later_device_can_hold() -> None:
    for sizes, capacities, expected in (
        ([1] * 10, [4, 4, 4, 4], (0,) * 4 + (1,) * 4 + (2,) * 2), ([1] * 10, [20, 4], (0,) * 10),
        ([2, 2, 5, 2], [5, 9], (0, 0, 1, 1)),
    ):  # fmt: skip
        assert solve(plain_chain(sizes, capacities), strategy=sequential).assignment == expected


def test_sequential_on_tied_weights_keeps_or_copies_what_is_cheaper() -> None:
    """One more tensor: that of the first and the last unit."""
    tied = {
        "tensor_unit": np.array([*range(6), 0]), "tensor_bytes": np.array([1.0] * 6 + [3]),
        "tensor_copies": np.array([1] * 6 + [0]), "edge_tensor": np.array([*range(6), 6]),
        "edge_unit": np.array([*range(1, 7), 5]), "ties": ((0, 5),),
    }  # fmt: skip
    for duplicate in (True, False):
        chain = plain_chain([3, 1, 1, 1, 1, 0], [6, 6], **tied, duplicate_ties=duplicate)
        found = solve(chain, strategy=sequential)
        assert found.cost.feasible and (duplicate or found.assignment[0] == found.assignment[5])


def test_low_0_leaves_the_first_device_as_empty_as_the_others_allow() -> None:
    for capacities, on_first in (([10, 6, 6], 0), ([10, 4, 4], 2), ([10], 10)):
        found = solve(plain_chain([1] * 10, capacities), strategy=balanced_low_0)
        assert found.assignment.count(0) == on_first
