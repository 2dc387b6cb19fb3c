"""The abstract interpretation behind `Flow`: the recorded run once more, under a placement, by the runtime's rules.

A module whose arguments were copied to its execution device sees the copies; so do the modules inside it that are given
them:

    value 7, made on device 0         object 7
    layers.1 (device 1) is called     object 9 = copy of 7 on device 1; the call's view: {7: 9}
      op 31 reads value 7             reads object 9, so it runs on device 1
    the call returns                  its view goes
"""

from collections.abc import Mapping

import torch

from autoshard.capture.graph import HOST, UNKNOWN, Call, Function, ModelGraph, Op, Save
from autoshard.capture.latest import Latest
from autoshard.common.module_paths import above
from autoshard.common.schemas import name_of_op
from autoshard.flow.data import Flow
from autoshard.flow.gradients import Gradients, Walked
from autoshard.flow.objects import HOST_DEVICE, Objects, buffer_deaths, columns
from autoshard.flow.views import Views
from autoshard.plan.placement import ExecutionDevices, resolve_execution_devices, tensor_devices

_LOOK_UP = torch.ops.aten.embedding.default
_LATEST = Latest[Flow]()
"""A plan is looked at several times in a row: when it is checked, priced among others, and shown."""


def flow(graph: ModelGraph, placements: Mapping[str, str]) -> Flow:
    """Walk the recorded run under a placement and say where every op runs, what is copied and what is live when.

    Follows the runtime op for op. Raises `PlanError` if a parameter or buffer has no entry in `placements`.
    """
    return _LATEST.of(graph, tuple(placements.items()), lambda: FlowWalk(graph, placements).run())


class FlowWalk(Walked):
    """State of one walk over the ops.

    Attributes:
        mixed_device, written_back: as in `Flow`, ordered sets.
    """

    def __init__(self, graph: ModelGraph, placements: Mapping[str, str]) -> None:
        names, paths = [tensor.name for tensor in graph.tensors], [module.path for module in graph.modules]
        uncallable = [module.path for module in graph.modules if not module.callable]
        execution_devices = resolve_execution_devices(placements, paths, names, uncallable)
        devices = tuple(dict.fromkeys(placements.values())) or (execution_devices.devices[""],)
        super().__init__(graph, Objects(graph, devices))
        self.execution_devices = execution_devices
        self.tensor_device = tensor_devices(execution_devices, graph.tied())
        self.device_index = {name: i for i, name in enumerate(self.objects.devices)}
        hooked = [
            *execution_devices.hooked,
            *(_lookup_tables(graph, execution_devices) if "" in execution_devices.mixed else ()),
        ]
        self.hooked = {path: self.device_index[execution_devices.devices[path]] for path in hooked}
        self.root_device = self.hooked[""]
        self.end = len(graph.ops)
        self.mixed_device: dict[str, None] = {}
        self.written_back: dict[str, None] = {}
        self._stack: list[int] = []
        self._views = Views(self.objects)
        self.sees = self._views.sees
        self._doubtful: set[int] = set()  # values that came back from a call as a copy: either object may be meant
        self._calls = self._calls_that_matter()
        self._next_call = 0
        self._functions = iter(sorted(graph.functions, key=lambda function: function.begin))
        self._function: Function | None = next(self._functions, None)
        self._event = 0  # the next op before which a call or a function begins or ends

    def run(self) -> Flow:
        self._place_givens()
        graph, objects = self.graph, self.objects
        saves: dict[int, list[Save]] = {}
        for save in graph.saves:
            saves.setdefault(save.op, []).append(save)
        gradients = Gradients(self) if objects.grad else None
        for op in graph.ops:
            if op.index >= self._event:
                self._advance(op.index)
            if gradients is not None and op.backward and not self._recomputes(op):
                read, device = gradients.inputs_of(op)
            else:
                read, device = self._inputs_of(op)
            self.op_device[op.index] = device
            self._make_outputs(op, read, device)
            for obj in read:  # only autograd is known to use something later than now
                if gradients is None:
                    objects.used[obj] = op.index
                else:
                    objects.use(obj, op.index)
            if op.mutates:
                self._mark_written(op, read)
            if gradients is not None and op.backward:
                gradients.made(op)
            for save in saves.get(op.index, ()):
                self._keep_saved(op, read, save)
            if objects.grad:
                self.op_objects.append(read)
        self._advance(self.end)
        while self._stack:
            self._leave(self.end)
        if gradients is not None:
            gradients.finish()
        return self._result()

    # ---- the start

    def _place_givens(self) -> None:
        """Give parameters, buffers, inputs and constants their device."""
        graph, objects = self.graph, self.objects
        device_of: dict[int, int] = {}
        for tensor in graph.tensors:
            device_of.setdefault(tensor.storage, self.device_index[self.tensor_device[tensor.name]])
        # The root's hook does not look into lists and dicts: what is in them stays with the caller.
        contained = set(graph.calls[0].contained) if graph.calls else set()
        for value in graph.values:
            kind = "activation" if value.op >= 0 else graph.storages[value.storage].kind
            if kind == "activation":
                continue
            if kind == "input":
                device = HOST_DEVICE if value.index in contained else self.root_device
            else:
                device = device_of.get(value.storage, HOST_DEVICE)
            objects.original(value.index, device, 0)
        for storage, device in device_of.items():  # tensors that no op ever read still take their bytes
            if objects.original_buffer[storage] < 0:
                nbytes = graph.storages[storage].nbytes
                objects.original_buffer[storage] = objects.new_buffer(storage, device, nbytes, 0)

    # ---- calls, and which object a value means in them

    def _calls_that_matter(self) -> tuple[Call, ...]:
        """Calls in order: all where there are gradients, else those of hooked modules, which see copies, and around."""
        calls = self.graph.calls
        if self.objects.grad:
            return calls
        kept: set[int] = set()
        for call in reversed(calls):  # those inside begin later
            if call.index in kept or call.path in self.hooked:
                kept.update((call.index, call.parent))
        return tuple(call for call in calls if call.index in kept)

    def _advance(self, time: int) -> None:
        """Enter and leave calls and functions so that all is as it was while op `time` ran."""
        while self._function is not None and self._function.end <= time:
            self._views.function.clear()
            self._function = next(self._functions, None)
        calls, coming = self.graph.calls, self._calls
        while self._next_call < len(coming) and coming[self._next_call].begin <= time:
            call = coming[self._next_call]
            while self._stack and self._stack[-1] != call.parent:
                self._leave(call.begin)
            self._enter(call)
            self._next_call += 1
        while self._stack and calls[self._stack[-1]].end <= time:
            self._leave(time)
        events = [coming[index].begin for index in (self._next_call,) if index < len(coming)]
        events += [calls[index].end for index in self._stack[-1:]]
        if self._function is not None:
            begin, end = self._function.begin, self._function.end
            if begin == time:
                self._enter_function(self._function)
            events.append(begin if begin > time else end)
        self._event = min(events, default=self.end)

    def _enter(self, call: Call) -> None:
        self._stack.append(call.index)
        device = self.hooked.get(call.path)
        if device is None:
            return
        if call.parent < 0 and not call.backward:
            self.objects.forward_began(call.begin)
            self.caller = self._device_of_caller(call)
        view: dict[int, int] = {}
        for value in call.inputs:
            if value in call.contained:
                continue
            obj = self.sees(value)
            if self.objects.device_of(obj) != device:
                view[value] = self.objects.copy(obj, device, call.begin, "hook", call.path)
                self._hold(view[value], call.end)
        self._views.given(len(self._stack), view)

    def _hold(self, copy: int, time: int) -> None:
        """A copy that no memo holds lives as long as the call it was made for."""
        if copy in self.objects.until:
            self.objects.until[copy] = max(self.objects.until[copy], time)

    def _leave(self, time: int) -> None:
        """Return from the innermost call: copies it was given and returns are what its caller has now."""
        call = self.graph.calls[self._stack[-1]]
        depth = len(self._stack)
        self._stack.pop()
        view = self._views.left(depth)
        returned = {value: view[value] for value in call.outputs if value in view}
        if returned:
            self._doubtful.update(returned)
            self._views.given(depth - 1, returned)
        if call.path in self.hooked and call.parent < 0 and not call.backward:
            self._leave_outermost(call, time)

    def _device_of_caller(self, call: Call) -> int | None:
        """Where the outputs of an outermost call go: to the device of its first input that is no parameter."""
        storages, values = self.graph.storages, self.graph.values
        own = (value for value in call.inputs if storages[values[value].storage].kind != "parameter")
        first = next(own, call.inputs[0] if call.inputs else None)
        device = None if first is None else self.objects.device_of(self.sees(first))
        starts_there = device is None or (device == HOST_DEVICE and first not in call.contained)
        return self.root_device if call.path == "" and starts_there else device

    def _leave_outermost(self, call: Call, time: int) -> None:
        """Drop the copies made for one run; bring the outputs to where the caller's inputs were."""
        self.objects.forward_ended(time)
        if self.caller is None:
            return
        device: dict[int, int] = {}
        gone: dict[int, int] = {}  # buffer -> when the output in it died
        values = self.graph.values
        for value in dict.fromkeys(call.outputs):
            obj = self.sees(value)
            if self.objects.device_of(obj) != self.caller:
                copy = self.objects.copy(obj, self.caller, time, "output", call.path)
                if value in call.contained:  # the caller has it as it was given, and goes on with that
                    self.objects.drop_with_outputs(copy)
                    continue
                device[value] = copy
                self.left[obj] = time + 1  # the caller gets the copy only
                buffer = self.objects.buffer[obj]
                gone[buffer] = min(values[value].died, gone.get(buffer, values[value].died))
        for obj, buffer in enumerate(self.objects.buffer if gone else ()):
            if buffer in gone:
                value = self.objects.value[obj]
                if value not in call.outputs and values[value].died >= gone[buffer]:  # only views held it
                    self.left[obj] = time + 1
        self._views.given(0, device)

    # ---- ops

    def _recomputes(self, op: Op) -> bool:
        """Whether an op of the backward pass belongs to a forward that is run again (checkpointing)."""
        call = self.graph.calls[op.call]
        return op.forward < 0 and call.backward and call.begin <= op.index < call.end

    def _enter_function(self, function: Function) -> None:
        """A torch function that is several ops: devices that meet in its arguments meet before the first of them."""
        op = self.graph.ops[function.begin]
        ops = self.graph.ops[function.begin : function.end]
        given = tuple([self.sees(value) for value in function.inputs])
        if self._all_together(given):
            self._views.function = dict(zip(function.inputs, given, strict=True))
            return
        first = self.graph.values[function.inputs[0]].storage
        writes = any(self.graph.values[value].storage == first for step in ops for value in step.mutates)
        self._views.function = dict(zip(function.inputs, self._align(op, given, writes), strict=True))

    def _inputs_of(self, op: Op) -> tuple[tuple[int, ...], int]:
        """Objects a forward op reads, brought together if they are on several devices, and the device it runs on."""
        given = tuple(map(self.sees, op.inputs))
        if not given:
            return given, self._named_device(op)
        if op.device_source != UNKNOWN:
            return self._moved_by_model(op, given)
        if self._doubtful and any(value in self._doubtful for value in op.inputs):
            self.mixed_device[self.graph.calls[op.call].path] = None
        device_of = self.objects.device_of
        devices = set(map(device_of, given))
        if len(devices) == 1 and HOST_DEVICE not in devices:
            return given, devices.pop()
        if not self._all_together(given):
            if _is_copy_into(op):  # the one op that takes two devices as they are
                return given, device_of(given[0])
            given = self._align(op, given, bool(op.mutates) and op.mutates[0] == op.inputs[0])
        placed = [obj for obj in given if not self.objects.is_host_scalar(obj)]
        return given, device_of(placed[0] if placed else given[0])

    def _all_together(self, given: tuple[int, ...]) -> bool:
        device_of = self.objects.device_of
        first = device_of(given[0])
        if all(device_of(obj) == first for obj in given):
            return True
        placed = [obj for obj in given if not self.objects.is_host_scalar(obj)]
        return all(device_of(obj) == device_of(placed[0]) for obj in placed)

    def _align(self, op: Op, given: tuple[int, ...], writes_first: bool) -> tuple[int, ...]:
        """Bring tensors to one device: that of the one written, else that of the module, else the last stage's."""
        objects = self.objects
        path = self.graph.calls[op.call].path
        self.mixed_device[path] = None
        if writes_first:
            target = objects.device_of(given[0])
        elif path in self.execution_devices.devices and path not in self.execution_devices.mixed:
            target = self.device_index[self.execution_devices.devices[path]]
        else:
            target = max(objects.device_of(obj) for obj in given)  # the last stage; the host only if there is no other
        return tuple(
            [
                obj if objects.device_of(obj) == target else objects.copy(obj, target, op.index, "align", path)
                for obj in given
            ]
        )

    def _moved_by_model(self, op: Op, given: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """The model's own `.to(device)`: an alias of a copy if the tensor is elsewhere, or a conversion on the way."""
        objects, device = self.objects, self._named_device(op)
        if objects.device_of(given[0]) == device:
            return given, device
        values = self.graph.values
        path = self.graph.calls[op.call].path
        if values[op.outputs[0]].storage == values[op.inputs[0]].storage:
            return (objects.copy(given[0], device, op.index, "model", path),), device
        objects.original(op.outputs[0], device, op.index)
        objects.note_transfer(given[0], op.outputs[0], op.index, path)
        return given, device

    def _named_device(self, op: Op) -> int:
        """The device an op was told to use: that of a tensor, the host, or else the execution device of its module."""
        if op.device_source >= 0:
            return self.objects.device_of(self.sees(op.device_source))
        if op.device_source == HOST:
            return HOST_DEVICE
        return self.device_index[self.execution_devices.device_of(self.graph.calls[op.call].path)]

    def _make_outputs(self, op: Op, read: tuple[int, ...], device: int) -> None:
        objects, values = self.objects, self.graph.values
        for value in op.outputs:
            if objects.current[value] >= 0:
                continue  # an in-place op returns its argument
            storage = values[value].storage
            shared = -1
            if op.backward or objects.original_buffer[storage] >= 0:  # else it is new, and no view of anything
                shared = next(
                    (obj for obj, given in zip(read, op.inputs, strict=True) if values[given].storage == storage), -1
                )
            if shared >= 0:
                objects.current[value] = objects.new_object(value, objects.buffer[shared], view_of=shared)
            else:
                objects.original(value, device, op.index)

    def _mark_written(self, op: Op, read: tuple[int, ...]) -> None:
        """A written tensor is a new version: copies of it are stale. If it is a copy itself, its source is."""
        objects = self.objects
        for obj, value in zip(read, op.inputs, strict=True):
            if value not in op.mutates:
                continue
            buffer = objects.buffer[obj]
            objects.buffer_version[buffer] += 1
            if buffer in objects.buffer_copied and not op.backward and self._read_later(value, op.index):
                depth = self._views.depth_of(buffer)
                if depth:
                    self.written_back[self.graph.calls[self._stack[depth - 1]].path] = None

    def _read_later(self, value: int, time: int) -> bool:
        """Whether anybody may look at a value's memory after op `time`."""
        graph = self.graph
        storage = graph.values[value].storage
        if graph.storages[storage].kind != "activation":
            return True
        if any(graph.values[kept].storage == storage for kept in (*graph.outputs, *graph.state)):
            return True
        return any(graph.values[v].storage == storage for op in graph.ops[time + 1 :] for v in op.inputs)

    def _keep_saved(self, op: Op, read: tuple[int, ...], save: Save) -> None:
        objects = self.objects
        obj = next((obj for obj, given in zip(read, op.inputs, strict=True) if given == save.value), -1)
        if obj < 0:
            obj = self.sees(save.value)
        self.saved[op.index, save.value] = obj
        objects.saved[obj] = max(objects.saved.get(obj, 0), save.released)
        memory_alone = save.value in op.outputs and self.graph.values[save.value].requires_grad
        for owner in () if memory_alone else (obj, objects.base.get(obj, obj)):
            objects.saved[owner] = max(objects.saved.get(owner, 0), save.released)
            objects.alive_until[owner] = max(objects.alive_until.get(owner, 0), save.released)

    # ---- the end

    def _result(self) -> Flow:
        objects = self.objects
        died = buffer_deaths(objects, self.left)
        for storage in self.graph.kept:  # what the forward before left where this one leaves it
            objects.buffer_born[objects.original_buffer[storage]] = 0
        buffers, copies = columns(objects, died)
        order = [module.path for module in self.graph.modules]
        called = {call.path for call in self.graph.calls}
        called |= {path for inner in called for path in above(inner) if path}
        # A branch that this run did not take: nobody knows what meets in there.
        for path in self.execution_devices.mixed - called:
            self.mixed_device[path] = None
        return Flow(
            execution_devices=self.execution_devices,
            tensor_device=self.tensor_device,
            devices=objects.devices,
            op_device=tuple(self.op_device),
            copies=copies,
            buffers=buffers,
            mixed_device=tuple(path for path in order if path in self.mixed_device),
            written_back=tuple(path for path in order if path in self.written_back),
            steps=self.end,
            uncounted=self.graph.uncounted,
        )


def _is_copy_into(op: Op) -> bool:
    return name_of_op(op.target) == "aten::copy_"


def _lookup_tables(graph: ModelGraph, execution_devices: ExecutionDevices) -> list[str]:
    """Modules that look up rows of a tensor of their own, which are called from code around the model as well."""
    own = {(tensor.module, tensor.storage) for tensor in graph.tensors}
    looking = [op for op in graph.ops if op.target is _LOOK_UP and not op.backward]
    found = [(graph.calls[op.call].path, graph.values[op.inputs[0]].storage) for op in looking]
    return [
        path for path, storage in dict.fromkeys(found) if (path, storage) in own and path in execution_devices.devices
    ]
