"""ModelGraph -> Profile: bytes and FLOPs of every module and of the whole model, by the recorded lifetimes."""

from collections.abc import Sequence

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.common.module_paths import parent
from autoshard.common.schemas import name_of_op
from autoshard.plan.workload import OPTIMIZER_STATE_TENSORS, Workload
from autoshard.profile.answer import further_tokens
from autoshard.profile.experts import hit_parts
from autoshard.profile.profile import ModuleProfile, Profile

_GATHERS = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather", "aten::_index_put_impl_")
"""Ops that read as many elements of their first input as they write, however large that input is."""


def profile_graph(graph: ModelGraph, workload: Workload) -> Profile:
    """Measure a captured run on one device, module by module.

    Memory follows the recorded births and deaths of storages: a view costs nothing, an in-place op reuses what is
    there, what autograd keeps lives until it lets go. In training the peak is that of a step in steady state:
    parameters, optimizer state and buffers all the time, gradients as the backward pass makes them, and the
    optimizer's own temporaries on top of them at the end.
    """
    rows = _Rows(graph)
    op_bytes, op_dtypes = _traffic(graph)
    live = live_bytes(graph)
    columns = _columns(graph, workload, rows, op_bytes, live)
    modules = tuple(
        ModuleProfile(
            path=module.path,
            class_name=module.class_name,
            **{name: int(column[i]) for name, column in columns.items()},
        )
        for i, module in enumerate(graph.modules)
    )
    root = modules[rows.index[""]]
    resident = root.parameter_bytes + root.buffer_bytes + root.optimizer_bytes
    peak = resident + int(live.max())
    if workload.training:
        step = optimizer_step_bytes([nbytes for _, nbytes in trained_sizes(graph)], workload.optimizer)
        peak = max(peak, resident + root.gradient_bytes + int(live[-1]) + step)
    return Profile(
        graph=graph,
        workload=workload,
        modules=modules,
        op_bytes=tuple(op_bytes),
        op_dtypes=tuple(op_dtypes),
        dtype=_main_dtype(graph, op_dtypes),
        parameter_bytes=root.parameter_bytes,
        buffer_bytes=root.buffer_bytes,
        gradient_bytes=root.gradient_bytes,
        optimizer_bytes=root.optimizer_bytes,
        cache_bytes=root.cache_bytes,
        activation_peak_bytes=int(live.max()),
        peak_bytes=peak,
        flops=root.flops,
        further=further_tokens(graph, workload.new_tokens),
        bytes_moved=root.bytes_moved,
    )


def _columns(
    graph: ModelGraph, workload: Workload, rows: "_Rows", op_bytes: Sequence[int], live: np.ndarray
) -> dict[str, Sequence[int] | np.ndarray]:
    """The figures of `ModuleProfile`, each for all modules."""
    op_rows = [rows.index[graph.calls[op.call].path] for op in graph.ops]
    uncounted = graph.uncounted
    tensors = _tensor_bytes(graph, rows)
    state = sorted({graph.values[v].storage for v in graph.state})
    forward = [
        s.index
        for s in graph.storages
        if s.kind == "activation" and s.born < graph.backward_begin and s.born not in uncounted
    ]
    trained = tensors["trained"] if workload.training else np.zeros_like(tensors["trained"])
    peaks, calls = _call_peaks(graph, rows, live)
    return {
        "calls": calls,
        "parameter_bytes": tensors["parameter"],
        "buffer_bytes": tensors["buffer"],
        "activation_bytes": rows.sum(*_born_in(graph, op_rows, forward)),
        "saved_bytes": rows.sum(*_saved(graph, op_rows)),
        "cache_bytes": rows.sum(*_born_in(graph, op_rows, state)),
        "gradient_bytes": trained,
        "optimizer_bytes": trained * OPTIMIZER_STATE_TENSORS[workload.optimizer],
        "peak_bytes": peaks,
        "flops": rows.sum(op_rows, [0 if op.index in uncounted else op.flops for op in graph.ops]),
        "bytes_moved": rows.sum(op_rows, op_bytes),
    }


def live_bytes(graph: ModelGraph) -> np.ndarray:
    """Return the bytes of inputs and activations live on one device at every op, and after the last."""
    end = len(graph.ops)
    change = np.zeros(end + 2, np.int64)
    for storage, born, died in graph.lives():
        change[born] += storage.nbytes
        change[died] -= storage.nbytes
    live = np.cumsum(change)[: end + 1]
    live[graph.uncounted.start : graph.uncounted.stop] = 0
    return live


def trained_storages(graph: ModelGraph) -> set[int]:
    """Return the storages of parameters that get a gradient and optimizer state.

    Of a recorded training step those for which backward left one; else the trainable ones that an op reads.
    """
    if graph.gradients:
        got = {name for name, _ in graph.gradients}
        return {tensor.storage for tensor in graph.tensors if tensor.name in got}
    read = {value for op in graph.ops for value in op.inputs}
    read_storages = {graph.values[value].storage for value in read}
    return {t.storage for t in graph.tensors if t.trainable and t.kind == "parameter" and t.storage in read_storages}


def first_saves(graph: ModelGraph) -> dict[int, int]:
    """Return activation storage -> the op that first saves it for backward."""
    first: dict[int, int] = {}
    for save in graph.saves:
        storage = graph.values[save.value].storage
        if graph.storages[storage].kind == "activation":
            first.setdefault(storage, save.op)
    return first


def trained_sizes(graph: ModelGraph) -> list[tuple[str, int]]:
    """Return (first name, bytes) of every parameter that is trained, in registration order, tied ones once."""
    trained = trained_storages(graph)
    sizes: dict[int, tuple[str, int]] = {}
    for tensor in graph.tensors:
        if tensor.storage in trained:
            sizes.setdefault(tensor.storage, (tensor.name, graph.storages[tensor.storage].nbytes))
    return list(sizes.values())


def optimizer_step_bytes(sizes: Sequence[int], optimizer: str, fused_list: bool = False) -> int:
    """Return the most temporary bytes of one optimizer step over parameters of these sizes, all on one device.

    Adam's loop makes sqrt(v), then the denominator beside it, and drops the last denominator one parameter later:

        parameter i-1   sqrt ██
                        denominator ███████████
        parameter i                   sqrt ████         peak: size[i-1] + 2 size[i]
                               denominator    ██████

    With `fused_list` (the multi-tensor form torch prefers on accelerators) the denominators of all live at once.
    """
    if optimizer not in ("adam", "adamw"):
        return 0
    if fused_list:
        return sum(sizes)
    previous, most = 0, 0
    for nbytes in sizes:
        most = max(most, previous + 2 * nbytes)
        previous = nbytes
    return most


class _Rows:
    """Sums per module row, rolled up from children to parents."""

    def __init__(self, graph: ModelGraph) -> None:
        self.index = {module.path: i for i, module in enumerate(graph.modules)}
        for module in graph.modules:
            for alias in module.aliases:
                self.index.setdefault(alias, self.index[module.path])
        for call in graph.calls:  # a module made during the run belongs to the nearest one that was there before
            path = call.path
            while path not in self.index:
                path = parent(path)
            self.index.setdefault(call.path, self.index[path])
        self.parents = [self.row_of(parent(module.path)) if module.path else -1 for module in graph.modules]
        depth = [module.path.count(".") + 1 if module.path else 0 for module in graph.modules]
        self.deepest_first = sorted(range(len(depth)), key=lambda i: -depth[i])

    def row_of(self, path: str) -> int:
        while path not in self.index:
            path = parent(path)
        return self.index[path]

    def sum(self, rows: Sequence[int], amounts: Sequence[int]) -> np.ndarray:
        total = np.zeros(len(self.parents), np.int64)
        if len(rows):
            np.add.at(total, np.asarray(rows), np.asarray(amounts, np.int64))
        for row in self.deepest_first:
            if self.parents[row] >= 0:
                total[self.parents[row]] += total[row]
        return total


def _tensor_bytes(graph: ModelGraph, rows: _Rows) -> dict[str, np.ndarray]:
    """Bytes of parameters and buffers per row; a storage counts once, at its first name."""
    owners: dict[str, tuple[list[int], list[int]]] = {kind: ([], []) for kind in ("parameter", "buffer", "trained")}
    seen: set[int] = set()
    trained = trained_storages(graph)
    for tensor in graph.tensors:
        if tensor.storage in seen:
            continue
        seen.add(tensor.storage)
        nbytes = graph.storages[tensor.storage].nbytes
        kinds = [tensor.kind, "trained"] if tensor.storage in trained else [tensor.kind]
        for kind in kinds:
            owners[kind][0].append(rows.row_of(tensor.module))
            owners[kind][1].append(nbytes)
    return {kind: rows.sum(*pair) for kind, pair in owners.items()}


def _born_in(graph: ModelGraph, op_rows: list[int], storages: Sequence[int]) -> tuple[list[int], list[int]]:
    """Row of the op that allocated each storage, and its bytes; storages that no op made are left out."""
    made = [graph.storages[s] for s in storages]
    made = [s for s in made if s.kind in ("activation", "constant") and 0 <= s.born < len(op_rows)]
    return [op_rows[s.born] for s in made], [s.nbytes for s in made]


def _saved(graph: ModelGraph, op_rows: list[int]) -> tuple[list[int], list[int]]:
    """Row of the first op that saves each activation storage for backward, and its bytes."""
    first = first_saves(graph)
    return [op_rows[op] for op in first.values()], [graph.storages[s].nbytes for s in first]


def _call_peaks(graph: ModelGraph, rows: _Rows, live: np.ndarray) -> tuple[list[int], list[int]]:
    """Most live bytes during any forward call of each module, and how many forward calls it had."""
    peaks, counts = [0] * len(graph.modules), [0] * len(graph.modules)
    uncounted = graph.uncounted
    called = [call for call in graph.calls if not call.backward and call.begin not in uncounted]
    for call in called:
        counts[rows.index[call.path]] += 1
    ran = [call for call in called if call.end > call.begin]
    if ran:
        # reduceat takes the maximum from one bound to the next; every second range is that of a call.
        bounds = np.array([(call.begin, call.end) for call in ran]).ravel()
        for call, peak in zip(ran, np.maximum.reduceat(live, bounds)[::2].tolist(), strict=True):
            row = rows.index[call.path]
            peaks[row] = max(peaks[row], peak)
    return peaks, counts


def _traffic(graph: ModelGraph) -> tuple[list[int], list[str]]:
    """Bytes each op reads and writes, and the dtype name it computes in.

    A view moves nothing. A gather reads what it writes of its first input, not the whole table. An expanded input is
    read as often as its storage is large. Of experts, a grouped product reads the weights of those that are hit.
    """
    value_bytes = [min(value.nbytes, graph.storages[value.storage].nbytes) for value in graph.values]
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in {value.dtype for value in graph.values}}
    value_dtype = [names[value.dtype] for value in graph.values]
    floating = [value.dtype.is_floating_point or value.dtype.is_complex for value in graph.values]
    value_storage, uncounted = [value.storage for value in graph.values], graph.uncounted
    moved, dtypes = [], []
    for op, hit in zip(graph.ops, hit_parts(graph), strict=True):
        dtype = next((value_dtype[v] for v in (*op.inputs, *op.outputs) if floating[v]), None)
        dtypes.append(dtype or next((value_dtype[v] for v in op.outputs), "int64"))
        read = {value_storage[v] for v in op.inputs}
        written = [v for v in op.outputs if value_storage[v] not in read]
        if (not written and not op.mutates) or op.index in uncounted:
            moved.append(0)
            continue
        inputs = list(dict.fromkeys(op.inputs))
        counted = [*written, *op.mutates]
        if inputs and written and name_of_op(op.target) in _GATHERS:
            table = inputs.pop(0)
            whole = value_bytes[table] <= sum([value_bytes[v] for v in written])
            counted += [table] if whole else written
        nbytes = sum([value_bytes[v] for v in (*counted, *inputs)])
        moved.append(nbytes - round(value_bytes[op.inputs[1]] * (1 - hit)) if hit < 1 and nbytes else nbytes)
    return moved, dtypes


def _main_dtype(graph: ModelGraph, op_dtypes: Sequence[str]) -> str:
    """The dtype most FLOPs run in; without any, that of the first parameter."""
    totals: dict[str, int] = {}
    for op, dtype in zip(graph.ops, op_dtypes, strict=True):
        totals[dtype] = totals.get(dtype, 0) + op.flops
    best = max(totals, key=lambda dtype: totals[dtype], default="")
    if best and totals[best]:
        return best
    return next((str(t.dtype).removeprefix("torch.") for t in graph.tensors if t.dtype.is_floating_point), "float32")
