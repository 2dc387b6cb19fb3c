"""The search in narrow windows against the dense sweep over the same lattice; links that differ from pair to pair."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.strategies.any_order import AnyOrder
from autoshard.strategies.chain import Chain
from autoshard.strategies.grid import Kept, all_orders, one_order
from autoshard.strategies.lattice import make_grid
from autoshard.strategies.problem import make_problem
from autoshard.strategies.solve import best_stages, links_into, solve
from autoshard.strategies.stages import StageTables
from autoshard.strategies.windows import needs, reaches
from tests.strategies.random_chains import random_chain

OBJECTIVES = ("latency", "throughput", "memory")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_windows_find_what_the_dense_sweep_finds(objective: str) -> None:
    solved = 0
    for seed in range(120):
        chain = random_chain(seed, per_pair=False, max_units=30, max_devices=5)
        problem = make_problem(chain)
        if problem is None:
            continue
        plain = StageTables(problem, links_into(chain))
        dense = best_stages(
            make_grid(problem.kinds), lambda edge, t=plain: t.stages(edge.devices[0]), problem.size, objective
        )
        narrow = AnyOrder(problem, plain, paired=False).solve(objective)
        assert (dense is None) == (narrow is None), seed
        if dense is not None:
            assert narrow[1] == pytest.approx(dense[1], rel=1e-9, abs=1e-12), seed
            solved += 1
    assert solved > 50


def decoder(units: int, devices: int, hosts: int) -> Chain:
    """A decoder with residuals, a mask that every unit reads, fast links inside a host and slow ones between hosts."""
    rng = np.random.default_rng(units)
    resident = rng.integers(2, 6, units).astype(float)
    source = np.concatenate([[-1, 0], np.arange(units), np.arange(units - 2)])
    edges = [(0, 0), *((1, u) for u in range(1, units)), *((2 + u, u + 1) for u in range(units))]
    edges += [(2 + units + u, u + 2) for u in range(units - 2)]
    host = np.arange(devices) * hosts // devices
    slow = np.where(host[:, None] == host[None, :], 1.0, 9.0)
    return Chain(
        paths=tuple((f"u{u}",) for u in range(units)), devices=tuple(f"cuda:{d}" for d in range(devices)),
        seconds=np.tile(resident, (devices, 1)), resident_bytes=resident, transient_bytes=np.ones(units),
        tensor_unit=source, tensor_bytes=np.full(len(source), 0.1), tensor_copies=np.ones(len(source)),
        edge_tensor=np.array([t for t, _ in edges]), edge_unit=np.array([u for _, u in edges]),
        capacity_bytes=np.full(devices, resident.sum() * 1.3 / devices + 5),
        link_seconds=np.zeros((devices, devices)), link_bytes_per_second=1 / slow,
    )  # fmt: skip


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("units", "devices", "hosts"), [(60, 6, 3), (500, 8, 2)])
def test_several_hosts_are_solved_to_the_optimum(units: int, devices: int, hosts: int, objective: str) -> None:
    """Residuals that cross a cut between hosts are followed to where they were made, so that the bound is met."""
    chain = decoder(units, devices, hosts)
    found = solve(chain, objective)
    assert found.cost.feasible and found.value == pytest.approx(found.bound, rel=1e-9)
    order = list(dict.fromkeys(device * hosts // devices for device in found.assignment))
    assert order == sorted(order), "every host is entered once"


def test_a_plan_that_returns_to_the_first_device_counts_what_comes_back() -> None:
    """Throughput: the first device pays for the outputs that come home, dearer from another host."""
    chain = decoder(40, 4, 2)
    sizes = np.where(chain.tensor_unit == 39, 90.0, 0.1)
    near = solve(replace(chain, tensor_bytes=sizes, capacity_bytes=chain.capacity_bytes + 200), "throughput")
    assert near.value == pytest.approx(near.bound, rel=1e-9)
    assert near.assignment[0] // 2 == near.assignment[-1] // 2, "a slow link home would be the bottleneck"


def test_a_limit_that_is_too_low_leaves_no_way() -> None:
    tables = np.where(np.tri(5, k=0, dtype=bool), np.inf, np.subtract.outer(np.arange(5), np.arange(5)).T)[None]
    grid = all_orders((0, 0))
    assert needs(grid, reaches(tables, 1.0))[0] > 0
    assert needs(grid, reaches(tables, 2.0))[0] == 0
    assert needs(grid, reaches(tables, 2.0))[1] == 2, "after one stage of two units the second device takes the rest"


@pytest.mark.parametrize("kept", [Kept(), Kept(ends=True), Kept(ends=True, lengths=2), Kept(ends=True, promise=True)])
def test_one_order_is_a_part_of_all_orders(kept: Kept) -> None:
    kinds = (0, 1, 0)

    def facts(grid, node: int) -> tuple:
        columns = (grid.first, grid.last, grid.is_short, grid.promise)
        return (*grid.counts[node].tolist(), *(int(column[node]) for column in columns))

    def edges(grid) -> set:
        return {
            (facts(grid, s), facts(grid, t), int(k))
            for s, t, k in zip(grid.source, grid.target, grid.kind, strict=True)
        }

    whole = edges(all_orders(kinds, kept))
    for order in ((0, 1, 2), (1, 0, 2)):
        part = edges(one_order(kinds, order, kept))
        assert part and part <= whole
    assert len(whole) == len(set(whole))
