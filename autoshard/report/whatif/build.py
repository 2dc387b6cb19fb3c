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
from autoshard.plan import Plan
from autoshard.profile.measure import trained_sizes
from autoshard.profile.profile import Profile
from autoshard.profile.scaling import Scaling, powers
from autoshard.report.whatif.moments import front, live_vectors
from autoshard.report.whatif.ranks import Table, ranks
from autoshard.report.whatif.sparse import counted, terms
from autoshard.report.whatif.units import unit_kinds
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
    plain = plan.mesh is None and not plan.cuts and not plan.streamed
    grows = [any(monomial[i] for monomial in scaling.monomials) for i in range(3)]
    used = [device.name for device in estimate.devices if device.peak_bytes > 0]
    lead = cluster.device(used[0] if used else cluster.names[0])
    table = [terms(row) for row in scaling.table]
    own: dict[str, Any] | None = None
    if plain:
        own = _planned(plan, estimate, profile, cluster, scaling, dtypes, of_op, of_extra)
    elif plan.cuts and plan.mesh is None:
        added = Table(table, classes, of_op, of_extra, lambda device: _rates(device, dtypes))
        own = ranks(plan, estimate, profile, cluster, scaling, added)
    return {
        "sizes": [b or 1, s, max(total - s, 0)],
        "vary": [b > 0 and grows[0], s > 0 and (grows[1] or grows[2]), s > 0 and total > s],
        "guessed": scaling.guessed,
        "decodes": total > s,
        "pass": "Prompt and one token" if total > s else "Training step" if profile.workload.training else "One pass",
        "devices": len(used) or 1,
        "monomials": [list(monomial) for monomial in scaling.monomials],
        "table": table,
        "ops": classes,
        "planned": own,
        "latency": estimate.latency_seconds,
        "units": unit_kinds(profile, scaling, of_op, of_extra),
        "hardware": _hardware(lead, cluster, dtypes),
    }


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


def _planned(
    plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, scaling: Scaling, dtypes: Sequence[str],
    of_op: Sequence[int], of_extra: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """Devices with the ops they run and the moments at which they may be fullest, and the copies between them."""
    moves = flow(profile.graph, plan.placements)
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
                "always": figures.peak_bytes - fullest if figures.peak_bytes else 0,
                "front": [terms(row) for row in moments],
                "ops": counted(placed) if index >= 0 else [],
                "optimizer": own * (3 + 2 * state) if profile.workload.optimizer != "none" else 0,
                **_rates(device, dtypes),
            }
        )
    return {"devices": devices, "transfers": _transfers(moves, profile, cluster, scaling), "collectives": None}


def _transfers(moves: Flow, profile: Profile, cluster: Cluster, scaling: Scaling) -> list[list[Any]]:
    """[device, delay, bandwidth, how many, bytes of all] of copies that are alike."""
    groups: dict[tuple[int, float, float], tuple[int, np.ndarray]] = {}
    for copy in moves.copies:
        if copy.kept or not moves.counts(copy) or HOST_NAME in (copy.source, copy.destination):
            continue
        link = cluster.link(copy.source, copy.destination)
        key = (cluster.names.index(copy.destination), link.latency_seconds, link.bytes_per_second)
        count, total = groups.get(key, (0, np.zeros(len(scaling.monomials))))
        value = profile.graph.values[copy.value]
        share = copy.nbytes / value.nbytes if value.nbytes else 0.0
        groups[key] = count + 1, total + share * scaling.table[scaling.value[copy.value]]
    return [[*key, count, terms(total)] for key, (count, total) in groups.items()]


def _rates(device: Device, dtypes: Sequence[str]) -> dict[str, Any]:
    return {
        "flops": [device.flops(dtype) for dtype in dtypes],
        "bandwidth": device.bytes_per_second,
        "launch": device.launch_seconds,
    }


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
        **_rates(device, dtypes),
    }  # fmt: skip
