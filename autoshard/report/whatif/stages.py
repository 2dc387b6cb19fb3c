"""A plan with stages for the sliders: replicas of pipelines of tensor-parallel ranks, each dimension maybe of one.

What `stage_cost` and `stage_memory` say of one micro-batch, as polynomials; the page runs the schedule by the clock.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.capture.stages import divide
from autoshard.cluster.cluster import Cluster, Device
from autoshard.cut_cost import Traced, local_profile, trace_cuts
from autoshard.estimate import Estimate
from autoshard.pipeline_cost import needs_processes, rows_of_part
from autoshard.plan import Mesh, Plan, Stage
from autoshard.profile.measure import optimizer_step_bytes, trained_sizes
from autoshard.profile.part import carriers_of_rows
from autoshard.profile.profile import Profile
from autoshard.profile.scaling import Scaling
from autoshard.replica_cost import BUCKET_BYTES, rows_per_replica
from autoshard.report.whatif.links import Links
from autoshard.report.whatif.moments import front, live_at
from autoshard.report.whatif.parts import Kinds, Part
from autoshard.report.whatif.sparse import counted, terms
from autoshard.schedules.fast import compile_order
from autoshard.schedules.orders import make_order
from autoshard.stage_cost import borders_of, weight_ops
from autoshard.stage_memory import StageMemory, StageRows
from autoshard.workload import OPTIMIZER_STATE_TENSORS

WAYS = "FBIW"
"""A program is a list of numbers: way times the number of stages + stage, in an order in which everything is ready."""


def staged_data(
    plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, scaling: Scaling, dtypes: Sequence[str]
) -> dict[str, Any]:
    """Return what `formula_stages.staged` takes; without what is always there, which `build` adds."""
    return _Staged(plan, profile, cluster, scaling, dtypes).data(estimate)


class _Staged:
    """Collects the figures of all ranks; equal ranks are looked at once."""

    def __init__(self, plan: Plan, profile: Profile, cluster: Cluster, scaling: Scaling, dtypes: Sequence[str]) -> None:
        self.plan, self.profile, self.cluster, self.scaling = plan, profile, cluster, scaling
        self.mesh, self.batch = plan.mesh or Mesh(), plan.batch
        self.stages = plan.stages or (Stage(paths=("",)),)
        self.kinds, self.links = Kinds(dtypes), Links(cluster)
        graph = profile.graph
        self.combined = self.mesh.data > 1 or self.mesh.tensor > 1
        self.processes = self.combined or needs_processes(plan, cluster)
        self.carrying = frozenset[int]() if self.batch is None else carriers_of_rows(graph, self.batch)
        self.traced = trace_cuts(graph, plan.cuts) if plan.cuts else Traced()
        self.staged = divide(graph, [stage.paths for stage in self.stages])
        self.memory = StageMemory(
            profile, graph, self.stages, self.staged, processes=self.processes, schedule=plan.schedule,
            batch=self.batch,
        )  # fmt: skip
        self.weights = weight_ops(graph)
        of_op = np.array(self.staged.op_stage, np.int64)
        self.ops_of = [np.flatnonzero(of_op == stage).tolist() for stage in range(len(self.stages))]
        self.trained: dict[tuple[int, ...], list[tuple[str, int]]] = {}
        self.parts: dict[tuple[int, tuple[int, ...]], tuple[Part, Profile, tuple[list[int], list[int]]]] = {}
        self.figures: list[dict[str, Any]] = []
        self.known: dict[object, int] = {}

    def data(self, estimate: Estimate) -> dict[str, Any]:
        plan, mesh, training = self.plan, self.mesh, self.profile.workload.training
        count, batch = plan.num_microbatches, self.batch
        rows = [0] if batch is None else rows_per_replica(batch, mesh.shares, mesh.data)
        order = make_order(
            "gpipe" if plan.schedule == "none" else plan.schedule, mesh.pipeline, count,
            stages_per_device=len(self.stages) // mesh.pipeline, training=training, one_process=not self.processes,
        )  # fmt: skip
        steps = compile_order(order, len(self.stages)).steps
        joined = not self.processes and plan.schedule != "1f1b" and training
        return {
            "way": "stages",
            "names": [[device.name, device.memory_bytes, device.overhead_bytes] for device in estimate.devices],
            "size": batch.size if batch is not None else 0,
            "shares": list(mesh.shares),
            "mesh": [mesh.data, mesh.pipeline, mesh.tensor],
            "microbatches": count,
            "training": training,
            "joined": joined,
            "processes": self.processes,
            "combined": self.combined,
            "program": [WAYS.index(step.kind) * len(self.stages) + step.stage for step in steps],
            "recompute": [stage.recompute for stage in self.stages],
            "replicas": [self._replica(index, share) for index, share in enumerate(rows)],
            "reduce": self._reduce() if training else [],
            "figures": self.figures,
            "table": self.kinds.table,
            "ops": self.kinds.ops,
            "rates": self.kinds.rates,
            "links": self.links.rows,
        }

    def _name(self, data: int, pipeline: int, tensor: int) -> str:
        return self.plan.devices[self.mesh.rank(data=data, pipeline=pipeline, tensor=tensor)].name

    def _replica(self, index: int, rows: int) -> dict[str, Any]:
        """Its ranks' figures, what goes between its stages, and what the ranks of a stage do together."""
        mesh, number = self.mesh, self.cluster.names.index
        part = rows if self.batch is None else rows_of_part(rows, self.plan.num_microbatches)
        names = [self._name(index, position, 0) for position in range(mesh.pipeline)]
        figures = [self._figures(index, tensor, part) for tensor in range(mesh.tensor)]
        first = self._part(part, self._shares(0), 0)
        sends, returns = [], []
        for border, found in enumerate(borders_of(self.profile.graph, self.staged, len(self.stages))):
            ends = names[border % len(names)], names[(border + 1) % len(names)]
            sends.append(self._copies(first, ends, found.tensors))
            returns.append(self._copies(first, ends[::-1], found.returned))
        return {
            "figures": figures,
            "devices": [[number(self._name(index, position, tensor)) for tensor in range(mesh.tensor)]
                        for position in range(mesh.pipeline)],
            "sends": sends,
            "returns": returns,
            "sums": [self._sums(index, stage, first, backward=False) for stage in range(len(self.stages))],
            "back_sums": [self._sums(index, stage, first, backward=True) for stage in range(len(self.stages))],
            "shared": self._shared(names),
        }  # fmt: skip

    def _shares(self, tensor: int) -> tuple[int, ...]:
        return tuple(cut.shares[tensor] for cut in self.plan.cuts)

    def _part(self, rows: int, shares: tuple[int, ...], tensor: int) -> Part:
        return self._sized(rows, shares, tensor)[0]

    def _sized(
        self, rows: int, shares: tuple[int, ...], tensor: int
    ) -> tuple[Part, Profile, tuple[list[int], list[int]]]:
        """Polynomials and kinds of ops of some rows of the batch on a rank, and the rank's profile of all rows."""
        if (rows, shares) not in self.parts:
            local = local_profile(self.profile, self.traced, tensor) if shares else self.profile
            share = 1.0 if self.batch is None else rows / self.batch.size
            part = Part(self.profile, local, self.scaling, self.carrying, share)
            self.parts[rows, shares] = part, local, self.kinds.of(part, self.profile)
        return self.parts[rows, shares]

    def _copies(self, part: Part, ends: tuple[str, str], tensors: Sequence[tuple[int, int]]) -> list[list[Any]]:
        if ends[0] == ends[1] or not tensors:
            return []
        graph, total = self.profile.graph, np.zeros(len(part.base))
        for value, nbytes in tensors:
            total += part.values[value] * (nbytes / max(graph.values[value].nbytes, 1))
        return [[self.links.between(*ends), len(tensors), terms(total)]]

    def _sums(self, index: int, stage: int, part: Part, *, backward: bool) -> list[list[Any]]:
        """Collectives of one forward of a stage that are alike, or of its backward."""
        names = [self._name(index, stage % self.mesh.pipeline, tensor) for tensor in range(self.mesh.tensor)]
        if len(names) < 2 or (backward and not self.profile.workload.training):
            return []
        graph, found = self.profile.graph, dict[tuple[bool, tuple[float, ...]], int]()
        for forward in self.traced.collectives:
            one = forward.backward if backward else forward
            if self.staged.op_stage[one.op] != stage:
                continue
            values = [v for v in graph.ops[one.op].outputs if graph.values[v].nbytes == one.tensor_bytes]
            plain = self.scaling.table[self.scaling.value[values[0]]] if values else np.eye(1, len(part.base) // 2)[0]
            plain = plain * (one.nbytes / max(float(plain @ part.base[: len(plain)]), 1e-9))
            with_rows = not self.carrying.isdisjoint(graph.ops[one.op].outputs)
            key = one.gathers, tuple(terms(part.with_rows(plain) if with_rows else part.whole(plain)))
            found[key] = found.get(key, 0) + 1
        costs = {gathers: (self.links.all_gather if gathers else self.links.all_reduce)(names) for gathers, _ in found}
        return [[count, costs[gathers], list(vector)] for (gathers, vector), count in found.items()]

    def _shared(self, names: Sequence[str]) -> list[list[Any]]:
        """[positions, cost, bytes] of gradients of parameters that several stages hold."""
        if not self.profile.workload.training:
            return []
        found = []
        for name, nbytes in trained_sizes(self.profile.graph):
            holders = sorted({stage % len(names) for stage in self.memory.held[name]})
            if len(self.memory.held[name]) > 1:
                found.append([holders, self.links.all_reduce([names[one] for one in holders]), nbytes])
        return found

    def _reduce(self) -> list[list[list[Any]]]:
        """Per position and tensor rank, [buckets, cost, bytes of each] of sums of gradients over replicas."""
        mesh, found = self.mesh, []
        for position in range(mesh.pipeline):
            row = []
            for tensor in range(mesh.tensor):
                names = [self._name(data, position, tensor) for data in range(mesh.data)]
                nbytes = self._trained(tensor, position)
                buckets = max(1, -(-nbytes // BUCKET_BYTES)) if nbytes and mesh.data > 1 else 0
                row.append([buckets, self.links.all_reduce(names), nbytes / max(buckets, 1)])
            found.append(row)
        return found

    def _trained(self, tensor: int, position: int) -> int:
        return sum(
            nbytes
            for name, nbytes in self.trained[self._shares(tensor)]
            for stage in self.memory.held[name]
            if stage % self.mesh.pipeline == position
        )

    def _figures(self, data: int, tensor: int, rows: int) -> int:
        """Number of the figures of a rank's stages for one micro-batch of so many rows."""
        mesh, shares = self.mesh, self._shares(tensor)
        devices = [
            self.cluster.device(self._name(data, stage % mesh.pipeline, tensor)) for stage in range(len(self.stages))
        ]
        key = (rows, shares, *((device.speed, device.block_bytes, device.overhead_bytes) for device in devices))
        if key not in self.known:
            part, local, ops = self._sized(rows, shares, tensor)
            self.trained[shares] = trained = trained_sizes(local.graph) if self.profile.workload.training else []
            self.known[key] = len(self.figures)
            stages = [self._stage(i, device, part, ops, trained) for i, device in enumerate(devices)]
            self.figures.append({
                "always": [0] * mesh.pipeline,
                "stages": stages,
                "steps": [self._step(position, devices[position], trained) for position in range(mesh.pipeline)],
            })  # fmt: skip
        return self.known[key]

    def _step(self, position: int, device: Device, trained: Sequence[tuple[str, int]]) -> list[int]:
        """Of the optimizer's step of a device: its temporary bytes, and those that it reads and writes."""
        optimizer = self.profile.workload.optimizer
        sizes = [
            nbytes
            for stage in range(position, len(self.stages), self.mesh.pipeline)
            for name, nbytes in trained
            if stage in self.memory.held[name]
        ]
        moved = sum(sizes) * (3 + 2 * OPTIMIZER_STATE_TENSORS[optimizer]) if optimizer != "none" else 0
        return [optimizer_step_bytes(sizes, optimizer, not device.name.startswith("cpu")) if sizes else 0, moved]

    def _stage(
        self, stage: int, device: Device, part: Part, ops: tuple[list[int], list[int]],
        trained: Sequence[tuple[str, int]],
    ) -> dict[str, Any]:  # fmt: skip
        begin = self.profile.graph.backward_begin
        mine = [(index, ops[0][index]) for index in self.ops_of[stage] if ops[0][index] >= 0]
        more = [
            (extra.before, kind) for extra, kind in zip(self.scaling.extra, ops[1], strict=True)
            if kind >= 0 and self.staged.op_stage[extra.beside] == stage
        ]  # fmt: skip
        block = device.block_bytes
        own = sum(-(-nbytes // block) * block for name, nbytes in trained if stage in self.memory.held[name])
        return {
            "rates": self.kinds.device(device),
            "F": counted(kind for index, kind in [*mine, *more] if index < begin),
            "B": counted(kind for index, kind in [*mine, *more] if index >= begin),
            "W": counted(kind for index, kind in mine if self.weights[index]),
            "again": counted(kind for index, kind in mine if self.memory.runs_again[index]),
            "gradient": own,
            **self._bytes(stage, device, part),
        }

    def _bytes(self, stage: int, device: Device, part: Part) -> dict[str, Any]:
        """What of `StageBytes` changes with the sizes; see there."""
        memory, graph = self.memory, self.profile.graph
        rows = memory.rows_of(stage)
        if rows is None:
            return {}
        buffers, steps, block = memory.moves.buffers, memory.moves.steps, device.block_bytes
        sizes = np.array([max(storage.nbytes, 1) for storage in graph.storages], np.float64)
        vectors = part.storages[buffers.storage] * (buffers.nbytes / sizes[buffers.storage])[:, None]
        fixed = ~vectors[:, 1:].any(axis=1)
        vectors[fixed, 0] = -(-vectors[fixed, 0] // block) * block

        def live(mask: np.ndarray, times: np.ndarray) -> np.ndarray:
            return live_at(times, buffers.born[mask], buffers.died[mask] - 1, vectors[mask])

        def fronts(found: np.ndarray) -> list[list[float]]:
            return [terms(row) for row in front(found)]

        # Only where something is born, and where backward begins, more may be there than before.
        times = np.unique([0, min(rows.begin, steps), *np.ceil(buffers.born[rows.here]).clip(0, steps)])
        times = times[(times <= graph.uncounted.start) | (times >= graph.uncounted.stop)]
        passing, new = live(rows.passing, times), live(rows.gradients, times)
        late = times >= rows.begin
        again = np.zeros_like(passing)  # of gradients that are there already
        at = np.searchsorted(times, np.ceil(buffers.born[rows.gradients]))
        np.add.at(again, at.clip(max=len(times) - 1), vectors[rows.gradients])
        found: dict[str, Any] = {
            "inputs": self._inputs(stage, part),
            "forward": fronts(passing[~late]),
            "first": fronts((passing + new)[late]),
            "back": fronts((passing + again)[late]),
            "kept": terms(vectors[rows.kept].sum(axis=0)),
            **{kind: terms(vectors[mask].sum(axis=0)) for kind, mask in rows.masks.items()},
        }
        return found if memory.joined is None else found | self._joined(rows, vectors, block)

    def _inputs(self, stage: int, part: Part) -> list[float]:
        """Bytes of the whole batch's inputs, where they are held."""
        total = np.zeros(len(part.base) // 2)
        if stage == self.memory.home or self.processes:
            for storage in self.profile.graph.storages:
                if storage.kind == "input":
                    total = total + self.scaling.table[self.scaling.storage[storage.index]]
        return terms(part.whole(total))

    def _joined(self, rows: StageRows, vectors: np.ndarray, block: int) -> dict[str, Any]:
        """What is held beside the one backward of all micro-batches, or in those of each; `vectors`: of each buffer."""
        memory, buffers = self.memory, self.memory.moves.buffers
        assert memory.joined is not None
        back = memory.joined.moments(rows.device, rows.passing, block)

        def live(mask: np.ndarray) -> np.ndarray:
            return live_at(back.times, buffers.born[mask], buffers.died[mask] - 1, vectors[mask])

        def beside(found: np.ndarray, constant: np.ndarray) -> list[list[float]]:
            found = found.copy()
            found[:, 0] += constant
            return [terms(row) for row in front(found)]

        others = live(back.others)
        if memory.steps:
            return {"first": beside(others, back.first), "back": beside(others, back.alone)}
        joined = {
            "first": beside(others, back.first),
            "later": beside(others, back.later),
            "last": beside(others + live(back.outputs), back.last),
            "waiting": back.waiting,
            "returning": terms(vectors[back.outputs].sum(axis=0)),
        }
        return {"joined": joined}


def device_keys(planned: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    """Device -> (figures, position) of its rank: those with equal ones have equal peaks."""
    return {
        number: (replica["figures"][tensor], position)
        for replica in planned["replicas"]
        for position, row in enumerate(replica["devices"])
        for tensor, number in enumerate(row)
    }
