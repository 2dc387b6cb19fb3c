"""The flow of a forward on one device, without a walk: all lives as long as it was recorded to, and little moves.

    parameters, inputs     on the device from the start
    what ops make          on the device
    constants, literals    on the host: numbers, which meet tensors of the device as they are, and what the model itself
                           brings to the device of another tensor (an empty cache, before the first token)

`Walk` says the same, op by op.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.capture.columns import Columns, columns_of
from autoshard.capture.graph import HOST, UNKNOWN, ModelGraph, Op
from autoshard.flow.data import HOST_NAME, Buffers, Copy, Flow
from autoshard.flow.objects import HOST_DEVICE
from autoshard.placement import Homes


def flow_alone(graph: ModelGraph, homes: Homes, tensor_device: dict[str, str], device: str) -> Flow | None:
    """Return what `Walk` finds on one device; None where it has to look: a backward, or more that may be copied."""
    if graph.backward_begin < len(graph.ops) or graph.saves:
        return None
    columns, own = columns_of(graph), dict.fromkeys(tensor.storage for tensor in graph.tensors)
    given = [value for value in graph.values if value.op < 0]
    given = [value for value in given if value.storage in own or graph.storages[value.storage].kind == "input"]
    runs_there = np.array([op.device_source != HOST for op in graph.ops], bool)
    there = runs_there[columns.outputs.op]
    outputs, makers = columns.outputs.value[there], columns.outputs.op[there]
    host = np.ones(len(graph.values), bool)
    host[outputs] = host[[value.index for value in given]] = False
    brought = _brought(graph, columns, host, columns.storage[outputs].tolist())
    if brought is None:
        return None
    start = list(dict.fromkeys([*(value.storage for value in given), *own]))
    born = np.full(len(graph.storages), len(graph.ops))
    np.minimum.at(born, columns.storage[outputs], makers)
    born[start] = 0
    died = _deaths(graph, columns, born, brought)
    rows = list(dict.fromkeys([*start, *columns.storage[outputs].tolist()]))
    place = {storage: row for row, storage in enumerate(rows)}
    copies = tuple(_copy(graph, op, device, place[storage]) for storage, op in brought.items())
    carried = [(storage, time) for storage, time in graph.carried if born[storage] < len(graph.ops)]
    storage = np.array(rows + [storage for storage, _ in carried], np.int64)
    nbytes, copied = np.array([row.nbytes for row in graph.storages], np.int64)[storage], np.zeros(len(storage), bool)
    for copy in copies:
        nbytes[copy.buffer], copied[copy.buffer] = copy.nbytes, True
    buffers = Buffers(
        storage=storage, device=np.zeros(len(storage), np.int64), nbytes=nbytes,
        born=np.append(born[rows], [0.0] * len(carried)), died=np.append(died[rows], [float(t) for _, t in carried]),
        copied=copied,
    )  # fmt: skip
    return Flow(
        homes=homes, tensor_device=tensor_device, devices=(device,), copies=copies,
        op_device=tuple(np.where(runs_there, 0, HOST_DEVICE).tolist()),
        buffers=buffers, aligned=(), written_back=(), steps=len(graph.ops), uncounted=graph.uncounted,
    )  # fmt: skip


def _brought(graph: ModelGraph, columns: Columns, host: np.ndarray, made: Sequence[int]) -> dict[int, Op] | None:
    """Storages on the host that an op brings to the device, in the order of these ops; None if others may be copied.

    `host`: values that are there; `made`: storages of what ops make on the device.
    """
    readers: dict[int, list[Op]] = {}
    for index in np.flatnonzero(columns.inputs.has(host)).tolist():
        for value in graph.ops[index].inputs:
            if host[value]:
                readers.setdefault(graph.values[value].storage, []).append(graph.ops[index])
    brought: dict[int, Op] = {}
    for storage, ops in readers.items():
        if ops[0].device_source >= 0 and len(ops) == len(ops[0].inputs) == len(ops[0].outputs) == 1:
            brought[storage] = ops[0]
        elif not all(_takes_numbers(graph, op, host) for op in ops):
            return None
    literals = [value for op in graph.ops if op.device_source == HOST for value in op.outputs]
    left = {graph.values[value].storage for value in (*literals, *np.flatnonzero(host).tolist())} - brought.keys()
    aliases = all(graph.values[op.outputs[0]].storage == storage for storage, op in brought.items())
    told = [op.device_source for op in graph.ops if op.device_source >= 0]
    moved = any(op.device_source == HOST and op.inputs for op in graph.ops)
    calls = [call for call in graph.calls if call.path == ""]
    ends = [value for call in calls for value in (*call.inputs, *call.outputs)]
    contained = any(call.contained for call in calls)
    if not aliases or not left.isdisjoint(made) or moved or contained or host[told + ends].any():
        return None
    return brought


def _takes_numbers(graph: ModelGraph, op: Op, host: np.ndarray) -> bool:
    """Whether what an op reads on the host are numbers, beside tensors of the device it runs on."""
    there = [value for value in op.inputs if host[value]]
    numbers = not any(graph.values[value].shape for value in there)
    return numbers and len(there) < len(op.inputs) and op.device_source == UNKNOWN


def _deaths(graph: ModelGraph, columns: Columns, born: np.ndarray, brought: Mapping[int, Op]) -> np.ndarray:
    """[storages] when each is freed: as recorded; of what was brought, with the last tensor in it."""
    after, held = len(graph.ops) + 1, graph.held
    last = born.copy()
    np.maximum.at(last, columns.storage[columns.inputs.value], columns.inputs.op)
    died = np.array([row.died for row in graph.storages], np.int64)
    for storage in brought:
        died[storage] = 0
    stays = np.array([row.kind != "activation" for row in graph.storages], bool)
    stays[[graph.values[value].storage for value in held]] = True
    stays[list(brought)] = False
    for value in columns.outputs.value.tolist() if brought else ():
        row = graph.values[value]
        if row.storage in brought:
            died[row.storage] = max(died[row.storage], after if value in held else row.died)
    return np.minimum(np.where(stays, after, np.maximum(died, last + 1)), after).astype(np.float64)


def _copy(graph: ModelGraph, op: Op, device: str, buffer: int) -> Copy:
    """What the model's own `.to(device)` copies."""
    value = graph.values[op.inputs[0]]
    nbytes = value.nbytes if value.copy_bytes < 0 else value.copy_bytes
    path = graph.calls[op.call].path
    return Copy(
        value=value.index, source=HOST_NAME, destination=device, nbytes=nbytes, born=op.index, reason="model",
        producer="", consumer=path, buffer=buffer,
    )  # fmt: skip
