"""Tensor objects that have a device, the memory they are in, and the copies made of them.

A recorded value is one tensor object of the original run. Under a placement it can have several: the original, and a
copy on each device that needs it:

    value 7, made on device 0      object 7 in buffer A        lives as the recorded tensor did
    copy of it on device 1         object 9 in buffer B        lives as long as object 7: the memo of copies holds it
    op 32 views the copy           object 10 in buffer B
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.flow.data import HOST_NAME, INPUTS, OUTPUTS, Buffers, Copy, CopyReason

HOST_DEVICE = -1


class Objects:
    """Objects and buffers as rows of parallel lists; devices are indices into `devices`, -1 is the host.

    Attributes:
        value, buffer: of each object.
        source: copy -> the object it is a copy of. base: view -> the object that it keeps alive.
        saved: object -> time at which autograd lets go of the memory; held: of this very object. A node keeps its
            inputs as they are, but of outputs with history the memory alone (torch's saved_variable.cpp).
        used: object -> the last op that read it.
        until: copy -> time at which whoever made it drops it, whatever becomes of its source.
        buffer_version: buffer -> how often it was written.
        current: per value, its original object, -1 if there is none yet.
        elsewhere: (value, device) -> the latest copy there.
        in_forward: a forward of the root is running, so copies are remembered.
    """

    def __init__(self, graph: ModelGraph, devices: tuple[str, ...]) -> None:
        self.graph, self.devices = graph, devices
        self.grad = graph.backward_begin < len(graph.ops)
        self.value: list[int] = []
        self.buffer: list[int] = []
        self.source: dict[int, int] = {}
        self.base: dict[int, int] = {}
        self.saved: dict[int, int] = {}
        self.alive_until: dict[int, int] = {}
        self.used: dict[int, float] = {}
        self.until: dict[int, float] = {}
        self.buffer_storage: list[int] = []
        self.buffer_device: list[int] = []
        self.buffer_bytes: list[int] = []
        self.buffer_born: list[float] = []
        self.buffer_version: Counter[int] = Counter()
        self.buffer_copied: set[int] = set()
        self.original_buffer = [-1] * len(graph.storages)
        self.current = [-1] * len(graph.values)
        self.elsewhere: dict[tuple[int, int], int] = {}
        self.copies: list[Copy] = []
        self.in_forward = False
        # (object, device, has history) -> copy, version it was made of
        self._memo: dict[tuple[int, int, bool], tuple[int, int]] = {}
        self._returned: list[int] = []  # copies that the last forward returned of what it had been given
        self._differentiable: list[tuple[int, int, bool]] = []  # memo keys that go when the root returns

    def device_of(self, obj: int) -> int:
        return self.buffer_device[self.buffer[obj]]

    def is_host_scalar(self, obj: int) -> bool:
        """Whether torch takes the object with tensors of any device: a number in a plain CPU tensor."""
        return self.device_of(obj) == HOST_DEVICE and not self.graph.values[self.value[obj]].shape

    def new_buffer(self, storage: int, device: int, nbytes: int, born: float, copied: bool = False) -> int:
        self.buffer_storage.append(storage)
        self.buffer_device.append(device)
        self.buffer_bytes.append(nbytes)
        self.buffer_born.append(born)
        buffer = len(self.buffer_born) - 1
        if copied:
            self.buffer_copied.add(buffer)
        return buffer

    def new_object(self, value: int, buffer: int, source: int = -1, view_of: int = -1) -> int:
        self.value.append(value)
        self.buffer.append(buffer)
        obj = len(self.value) - 1
        if source >= 0:
            self.source[obj] = source
        if view_of >= 0:
            self.base[obj] = self.base.get(view_of, view_of)
        return obj

    def use(self, obj: int, time: float) -> None:
        """Note that an object is read."""
        self.used[obj] = max(self.used.get(obj, -1), time)

    def original(self, value: int, device: int, born: float) -> int:
        """Make the original object of a value, in the buffer of its storage if there is one already."""
        storage = self.graph.values[value].storage
        buffer = self.original_buffer[storage]
        if buffer < 0:
            buffer = self.new_buffer(storage, device, self.graph.storages[storage].nbytes, born)
            self.original_buffer[storage] = buffer
        obj = self.current[value] = self.new_object(value, buffer)
        return obj

    def _has_history(self, obj: int) -> bool:
        return self.grad and self.graph.values[self.value[obj]].requires_grad

    def copy(self, obj: int, device: int, time: float, reason: CopyReason, consumer: str) -> int:
        """Return the copy of an object on a device: remembered, unless its source was written since."""
        differentiable = self._has_history(obj)
        key, version = (obj, device, differentiable), self.buffer_version[self.buffer[obj]]
        known = self._memo.get(key)
        if known is not None and known[1] == version and reason != "output":
            return known[0]
        value = self.graph.values[self.value[obj]]
        storage = self.graph.storages[value.storage]
        remembered = reason in ("hook", "align")
        # A parameter's copy outlives the forward; it is there from the start, but for the very first time.
        kept = remembered and not differentiable and value.op < 0 and storage.kind == "parameter"
        remembered = remembered and (self.in_forward or kept)
        nbytes = self.graph.copied_bytes(value.index)
        buffer = self.new_buffer(value.storage, device, nbytes, 0 if kept else time, copied=True)
        copy = self.new_object(value.index, buffer, source=obj)
        self.elsewhere[value.index, device] = copy
        if remembered:
            self._memo[key] = (copy, version)
            if differentiable:
                self._differentiable.append(key)
        else:
            self.until[copy] = time
        if reason == "output":
            self.until[copy] = len(self.graph.ops) + 1
        self._note(value.index, self.device_of(obj), device, nbytes, time, reason, consumer, buffer, kept)
        return copy

    def note_transfer(self, obj: int, value: int, time: int, consumer: str) -> None:
        """Note that an op reads an object and makes `value` of it on another device, without a copy in between."""
        made = self.current[value]
        nbytes = self.graph.values[value].nbytes
        self._note(value, self.device_of(obj), self.device_of(made), nbytes, time, "model", consumer)

    def drop_with_outputs(self, copy: int) -> None:
        """Drop a copy that a forward returned at the next one: a generation keeps the outputs of a step no longer."""
        self._returned.append(copy)

    def forward_began(self, time: int) -> None:
        """Drop what is remembered of an earlier forward: only copies of parameters are trusted from one to the next."""
        alive_after = {copy.buffer for copy in self.copies if copy.kept}
        for copy in self._returned:
            self.until[copy] = time
        self._returned.clear()
        for key, (copy, _) in list(self._memo.items()):
            if self.buffer[copy] not in alive_after:
                self.until[copy] = time
                del self._memo[key]
        self.in_forward = True

    def forward_ended(self, time: int) -> None:
        """Drop copies with autograd history from the memo: the graph holds those it needs."""
        for key in self._differentiable:
            known = self._memo.pop(key, None)
            if known is not None:
                self.until[known[0]] = time
        self._differentiable.clear()
        self.in_forward = False

    def _note(
        self, value: int, source: int, destination: int, nbytes: int, time: float, reason: CopyReason, consumer: str,
        buffer: int = -1, kept: bool = False,
    ) -> None:  # fmt: skip
        row = Copy(
            value=value, source=self._name(source), destination=self._name(destination), nbytes=nbytes, born=time,
            reason=reason, producer=producer_of(self.graph, value),
            consumer=OUTPUTS if reason == "output" and not consumer else consumer, buffer=buffer, kept=kept,
        )  # fmt: skip
        self.copies.append(row)

    def _name(self, device: int) -> str:
        return self.devices[device] if device >= 0 else HOST_NAME


def producer_of(graph: ModelGraph, value: int) -> str:
    """Return the module whose op made a value, or that holds it; `INPUTS` for inputs."""
    row = graph.values[value]
    if row.op >= 0:
        return graph.calls[graph.ops[row.op].call].path
    return INPUTS if value in graph.inputs else (graph.storages[row.storage].name or "").rpartition(".")[0]


def buffer_deaths(objects: Objects, left: Mapping[int, int]) -> list[float]:
    """Return when each buffer is freed: with its last object, or when autograd lets go of the last one it saved.

    `left`: object -> time by which it has gone to another device for good.
    """
    graph, copies, to_the_end = objects.graph, objects.copies, objects.graph.alive_at_end
    after = len(graph.ops) + 1
    of_object, source, until = np.array(objects.buffer, int), objects.source, objects.until
    alive_until, used, saved = np.zeros(len(of_object)), np.full(len(of_object), -1.0), np.zeros(len(of_object))
    for column, known_of in ((alive_until, objects.alive_until), (used, objects.used), (saved, objects.saved)):
        column[list(known_of)] = list(known_of.values())
    of_value = np.array([value.died for value in graph.values], float)
    of_value[list(to_the_end)] = after
    last = of_value[objects.value]
    for obj, time in left.items():
        last[obj] = last[obj] if obj in source else time
    # `known`: until when Python or autograd holds the very object: so long copies are kept
    known, outputs = np.maximum(last, alive_until), {copy.buffer for copy in copies if copy.reason == "output"}
    for obj, made_of in source.items():  # a source comes before its copies
        kept_by = last[obj] if objects.buffer[obj] in outputs else known[made_of]
        last[obj] = min(kept_by, until.get(obj, np.inf))
        known[obj] = max(last[obj], alive_until[obj])

    last_read, storage = np.array(objects.buffer_born, float), np.array(objects.buffer_storage, int)
    died = last_read + 1
    np.maximum.at(died, of_object, np.maximum(np.maximum(last, used + 1), saved))
    np.maximum.at(last_read, of_object, used)
    rows, copied = graph.storages, np.isin(np.arange(len(storage)), list(objects.buffer_copied))
    fixed = np.array([row.kind in ("parameter", "buffer", "input") for row in rows], bool)[storage]
    stays = fixed | np.isin(storage, [graph.values[value].storage for value in to_the_end])
    recorded = np.where(stays, after, np.maximum(np.array([row.died for row in rows], float)[storage], last_read + 1))
    alone = ~np.isin(storage, storage[copied])  # nothing of it left its device: the recorded death is exact
    died = np.where(~copied & (alone | fixed), recorded, died)
    died[[copy.buffer for copy in copies if copy.kept]] = after
    return list(np.minimum(died, after).tolist())


def columns(objects: Objects, died: Sequence[float]) -> tuple[Buffers, tuple[Copy, ...]]:
    """Return the buffers on planned devices as columns, and the copies with their rows in them."""
    device = np.array(objects.buffer_device, np.int64)
    keep = np.flatnonzero(device >= 0)
    number = {row: i for i, row in enumerate(keep.tolist())}
    buffers = Buffers(
        storage=np.array(objects.buffer_storage, np.int64)[keep],
        device=device[keep],
        nbytes=np.array(objects.buffer_bytes, np.int64)[keep],
        born=np.array(objects.buffer_born, np.float64)[keep],
        died=np.array(died, np.float64)[keep],
        copied=np.isin(keep, list(objects.buffer_copied)),
    )
    return buffers, tuple(replace(copy, buffer=number.get(copy.buffer, -1)) for copy in objects.copies)
