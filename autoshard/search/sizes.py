"""Other sizes of a plan of one process: cells of the grid that a page shows, each priced by the one estimator.

A cell is the plan as it is with another batch or length, as `autoshard estimate PLAN --batch B --seq S` says. Every
other size takes a recorded run of the model, so large models have fewer cells.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from autoshard.cluster.cluster import Cluster
from autoshard.engine.estimate import Estimate
from autoshard.engine.pricer import price
from autoshard.errors import AutoshardError, PlanError
from autoshard.plan import Plan
from autoshard.plan.batching import of_size
from autoshard.plan.sharding import shares_of
from autoshard.plan.workload import Workload
from autoshard.profile.profile import Profile

MOST_OPS = 50_000
"""Recorded ops that the cells of a page may take, some 7 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What a plan costs for another batch, length or number of devices.

    Attributes:
        batch, tokens: 0 where the model has none.
        mesh: how it is planned there; "" where nothing fits, or nothing could be planned.
        full: part of the fullest device that its peak takes; above 1 it does not fit.
    """

    batch: int
    tokens: int
    devices: int
    mesh: str = ""
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    full: float = 0.0
    own: bool = False


def for_size(plan: Plan, workload: Workload) -> Plan:
    """The plan of one process with another workload: its parts of the batch as large as that makes them.

    Raises `PlanError` where a part would have no row.
    """
    rows, batch, mesh = workload.batch_size, plan.batch, plan.mesh
    if batch is None or mesh is None or not rows or rows == batch.size:
        return replace(plan, workload=workload)
    batch = of_size(batch, rows)
    if min(shares_of(batch.size, mesh.data, mesh.shares)) < plan.num_microbatches:
        parts = mesh.data * plan.num_microbatches
        raise PlanError(f"the plan divides a batch into {parts} parts, and one of {rows} rows is too small for that.")
    return replace(plan, workload=workload, batch=batch)


def cells(
    plan: Plan,
    estimate: Estimate,
    profile: Profile,
    cluster: Cluster,
    sizes: Workload,
    record: Callable[[Workload], Profile],
) -> Iterator[Cell]:
    """The plan's own cell, then other sizes of it, the nearest first.

    `sizes`: its workload with the batch and length that were recorded. `record` measures the model at others.
    """
    yield _cell(plan, estimate, sizes, own=True)
    near, far = _other_sizes(sizes)
    for asked in (*near, *far)[: MOST_OPS // max(1, len(profile.graph.ops))]:
        try:
            found = price(for_size(plan, asked), record(asked), cluster)
        except AutoshardError:  # the model takes no such sequence, or the plan no so small batch
            continue
        yield _cell(plan, found, asked)


def _other_sizes(sizes: Workload) -> tuple[list[Workload], list[Workload]]:
    """Batches and lengths around that of the plan: where one of them differs, and where both do."""
    found: tuple[list[Workload], list[Workload]] = ([], [])
    seen: set[tuple[float | None, float | None]] = {(sizes.batch_size, sizes.sequence_length)}
    for rows, length in product((1, 2, 0.5, 4), (1, 2, 0.5)):
        batch = None if sizes.batch_size is None else sizes.batch_size * rows
        tokens = None if sizes.sequence_length is None else sizes.sequence_length * length
        if (batch, tokens) in seen or any(one is not None and one != int(one) for one in (batch, tokens)):
            continue
        seen.add((batch, tokens))
        other = replace(
            sizes, batch_size=None if batch is None else int(batch),
            sequence_length=None if tokens is None else int(tokens), assumed=False,
        )  # fmt: skip
        found[rows != 1 and length != 1].append(other)
    return found


def _cell(plan: Plan, found: Estimate, sizes: Workload, *, own: bool = False) -> Cell:
    batch, tokens = sizes.batch_size or 0, sizes.sequence_length or 0
    rate = found.tokens_per_second or max(batch, 1) * max(tokens, 1) / found.latency_seconds
    return Cell(
        batch=batch, tokens=tokens, devices=len(plan.devices), own=own, seconds=found.latency_seconds,
        mesh="this plan", tokens_per_second=rate, full=found.fullest.peak_bytes / max(found.fullest.memory_bytes, 1),
    )  # fmt: skip
