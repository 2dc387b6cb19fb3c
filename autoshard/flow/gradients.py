"""The backward pass of a walk: each op runs where its forward op ran, on gradients that follow it there.

    forward     h (device 0) ──copy──▶ h' (device 1) ── op 41
    backward    op of op 41 (device 1) makes the gradient of h' ──copy──▶ op of what made h (device 0)

So a gradient goes back over a boundary when it is read on the other side. Of a parameter that was read from another
device it goes there at once.
"""

from dataclasses import dataclass, field

from autoshard.capture.graph import ModelGraph, Op
from autoshard.flow.objects import HOST_DEVICE, Objects


@dataclass(slots=True)
class Walked:
    """What a walk over the ops has found so far.

    Attributes:
        caller: device of the code around the outermost call, where its outputs go; None if they stay.
        op_device: per op, the index of its device, -1 for the host.
        op_objects: per op, the objects it read; kept only where a backward pass will ask.
        saved: (op, value) -> the object that autograd saved for that op.
        left: object -> time by which it has gone to another device for good.
    """

    graph: ModelGraph
    objects: Objects
    caller: int | None = None
    op_device: list[int] = field(default_factory=list)
    op_objects: list[tuple[int, ...]] = field(default_factory=list)
    saved: dict[tuple[int, int], int] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.op_device = [HOST_DEVICE] * len(self.graph.ops)


class Gradients:
    """Backward ops of one walk."""

    def __init__(self, walk: Walked) -> None:
        self.walk, self.graph, self.objects = walk, walk.graph, walk.objects
        self.begin = walk.graph.backward_begin
        self._target: dict[int, int] = {}  # storage of a parameter's gradient that was copied -> the parameter's device

    def inputs_of(self, op: Op) -> tuple[tuple[int, ...], int]:
        """Return the objects a backward op reads, on its device, and the device."""
        objects, values = self.objects, self.graph.values
        device, read = self._device(op), []
        given = [self._object(value, op.forward, device) for value in op.inputs]
        places = {objects.device_of(obj) for obj in given}
        if len(places) == 1 and all(values[value].op < self.begin for value in op.inputs):
            device = places.pop()  # a function of the user's saved it there
        for value, obj in zip(op.inputs, given, strict=True):
            if objects.device_of(obj) != device and not objects.is_host_scalar(obj):
                path = self.graph.calls[op.call].path
                if values[value].op >= self.begin:
                    obj = self._move(value, device, op.index, path)
                else:
                    obj = objects.copy(obj, device, op.index, "backward", path)
            read.append(obj)
        return tuple(read), device

    def made(self, op: Op) -> None:
        """Copy to their parameters' devices the gradients that an op made of parameters which its forward op read
        through copies."""
        objects, values = self.objects, self.graph.values
        if op.forward < 0:
            return
        forward = self.graph.ops[op.forward]
        for value, obj in zip(forward.inputs, self.walk.op_objects[op.forward], strict=True):
            storage = values[value].storage
            if self.graph.storages[storage].kind == "parameter" and objects.buffer[obj] in objects.buffer_copied:
                for out in op.outputs:
                    if sorted(values[out].shape) == sorted(values[value].shape):  # it may be transposed
                        target = objects.buffer_device[objects.original_buffer[storage]]
                        self._target[values[out].storage] = target
                        self._move(out, target, op.index, "")

    def finish(self) -> None:
        """Keep what is in `.grad` after the last op; other than parameters' for longer."""
        objects, graph, end = self.objects, self.graph, len(self.graph.ops)
        alive_after = [(value, end) for value in graph.alive_after if graph.values[value].op >= self.begin]
        for value, time in [*((value, end - 1) for _, value in graph.gradients), *alive_after]:
            if objects.current[value] >= 0:
                objects.use(objects.current[value], time)

    def _move(self, value: int, device: int, time: int, path: str) -> int:
        """Move a gradient to another device, where it lives on; return it there."""
        objects, before = self.objects, self.objects.current[value]
        if objects.device_of(before) != device:
            moved = objects.current[value] = objects.copy(before, device, time, "backward", path)
            del objects.source[moved], objects.until[moved]
            self.walk.left[before] = time + 1
        return objects.current[value]

    def _device(self, op: Op) -> int:
        storages = [self.graph.values[value].storage for value in op.inputs]
        target = next((self._target[storage] for storage in storages if storage in self._target), None)
        if target is not None:
            return target
        if op.forward >= 0:
            return self.walk.op_device[op.forward]
        made = [value for value in op.inputs if self.graph.values[value].op >= self.begin]
        if made:
            return self.objects.device_of(self.objects.current[made[0]])
        target = self.walk.caller  # the gradient of the loss is where that is: where outputs go, if they go
        return self.walk.op_device[self.begin - 1] if target is None else target

    def _object(self, value: int, forward: int, device: int) -> int:
        """The object behind a value: a gradient, what autograd saved for the forward op, or what that op read."""
        objects = self.objects
        obj = objects.current[value]
        if self.graph.values[value].op < self.begin:
            obj = self.walk.saved.get((forward, value), -1)
            if obj < 0 and forward >= 0:
                read = zip(self.graph.ops[forward].inputs, self.walk.op_objects[forward], strict=True)
                obj = next((obj for given, obj in read if given == value), -1)
                if obj < 0 or objects.device_of(obj) != device:
                    obj = objects.elsewhere.get((value, device), obj)
            if obj < 0:
                obj = objects.current[value]
        return obj if obj >= 0 else objects.original(value, device, 0)
