"""The backward pass of a walk: a gradient op runs where its forward op ran, gradients follow the copies back.

    forward     h (device 0) ──copy, before op 40──▶ h' (device 1) ── op 41
    backward    gradient of h (device 0) ◀──copy back── gradient of h' (device 1), once the pass is below op 40

Some forward ops leave no op in the backward pass: the gradient of a sum is that of each of its terms. They have a
device all the same, and gradients pass through it:

    y = x + f(x) on device 0, f on device 1:   gradient of y (device 0) ──▶ copy on device 1 for f
                                               and stays on device 0 as a part of the gradient of x
"""

from typing import TYPE_CHECKING

from autoshard.capture.graph import Op

if TYPE_CHECKING:
    from autoshard.flow.walk import Walk

_HOME = -1
"""Way of the parts of a gradient that are where the forward value was made."""
_SEARCHED = 64
"""How many forward values are looked at to find the way of one gradient."""


Version = tuple[int, int]
"""A forward value as one op left it: (value, the op that made it or wrote it last, -1 for what was given)."""


class Gradients:
    """Backward ops of one walk."""

    def __init__(self, walk: "Walk") -> None:
        self.walk, self.graph, self.objects = walk, walk.graph, walk.objects
        self.begin = walk.graph.backward_begin
        self._last_device = walk.root_device
        self._one_device = len(walk.objects.devices) == 1
        self._sum_of: dict[int, Version] = {}  # value made by a sum of gradients -> what they are gradients of
        self._parts: dict[int, dict[int, int]] = {}  # value made by a sum -> way back -> what goes that way together
        self._moved: dict[tuple[int, Version, int], int] = {}  # (gradient object, version, device) -> object there
        self._read_as: dict[int, int] = {}  # gradient object, a part of a sum -> the object its forward op read
        self._lowest: list[int] = []  # per backward op, the earliest forward op that the pass has come down to
        self._home = {
            value: walk.device_index[walk.tensor_device[name]] for name, value in walk.graph.gradients
        }  # gradient of a parameter -> device of the parameter
        self._has_backward = [False] * walk.end
        self._writes: dict[int, list[int]] = {}  # value -> forward ops that write it in place
        lowest = walk.end
        for op in walk.graph.ops[self.begin :]:
            if op.forward >= 0:
                self._has_backward[op.forward] = True
                lowest = min(lowest, op.forward)
            self._lowest.append(lowest)
        for op in walk.graph.ops[: self.begin]:
            for value in op.mutates:
                self._writes.setdefault(value, []).append(op.index)

    def inputs_of(self, op: Op) -> tuple[tuple[int, ...], int]:
        """Return the objects a backward op reads, on its device, and the device."""
        objects, values = self.objects, self.graph.values
        made = [value for value in op.inputs if values[value].op >= self.begin]
        if len(made) == 2 and not self._one_device and _is_sum(op):
            shared = self._shared(*made)
            if shared is not None:
                return self._add(op, made[0], made[1], shared)
        goals, device = self._wanted_by(op, made)
        if device >= 0:
            self._last_device = device
        forward = self._forward_objects(op)
        read = []
        for value in op.inputs:
            if values[value].op >= self.begin:
                obj = self._come(value, goals, op)
                if value in op.mutates:
                    objects.current[value] = obj
            else:
                obj = forward.get(value, -1)
                if obj < 0 or objects.device_of(obj) != device:
                    obj = objects.elsewhere.get((value, device), obj)
                if obj < 0:
                    obj = objects.current[value] if objects.current[value] >= 0 else objects.original(value, device, 0)
            if objects.device_of(obj) != device and not objects.is_host_scalar(obj):
                obj = self._once(obj, (-1, -1), device, op.index, op)  # its way is not known
            read.append(obj)
        return tuple(read), device

    def _wanted_by(self, op: Op, made: list[int]) -> tuple[tuple[Version, ...], int]:
        """What an op reads gradients of, and the device it runs on."""
        if len(op.outputs) == 1 and op.outputs[0] in self._home:  # what `.grad` will hold
            return (), self._home[op.outputs[0]]
        if op.forward >= 0:
            outputs = self.graph.ops[op.forward].outputs
            return tuple((value, op.forward) for value in outputs), self.walk.op_device[op.forward]
        devices = {self.objects.device_of(self.objects.current[value]) for value in made}
        return (), devices.pop() if devices else self._last_device

    def _add(self, op: Op, left: int, right: int, shared: Version) -> tuple[tuple[int, ...], int]:
        """A sum of two gradients of one value: parts that go back from one copy are added before they do.

        recorded          ((a + b) + c)            a on device 0, b and c from one copy on device 1
        under the plan    a + copy of (b + c)
        """
        objects = self.objects
        (out,) = op.outputs
        reached = self._lowest[op.index - self.begin]
        ours, theirs = (self._parts_of(value, shared, op, reached) for value in (left, right))
        way = next((way for way in ours if way in theirs), None)
        if way is None:  # an alias is made just before the op that uses it: if that was the last part, it goes now
            ours, theirs = (self._parts_of(value, shared, op, reached - 1) for value in (left, right))
            way = next((way for way in ours if way in theirs), None)
        merged = {**ours, **theirs}
        read: tuple[int, ...] = ()
        device = self._device_of(shared)
        if way is not None:
            device = objects.device_of(ours[way])
            read = (ours[way], theirs[way])
            merged[way] = ours[way] if out == left else objects.original(out, device, op.index)
        self._sum_of[out] = shared
        self._parts[out] = merged
        objects.current[out] = merged.get(_HOME if way is None else way, next(iter(merged.values())))
        return read, device

    def _parts_of(self, value: int, shared: Version, op: Op, reached: int) -> dict[int, int]:
        """Way back -> the part of a gradient that has not gone it once the pass is back at op `reached`."""
        if self._sum_of.get(value) != shared or value not in self._parts:
            obj = self._come(value, (shared,), op, arrive=False)
            self._parts[value], self._sum_of[value] = {self._way_of(obj, value, shared): obj}, shared
        gone = [way for way in self._parts[value] if way != _HOME and reached < self.objects.way_back.get(way, 0)]
        return self._bring_together(value, gone, op)

    def _way_of(self, obj: int, value: int, version: Version) -> int:
        """The alias of a copy by which a gradient goes back."""
        device = self.objects.device_of(obj)
        if device == self._device_of(version):
            return _HOME
        read = self._read_as.get(obj, -1)
        if read < 0:
            read = self._object_read(self.graph.ops[self.graph.values[value].op].forward, version[0])
        return read if read >= 0 else self.objects.elsewhere.get((version[0], device), _HOME)

    def _bring_together(self, value: int, ways: list[int], op: Op) -> dict[int, int]:
        """Send the parts that go these ways to where the forward value was made, and add them up there."""
        objects, parts, shared = self.objects, dict(self._parts[value]), self._sum_of[value]
        home = self._device_of(shared)
        for way in ways:
            if way == _HOME:
                continue
            obj = self._to_maker(parts.pop(way), shared, op, way)
            if _HOME in parts:
                row = self.graph.values[value]
                time = max(row.op, objects.buffer_born[objects.buffer[obj]])
                objects.used[obj] = max(objects.used[obj], time)
                objects.used[parts[_HOME]] = max(objects.used[parts[_HOME]], time)
                obj = objects.new_object(value, objects.new_buffer(row.storage, home, row.nbytes, time, copied=True))
                self.walk.left[obj] = time + 1
            parts[_HOME] = obj
        self._parts[value] = parts
        return parts

    def _gather(self, value: int, op: Op) -> int:
        """The whole of a sum, where the forward value was made if it has parts in several places."""
        parts = self._parts[value]
        if len(parts) > 1:
            parts = self._bring_together(value, list(parts), op)
        obj = self.objects.current[value] = next(iter(parts.values()))
        return obj

    def _shared(self, left: int, right: int) -> Version | None:
        """The latest version that two gradients can both belong to; None for steps of one formula."""
        ops, values = self.graph.ops, self.graph.values
        if left not in self._sum_of and ops[values[left].op].forward == ops[values[right].op].forward:
            return None
        common = set(self._ways(left)) & set(self._ways(right))
        return max(common, key=lambda version: (version[1], version[0]), default=None)

    def _ways(self, gradient: int) -> dict[Version, Version | None]:
        """Versions a gradient may be of, or go on to: version -> the one it was reached from, None for the first."""
        values, ops = self.graph.values, self.graph.ops
        if gradient in self._sum_of:
            found: dict[Version, Version | None] = {self._sum_of[gradient]: None}
        else:
            forward = ops[values[gradient].op].forward
            found = dict.fromkeys(self._read_by(ops[forward])) if forward >= 0 else {}
        queue = list(found)
        for version in queue:
            maker = version[1]
            if 0 <= maker < self.begin and not self._has_backward[maker] and len(found) < _SEARCHED:
                for term in self._read_by(ops[maker]):
                    if term not in found:
                        found[term] = version
                        queue.append(term)
        return found

    def _read_by(self, op: Op) -> list[Version]:
        """The versions of differentiable values that a forward op read."""
        read = []
        for value in op.inputs:
            row = self.graph.values[value]
            if row.requires_grad:
                writes = self._writes.get(value, ())
                read.append((value, max((time for time in writes if time < op.index), default=row.op)))
        return read

    def _come(self, value: int, goals: tuple[Version, ...], op: Op, arrive: bool = True) -> int:
        """The object of a gradient after it went the way of its forward values to a goal; not the last step of it
        unless it is to `arrive`."""
        obj = self._gather(value, op) if value in self._parts else self.objects.current[value]
        maker = self.graph.ops[self.graph.values[value].op]
        if self._one_device or not goals or (maker.forward == op.forward >= 0 and value not in self._sum_of):
            return obj
        ways = self._ways(value)
        step: Version | None = next((goal for goal in goals if goal in ways), None)
        way = []
        while step is not None:
            way.append(step)
            step = ways[step]
        reader = -1 if value in self._sum_of else maker.forward
        for passed in reversed(way):
            read = self._object_read(reader, passed[0])
            if passed is way[0] and not arrive:
                if read >= 0:
                    self._read_as.setdefault(obj, read)
            else:
                obj = self._to_maker(obj, passed, op, read)
            reader = passed[1]
        return obj

    def _object_read(self, reader: int, value: int) -> int:
        """The object by which a forward op read a value, -1 if unknown."""
        if reader < 0:
            return -1
        read = zip(self.graph.ops[reader].inputs, self.walk.op_objects[reader], strict=False)
        return next((obj for given, obj in read if given == value), -1)

    def _to_maker(self, obj: int, version: Version, op: Op, read: int = -1) -> int:
        """Bring the gradient of a version to the device where that was made, copy by copy as the forward came.

        `read`: the object that was read; each copy on the way is undone when the pass comes back to where it was made.
        """
        objects = self.objects
        if objects.is_host_scalar(obj):
            return obj
        if read < 0:
            read = self._read_as.get(obj, objects.elsewhere.get((version[0], objects.device_of(obj)), -1))
        while read >= 0 and objects.source[read] >= 0:
            made, read = objects.way_back.get(read, objects.buffer_born[objects.buffer[read]]), objects.source[read]
            time = self._passed(made, self.graph.values[objects.value[obj]].op + 1, op.index)
            obj = self._once(obj, version, objects.device_of(read), time, op)
        return self._once(obj, version, self._device_of(version), op.index, op)

    def _once(self, obj: int, version: Version, device: int, time: int, op: Op) -> int:
        """Send a gradient to a device unless it is there, or was sent there for the same version before."""
        if self.objects.device_of(obj) == device:
            return obj
        key = (obj, version, device)
        if key not in self._moved:
            self._moved[key] = self._send(obj, device, time, op)
        return self._moved[key]

    def _send(self, obj: int, device: int, time: int, op: Op) -> int:
        if self.graph.values[self.objects.value[obj]].op >= self.begin:
            self.walk.left[obj] = max(self.walk.left.get(obj, 0), time + 1)
        return self.objects.copy(obj, device, time, "backward", self.graph.calls[op.call].path)

    def _device_of(self, version: Version) -> int:
        value, maker = version
        if maker >= 0:
            return self.walk.op_device[maker]
        return self.objects.device_of(self.objects.current[value])

    def _forward_objects(self, op: Op) -> dict[int, int]:
        if op.forward < 0:
            return {}
        return dict(zip(self.graph.ops[op.forward].inputs, self.walk.op_objects[op.forward], strict=True))

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
            if value in self._parts:
                obj = self._gather(value, self.graph.ops[-1])
            if obj >= 0 and objects.device_of(obj) != home:
                time = max(self.graph.values[value].op, objects.used[obj])
                walk.left[obj] = time + 1
                objects.copy(obj, home, time, "backward", name.rpartition(".")[0])


def _is_sum(op: Op) -> bool:
    schema = getattr(op.target, "_schema", None)
    return schema is not None and schema.name in ("aten::add", "aten::add_")
