"""The search against brute force: every assignment of many small random chains, priced one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.strategies.chain import Chain, cost_of, join, tie_choices
from autoshard.strategies.partition import Room, Solution, balanced
from autoshard.strategies.paths import cut_depths
from autoshard.strategies.placing import levels
from autoshard.strategies.stage_costs import StageCosts
from tests.strategies.brute import all_assignments, price_all
from tests.strategies.random_chains import random_chain, with_devices

OBJECTIVES = ("latency", "throughput", "memory")


def solve(chain: Chain, objective: str = "latency") -> Solution | None:
    """The best with tied units apart or together; its cost is that of the whole chain."""
    found = [
        (solution, group)
        for one, group in tie_choices(chain)
        if (solution := balanced(StageCosts(one), Room.of(one.capacity_bytes), objective)) is not None
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
    for seed in range(1_000):
        chain, objective = random_chain(seed), OBJECTIVES[seed % 3]
        best, found = best_of_all(chain, objective), solve(chain, objective)
        seen["refusals" if found is None else "plans"] += 1
        if found is None:
            assert best == np.inf, f"seed {seed}: no plan found, the best has {best}"
            continue
        assert found.value >= best * (1 - 1e-9) or not chain.seconds.any(), seed
        if exact(chain):
            assert found.value == pytest.approx(best, rel=1e-6, abs=1e-9), f"seed {seed}, {objective}"
        else:
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


@pytest.mark.parametrize("seed", range(40))
def test_near_brute_force_on_four_devices(seed: int) -> None:
    chain = random_chain(seed, max_units=6, max_devices=4, per_pair=False)
    for objective in OBJECTIVES:
        best, found = best_of_all(chain, objective), solve(chain, objective)
        assert (found is None) == (best == np.inf)
        if found is not None and exact(chain):
            assert found.value == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_brute_force_prices_like_the_cost_model() -> None:
    for seed in range(300):
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


def test_cut_depths_count_the_modules_that_a_cut_splits() -> None:
    paths = (("embed",), ("layers.0.attn.q",), ("layers.0.attn.k",), ("layers.0.mlp",), ("layers.1.mlp",), ("head",))
    assert cut_depths(paths).tolist() == [0, 1, 4, 3, 2, 1]


def test_solving_twice_gives_the_same_plan() -> None:
    for seed in range(60):
        for objective in OBJECTIVES:
            assert solve(random_chain(seed), objective) == solve(random_chain(seed), objective)


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


def test_devices_that_all_differ_are_taken_in_a_likely_order() -> None:
    """16 devices have 10^13 orders; some are looked at."""
    chain = long_chain(160, 16, seconds=np.linspace(1, 2, 16)[:, None] * np.ones((16, 160)))
    capacity = np.arange(16) + 4
    found = balanced(StageCosts(chain), Room.of(capacity), "latency")
    assert found is not None and found.cost.feasible
    fastest = np.repeat(chain.seconds[:, 0], capacity)[:160]  # full devices, the fastest first
    assert found.cost.latency <= 1.1 * fastest.sum() + 16
