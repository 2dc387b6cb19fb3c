"""Units: the smallest pieces a placement may move, in the order in which the model runs them.

One unit per module that has tensors of its own. What has none (activations, glue in a parent's forward) runs wherever
the unit before it runs:

    embed        unit 0   ─ lookup
    layers.0.q   unit 1   ─ matmul, and the rotary arithmetic and softmax that follow in the parent's forward
    layers.0.k   unit 2   …
"""

from dataclasses import dataclass

import numpy as np

from autoshard.capture.columns import columns_of
from autoshard.capture.graph import ModelGraph
from autoshard.capture.latest import Latest
from autoshard.common.module_paths import parent
from autoshard.plan.workload import OPTIMIZER_STATE_TENSORS
from autoshard.profile.measure import first_saves, live_bytes, optimizer_step_bytes, trained_storages
from autoshard.profile.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """n units in order of first execution, and the T values that pass between them.

    Attributes:
        paths: per unit, placement paths (a module, or tensor names where modules below it have tensors too).
        op_unit: [ops] the unit each op runs with.
        weight_bytes: [n] on the unit's device at any moment: tensors and optimizer state, tied ones once.
        resident_bytes: [n] held all through the pass: tensors, optimizer state, cache, and the larger of what is saved
            for backward and of the gradients that take its place.
        stepped_bytes: [n] the same on accelerators, where the optimizer's step takes room for all parameters at once.
        transient_bytes: [n] most bytes of other activations that live while one of its ops runs.
        value: [T] graph values that a unit reads and another made; maker: [T] its unit, -1 the root's inputs.
        nbytes: [T] of a copy. copies: [T] copies of it per pass: 0 where it is made once and kept, 2 where its gradient
            comes back.
        edge_value, edge_unit: [E] row of `value` and unit that reads it; n for the root's outputs.
        ties: (units ascending, bytes) of tensors that several units hold under different names.
        root_unit: the unit on whose device the root runs its own ops.
    """

    paths: tuple[tuple[str, ...], ...]
    op_unit: np.ndarray
    weight_bytes: np.ndarray
    resident_bytes: np.ndarray
    stepped_bytes: np.ndarray
    transient_bytes: np.ndarray
    value: np.ndarray
    maker: np.ndarray
    nbytes: np.ndarray
    copies: np.ndarray
    edge_value: np.ndarray
    edge_unit: np.ndarray
    ties: tuple[tuple[tuple[int, ...], int], ...]
    root_unit: int


_LATEST = Latest[Units]()


def find_units(profile: Profile) -> Units:
    """Cut a profiled model into units. A model without tensors is one unit with the path ""."""
    return _LATEST.of(profile.graph, profile.workload, lambda: _found(profile))


def _found(profile: Profile) -> Units:
    graph = profile.graph
    modules = _modules_in_order(graph)
    unit_of = {path: i for i, path in enumerate(modules)}
    op_unit = _assign_ops(graph, unit_of)
    value, maker, nbytes, copies, edges = _edges(graph, unit_of, op_unit)
    weights, resident, stepped = _resident(profile, unit_of, op_unit)
    return Units(
        paths=_paths(graph, modules),
        op_unit=op_unit,
        weight_bytes=weights,
        resident_bytes=resident,
        stepped_bytes=stepped,
        transient_bytes=_transient(profile, len(modules), op_unit),
        value=np.array(value, np.int64),
        maker=np.array(maker, np.int64),
        nbytes=np.array(nbytes, np.int64),
        copies=np.array(copies, np.int64),
        edge_value=np.array([row for row, _ in edges], np.int64),
        edge_unit=np.array([unit for _, unit in edges], np.int64),
        ties=_ties(graph, unit_of),
        root_unit=_root_unit(graph, unit_of),
    )


def _modules_in_order(graph: ModelGraph) -> list[str]:
    """Modules with own tensors by first call; one that is never called goes after the one registered before it."""
    registered = list(dict.fromkeys(tensor.module for tensor in graph.tensors))
    own = set(registered)
    called: dict[str, None] = {}
    for op in graph.ops:  # by first op, not first call: a parent with own tensors uses them when its own ops run
        path = graph.calls[op.call].path
        if path in own:
            called.setdefault(path)
        if len(called) == len(own):
            break
    order = list(called)
    place = {path: i for i, path in enumerate(order)}
    late: list[list[str]] = [[] for _ in range(len(order) + 1)]
    previous = -1
    for path in registered:
        if path in place:
            previous = place[path]
        else:
            late[previous + 1].append(path)
    merged = list(late[0])
    for i, path in enumerate(order):
        merged += [path, *late[i + 1]]
    return merged or [""]


def _paths(graph: ModelGraph, modules: list[str]) -> tuple[tuple[str, ...], ...]:
    """A module's own path covers it alone unless modules below it have tensors too; then its tensors are named.

    So are the names that a module has in a second place of the tree.
    """
    above = set()
    for path in modules:
        while path:
            path = parent(path)
            above.add(path)
    names: dict[str, list[str]] = {}
    for tensor in graph.tensors:
        names.setdefault(tensor.module, []).append(tensor.name)
    paths = []
    for path in modules:
        own = names.get(path, [])
        if path in above:
            paths.append(tuple(own))
        else:
            paths.append((path, *(name for name in own if path and not name.startswith(f"{path}."))))
    return tuple(paths)


def _assign_ops(graph: ModelGraph, unit_of: dict[str, int]) -> np.ndarray:
    """Unit of every op: its module's, else that of the op before it; backward ops go with their forward op."""
    own = [unit_of.get(call.path, -1) for call in graph.calls]
    units = [0] * len(graph.ops)
    current = next((own[op.call] for op in graph.ops if own[op.call] >= 0), 0)
    for op in graph.ops:
        if op.forward >= 0:
            current = units[op.forward]
        elif own[op.call] >= 0:
            current = own[op.call]
        units[op.index] = current
    return np.array(units, np.int64)


def _resident(profile: Profile, unit_of: dict[str, int], op_unit: np.ndarray) -> tuple[np.ndarray, ...]:
    """The columns `weight_bytes`, `resident_bytes` and `stepped_bytes`."""
    graph, workload = profile.graph, profile.workload
    weights, cached, exchanged, saved, step = (np.zeros(len(unit_of) or 1, np.int64) for _ in range(5))
    trained = trained_storages(graph) if workload.training else set()
    seen: set[int] = set()
    for tensor in graph.tensors:
        if tensor.storage in seen:
            continue
        seen.add(tensor.storage)
        nbytes = graph.storages[tensor.storage].nbytes
        weights[unit_of[tensor.module]] += nbytes
        if tensor.storage in trained:
            weights[unit_of[tensor.module]] += nbytes * OPTIMIZER_STATE_TENSORS[workload.optimizer]
            exchanged[unit_of[tensor.module]] += nbytes
            step[unit_of[tensor.module]] += optimizer_step_bytes([nbytes], workload.optimizer, fused_list=True)
    for storage in {graph.values[v].storage for v in graph.state}:
        row = graph.storages[storage]
        if row.kind == "activation" and len(op_unit):
            cached[op_unit[row.born]] += row.nbytes
    for storage, op in first_saves(graph).items():
        saved[op_unit[op]] += graph.storages[storage].nbytes
    weights_and_cache = weights + cached
    return (
        weights,
        weights_and_cache + np.maximum(exchanged, saved),
        weights_and_cache + np.maximum(exchanged + step, saved),
    )


def _transient(profile: Profile, count: int, op_unit: np.ndarray) -> np.ndarray:
    """Live activation bytes at every op, less those counted as resident, at their most per unit."""
    graph = profile.graph
    end = len(graph.ops)
    live = live_bytes(graph)[:end]
    resident = set(first_saves(graph)) | {graph.values[v].storage for v in graph.state}
    change = np.zeros(end + 1, np.int64)
    for storage in graph.storages:
        gradient = graph.backward_begin <= storage.born < end <= storage.died
        if storage.kind == "activation" and (storage.index in resident or gradient):
            change[storage.born] += storage.nbytes
            change[min(storage.died, end)] -= storage.nbytes
    most = np.zeros(count, np.int64)
    if end:
        np.maximum.at(most, op_unit, np.maximum(live - np.cumsum(change)[:end], 0))
    if profile.workload.training:
        trained, sizes = trained_storages(graph), dict[str, dict[int, int]]()
        for tensor in graph.tensors:
            if tensor.storage in trained:
                sizes.setdefault(tensor.module, {})[tensor.storage] = tensor.nbytes
        for i, module in enumerate(_modules_in_order(graph)):
            step = optimizer_step_bytes(list(sizes.get(module, {}).values()), profile.workload.optimizer)
            most[i] = max(most[i], step)
    return most


def _edges(
    graph: ModelGraph, unit_of: dict[str, int], op_unit: np.ndarray
) -> tuple[list[int], list[int], list[int], list[int], list[tuple[int, int]]]:
    holders: dict[int, set[int]] = {}  # parameter or buffer storage -> units that hold it under some name
    owner: dict[int, int] = {}
    for tensor in graph.tensors:
        holders.setdefault(tensor.storage, set()).add(unit_of[tensor.module])
        owner.setdefault(tensor.storage, unit_of[tensor.module])
    training = graph.backward_begin < len(graph.ops)
    rows: dict[int, int] = {}
    value: list[int] = []
    maker: list[int] = []
    nbytes: list[int] = []
    copies: list[int] = []
    edges: dict[tuple[int, int], None] = {}

    def add(index: int, unit: int) -> None:
        row = graph.values[index]
        storage = graph.storages[row.storage]
        if row.op >= 0:
            made = int(op_unit[row.op])
        elif storage.kind == "input":
            made = -1
        elif row.storage in owner:
            made = owner[row.storage]
            if unit in holders[row.storage]:
                return
        else:
            return  # a constant on the host
        if made == unit:
            return
        if index not in rows:
            rows[index] = len(value)
            value.append(index)
            maker.append(made)
            nbytes.append(graph.copied_bytes(index))
            differentiable = training and row.requires_grad
            copies.append(2 if differentiable else 0 if row.storage in owner else 1)
        edges[rows[index], unit] = None

    reads, counted = columns_of(graph).inputs, np.arange(len(graph.ops)) < graph.backward_begin
    counted[list(graph.uncounted)] = False
    makers, reading = columns_of(graph).maker[reads.value], op_unit[reads.op]
    elsewhere = counted[reads.op] & ((makers < 0) | (op_unit[makers] != reading))
    for index, unit in dict.fromkeys(zip(reads.value[elsewhere].tolist(), reading[elsewhere].tolist(), strict=True)):
        add(index, unit)
    for index in graph.outputs:
        if graph.values[index].op >= 0:
            add(index, len(unit_of) or 1)
    return value, maker, nbytes, copies, list(edges)


def _ties(graph: ModelGraph, unit_of: dict[str, int]) -> tuple[tuple[tuple[int, ...], int], ...]:
    module_of = {tensor.name: tensor for tensor in graph.tensors}
    ties = []
    for names in graph.tied():
        units = tuple(sorted({unit_of[module_of[name].module] for name in names}))
        if len(units) > 1:
            ties.append((units, graph.storages[module_of[names[0]].storage].nbytes))
    return tuple(ties)


def _root_unit(graph: ModelGraph, unit_of: dict[str, int]) -> int:
    """The unit that decides where the root executes: of its own first tensor, else of its first child's, and so on
    down."""
    if not graph.tensors:
        return 0
    path = ""
    while path not in unit_of:
        prefix = f"{path}." if path else ""
        below = [m.path for m in graph.modules if m.path != path and parent(m.path) == path]
        has = {t.module for t in graph.tensors if t.module.startswith(prefix)}
        child = next((c for c in below if c in has or any(module.startswith(c + ".") for module in has)), None)
        if child is None:  # only a module shared with another place in the tree is left
            return unit_of[graph.tensors[0].module]
        path = child
    return unit_of[path]


def tensor_units(graph: ModelGraph, units: Units) -> dict[str, int]:
    """Return the unit of every parameter and buffer name."""
    by_path = {path: unit for unit, paths in enumerate(units.paths) for path in paths}
    return {t.name: by_path[t.name] if t.name in by_path else by_path[t.module] for t in graph.tensors}
