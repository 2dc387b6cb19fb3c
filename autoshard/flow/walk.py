"""The abstract interpretation behind `Flow`: the recorded run once more, with tensor objects that have a device.

A recorded value is one tensor object of the original run. Under a placement it can have several: the original, and a
copy on each device that needs it. A module whose arguments were copied to its home sees the copies (its `view`), and
what its ops make of a copy, views included, belongs to the copy's buffer:

    value 7, made on device 0        object 7 (original, buffer A)
    layers.1 (device 1) is called    object 9 = copy of 7 to device 1 (buffer B); view of the call: {7: 9}
      op 31 reads value 7            reads object 9, so it runs on device 1
      op 32 views it                 object 10 in buffer B
    the call returns                 its view goes; buffer B lives on while object 7 does: the memo holds it
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autoshard.capture.graph import HOST, UNKNOWN, Call, ModelGraph, Op
from autoshard.flow.data import HOST_NAME, Buffers, Copy, CopyReason, Flow
from autoshard.placement import Homes, resolve_homes, tensor_devices

_VIEW_CHAIN = 8
"""How far a temporary view is followed back to the tensor that a function was given."""


def flow(graph: ModelGraph, placements: Mapping[str, str]) -> Flow:
    """Walk the recorded run under a placement and say where every op runs, what is copied and what is live when.

    Follows the runtime op for op. Raises `PlanError` if a parameter or buffer has no entry in `placements`.
    """
    names = [tensor.name for tensor in graph.tensors]
    homes = resolve_homes(placements, [module.path for module in graph.modules], names)
    return _Walk(graph, homes, tensor_devices(homes, graph.tied()), tuple(dict.fromkeys(placements.values()))).run()


class _Walk:
    """State of one walk. Objects and buffers are rows of parallel lists; devices are indices, -1 is the host."""

    def __init__(
        self, graph: ModelGraph, homes: Homes, tensor_device: dict[str, str], devices: tuple[str, ...]
    ) -> None:
        self.graph, self.homes, self.tensor_device = graph, homes, tensor_device
        self.devices = devices or (homes.homes[""],)
        index = {name: i for i, name in enumerate(self.devices)}
        self.home = {path: index[device] for path, device in homes.homes.items()}
        self.hooked = {path: self.home[path] for path in homes.hooked}
        self.end = len(graph.ops)
        self.grad = graph.backward_begin < self.end
        self.value_storage = [value.storage for value in graph.values]
        kept = (*graph.outputs, *graph.state, *graph.inputs)
        self.kept_values = set(kept)
        self.long_lived = {  # copies of these are made once and stay
            s.index for s in graph.storages if s.kind in ("parameter", "buffer", "constant") and s.died >= self.end
        }

        self.object_value: list[int] = []
        self.object_buffer: list[int] = []
        self.object_source: list[int] = []  # the object it is a copy of, else -1
        self.object_base: list[int] = []  # the object it is a view of, else -1
        self.object_saved: list[int] = []  # time at which autograd lets go of this very object, 0 if it never had it
        self.object_dropped: list[int] = []  # time at which a memo entry made for one forward is dropped
        self.object_used: list[int] = []  # last op that read it
        self.buffer_storage: list[int] = []
        self.buffer_device: list[int] = []
        self.buffer_bytes: list[int] = []
        self.buffer_born: list[int] = []
        self.buffer_version: list[int] = []
        self.buffer_copied: list[bool] = []
        self.original_buffer = [-1] * len(graph.storages)
        self.current = [-1] * len(graph.values)  # the original object of each value
        self.elsewhere: dict[tuple[int, int], int] = {}  # (value, device) -> object, for values with copies
        self.memo: dict[tuple[int, int], tuple[int, int]] = {}  # (object, device) -> copy, version it was made of
        self.per_forward: list[tuple[int, int]] = []  # memo keys dropped when the root returns
        self.op_device = [-1] * self.end
        self.op_objects: dict[int, tuple[int, ...]] = {}
        self.copies: list[Copy] = []
        self.aligned: dict[str, None] = {}
        self.written_back: dict[str, None] = {}
        self.stack: list[int] = []
        self.views: list[tuple[int, dict[int, int]]] = [(0, {})]  # (depth of the call, value -> object it sees)
        self.gradient_left: dict[int, int] = {}  # gradient -> time by which its copies to other devices are made
        self.doubtful: set[int] = set()  # values that came back from a call as a copy: either object may be meant
        self.next_call = 0
        self.root_device = self.hooked[""]

    def run(self) -> Flow:
        self.place_givens()
        saves: dict[int, list[tuple[int, int]]] = {}
        for save in self.graph.saves:
            saves.setdefault(save.op, []).append((save.value, save.released))
        gradients = _Gradients(self) if self.grad else None
        for op in self.graph.ops:
            self.advance(op.index)
            if gradients is not None and op.backward and not self.recomputes(op):
                objects, device = gradients.inputs_of(op)
            else:
                objects, device = self.inputs_of(op)
            self.op_device[op.index] = device
            self.make_outputs(op, objects, device)
            for obj in objects:
                self.object_used[obj] = op.index
            if op.mutates:
                self.mark_written(op, objects)
            for value, released in saves.get(op.index, ()):
                self.keep_saved(op, objects, value, released)
            if self.grad:
                self.op_objects[op.index] = objects
        self.advance(self.end)
        while self.stack:
            self.leave(self.end)
        if gradients is not None:
            gradients.bring_home()
        return self.result()

    # ---- the start, calls and what they see

    def place_givens(self) -> None:
        """Give parameters, buffers, inputs and constants their device."""
        index = {name: i for i, name in enumerate(self.devices)}
        storage_device: dict[int, int] = {}
        for tensor in self.graph.tensors:
            storage_device.setdefault(tensor.storage, index[self.tensor_device[tensor.name]])
        for value in self.graph.values:
            kind = self.graph.storages[value.storage].kind
            if value.op >= 0 or kind == "activation":
                continue
            if kind == "input":
                device = self.root_device
            else:
                device = storage_device.get(value.storage, -1)
            self.original(value.index, device, 0)
        for storage, device in storage_device.items():  # tensors that no op ever read still take their bytes
            if self.original_buffer[storage] < 0:
                self.original_buffer[storage] = self.new_buffer(storage, device, self.graph.storages[storage].nbytes, 0)
        calls = self.graph.calls
        if calls:
            for inside in calls[0].contained:  # the root's hook does not look into lists and dicts
                if self.graph.storages[self.value_storage[inside]].kind == "input":
                    self.original_buffer[self.value_storage[inside]] = -1
                    self.original(inside, -1, 0)

    def advance(self, time: int) -> None:
        """Enter and leave calls so that the stack is what it was while op `time` ran."""
        calls = self.graph.calls
        while self.next_call < len(calls) and calls[self.next_call].begin <= time:
            call = calls[self.next_call]
            while self.stack and self.stack[-1] != call.parent:
                self.leave(call.begin)
            self.enter(call)
            self.next_call += 1
        while self.stack and calls[self.stack[-1]].end <= time:
            self.leave(time)

    def enter(self, call: Call) -> None:
        self.stack.append(call.index)
        home = self.hooked.get(call.path)
        if home is None:
            return
        view: dict[int, int] = {}
        for value in call.inputs:
            if value in call.contained:
                continue
            obj = self.sees(value)
            if self.device_of(obj) != home:
                view[value] = self.copy(obj, home, call.begin, "hook", call.path)
        if view:
            self.views.append((len(self.stack), view))

    def leave(self, time: int) -> None:
        """Return from the innermost call: copies it was given and returns are what its caller has now."""
        call = self.graph.calls[self.stack[-1]]
        depth = len(self.stack)
        self.stack.pop()
        view = self.views.pop()[1] if self.views[-1][0] == depth else {}
        returned = {value: view[value] for value in call.outputs if value in view}
        if returned:
            self.doubtful.update(returned)
            self.see(depth - 1, returned)
        if call.path == "" and call.parent < 0:
            self.leave_root(call, time)

    def leave_root(self, call: Call, time: int) -> None:
        """Drop the copies made for one forward; bring the outputs to the device of the root's inputs."""
        for key in self.per_forward:
            copy = self.memo.pop(key, None)
            if copy is not None:
                self.object_dropped[copy[0]] = time
        self.per_forward.clear()
        home = {}
        for value in dict.fromkeys(call.outputs):
            obj = self.sees(value)
            if self.device_of(obj) != self.root_device:
                home[value] = self.copy(obj, self.root_device, time, "output", "")
        self.see(0, home)

    def see(self, depth: int, objects: dict[int, int]) -> None:
        if not objects:
            return
        if self.views[-1][0] == depth:
            self.views[-1][1].update(objects)
        else:
            self.views.append((depth, objects))

    def sees(self, value: int) -> int:
        """The object that the running call means by a value."""
        if len(self.views) > 1 or self.views[0][1]:
            for _, view in reversed(self.views):
                if value in view:
                    return view[value]
        obj = self.current[value]
        return obj if obj >= 0 else self.original(value, -1, 0)

    # ---- ops

    def recomputes(self, op: Op) -> bool:
        """Whether an op of the backward pass belongs to a forward that is run again (checkpointing)."""
        call = self.graph.calls[op.call]
        return call.backward and call.begin <= op.index < call.end and op.forward < 0

    def inputs_of(self, op: Op) -> tuple[tuple[int, ...], int]:
        """Objects a forward op reads, brought together if they are on several devices, and the device it runs on."""
        objects = tuple([self.sees(value) for value in op.inputs])
        if not objects:
            return objects, self.named_device(op)
        if op.device_source != UNKNOWN:
            return self.moved_by_model(op, objects[0]), self.named_device(op)
        first = self.device_of(objects[0])
        mixed = any(self.device_of(obj) != first for obj in objects)
        if self.doubtful and any(value in self.doubtful for value in op.inputs):
            self.aligned[self.graph.calls[op.call].path] = None
        if not mixed:
            return objects, first
        counted = [obj for obj in objects if not self.is_host_scalar(obj)]
        first = self.device_of(counted[0])
        if all(self.device_of(obj) == first for obj in counted):
            return objects, first
        path = self.graph.calls[op.call].path
        self.aligned[path] = None
        target = self.meeting_place(op, objects, path)
        moved = tuple([obj if self.is_host_scalar(obj) else self.align(obj, target, op, path) for obj in objects])
        return moved, target

    def moved_by_model(self, op: Op, obj: int) -> tuple[int, ...]:
        """The model's own `.to(device)`: a copy if the tensor is elsewhere, the tensor itself if not; no memo."""
        device = self.named_device(op)
        if self.device_of(obj) == device:
            return (obj,)
        copy = self.copy(obj, device, op.index, "model", self.graph.calls[op.call].path)
        self.memo.pop((obj, device), None)
        return (copy,)

    def named_device(self, op: Op) -> int:
        """The device an op was told to use: that of a tensor, the host, or else the home of its module."""
        if op.device_source >= 0:
            return self.device_of(self.sees(op.device_source))
        if op.device_source == HOST:
            return -1
        return self.devices.index(self.homes.home_of(self.graph.calls[op.call].path))

    def meeting_place(self, op: Op, objects: tuple[int, ...], path: str) -> int:
        if op.mutates:
            written = [obj for obj, value in zip(objects, op.inputs, strict=True) if value == op.mutates[0]]
            if written:
                return self.device_of(written[0])
        if path in self.home and path not in self.homes.mixed:
            return self.home[path]
        return next((self.device_of(obj) for obj in objects if self.device_of(obj) >= 0), -1)

    def align(self, obj: int, target: int, op: Op, path: str) -> int:
        """Bring one input to the target.

        A view that lives for this op only is a step inside a torch function, which was given the tensor it is a view
        of: that one is copied.
        """
        if self.device_of(obj) == target:
            return obj
        given = obj
        values = self.graph.values
        for _ in range(_VIEW_CHAIN):
            value = values[self.object_value[given]]
            if self.object_base[given] < 0 or value.op < 0 or value.died > op.index + 1:
                break
            if self.graph.ops[value.op].call != op.call:
                break
            given = self.object_base[given]
        copy = self.copy(given, target, op.index, "align", path)
        if given == obj:
            return copy
        return self.new_object(self.object_value[obj], self.object_buffer[copy], base=copy)

    def make_outputs(self, op: Op, objects: tuple[int, ...], device: int) -> None:
        storage_of = self.value_storage
        for value in op.outputs:
            if self.current[value] >= 0:
                continue  # an in-place op returns its argument
            storage = storage_of[value]
            base = -1
            for obj, given in zip(objects, op.inputs, strict=True):
                if storage_of[given] == storage:
                    base = obj
                    break
            if base >= 0:
                self.current[value] = self.new_object(value, self.object_buffer[base], base=base)
            else:
                self.original(value, device, op.index)

    def mark_written(self, op: Op, objects: tuple[int, ...]) -> None:
        """A written tensor is a new version: copies of it are stale. If it is a copy itself, its source is."""
        for obj, value in zip(objects, op.inputs, strict=True):
            if value not in op.mutates:
                continue
            buffer = self.object_buffer[obj]
            self.buffer_version[buffer] += 1
            if self.buffer_copied[buffer] and not op.backward and self.read_later(value, op.index):
                for depth, view in reversed(self.views):
                    if depth and any(self.object_buffer[seen] == buffer for seen in view.values()):
                        self.written_back[self.graph.calls[self.stack[depth - 1]].path] = None
                        break

    def read_later(self, value: int, time: int) -> bool:
        storage = self.value_storage[value]
        if storage in self.long_lived or self.graph.storages[storage].kind == "input":
            return True
        if any(self.value_storage[kept] == storage for kept in self.kept_values):
            return True
        ops = self.graph.ops
        return any(any(self.value_storage[v] == storage for v in op.inputs) for op in ops[time + 1 :])

    def keep_saved(self, op: Op, objects: tuple[int, ...], value: int, released: int) -> None:
        obj = next((o for o, given in zip(objects, op.inputs, strict=True) if given == value), -1)
        if obj < 0:
            obj = self.sees(value)
        self.object_saved[obj] = max(self.object_saved[obj], released)

    # ---- objects, buffers, copies

    def device_of(self, obj: int) -> int:
        return self.buffer_device[self.object_buffer[obj]]

    def is_host_scalar(self, obj: int) -> bool:
        return self.device_of(obj) < 0 and not self.graph.values[self.object_value[obj]].shape

    def original(self, value: int, device: int, born: int) -> int:
        storage = self.value_storage[value]
        buffer = self.original_buffer[storage]
        if buffer < 0:
            buffer = self.new_buffer(storage, device, self.graph.storages[storage].nbytes, born)
            self.original_buffer[storage] = buffer
        self.current[value] = self.new_object(value, buffer)
        return self.current[value]

    def new_buffer(self, storage: int, device: int, nbytes: int, born: int, copied: bool = False) -> int:
        self.buffer_storage.append(storage)
        self.buffer_device.append(device)
        self.buffer_bytes.append(nbytes)
        self.buffer_born.append(born)
        self.buffer_version.append(0)
        self.buffer_copied.append(copied)
        return len(self.buffer_storage) - 1

    def new_object(self, value: int, buffer: int, source: int = -1, base: int = -1) -> int:
        self.object_value.append(value)
        self.object_buffer.append(buffer)
        self.object_source.append(source)
        self.object_base.append(base)
        self.object_saved.append(0)
        self.object_dropped.append(-1)
        self.object_used.append(-1)
        return len(self.object_value) - 1

    def copy(self, obj: int, device: int, time: int, reason: CopyReason, consumer: str) -> int:
        """The copy of an object on a device, from the memo if its source has not been written since."""
        key, version = (obj, device), self.buffer_version[self.object_buffer[obj]]
        known = self.memo.get(key)
        if known is not None and known[1] == version:
            return known[0]
        value = self.graph.values[self.object_value[obj]]
        source_buffer = self.object_buffer[obj]
        nbytes = min(value.nbytes, self.buffer_bytes[source_buffer])
        per_forward = self.grad and value.requires_grad
        kept = self.buffer_storage[source_buffer] in self.long_lived and not per_forward and reason != "output"
        kept = kept and value.op < 0
        buffer = self.new_buffer(value.storage, device, nbytes, 0 if kept else time, copied=True)
        copy = self.new_object(value.index, buffer, source=obj)
        self.memo[key] = (copy, version)
        self.elsewhere[value.index, device] = copy
        if per_forward:
            self.per_forward.append(key)
        row = Copy(
            value=value.index,
            source=self.device_name(self.device_of(obj)),
            destination=self.device_name(device),
            nbytes=nbytes,
            born=time,
            reason=reason,
            producer=self.producer_of(value.index),
            consumer=consumer,
            buffer=buffer if device >= 0 else -1,
            kept=kept,
        )
        self.copies.append(row)
        return copy

    def device_name(self, device: int) -> str:
        return self.devices[device] if device >= 0 else HOST_NAME

    def producer_of(self, value: int) -> str:
        row = self.graph.values[value]
        if row.op >= 0:
            return self.graph.calls[self.graph.ops[row.op].call].path
        name = self.graph.storages[row.storage].name
        return name.rpartition(".")[0] if name else ""

    # ---- the end

    def result(self) -> Flow:
        died = self.deaths()
        keep = [row for row, device in enumerate(self.buffer_device) if device >= 0]
        number = {row: i for i, row in enumerate(keep)}

        def column(rows: list[int]) -> np.ndarray:
            return np.array([rows[row] for row in keep], np.int64)

        buffers = Buffers(
            storage=column(self.buffer_storage),
            device=column(self.buffer_device),
            nbytes=column(self.buffer_bytes),
            born=column(self.buffer_born),
            died=column(died),
            copied=np.array([self.buffer_copied[row] for row in keep], bool),
        )
        copies = tuple(replace(copy, buffer=number.get(copy.buffer, -1)) for copy in self.copies)
        return Flow(
            homes=self.homes,
            tensor_device=self.tensor_device,
            devices=self.devices,
            op_device=tuple(self.op_device),
            copies=copies,
            buffers=buffers,
            aligned=tuple(path for path in self.module_order() if path in self.aligned),
            written_back=tuple(path for path in self.module_order() if path in self.written_back),
            steps=self.end,
        )

    def module_order(self) -> list[str]:
        return list(dict.fromkeys([module.path for module in self.graph.modules] + [*self.aligned, *self.written_back]))

    def deaths(self) -> list[int]:
        """When each buffer is freed: with its last object, or when autograd lets go of the last one saved."""
        after = self.end + 1
        values, storages = self.graph.values, self.graph.storages
        copied_storages = {self.buffer_storage[row] for row, copied in enumerate(self.buffer_copied) if copied}
        object_died = [0] * len(self.object_value)
        for obj, index in enumerate(self.object_value):  # a copy comes after its source, so one pass is enough
            value, source = values[index], self.object_source[obj]
            if source >= 0:
                died = max(object_died[source], self.object_saved[source])
                if self.object_dropped[obj] >= 0:
                    died = min(died, self.object_dropped[obj])
            elif index in self.kept_values:
                died = after
            else:
                died = self.gradient_left.get(obj, value.died)
            object_died[obj] = max(died, self.object_used[obj] + 1)
        buffer_died = list(self.buffer_born)
        for obj, buffer in enumerate(self.object_buffer):
            last = max(object_died[obj], self.object_saved[obj])
            if last > buffer_died[buffer]:
                buffer_died[buffer] = last
        kept_copies = {copy.buffer for copy in self.copies if copy.kept}
        kept_storages = {self.value_storage[value] for value in self.kept_values}
        for buffer, index in enumerate(self.buffer_storage):
            storage = storages[index]
            copied = self.buffer_copied[buffer]
            stays = storage.kind in ("parameter", "buffer", "input") or index in kept_storages
            if (stays and not copied) or buffer in kept_copies:
                buffer_died[buffer] = after
            elif not copied and index not in copied_storages:
                buffer_died[buffer] = storage.died  # nothing left its device: the recorded death is exact
        return [min(died, after) for died in buffer_died]


class _Gradients:
    """Backward: a gradient op runs where its forward op ran; gradients that are elsewhere follow the copies back."""

    def __init__(self, walk: _Walk) -> None:
        self.walk = walk
        self.begin = walk.graph.backward_begin
        self.last_device = walk.root_device
        # The op that first reads each value made in backward: where sums of gradients from two devices are wanted.
        self.reader: dict[int, Op] = {}
        for op in walk.graph.ops[self.begin :]:
            for value in op.inputs:
                self.reader.setdefault(value, op)
        self.reached = self._reached()

    def _reached(self) -> list[int]:
        """For every backward op, the earliest forward op that the pass has come down to."""
        lowest, reached = self.walk.end, []
        for op in self.walk.graph.ops[self.begin :]:
            if 0 <= op.forward < lowest:
                lowest = op.forward
            reached.append(lowest)
        return reached

    def inputs_of(self, op: Op) -> tuple[tuple[int, ...], int]:
        walk = self.walk
        device = self.device_of(op)
        self.last_device = device if device >= 0 else self.last_device
        forward = self.forward_objects(op)
        objects = []
        for value in op.inputs:
            obj = forward.get(value, -1)
            if obj < 0:
                obj = walk.elsewhere.get((value, device), -1)
            if obj < 0:
                obj = walk.current[value] if walk.current[value] >= 0 else walk.original(value, device, 0)
            if walk.device_of(obj) != device and not walk.is_host_scalar(obj):
                obj = self.bring(obj, value, device, op)
            objects.append(obj)
        return tuple(objects), device

    def forward_objects(self, op: Op) -> dict[int, int]:
        if op.forward < 0:
            return {}
        forward = self.walk.graph.ops[op.forward]
        return dict(zip(forward.inputs, self.walk.op_objects.get(op.forward, ()), strict=False))

    def device_of(self, op: Op) -> int:
        walk = self.walk
        if op.forward >= 0:
            return walk.op_device[op.forward]
        made = [walk.current[v] for v in op.inputs if walk.current[v] >= 0]
        devices = {walk.device_of(obj) for obj in made if not walk.is_host_scalar(obj)}
        if len(devices) == 1:
            return devices.pop()
        if not devices:
            return self.last_device
        if op.mutates and walk.current[op.mutates[0]] >= 0:  # a gradient that is added to what .grad holds
            return walk.device_of(walk.current[op.mutates[0]])
        for _ in range(_VIEW_CHAIN):  # a sum of gradients is wanted where it is read
            reader = next((self.reader[v] for v in op.outputs if v in self.reader), None)
            if reader is None:
                break
            if reader.forward >= 0:
                return walk.op_device[reader.forward]
            op = reader
        return walk.device_of(made[0])

    def bring(self, obj: int, value: int, device: int, op: Op) -> int:
        """Copy a gradient to the device of the op that needs it. The copy is made when the pass comes back to where the
        forward copy was made, and the original goes then."""
        walk = self.walk
        known = walk.memo.get((obj, device))
        if known is not None:
            return known[0]
        time = op.index
        if op.forward >= 0 and walk.graph.values[value].op >= self.begin:
            crossed = [
                walk.buffer_born[walk.object_buffer[walk.elsewhere[out, walk.device_of(obj)]]]
                for out in walk.graph.ops[op.forward].outputs
                if (out, walk.device_of(obj)) in walk.elsewhere
            ]
            if crossed:
                time = self.passed(min(crossed), walk.graph.values[value].op + 1, op.index)
        if walk.graph.values[value].op >= self.begin:
            walk.gradient_left[obj] = max(walk.gradient_left.get(obj, 0), time + 1)
        return walk.copy(obj, device, time, "backward", walk.graph.calls[op.call].path)

    def passed(self, forward_time: int, earliest: int, latest: int) -> int:
        """First backward op, from `earliest` to `latest`, that comes after the pass went below `forward_time`."""
        for time in range(max(earliest, self.begin), latest):
            if self.reached[time - self.begin] < forward_time:
                return time
        return latest

    def bring_home(self) -> None:
        """Move gradients of parameters that were read elsewhere to the parameter's device, as soon as they are made."""
        walk = self.walk
        graph = walk.graph
        wanted: dict[tuple[int, ...], list[int]] = {}
        for (index, _), obj in walk.elsewhere.items():
            row = graph.values[index]
            if row.op < 0 and row.requires_grad and walk.object_source[obj] >= 0:
                wanted.setdefault(row.shape, []).append(index)
        if not wanted:
            return
        for row in graph.values:
            if row.op < self.begin or row.died < walk.end or row.shape not in wanted:
                continue
            obj = walk.current[row.index]
            op = graph.ops[row.op]
            if obj < 0 or op.forward < 0:
                continue
            read = set(graph.ops[op.forward].inputs)
            for parameter in wanted[row.shape]:
                home = walk.device_of(walk.current[parameter])
                if parameter in read and walk.device_of(obj) != home:
                    walk.copy(obj, home, row.op, "backward", walk.producer_of(parameter))
                    walk.gradient_left[obj] = row.op + 1
                    break
