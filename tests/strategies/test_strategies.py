"""The strategies on hand-made chains: what users reported, and what each strategy promises."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from autoshard.strategies import partition
from autoshard.strategies.chain import Chain, cost_of, tie_choices
from autoshard.strategies.partition import Room, Solution
from autoshard.strategies.stage_costs import StageCosts


def solved(name: str, chain: Chain, objective: str) -> Solution | None:
    """What a strategy finds in the devices of a chain, with tied units apart or together; for all units."""
    found = []
    for one, group in tie_choices(chain):
        solution = getattr(partition, name)(StageCosts(one), Room.of(one.capacity_bytes), objective)
        if solution is not None:
            assignment = tuple(np.array(solution.assignment)[group].tolist())
            found.append(replace(solution, assignment=assignment, cost=cost_of(chain, assignment)))
    return min(found, key=lambda one: one.value, default=None)


def balanced(chain: Chain, objective: str = "latency") -> Solution | None:
    return solved("balanced", chain, objective)


def balanced_low_0(chain: Chain, objective: str = "latency") -> Solution | None:
    return solved("balanced_low_0", chain, objective)


def sequential(chain: Chain, objective: str = "latency") -> Solution | None:
    return solved("sequential", chain, objective)


auto = solve = balanced


def plain_chain(sizes, capacities, *, seconds=None, nbytes=0.0, links=None, tie=None, **more) -> Chain:
    """A chain without skips: one tensor of `nbytes` from each unit to the next; 1 second per unit and device.

    `tie`: units that hold one tensor, and its bytes.
    """
    units, devices = len(sizes), len(capacities)
    tied = () if tie is None else tuple((units, unit) for unit in tie[0][1:])
    more |= {} if tie is None else {"ties": (tie[0],)}
    own = [] if tie is None else [(tie[0][0], tie[1], 0)]
    latency, bandwidth = links or (np.zeros((devices, devices)), np.ones((devices, devices)))
    return Chain(
        paths=tuple((f"layer{u}",) for u in range(units)),
        devices=tuple(f"cuda:{d}" for d in range(devices)),
        seconds=np.ones((devices, units)) if seconds is None else np.array(seconds, float),
        resident_bytes=np.array(sizes),
        transient_bytes=np.zeros(units),
        tensor_unit=np.array([*range(units), *(unit for unit, _, _ in own)]),
        tensor_bytes=np.array([*[nbytes] * units, *(size for _, size, _ in own)]),
        tensor_copies=np.array([*[1] * units, *(times for _, _, times in own)]),
        edge_tensor=np.array([*range(units), *(tensor for tensor, _ in tied)]),
        edge_unit=np.array([*range(1, units + 1), *(unit for _, unit in tied)]),
        capacity_bytes=np.array(capacities),
        link_seconds=np.array(latency, float),
        link_bytes_per_second=np.array(bandwidth, float),
        **more,
    )


EVERY = [
    pytest.param(strategy, objective, id=f"{strategy.__name__}-{objective}")
    for strategy in (sequential, balanced, balanced_low_0)
    for objective in ("latency", "throughput", "memory")
]


@pytest.mark.parametrize(("strategy", "objective"), EVERY)
@pytest.mark.parametrize(
    ("sizes", "capacities"),
    [
        pytest.param([1] * 20 + [40], [6] * 7 + [45], id="a huge last leaf among eight devices"),
        pytest.param([40] + [1] * 20, [6] * 7 + [45], id="a huge first leaf that only the last device can hold"),
        pytest.param([50, 4, 4, 4], [12, 52], id="a first layer larger than the first device"),
        pytest.param([1, 1, 50, 1, 1, 1], [3, 51, 3], id="one giant layer in the middle"),
        pytest.param([9, 9, 9] + [1] * 9, [20, 20], id="big first layers, so not the same number of layers each"),
        pytest.param([1] * 48, [24, 24, 12], id="24 + 24 + 12 for a model of 48"),
    ],
)
def test_a_plan_is_found_whenever_there_is_one(strategy, objective, sizes, capacities) -> None:
    found = strategy(plain_chain(sizes, capacities), objective)
    assert found is not None and found.cost.feasible
    assert all(need <= has for need, has in zip(found.cost.memory_bytes, capacities, strict=True))


@pytest.mark.parametrize(("strategy", "objective"), EVERY)
def test_no_plan_where_there_is_none(strategy, objective) -> None:
    assert strategy(plain_chain([5, 50, 5], [40, 40, 40]), objective) is None


def test_three_unequal_devices_are_all_used_when_all_are_needed() -> None:
    for objective in ("latency", "throughput", "memory"):
        assert set(balanced(plain_chain([1] * 56, [24, 24, 12]), objective).assignment) == {0, 1, 2}


def test_sequential_fills_in_order_and_uses_no_more_than_needed() -> None:
    assert sequential(plain_chain([1] * 10, [4, 4, 4, 4])).assignment == (0,) * 4 + (1,) * 4 + (2,) * 2
    assert sequential(plain_chain([1] * 10, [20, 4])).assignment == (0,) * 10


def test_sequential_leaves_room_for_what_only_a_later_device_can_hold() -> None:
    # filling greedily would put 6 on the second device and leave 5 for the last one, which holds 4
    assert sequential(plain_chain([3, 3, 2, 4], [4, 6, 4])) is not None
    assert sequential(plain_chain([2, 2, 5, 2], [5, 9])).assignment == (0, 0, 1, 1)


def test_sequential_on_tied_weights_keeps_or_copies_what_is_cheaper() -> None:
    tie = ((0, 5), 3)
    copied = sequential(plain_chain([3, 1, 1, 1, 1, 0], [6, 6], nbytes=1.0, tie=tie))
    assert copied.cost.feasible
    together = sequential(plain_chain([3, 1, 1, 1, 1, 0], [6, 6], tie=tie, duplicate_ties=False))
    assert together.cost.feasible and together.assignment[0] == together.assignment[5]


def test_latency_uses_one_device_where_one_is_enough() -> None:
    assert len(set(auto(plain_chain([1] * 10, [10, 10, 10], nbytes=1.0)).assignment)) == 1


def test_a_fast_device_gets_work_in_proportion_and_a_slow_one_is_left_out_when_it_hurts() -> None:
    seconds = [[1.0] * 40, [3.0] * 40]
    found = balanced(plain_chain([1] * 40, [40, 40], seconds=seconds), "throughput")
    assert found.assignment.count(0) == 30 and found.cost.bottleneck == 30.0
    dear = plain_chain([1] * 40, [40, 40], seconds=seconds, nbytes=100.0)
    assert set(balanced(dear, "throughput").assignment) == {0}
    assert set(balanced(dear, "latency").assignment) == {0}


@pytest.mark.parametrize("capacities", [(192, 128, 64), (64, 128, 192), (474, 526), (100, 37, 91, 12)])
def test_memory_shares_are_within_one_layer_of_the_capacities(capacities) -> None:
    sizes = [2] * 64
    found = balanced(plain_chain(sizes, capacities), "memory")
    fair = sum(sizes) / sum(capacities)
    for need, has in zip(found.cost.memory_bytes, capacities, strict=True):
        assert need <= fair * has + 2 and need >= fair * has - 2 * len(capacities)


def test_the_spare_layer_goes_where_it_leaves_the_most_room() -> None:
    capacities, layers = (192, 128, 64), 40
    found = balanced(plain_chain([7] * layers, capacities), "memory")
    every = (
        max(7 * count / has for count, has in zip((a, b, layers - a - b), capacities, strict=True))
        for a in range(layers + 1)
        for b in range(layers + 1 - a)
    )
    assert found.cost.load == min(every)


def test_low_0_leaves_the_first_device_as_empty_as_the_others_allow() -> None:
    assert 0 not in balanced_low_0(plain_chain([1] * 10, [10, 6, 6])).assignment
    assert balanced_low_0(plain_chain([1] * 10, [10, 4, 4])).assignment.count(0) == 2
    only = balanced_low_0(plain_chain([1] * 10, [10]))
    assert set(only.assignment) == {0}


def test_without_speeds_memory_is_evened_out() -> None:
    found = balanced(plain_chain([1] * 12, [10, 10, 10], seconds=np.zeros((3, 12))))
    assert sorted(found.cost.memory_bytes) == [4, 4, 4]


def test_pinned_units_stay_where_they_are_and_the_rest_is_contiguous() -> None:
    chain = plain_chain([1] * 8, [6, 6], nbytes=1.0, pins={0: 1, 7: 1, 3: 0})
    found = solve(chain, "memory")
    assert found.assignment[0] == found.assignment[7] == 1 and found.assignment[3] == 0
    free = [found.assignment[u] for u in (1, 2, 4, 5, 6)]
    assert sum(a != b for a, b in pairwise(free)) <= 1


def test_pins_on_tied_units_that_contradict_have_no_plan_in_training() -> None:
    tie = ((0, 3), 1)
    assert solve(plain_chain([1] * 4, [9, 9], tie=tie, duplicate_ties=False, pins={0: 0, 3: 1})) is None
    apart = solve(plain_chain([1] * 4, [9, 9], tie=tie, pins={0: 0, 3: 1}))
    assert apart is not None and cost_of(plain_chain([1] * 4, [9, 9], tie=tie), apart.assignment).memory_bytes[1] >= 2
