"""The model as a row of units, of few kinds: what a division into other devices is computed from."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoshard.cost import tensor_units, weight_bytes
from autoshard.profile.measure import optimizer_step_bytes, trained_sizes
from autoshard.profile.profile import Profile
from autoshard.profile.scaling import Scaling
from autoshard.profile.units import Units, find_units
from autoshard.report.whatif.moments import front
from autoshard.report.whatif.sparse import counted, terms
from autoshard.workload import OPTIMIZER_STATE_TENSORS


def unit_kinds(profile: Profile, scaling: Scaling, of_op: Sequence[int], of_extra: Sequence[int]) -> dict[str, Any]:
    """Return {"kinds": […], "order": [kind of every unit]}. A kind has

    ops         kind of op, how many, …
    held        bytes that are there all through the pass
    front       moments at which activations of its ops may take most
    out         [how many, bytes] of tensors that later units read, of this unit or those before it
    optimizer   bytes that the optimizer's step reads and writes
    """
    units = find_units(profile)
    ops: list[list[int]] = [[] for _ in units.paths]
    for op, kind in enumerate(of_op):
        if kind >= 0:
            ops[units.op_unit[op]].append(kind)
    for extra, kind in zip(scaling.extra, of_extra, strict=True):
        if kind >= 0:
            ops[units.op_unit[extra.beside]].append(kind)
    held, saved_storages = _held(profile, scaling, units)
    moments = _transient(profile, scaling, units, saved_storages)
    out = _out(profile, scaling, units)
    optimizer = _optimizer(profile, units)
    known: dict[str, int] = {}
    kinds: list[dict[str, Any]] = []
    order = []
    for i in range(len(units.paths)):
        unit = {
            "ops": counted(ops[i]),
            "held": terms(held[i]),
            "front": [terms(row) for row in moments[i]],
            "out": [round(float(out[0][i])), terms(out[1][i])],
            "optimizer": optimizer[i],
        }
        key = repr(unit)
        if key not in known:
            known[key] = len(kinds)
            kinds.append(unit)
        order.append(known[key])
    return {"kinds": kinds, "order": order}


def _held(profile: Profile, scaling: Scaling, units: Units) -> tuple[np.ndarray, set[int]]:
    """[units, monomials] bytes of tensors, optimizer state, cache, and the larger of gradients and what is saved."""
    graph = profile.graph
    held = np.zeros((len(units.paths), len(scaling.monomials)))
    held[:, 0] = weight_bytes(profile, units)
    for storage in {graph.values[v].storage for v in graph.state}:
        row = graph.storages[storage]
        if row.kind == "activation":
            held[units.op_unit[row.born]] += scaling.table[scaling.storage[storage]]
    if not profile.workload.training:
        return held, set()
    gradients, saved = np.zeros(len(held)), np.zeros_like(held)
    owner = tensor_units(graph, units)
    for name, nbytes in trained_sizes(graph):
        gradients[owner[name]] += nbytes
    first: dict[int, int] = {}
    for save in graph.saves:
        storage = graph.values[save.value].storage
        if graph.storages[storage].kind == "activation":
            first.setdefault(storage, save.op)
    for storage, op in first.items():
        saved[units.op_unit[op]] += scaling.table[scaling.storage[storage]]
    base = scaling.at(*scaling.sizes)
    more = np.zeros(len(held))
    for storage, op in first.items():
        more[units.op_unit[op]] += base[scaling.storage[storage]]
    held[:, 0] += np.where(gradients > more, gradients, 0.0)
    held += np.where((gradients > more)[:, None], 0.0, saved)
    return held, set(first)


def _transient(profile: Profile, scaling: Scaling, units: Units, saved: set[int]) -> list[np.ndarray]:
    """Per unit, the moments at which other activations of its ops may take most."""
    graph = profile.graph
    end = len(graph.ops)
    change = np.zeros((end + 2, len(scaling.monomials)))
    resident = saved | {graph.values[v].storage for v in graph.state}
    for storage, born, died in graph.lives():
        gradient = graph.backward_begin <= storage.born < end <= storage.died
        if storage.index in resident or gradient:
            continue
        vector = scaling.table[scaling.storage[storage.index]]
        change[born] += vector
        change[died] -= vector
    for extra in scaling.extra:
        for polynomial, died in extra.made:
            change[min(extra.before, end)] += scaling.table[polynomial]
            change[min(max(died, extra.before + 1), end + 1)] -= scaling.table[polynomial]
    live = np.cumsum(change, axis=0)[:end]
    uncounted = graph.uncounted
    counts = np.ones(end, bool)
    counts[uncounted.start : uncounted.stop] = False
    found = []
    order = np.argsort(units.op_unit[:end], kind="stable")
    bounds = np.searchsorted(units.op_unit[:end][order], np.arange(len(units.paths) + 1))
    for i in range(len(units.paths)):
        mine = order[bounds[i] : bounds[i + 1]]
        found.append(front(live[mine[counts[mine]]]))
    if profile.workload.training:
        sizes: dict[int, list[int]] = {}
        owner = tensor_units(graph, units)
        for name, nbytes in trained_sizes(graph):
            sizes.setdefault(owner[name], []).append(nbytes)
        for i, own in sizes.items():
            step = np.zeros((1, len(scaling.monomials)))
            step[0, 0] = optimizer_step_bytes(own, profile.workload.optimizer)
            found[i] = front(np.vstack([found[i], step]))
    return found


def _out(profile: Profile, scaling: Scaling, units: Units) -> tuple[np.ndarray, np.ndarray]:
    """Number and bytes of the copies that a cut behind every unit makes."""
    count = len(units.paths)
    number, nbytes = np.zeros(count + 1), np.zeros((count + 1, len(scaling.monomials)))
    last = np.full(len(units.value), -1, np.int64)
    inside = units.edge_unit < count
    np.maximum.at(last, units.edge_value[inside], units.edge_unit[inside])
    for row in range(len(units.value)):
        first, end = max(int(units.maker[row]), 0), int(last[row])
        if units.copies[row] and end > first:
            value = profile.graph.values[int(units.value[row])]
            share = units.copies[row] * units.nbytes[row] / max(value.nbytes, 1)
            vector = share * scaling.table[scaling.value[value.index]]
            number[first] += units.copies[row]
            number[end] -= units.copies[row]
            nbytes[first] += vector
            nbytes[end] -= vector
    return np.cumsum(number)[:count], np.round(np.cumsum(nbytes, axis=0)[:count], 3)


def _optimizer(profile: Profile, units: Units) -> list[int]:
    """Bytes that the optimizer's step reads and writes."""
    workload = profile.workload
    found = [0] * len(units.paths)
    if workload.training and workload.optimizer != "none":
        owner = tensor_units(profile.graph, units)
        for name, nbytes in trained_sizes(profile.graph):
            found[owner[name]] += nbytes * (3 + 2 * OPTIMIZER_STATE_TENSORS[workload.optimizer])
    return found
