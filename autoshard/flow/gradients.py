"""The backward pass of a walk: a gradient op runs where its forward op ran, gradients follow the copies back.

forward     h (device 0) ──copy, before op 40──▶ h' (device 1) ── op 41
backward    gradient of h (device 0) ◀──copy back── gradient of h' (device 1), once the pass is below op 40
"""

from typing import TYPE_CHECKING

from autoshard.capture.graph import Op

if TYPE_CHECKING:
    from autoshard.flow.walk import Walk

_CHAIN = 8
"""How many sums of gradients in a row are followed to the op that wants them."""


class Gradients:
    """Backward ops of one walk. `left`: gradient object -> time by which it has gone to another device."""

    def __init__(self, walk: "Walk") -> None:
        self.walk, self.graph, self.objects = walk, walk.graph, walk.objects
        self.begin = walk.graph.backward_begin
        self.left: dict[int, int] = {}
        self._last_device = walk.root_device
        self._reader: dict[int, Op] = {}  # the op that first reads each value
        self._lowest: list[int] = []  # per backward op, the earliest forward op that the pass has come down to
        lowest = walk.end
        for op in walk.graph.ops[self.begin :]:
            for value in op.inputs:
                self._reader.setdefault(value, op)
            if op.forward >= 0:
                lowest = min(lowest, op.forward)
            self._lowest.append(lowest)
        values = walk.graph.values
        index = walk.device_index
        self._wanted = {
            values[value].storage: index[walk.tensor_device[name]] for name, value in walk.graph.gradients
        }  # memory of a parameter's gradient -> device of the parameter

    def inputs_of(self, op: Op) -> tuple[tuple[int, ...], int]:
        """Return the objects a backward op reads, on its device, and the device."""
        objects = self.objects
        device = self._device_of(op)
        if device >= 0:
            self._last_device = device
        forward = self._forward_objects(op)
        read = []
        for value in op.inputs:
            obj = forward.get(value, -1)
            if obj < 0 or objects.device_of(obj) != device:
                obj = objects.elsewhere.get((value, device), obj)
            if obj < 0:
                obj = objects.current[value] if objects.current[value] >= 0 else objects.original(value, device, 0)
            if objects.device_of(obj) != device and not objects.is_host_scalar(obj):
                obj = self._bring(obj, value, device, op)
                if value in op.mutates:  # a sum in place: from now on this is the gradient
                    objects.current[value] = obj
            read.append(obj)
        return tuple(read), device

    def _forward_objects(self, op: Op) -> dict[int, int]:
        if op.forward < 0:
            return {}
        return dict(zip(self.graph.ops[op.forward].inputs, self.walk.op_objects[op.forward], strict=True))

    def _device_of(self, op: Op) -> int:
        """Where its forward op ran. A sum of gradients from several devices is made where it is read."""
        objects = self.objects
        made = [objects.current[v] for v in op.inputs if self.graph.values[v].op >= self.begin]
        devices = {objects.device_of(obj) for obj in made if not objects.is_host_scalar(obj)}
        if len(devices) > 1:
            return self._device_of_reader(op)
        if op.forward >= 0:
            return self.walk.op_device[op.forward]
        return devices.pop() if devices else self._last_device

    def _device_of_reader(self, op: Op) -> int:
        for _ in range(_CHAIN):
            for value in op.outputs:
                storage = self.graph.values[value].storage
                if storage in self._wanted:
                    return self._wanted[storage]
            reader = next(
                (self._reader[v] for v in op.outputs if v in self._reader and self._reader[v] is not op), None
            )
            if reader is None:
                break
            read = [v for v in reader.inputs if self.graph.values[v].op >= self.begin]
            if reader.forward >= 0 and len(read) < 2:
                return self.walk.op_device[reader.forward]
            op = reader
        return self.walk.op_device[op.forward] if op.forward >= 0 else self._last_device

    def _bring(self, obj: int, value: int, device: int, op: Op) -> int:
        """Copy to the device of the op that needs it.

        A gradient is copied when the pass comes back to where the forward copy was made, and the original goes then.
        """
        objects, graph = self.objects, self.graph
        time = op.index
        path = graph.calls[op.call].path
        if graph.values[value].op < self.begin:
            return objects.copy(obj, device, time, "backward", path)
        if op.forward >= 0:
            here = objects.device_of(obj)
            crossed = [
                objects.buffer_born[objects.buffer[objects.elsewhere[out, here]]]
                for out in graph.ops[op.forward].outputs
                if (out, here) in objects.elsewhere
            ]
            if crossed:
                time = self._passed(min(crossed), graph.values[value].op + 1, op.index)
        self.left[obj] = max(self.left.get(obj, 0), time + 1)
        return objects.copy(obj, device, time, "backward", path)

    def _passed(self, forward_time: int, earliest: int, latest: int) -> int:
        """First backward op, from `earliest` to `latest`, that comes after the pass went below `forward_time`."""
        for time in range(max(earliest, self.begin), latest):
            if self._lowest[time - self.begin] < forward_time:
                return time
        return latest

    def bring_home(self) -> None:
        """Move gradients of parameters that were read elsewhere to the parameter's device, as soon as they are made."""
        objects, walk = self.objects, self.walk
        for name, value in self.graph.gradients:
            home = walk.device_index[walk.tensor_device[name]]
            obj = objects.current[value]
            if obj >= 0 and objects.device_of(obj) != home:
                time = max(self.graph.values[value].op, objects.used[obj])
                self.left[obj] = time + 1
                objects.copy(obj, home, time, "backward", name.rpartition(".")[0])
