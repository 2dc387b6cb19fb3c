"""Other sizes and devices of a plan: cells of the grid that a page shows, each priced by the one estimator.

    its own devices     the plan as it is with another batch or length, as `autoshard estimate PLAN --batch B --seq S`
    other devices       whole modules placed anew, as `autoshard plan TARGET --devices 4xT4 --strategy S`

Every other size takes a recorded run of the model, so large models have fewer cells.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.hardware import hardware_table
from autoshard.cluster.parse import MACHINE, parse_devices
from autoshard.common.sizes import format_bytes
from autoshard.engine.estimate import Estimate
from autoshard.engine.pricer import price
from autoshard.errors import AutoshardError, PlanError
from autoshard.plan import Plan
from autoshard.plan.batching import of_size
from autoshard.plan.choices import Strategy
from autoshard.plan.sharding import shares_of
from autoshard.plan.workload import Workload
from autoshard.profile.profile import Profile

MOST_OPS = 50_000
"""Recorded ops that the cells of a page may take, some 7 s; to plan anew counts as half a run, with offload as one."""
CARDS = ("RTX-4090", "L40S", "A100-SXM-80", "H100-SXM", "H200-SXM", "B200")
"""The few cards that a page asks about: those that people have or rent, one of each size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What a plan costs for another batch, length or number of devices.

    Attributes:
        batch, tokens: 0 where the model has none.
        card: of other devices than the plan's.
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
    card: str = ""
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
    plan_anew: Callable[[Cluster], Plan],
) -> Iterator[Cell]:
    """The plan's own cell, then other sizes of it, the nearest first, then other devices.

    `sizes`: its workload with the batch and length that were recorded. `record` measures the model at others.
    """
    yield _cell(plan, estimate, sizes, own=True)
    left, run = MOST_OPS, len(profile.graph.ops)
    near, far = _other_sizes(sizes)
    every: list[Workload | Cluster] = [*near, *_other_devices(plan, cluster), *far]
    for asked in every:
        cost = run // 2 if isinstance(asked, Cluster) and not plan.offloaded else run
        if left < cost:
            continue
        left -= cost
        if isinstance(asked, Cluster):
            yield _planned_anew(profile, asked, sizes, plan_anew)
            continue
        try:
            found = price(for_size(plan, asked), record(asked), cluster)
        except AutoshardError:  # the model takes no such sequence, or the plan no so small batch
            continue
        yield _cell(plan, found, asked)


def _planned_anew(profile: Profile, other: Cluster, sizes: Workload, plan_anew: Callable[[Cluster], Plan]) -> Cell:
    """The cell of other devices; where their memory can't hold the weights nothing is planned."""
    if profile.parameter_bytes + profile.buffer_bytes <= sum(device.memory_bytes for device in other.devices):
        with contextlib.suppress(AutoshardError):
            made = plan_anew(other)
            return _cell(made, price(made, profile, other), sizes, other)
    count, card = _named(other)
    return Cell(batch=sizes.batch_size or 0, tokens=sizes.sequence_length or 0, devices=count, card=card)


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


def _other_devices(plan: Plan, cluster: Cluster) -> Iterator[Cluster]:
    """Half and twice as many of the plan's devices, where all are alike, and as many of a few cards.

    Only for whole modules: to find other cuts or stages takes as long as the plan itself.
    """
    stores = [device for device in cluster.devices if device.name in ("cpu", "disk")]
    computing = [device for device in cluster.devices if device not in stores]
    count, lead = len(computing), computing[0] if computing else None
    whole = plan.mesh is None and not plan.cuts and not plan.pins and plan.strategy in get_args(Strategy)
    if lead is None or not whole or len({one.host for one in computing}) > 1:
        return
    more = "".join(f",{device.name}={device.memory_bytes}B" for device in stores)
    named = lead.kind if lead.kind != "generic" else format_bytes(lead.memory_bytes).replace(" ", "")

    def made(number: int, card: str) -> Cluster:
        return parse_devices(f"{number}x{card}{more}")

    if count <= MACHINE and made(count, named).devices == cluster.devices:
        for number in (count // 2, 2 * count):
            if 0 < number <= MACHINE:
                yield made(number, named)
    if count <= MACHINE:
        for card in CARDS:
            if card != lead.kind and card in hardware_table():
                yield made(count, card)


def _cell(plan: Plan, found: Estimate, sizes: Workload, other: Cluster | None = None, *, own: bool = False) -> Cell:
    batch, tokens = sizes.batch_size or 0, sizes.sequence_length or 0
    rate = found.tokens_per_second or max(batch, 1) * max(tokens, 1) / found.latency_seconds
    count, card = _named(other) if other is not None else (len(plan.devices), "")
    return Cell(
        batch=batch, tokens=tokens, devices=count, card=card, own=own, seconds=found.latency_seconds,
        mesh="this plan" if other is None else plan.strategy, tokens_per_second=rate,
        full=found.fullest.peak_bytes / max(found.fullest.memory_bytes, 1),
    )  # fmt: skip


def _named(cluster: Cluster) -> tuple[int, str]:
    """How many computing devices there are, and of what kind."""
    computing = [device for device in cluster.devices if device.name not in ("cpu", "disk")]
    lead = computing[0]
    return len(computing), lead.kind if lead.kind != "generic" else format_bytes(lead.memory_bytes)
