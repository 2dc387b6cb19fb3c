"""Every plan of a small request, written down one by one: what `auto` is held against.

Only the writing of a plan and its price are those of the package; no search, bound or table of it is used.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations, product

from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.cluster.device import Device
from autoshard.engine.estimate import Estimate
from autoshard.engine.pipelines import estimate_stages
from autoshard.engine.pricer import price
from autoshard.engine.replicas import estimate_replicas
from autoshard.errors import AutoshardError
from autoshard.flow import flow
from autoshard.plan import Mesh, Plan, Stage
from autoshard.profile.units import find_units, tensor_units
from autoshard.search.request import Request
from autoshard.strategies.compare import value_of
from autoshard.strategies.paths import collapse


def least_of_all(request: Request) -> dict[str, float]:
    """Per strategy the least value of all its plans that fit; infinite where none does."""
    training = request.profile.workload.training
    found: dict[str, float] = {}
    for name, plan, figures in every_plan(request):
        del plan
        value = value_of(figures, request.objective, training) if figures.fits else float("inf")
        found[name] = min(found.get(name, float("inf")), value)
    return found


def every_plan(request: Request) -> Iterator[tuple[str, Plan, Estimate]]:
    """All plans that one process can carry out, priced."""
    profile, cluster = request.profile, request.limited
    for plan in placements(request):
        yield "placement", plan, price(plan, profile, cluster)
    for plan in replicas(request):
        yield "data-parallel", plan, estimate_replicas(plan, profile, cluster)
    for plan in pipelines(request):
        try:
            yield "pipeline", plan, estimate_stages(plan, profile, cluster)
        except AutoshardError:  # stages that can't be cut there
            continue


def bare(request: Request, strategy: str, **decisions: object) -> Plan:
    made = Plan(
        strategy=strategy, objective=request.objective, workload=request.profile.workload, devices=(), placements={},
        fingerprint=request.profile.graph.fingerprint,
    )  # fmt: skip
    return replace(made, **decisions)


def partitions(size: int, parts: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """[0, size) in so many runs, none empty."""
    for inner in combinations(range(1, size), parts - 1):
        yield tuple(zip((0, *inner), (*inner, size), strict=True))


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """`total` as an ordered sum of so many numbers, none 0."""
    for runs in partitions(total, parts):
        yield tuple(high - low for low, high in runs)


def orders(cluster: Cluster, count: int) -> Iterator[tuple[Device, ...]]:
    yield from permutations(cluster.devices, count)


def paths_of(request: Request, of_unit: dict[int, str]) -> dict[str, str]:
    """Dotted paths -> what the unit of each says."""
    graph, units = request.profile.graph, find_units(request.profile)
    return collapse({name: of_unit[unit] for name, unit in tensor_units(graph, units).items()}, graph)


def placements(request: Request) -> Iterator[Plan]:
    """Runs of units on every order of every set of devices."""
    size, rows = len(find_units(request.profile).paths), tuple(map(plan_device, request.limited.devices))
    for count in range(1, min(len(rows), size) + 1):
        for devices, runs in product(orders(request.limited, count), partitions(size, count)):
            of_unit = {u: device.name for device, run in zip(devices, runs, strict=True) for u in range(*run)}
            placed = paths_of(request, of_unit)
            mixed_device = flow(request.profile.graph, placed).mixed_device
            yield bare(request, "balanced", devices=rows, placements=placed, mixed_device=mixed_device)


def replicas(request: Request) -> Iterator[Plan]:
    """Every set of devices and every share of rows."""
    size, devices = request.batch.size, request.limited.devices
    for count in range(1, len(devices) + 1):
        for used in combinations(devices, count):
            common = {"devices": tuple(map(plan_device, used)), "placements": {"": used[0].name}}
            for shares in compositions(size, count):
                even = len(set(shares)) == 1
                mesh = Mesh(dp=count, shares=() if even else shares)
                yield bare(request, "data-parallel", mesh=mesh, batch=request.batch, **common)


def pipelines(request: Request) -> Iterator[Plan]:
    """Stages of units, orders of devices, micro-batches, and which stages compute again."""
    training, size = request.profile.workload.training, request.batch.size
    units, devices = len(find_units(request.profile).paths), request.limited.devices
    for count, m in product(range(2, len(devices) + 1), range(1, size + 1)):
        ways = list(product((False, True), repeat=count)) if training else [(False,) * count]
        for used, runs, again in product(orders(request.limited, count), partitions(units, count), ways):
            placed = paths_of(request, {u: str(stage) for stage, run in enumerate(runs) for u in range(*run)})
            own = [tuple(path for path, stage in placed.items() if stage == str(i)) for i in range(count)]
            yield bare(
                request, "pipeline", devices=tuple(map(plan_device, used)),
                placements={path: used[i].name for i, paths in enumerate(own) for path in paths},
                num_microbatches=m, schedule="gpipe", mesh=Mesh(pp=count), batch=request.batch,
                stages=tuple(Stage(paths=paths, recompute=yes) for paths, yes in zip(own, again, strict=True)),
            )  # fmt: skip
