"""The solvers against brute force: every assignment of thousands of small random chains, priced one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost import relaxed_bound
from autoshard.strategies import solve as solve_module
from autoshard.strategies.chain import Chain, cost_of
from autoshard.strategies.levels import coarsen, cut_depths
from autoshard.strategies.placing import simple_load
from autoshard.strategies.solve import Solution, can_fit, most_even, solve
from tests.strategies.brute import all_assignments, price_all
from tests.strategies.random_chains import random_chain, with_devices

OBJECTIVES = ("latency", "throughput", "memory")
ORDERS = ("given", "any")


def check(seed: int, chain: Chain, objective: str, order: str) -> tuple[Solution | None, float]:
    """Solve one chain and compare with the best of all assignments."""
    place = all_assignments(chain, order)
    best = float(price_all(chain, place)[objective].min()) if len(place) else np.inf
    found = solve(chain, objective, order)
    where = f"seed {seed}, {objective}, {order} order"
    if found is None:
        assert best == np.inf, f"{where}: no plan found, the best has {best}"
        return None, best
    assert found.cost.feasible, f"{where}: the plan does not fit"
    assert found.value == pytest.approx(best, rel=1e-9, abs=1e-9), where
    assert found.bound <= best * (1 + 1e-9) + 1e-12, f"{where}: the bound is above the optimum"
    return found, best


def run_many(seeds: range) -> dict[str, int]:
    seen = dict.fromkeys(("plans", "refusals", "ties", "apart", "pins", "per pair", "skips", "loops", "several"), 0)
    for seed in seeds:
        chain = random_chain(seed)
        found, _ = check(seed, chain, OBJECTIVES[seed % 3], ORDERS[seed // 3 % 2])
        seen["refusals" if found is None else "plans"] += 1
        if found is None:
            continue
        makers = chain.tensor_unit[chain.edge_tensor]
        seen["ties"] += bool(chain.ties)
        seen["apart"] += any(len({found.assignment[u] for u in tie.units}) > 1 for tie in chain.ties)
        seen["pins"] += bool(chain.pins)
        seen["per pair"] += chain.num_devices > 2 and len(np.unique(chain.link_seconds)) > 1
        seen["skips"] += bool((chain.edge_unit > makers + 1).any())
        seen["loops"] += bool((chain.edge_unit < makers).any())
        seen["several"] += len(set(found.assignment)) > 1
    return seen


def test_equal_to_brute_force_on_many_chains() -> None:
    seen = run_many(range(1_000))
    assert all(count >= 30 for count in seen.values()), f"a feature was hardly tried: {seen}"


def test_a_device_that_only_has_pinned_units_counts_in_the_bottleneck() -> None:
    check(17602, random_chain(17602), "throughput", "any")


def test_a_copy_for_two_units_pinned_to_one_device_is_paid_once() -> None:
    check(211750, random_chain(211750, per_pair=True), "latency", "any")


@pytest.mark.slow
def test_equal_to_brute_force_on_a_hundred_thousand_chains() -> None:
    run_many(range(100_000))


@pytest.mark.parametrize("seed", range(40))
def test_equal_to_brute_force_on_four_devices(seed: int) -> None:
    chain = random_chain(seed, max_units=6, max_devices=4)
    for objective in OBJECTIVES:
        for order in ORDERS:
            check(seed, chain, objective, order)


def test_long_chains_are_solved_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver for thousands of units, on chains small enough for brute force. Loops it may only bound."""
    monkeypatch.setattr(solve_module, "MAX_DENSE", 0)
    exact = 0
    for seed in range(400):
        chain = random_chain(seed, per_pair=False)
        objective, order = OBJECTIVES[seed % 3], ORDERS[seed // 3 % 2]
        place = all_assignments(chain, order)
        best = float(price_all(chain, place)[objective].min()) if len(place) else np.inf
        found = solve(chain, objective, order)
        makers = np.where(chain.tensor_unit < 0, chain.home, chain.tensor_unit)[chain.edge_tensor]
        users = np.where(chain.edge_unit >= chain.num_units, chain.home, chain.edge_unit)
        merged = chain.ties and not all(len(tie.units) == 1 for tie in chain.ties)
        if (users < makers).any() and (merged or chain.pins or (users[users < makers] > 0).any()):
            assert found is None or (found.cost.feasible and found.value >= best * (1 - 1e-9)), seed
        elif found is None:
            assert best == np.inf, seed
        else:
            assert found.cost.feasible and found.value == pytest.approx(best, rel=1e-6, abs=1e-6), seed
            exact += 1
        if found is not None:
            assert found.bound <= best * (1 + 1e-9) + 1e-9, f"seed {seed}: the bound is above the optimum"
    assert exact > 100


def test_any_of_the_equals_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the value alone is wanted, chains are solved without dense tables if that is exact."""
    monkeypatch.setattr(solve_module, "MIN_LONG", 0)
    for seed in (*range(250), 2005):  # in 2005 a device with a pinned unit has room for a stage, but for no part of it
        chain = random_chain(seed, per_pair=False, max_units=9)
        found, best = solve(chain, any_equal=True), solve(chain)
        assert (found is None) == (best is None), seed
        if found is not None and best is not None:
            assert found.cost.feasible and found.value == pytest.approx(best.value, rel=1e-9, abs=1e-9), seed
            assert found.bound <= best.value * (1 + 1e-9), seed


def test_brute_force_prices_like_the_cost_model() -> None:
    for seed in range(300):
        chain = random_chain(seed)
        place = all_assignments(chain, "any")
        for row, figures in zip(place[:20], zip(*price_all(chain, place[:20]).values(), strict=True), strict=True):
            cost = cost_of(chain, row)
            expected = (cost.latency, cost.bottleneck, cost.load) if cost.feasible else (np.inf,) * 3
            assert figures == pytest.approx(expected), seed


@given(seed=st.integers(0, 10**9), objective=st.sampled_from(OBJECTIVES), order=st.sampled_from(ORDERS))
def test_more_memory_never_makes_it_worse(seed: int, objective: str, order: str) -> None:
    chain = random_chain(seed)
    extra = np.random.default_rng(seed).integers(0, 20, chain.num_devices)
    larger = with_devices(chain, capacity_bytes=chain.capacity_bytes + extra)
    before, after = solve(chain, objective, order), solve(larger, objective, order)
    assert before is None or (after is not None and after.value <= before.value * (1 + 1e-9) + 1e-12)


@given(seed=st.integers(0, 10**9), objective=st.sampled_from(OBJECTIVES), order=st.sampled_from(ORDERS))
def test_another_device_never_makes_it_worse(seed: int, objective: str, order: str) -> None:
    chain = random_chain(seed, max_devices=4)
    keep = range(chain.num_devices - 1)
    if not keep or any(device not in keep for device in chain.pins.values()):
        return
    before, after = solve(with_devices(chain, keep=keep), objective, order), solve(chain, objective, order)
    assert before is None or (after is not None and after.value <= before.value * (1 + 1e-9) + 1e-12)


@given(seed=st.integers(0, 10**9))
def test_the_relaxed_bound_is_below_the_optimum(seed: int) -> None:
    chain = random_chain(seed)
    for objective in ("latency", "throughput"):
        found = solve(chain, objective)
        if found is not None:
            held = np.asarray(chain.resident_bytes, float)
            bound = relaxed_bound(chain.seconds, held, np.asarray(chain.capacity_bytes, float), objective)
            assert bound <= found.value * (1 + 1e-9) + 1e-9


@given(seed=st.integers(0, 10**9))
def test_the_simple_load_is_below_the_most_even_one(seed: int) -> None:
    chain = random_chain(seed)
    even = most_even(chain)
    assert even is None or simple_load(chain, np.asarray(chain.capacity_bytes, float)) <= even.bound * (1 + 1e-9)


@given(seed=st.integers(0, 10**9))
def test_can_fit_says_what_solve_finds(seed: int) -> None:
    chain = random_chain(seed)
    assert can_fit(chain) == (solve(chain, "latency") is not None)


def test_among_equals_memory_is_most_even() -> None:
    """Given order, no ties, uniform links: of all plans with the least latency the one with the least load."""
    tried = 0
    for seed in range(1_000):
        chain = random_chain(seed, per_pair=False)
        if chain.ties or chain.pins:
            continue
        priced = price_all(chain, all_assignments(chain, "given"))
        best = priced["latency"].min()
        if best < np.inf:
            found = solve(chain, "latency", "given")
            used = len(set(found.assignment))
            equal = priced["latency"] <= best * (1 + 1e-11)
            place = all_assignments(chain, "given")
            same_devices = [set(row) == set(found.assignment) for row in place.tolist()]
            assert found.cost.load == pytest.approx(priced["memory"][equal & np.array(same_devices)].min()), seed
            tried += used > 1
    assert tried > 50


@given(seed=st.integers(0, 10**9), cuts=st.lists(st.booleans(), min_size=7, max_size=7))
def test_a_coarser_chain_prices_the_same(seed: int, cuts: list[bool]) -> None:
    chain = random_chain(seed)
    joined, group = coarsen(chain, np.array(cuts[: chain.num_units]))
    found = solve(joined, "latency")
    whole = solve(chain, "latency")
    if found is not None:
        cost = cost_of(chain, np.array(found.assignment)[group])
        assert cost.feasible
        assert (cost.latency, cost.bottleneck, cost.load) == pytest.approx(
            (found.cost.latency, found.cost.bottleneck, found.cost.load)
        )
        assert whole is not None and whole.value <= found.value * (1 + 1e-9) + 1e-12


def test_cut_depths_count_the_modules_that_a_cut_splits() -> None:
    paths = (("embed",), ("layers.0.attn.q",), ("layers.0.attn.k",), ("layers.0.mlp",), ("layers.1.mlp",), ("head",))
    assert cut_depths(paths).tolist() == [0, 1, 4, 3, 2, 1]


def test_solving_twice_gives_the_same_plan() -> None:
    for seed in range(60):
        for objective in OBJECTIVES:
            assert solve(random_chain(seed), objective) == solve(random_chain(seed), objective)
