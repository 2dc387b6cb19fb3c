"""A plan of replicas for the sliders: what `replica_cost` says, as polynomials in the batch and each replica's part."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.batching import BatchAxis
from autoshard.cluster.cluster import Cluster, Device
from autoshard.estimate import Estimate
from autoshard.plan import Plan
from autoshard.profile.measure import optimizer_step_bytes
from autoshard.profile.part import carriers_of_rows
from autoshard.profile.profile import Profile
from autoshard.profile.rows import Rows, by_rows
from autoshard.profile.scaling import Scaling
from autoshard.replica_cost import BUCKET_BYTES, rows_per_replica
from autoshard.report.whatif.links import Links
from autoshard.report.whatif.moments import live_at
from autoshard.report.whatif.parts import Kinds, Part
from autoshard.report.whatif.sparse import counted, terms
from autoshard.shard_memory import Block, Whole, blocks_of, find_whole
from autoshard.workload import OPTIMIZER_STATE_TENSORS


def replicated_data(
    plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, scaling: Scaling, dtypes: Sequence[str]
) -> dict[str, Any]:
    """Return what `formula_replicas.replicated` takes; without what is always there, which `build` adds."""
    mesh, batch, graph = plan.mesh, plan.batch, profile.graph
    assert mesh is not None and batch is not None
    names = [device.name for device in plan.devices][: mesh.data]
    devices = [cluster.device(name) for name in names]
    processes = mesh.sharded or len({device.host for device in devices}) > 1
    blocks = blocks_of(graph, [path for stage in plan.stages for path in stage.paths]) if mesh.sharded else ()
    kinds, links = Kinds(dtypes), Links(cluster)
    one = _Replicas(profile, batch, scaling, kinds, blocks, processes)
    shares = rows_per_replica(batch, mesh.shares, mesh.data)
    replicas = [one.number(device, rows, mesh.data, first=not i, adds=i % 2 == 1 and i + 1 < len(devices))
                for i, (device, rows) in enumerate(zip(devices, shares, strict=True))]  # fmt: skip
    others = [
        one.number(devices[0], shares[0], *kind)
        for kind in ((1, True, False), (2, True, False), (2, False, True), (2, False, False))
    ]
    inputs, outputs = (
        [[links.between(*ends), 1, terms(one.rows_of(values))] for ends in pairs]
        for values, pairs in (
            (graph.inputs, [(names[0], name) for name in names[1:]]),
            ((*graph.outputs, *one.rows.joined), [(name, names[0]) for name in names[1:]]),
        )
    )
    return {
        "way": "replicas",
        "names": [[device.name, device.memory_bytes, device.overhead_bytes] for device in estimate.devices],
        "devices": [cluster.names.index(name) for name in names],
        "size": batch.size,
        "shares": list(mesh.shares),
        "training": profile.workload.training,
        "sharded": mesh.sharded,
        "processes": processes,
        "replicas": replicas,
        # For other counts: a device alone, the first, those to which gradients are added, the rest.
        "others": others,
        "over": mesh.data if mesh.sharded else 1,
        "figures": one.figures,
        "transfers": [] if processes else [
            [number + 1, row] for rows in (inputs, outputs) for number, row in enumerate(rows) if row[2]
        ],
        # What goes to a replica and back, for other counts.
        "moved": [] if processes else [row[0][2] for row in (inputs, outputs) if row and row[0][2]],
        "exchange": _sharded(links, names, blocks, one) if blocks else _summed(links, names, one, processes),
        "flops": [terms(one.flops(0)), terms(one.flops(graph.backward_begin))],
        "table": kinds.table,
        "ops": kinds.ops,
        "rates": kinds.rates,
        "links": links.rows,
    }  # fmt: skip


def _summed(links: Links, names: Sequence[str], one: "_Replicas", processes: bool) -> list[list[Any]]:
    """[how many, cost, bytes] of buckets of gradients."""
    nbytes = one.gradient_bytes
    if len(names) < 2 or not nbytes:
        return []
    buckets = max(1, -(-nbytes // BUCKET_BYTES)) if processes else 1
    return [[buckets, links.all_reduce(names), nbytes / buckets]]


def _sharded(links: Links, names: Sequence[str], blocks: Sequence[Block], one: "_Replicas") -> list[list[Any]]:
    """[how many, cost, bytes] of gathers and scatters; the first has nothing to hide behind."""
    training, gather = one.profile.workload.training, links.all_gather(names)
    found = []
    for block in reversed(blocks):  # what is outside of blocks comes first
        found.append([1 + (training and block.path != ""), gather, block.parameter_bytes])
        found.append([int(training), gather, block.gradient_bytes])
    return found


class _Replicas:
    """Collects the figures of replicas; equal ones are looked at once."""

    def __init__(
        self, profile: Profile, batch: BatchAxis, scaling: Scaling, kinds: Kinds, blocks: Sequence[Block],
        processes: bool,
    ) -> None:  # fmt: skip
        self.profile, self.scaling, self.kinds = profile, scaling, kinds
        self.whole, self.processes = find_whole(profile.graph, blocks) if blocks else None, processes
        self.carrying = carriers_of_rows(profile.graph, batch)
        self.rows: Rows = by_rows(profile, batch)
        self.parts: dict[int, tuple[Part, list[int]]] = {}
        self.figures: list[dict[str, Any]] = []
        self.known: dict[object, int] = {}

    @property
    def gradient_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.rows.trained)

    def part(self, rows: int) -> tuple[Part, list[int]]:
        """Polynomials, and kinds of ops, of so many rows."""
        if rows not in self.parts:
            table, share = self.rows, self.rows.part(rows)
            part = Part(self.profile, self.profile, self.scaling, self.carrying, share)
            part.set_ops(
                np.where(table.with_rows, table.flops * share, table.flops),
                table.moved_bytes * (1.0 - table.moved_part * (1.0 - share)),
            )
            ops, extra = self.kinds.of(part, self.profile)
            self.parts[rows] = part, [kind for kind in (*ops, *extra) if kind >= 0]
        return self.parts[rows]

    def rows_of(self, values: Sequence[int]) -> np.ndarray:
        """Bytes of those of some values that have rows, for the part of a replica."""
        graph, part = self.profile.graph, next(iter(self.parts.values()))[0]
        storages = dict.fromkeys(graph.values[value].storage for value in values if value in self.carrying)
        return part.with_rows(self.scaling.table[self.scaling.storage[list(storages)]].sum(axis=0))

    def flops(self, begin: int) -> np.ndarray:
        """FLOPs from an op on, of the whole batch."""
        part = next(iter(self.parts.values()))[0]
        counts = self.rows.flops > 0
        counts[:begin] = False
        return part.whole(self.scaling.table[self.scaling.flops[counts]].sum(axis=0))

    def number(self, device: Device, rows: int, count: int, first: bool, adds: bool) -> int:
        """Number of the figures of one of so many replicas; the arguments are those of `replica_cost.Figures.of`."""
        first = first and not self.processes and count > 1
        adds = adds and not first and not self.processes
        kind = device.block_bytes, device.overhead_bytes, device.name[:3] == "cpu"
        key = (device.speed, *kind, rows, first, adds, count > 1)
        if key not in self.known:
            self.known[key] = len(self.figures)
            self.figures.append(self._figures(device, rows, count > 1, first, adds))
        return self.known[key]

    def _figures(self, device: Device, rows: int, several: bool, first: bool, adds: bool) -> dict[str, Any]:
        part, ops = self.part(rows)
        table, workload, block = self.rows, self.profile.workload, device.block_bytes
        other = not first and not self.processes and several  # only the model itself, on the first, is trained
        died = table.let_go if (first or other) and workload.training else table.died
        if other and workload.training:
            died = np.where(table.sent, np.minimum(died, table.backward_begin), died)
        vectors = part.storages[table.storage]
        trained = [-(-size // block) * block for _, size in table.trained]
        accelerator = not device.name.startswith("cpu")
        step = optimizer_step_bytes(trained, workload.optimizer, fused_list=accelerator) if trained else 0
        parameter, buffer = (
            sum(-(-int(size) // block) * block for size in sizes)
            for sizes in (table.parameter_sizes, table.buffer_sizes)
        )
        state = sum(trained) * OPTIMIZER_STATE_TENSORS[workload.optimizer] if workload.training and not other else 0
        left = (table.born <= table.end) & (table.end < died) & ~table.gradient
        moved = 3 + 2 * OPTIMIZER_STATE_TENSORS[workload.optimizer] if workload.optimizer != "none" else 0
        if self.whole is None:
            moments, after = _moments(table, vectors, died)
        else:
            moments, after = _sharded_moments(table, vectors, self.whole, accelerator), np.zeros(0)
        return {
            "rates": self.kinds.device(device),
            "ops": counted(ops),
            "optimizer": self.gradient_bytes * moved if workload.training else 0,
            "moments": moments,
            "after": terms(after),
            "left": terms(vectors[left].sum(axis=0)),
            "inputs": terms(self._whole(self.profile.graph.inputs)),
            "outputs": terms(self._whole(self.profile.graph.outputs)),
            "caches": [terms(self._whole(values)) for values in (table.joined, table.joined[:1])],
            "gradient": sum(trained),
            # Buckets stay from step to step.
            "stays": self.whole is None and workload.training and several and self.processes,
            "adding": 2 * max(trained) if (first or adds) and trained else -1,
            "step": step if workload.training and not other else -1,
            "first": first,
            "divided": parameter + state,  # over replicas that are sharded
            "buffer": buffer,
            "always": 0,
        }

    def _whole(self, values: Sequence[int]) -> np.ndarray:
        half = len(self.scaling.monomials)
        return self.rows_of(values)[[*range(half, 2 * half), *range(half)]]


def _moments(table: Rows, vectors: np.ndarray, died: np.ndarray) -> tuple[list[list[list[float]]], np.ndarray]:
    """[all, caches, gradients] live at moments that may be the fullest, the first of equals; and at the end of forward.

    Moments are in order of time, as the first of the fullest counts.
    """
    times = np.arange(table.end + 1)

    def live(mask: np.ndarray) -> np.ndarray:
        return live_at(times, table.born[mask], died[mask] - 1, vectors[mask])

    every = live(np.ones(len(died), bool))
    kinds = every, live(table.cache), live(table.gradient & ~table.cache)
    begin = table.backward_begin
    after = every[begin - 1] if begin else np.zeros(every.shape[1])
    return [[terms(kind[time]) for kind in kinds] for time in _fullest(every)], after


def _sharded_moments(table: Rows, vectors: np.ndarray, whole: Whole, accelerator: bool) -> list[list[list[float]]]:
    """[all but gradients in parts, caches, gradients in parts], likewise; see `replica_cost.Figures`."""
    times = np.arange(len(whole.used))
    others = ~np.isin(table.storage, whole.gradients)

    def live(mask: np.ndarray) -> np.ndarray:
        return live_at(times, 2 * table.born[mask], 2 * table.died[mask] - 2, vectors[mask])

    every, parts = live(others), np.zeros((len(times), vectors.shape[1]))
    every[:, 0] += whole.beside(accelerator=accelerator)
    parts[:, 0] = whole.scattered
    kinds = every, live(others & table.cache), parts
    return [[terms(kind[time]) for kind in kinds] for time in _fullest(np.hstack([every, parts]))]


def _fullest(vectors: np.ndarray) -> list[int]:
    """The times at which no other is as full in every column, in order, the first of equals."""
    rows = np.round(vectors, 3)
    first = np.argsort(-rows.sum(axis=1), kind="stable")
    rows = rows[first]
    kept = []
    while len(rows):
        kept.append(int(first[0]))
        later = ~(rows <= rows[0]).all(axis=1)
        rows, first = rows[later], first[later]
    return sorted(kept)


def replica_keys(planned: Mapping[str, Any]) -> dict[int, int]:
    """Device -> number of its figures."""
    return dict(zip(planned["devices"], planned["replicas"], strict=True))
