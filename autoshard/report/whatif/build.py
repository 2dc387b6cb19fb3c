"""The polynomials of a plan's figures, few enough to stand in a page: equal ops, moments and units are merged."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.cluster.cluster import Cluster, Device
from autoshard.cluster.hardware import hardware_table, make_device
from autoshard.cluster.links import make_links
from autoshard.estimate import Estimate
from autoshard.flow import HOST_NAME, Flow, flow
from autoshard.mesh_cost import UNDIVIDED
from autoshard.plan import Mesh, Plan
from autoshard.profile.measure import trained_sizes
from autoshard.profile.profile import Profile
from autoshard.profile.scaling import Scaling, powers
from autoshard.replica_cost import rows_per_replica
from autoshard.report.whatif.links import Links
from autoshard.report.whatif.moments import front, live_vectors
from autoshard.report.whatif.parts import rates
from autoshard.report.whatif.predict import predict
from autoshard.report.whatif.ranks import ranks
from autoshard.report.whatif.replicas import replica_keys, replicated_data
from autoshard.report.whatif.sparse import counted, terms
from autoshard.report.whatif.stages import device_keys, staged_data
from autoshard.report.whatif.streams import stream_data
from autoshard.report.whatif.units import unit_kinds
from autoshard.stream_cost import streamed_modules, with_slots
from autoshard.workload import OPTIMIZER_STATE_TENSORS


def what_if_data(
    plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, scaling: Scaling
) -> dict[str, Any]:
    """Return what `predict` takes, as plain data for JSON.

    Plans that place modules, or cut parameters in one machine, keep their division; for others there is only the model
    split anew.
    """
    b, s, total = scaling.sizes
    dtypes = sorted(set(profile.op_dtypes) | {extra.dtype for extra in scaling.extra})
    classes, of_op, of_extra = _op_classes(profile, scaling, dtypes)
    grows = [any(monomial[i] for monomial in scaling.monomials) for i in range(3)]
    used = [
        row.name for row in estimate.devices if row.peak_bytes > 0 and (row.compute_seconds or not row.stored_bytes)
    ]
    lead = cluster.device(used[0] if used else cluster.names[0])
    table = [terms(row) for row in scaling.table]
    # One process runs generate() undivided, and it is priced so: see `mesh_cost.UNDIVIDED`.
    undivided = UNDIVIDED in estimate.notes
    least = _least_batch(plan) if b and not undivided else 1
    data = {
        "sizes": [b or 1, s, max(total - s, 0)],
        "vary": [b > 0 and grows[0], s > 0 and (grows[1] or grows[2]), s > 0 and total > s],
        "guessed": scaling.guessed,
        "decodes": total > s,
        "pass": "Prompt and one token" if total > s else "Training step" if profile.workload.training else "One pass",
        "devices": len(used) or 1,
        "monomials": [list(monomial) for monomial in scaling.monomials],
        "table": table,
        "ops": classes,
        "units": unit_kinds(profile, scaling, of_op, of_extra),
        "hardware": _hardware(lead, cluster, dtypes),
        "least": least,
        "words": _words(plan, least, divides=plan.mesh is not None and not undivided),
    }
    if plan.mesh is not None and not undivided:
        stages = plan.mesh.pipeline > 1 or plan.mesh.tensor > 1
        make = staged_data if stages else replicated_data
        data["planned"] = make(plan, estimate, profile, cluster, scaling, dtypes)
        _add_always(data, estimate)
    elif plan.cuts:
        data["planned"] = ranks(plan, estimate, profile, cluster, scaling, dtypes)
    else:
        data["planned"] = _placed(plan, estimate, profile, cluster, scaling, dtypes, of_op, of_extra)
    return data


def _least_batch(plan: Plan) -> int:
    """The fewest rows of which every replica has enough for its micro-batches, up to what is planned."""
    mesh, batch = plan.mesh, plan.batch
    if mesh is None or batch is None:
        return 1
    for size in range(1, batch.size):
        rows = rows_per_replica(replace(batch, size=size), mesh.shares, mesh.data)
        if min(rows) >= plan.num_microbatches:
            return size
    return batch.size


def _words(plan: Plan, least: int, *, divides: bool) -> tuple[str, str]:
    """How the model is divided under the sliders, and what of the plan is left out where it is split anew."""
    mesh = plan.mesh or Mesh()
    parts = []
    if divides and mesh.data > 1:
        parts.append(f"{mesh.data} replicas" + (" that share all parameters" if mesh.sharded else ""))
    if divides and mesh.pipeline > 1:
        parts.append(f"{len(plan.stages)} stages")
    if divides and plan.num_microbatches > 1:
        parts.append(f"{plan.num_microbatches} micro-batches")
    parts += ["cuts"] if plan.cuts else []
    parts += ["streamed modules"] if plan.streamed else []
    if not parts:
        return "With the modules where the plan has them.", ""
    own = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    ordered = f", in the order of {plan.schedule}" if divides and plan.num_microbatches > 1 else ""
    rows = f" A batch has {least} rows at least, one for every part." if least > 1 else ""
    return (
        f"With the plan's {own}{ordered}.{rows}",
        f" That leaves out the plan's {own}; `autoshard plan` makes such a plan for other devices.",
    )


def _add_always(data: dict[str, Any], estimate: Estimate) -> None:
    """Add to the peaks of ranks what the polynomials don't have: parameters, overhead, the allocator's rounding."""
    planned, (batch, sequence, fresh) = data["planned"], data["sizes"]
    found = predict(data, batch, sequence, fresh)
    lacking = [figures.peak_bytes - row[1] for figures, row in zip(estimate.devices, found["devices"], strict=True)]
    if planned["way"] == "replicas":
        for number, figures in replica_keys(planned).items():
            planned["figures"][figures]["always"] = lacking[number]
        return
    for number, (figures, position) in device_keys(planned).items():
        planned["figures"][figures]["always"][position] = lacking[number]


def _op_classes(
    profile: Profile, scaling: Scaling, dtypes: Sequence[str]
) -> tuple[list[list[int]], list[int], list[int]]:
    """Distinct (FLOPs, bytes moved, dtype) of ops, and that of every op; -1 for ops that take no time anywhere."""
    known: dict[tuple[int, int, int], int] = {}
    idle = (scaling.table == 0).all(axis=1).tolist()
    uncounted = profile.graph.uncounted

    def number(flops: int, moved: int, dtype: str) -> int:
        if idle[flops] and idle[moved]:
            return -1
        return known.setdefault((flops, moved, dtypes.index(dtype)), len(known))

    rows = zip(scaling.flops.tolist(), scaling.moved.tolist(), profile.op_dtypes, strict=True)
    of_op = [-1 if i in uncounted else number(*row) for i, row in enumerate(rows)]
    of_extra = [-1 if e.before in uncounted else number(e.flops, e.moved, e.dtype) for e in scaling.extra]
    return [list(key) for key in known], of_op, of_extra


def _placed(
    plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, scaling: Scaling, dtypes: Sequence[str],
    of_op: Sequence[int], of_extra: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """Devices with the ops they run and the moments at which they may be fullest, and the copies between them."""
    bare = moves = flow(profile.graph, plan.placements)
    modules = streamed_modules(plan, profile.graph)
    if modules:
        moves = with_slots(bare, modules, profile.graph)
    base = powers(scaling.monomials, *scaling.sizes)
    trained = dict(trained_sizes(profile.graph)) if profile.workload.training else {}
    state = OPTIMIZER_STATE_TENSORS[profile.workload.optimizer]
    devices = []
    for figures in estimate.devices:
        device = cluster.device(figures.name)
        index = moves.devices.index(device.name) if device.name in moves.devices else -1
        placed = [kind for op, kind in enumerate(of_op) if kind >= 0 and moves.op_device[op] == index]
        placed += [
            kind for extra, kind in zip(scaling.extra, of_extra, strict=True)
            if kind >= 0 and moves.op_device[extra.beside] == index
        ]  # fmt: skip
        moments = (
            front(live_vectors(profile, moves, scaling, index, device)) if index >= 0 else np.zeros((0, len(base)))
        )
        own = sum(nbytes for name, nbytes in trained.items() if moves.tensor_device[name] == device.name)
        fullest = float((moments @ base).max(initial=0.0))
        devices.append(
            {
                "name": device.name,
                "memory": device.memory_bytes,
                # What the moments do not have: optimizer state, overhead, the allocator's rounding.
                "always": figures.peak_bytes - figures.overhead_bytes - fullest if figures.peak_bytes else 0,
                "overhead": figures.overhead_bytes,
                "front": [terms(row) for row in moments],
                "ops": counted(placed) if index >= 0 else [],
                "optimizer": own * (3 + 2 * state) if profile.workload.optimizer != "none" else 0,
                **rates(device, dtypes),
            }
        )
    links = Links(cluster)
    transfers = _transfers(moves, profile, cluster, scaling, links)
    found: dict[str, Any] = {
        "way": "placed",
        "devices": devices,
        "transfers": transfers,
        "collectives": None,
        "links": links.rows,
    }
    if modules:
        names = [row["name"] for row in devices]
        found["stream"] = stream_data(modules, profile, cluster, names, scaling, bare, of_op, of_extra, links)
    return found


def _transfers(moves: Flow, profile: Profile, cluster: Cluster, scaling: Scaling, links: Links) -> list[list[Any]]:
    """[device, link, how many, bytes of all] of copies that are alike."""
    groups: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
    for copy in moves.copies:
        if copy.kept or not moves.counts(copy) or HOST_NAME in (copy.source, copy.destination):
            continue
        key = cluster.names.index(copy.destination), links.between(copy.source, copy.destination)
        count, total = groups.get(key, (0, np.zeros(len(scaling.monomials))))
        value = profile.graph.values[copy.value]
        share = copy.nbytes / value.nbytes if value.nbytes else 0.0
        groups[key] = count + 1, total + share * scaling.table[scaling.value[copy.value]]
    return [[*key, count, terms(total)] for key, (count, total) in groups.items()]


def _hardware(lead: Device, cluster: Cluster, dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """The plan's own kind of device, then the cards that have a name, with the link between two in one machine."""
    others = [name for name in cluster.names if name != lead.name]
    link = cluster.link(lead.name, others[0]) if others else make_links(_pair(lead))[0]
    rows = [
        _row(
            lead,
            lead.kind if lead.kind != "generic" else "as given",
            link.bytes_per_second,
            link.latency_seconds,
            dtypes,
        )
    ]
    for hardware in hardware_table().values():
        if hardware.is_card and hardware.name != lead.kind and hardware.arch not in ("cpu", "disk"):
            device = make_device(hardware, name="cuda:0", memory_bytes=hardware.memory_bytes, host="host0")
            link = make_links(_pair(device))[0]
            rows.append(_row(device, hardware.name, link.bytes_per_second, link.latency_seconds, dtypes))
    return rows


def _pair(device: Device) -> tuple[Device, Device]:
    return replace(device, name="cuda:0"), replace(device, name="cuda:1")


def _row(device: Device, name: str, link: float, delay: float, dtypes: Sequence[str]) -> dict[str, Any]:
    return {
        "name": name, "memory": device.memory_bytes, "overhead": device.overhead_bytes, "link": link, "delay": delay,
        **rates(device, dtypes),
    }  # fmt: skip
