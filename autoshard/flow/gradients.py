"""The backward pass of a walk, as the autograd engine runs it: nodes, the gradients that wait for them, and ways back.

    forward     h (device 0) ──copy, before op 40──▶ h' (device 1) ── op 41
    backward    node of op 41 ──▶ way back of h' ──copy──▶ node that made h (device 0)

A node runs on the device of its forward op once everything that feeds it has run, the one made last first
(torch/csrc/autograd/engine.cpp). So under a plan the recorded nodes run in the recorded order. Between them run the
ways back of copies (`runtime/travel.py`), each before the first node that was made before its copy. Until then
gradients wait on the device of the copy, and add up there. The nodes that fill `.grad` run as soon as they are fed.

A gradient lives until the node that it was sent to has run, or until it became a term of a sum: the engine holds the
inputs of a node as long as its function runs, and hands on what it returns (`call_function`, input_buffer.cpp).
"""

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autoshard.capture.graph import GradEdge, GradNode, ModelGraph, Op

if TYPE_CHECKING:
    from autoshard.flow.walk import Walk

_MOMENT = 2.0**-20
"""Time of one thing that autograd does between two ops."""
Target = tuple[int, int]
"""Where gradients wait: (node, slot), or (-1, alias) for the way back of a copy."""


class Gradients:
    """Backward ops of one walk.

    Attributes:
        passed_on: buffers of gradients that were sent from node to node: they live until their last use.
        outlived: storages of such gradients that lived longer when recorded: somebody else held them, too.
    """

    def __init__(self, walk: "Walk") -> None:
        self.walk, self.graph, self.objects = walk, walk.graph, walk.objects
        self.nodes = walk.graph.nodes
        self.begin = walk.graph.backward_begin
        self.passed_on: set[int] = set()
        self.outlived = _outlived(walk.graph)
        self._time, self._moments = self.begin, 0  # the op that comes next, and what happened since the last one
        self._now: float = self.begin - 1  # when the last thing happened
        self._next = 0  # node
        self._running: list[int] = []  # nodes, each inside the one before it
        self._slots: dict[Target, int] = {}  # -> the gradient that waits there
        self._ways: dict[int, list[tuple[float, int]]] = {}  # run of the engine -> heap of (-time made, -alias)
        self._onward: dict[int, GradEdge] = {}  # alias whose way back is pending -> the edge it is a part of
        self._pending: dict[int, int] = {}  # node -> ways back that lead to it and have not run
        self._late: set[int] = set()  # nodes that fill `.grad` and wait for a way back when recorded
        self._sums = {edge.sum: edge for node in self.nodes for edge in node.edges if edge.sum >= 0}

    # ---- ops

    def inputs_of(self, op: Op) -> tuple[tuple[int, ...], int]:
        """Return the objects a backward op reads, on its device, and the device."""
        self._advance(op.index)
        objects, values = self.objects, self.graph.values
        if op.index in self._sums:
            return self._sum(op, self._sums[op.index])
        node = self._running[-1] if self._running else -1
        if node in self._late:
            return self._skip(op, self.nodes[node])
        device, read = self._device(op, node), []
        given = [self._object(value, op.forward, device) for value in op.inputs]
        places = {objects.device_of(obj) for obj in given}
        if len(places) == 1 and all(values[value].op < self.begin for value in op.inputs):
            device = places.pop()  # a function of the user's saved it there
        for value, obj in zip(op.inputs, given, strict=True):
            if objects.device_of(obj) != device and not objects.is_host_scalar(obj):
                obj = self._copy(obj, device, op.index, self.graph.calls[op.call].path)  # its way is not known
                if values[value].op >= self.begin:
                    objects.current[value] = obj
            read.append(obj)
        self._now = op.index
        return tuple(read), device

    def _device(self, op: Op, node: int) -> int:
        if node >= 0 and self.nodes[node].leaf >= 0:
            return self._device_of_node(node)
        if op.forward >= 0:
            return self.walk.op_device[op.forward]
        made = [value for value in op.inputs if self.graph.values[value].op >= self.begin]
        devices = {self.objects.device_of(self.objects.current[value]) for value in made}
        if devices:
            return devices.pop()
        home = self.walk.caller  # the gradient of the loss is where that is: where outputs go, if they go
        return self.walk.op_device[self.begin - 1] if home is None else home

    def _object(self, value: int, forward: int, device: int) -> int:
        """The object behind a value: a gradient, what autograd saved for the forward op, or what that op read."""
        objects = self.objects
        obj = objects.current[value]
        if self.graph.values[value].op < self.begin:
            obj = self.walk.given.get((forward, value), self.walk.saved.get((forward, value), -1))
            if obj < 0 and forward >= 0:
                read = zip(self.graph.ops[forward].inputs, self.walk.op_objects[forward], strict=True)
                obj = next((obj for given, obj in read if given == value), -1)
                if obj < 0 or objects.device_of(obj) != device:
                    obj = objects.elsewhere.get((value, device), obj)
            if obj < 0:
                obj = objects.current[value]
        return obj if obj >= 0 else objects.original(value, device, 0)

    def _sum(self, op: Op, edge: GradEdge) -> tuple[tuple[int, ...], int]:
        """The recorded sum of a gradient and what was in its slot. Under the plan that slot may be another one."""
        self._now = op.index
        target = self._send(edge, op.index)
        obj = self.objects.current[op.outputs[0]] = self._slots[target]
        return (obj,) * len(op.inputs), self.objects.device_of(obj)

    def _skip(self, op: Op, node: GradNode) -> tuple[tuple[int, ...], int]:
        """An op of a node that fills a `.grad`, which will be done when its gradient has come."""
        parameter = self.objects.current[node.leaf]
        for value in op.outputs:
            if self.objects.current[value] < 0:
                self.objects.current[value] = parameter
        return (parameter,) * len(op.inputs), self.objects.device_of(parameter)

    # ---- nodes

    def _advance(self, time: int) -> None:
        """Run everything that autograd does before op `time`."""
        while True:
            following = self.nodes[self._next] if self._next < len(self.nodes) else None
            running = self.nodes[self._running[-1]] if self._running else None
            inside = running is None or (following is not None and following.run > running.run)
            if inside:
                if following is None or following.begin > time:
                    break
                self._set_time(following.begin)
                self._begin(self._next, following)
                self._running.append(self._next)
                self._next += 1
            else:
                assert running is not None
                if running.end > time:
                    break
                self._set_time(running.end)
                self._running.pop()
                for edge in running.edges:
                    if edge.sum < 0:
                        self._send(edge)
                if following is None or following.run != running.run:
                    self._go_back(running.run, -1)
        self._set_time(time)

    def finish(self) -> None:
        """Run what is left after the last op, and keep what is in `.grad`; other than parameters' for longer."""
        end, graph = self.walk.end, self.graph
        self._advance(end)
        lasting = [(value, end) for value in graph.lasting if graph.values[value].op >= self.begin]
        for value, time in [*((value, end - _MOMENT) for _, value in graph.gradients), *lasting]:
            if self.objects.current[value] >= 0:
                self.objects.use(self.objects.current[value], time)

    def _set_time(self, time: int) -> None:
        if time != self._time:
            self._time, self._moments = time, 0
            self._now = max(self._now, time - 1)

    def _moment(self) -> float:
        """The time of one more thing that happens before the next op."""
        self._moments += 1
        self._now = self._time - 1 + self._moments * _MOMENT
        return self._now

    def _begin(self, index: int, node: GradNode) -> None:
        objects = self.objects
        if node.leaf < 0:
            self._go_back(node.run, node.made)
            while self._pending.get(index):  # made before its copy, but numbered after it: views of written tensors are
                self._go_back_once(node.run)
        elif self._pending.get(index):
            self._late.add(index)
            return
        for slot, value in enumerate(node.incoming):
            if value < 0:
                continue
            obj = self._slots.pop((index, slot), objects.current[value])
            if obj < 0:
                continue
            objects.current[value] = obj
            died = self.graph.storages[self.graph.values[value].storage].died
            last = (died if node.begin < died < node.end else node.end) - 1
            self.objects.use(obj, last if node.end > node.begin else self._now)

    def _device_of_node(self, index: int) -> int:
        node = self.nodes[index]
        if node.leaf >= 0:
            return self.objects.device_of(self.objects.current[node.leaf])
        return self.walk.op_device[node.made]

    # ---- gradients on their way

    def _send(self, edge: GradEdge, time: float = -1) -> Target:
        """Put what a node sent where it waits: at the next node, or at the way back of the copy that was read."""
        obj = self.objects.current[edge.value]
        if obj < 0:  # a constant
            obj = self.objects.original(edge.value, self._device_of_node(edge.node), self._time)
        alias = next(self._copies_between(edge), -1)
        if alias < 0:
            return self._put((edge.node, edge.slot), obj, edge, time)
        if alias not in self._onward:
            self._onward[alias] = edge
            self._pending[edge.node] = self._pending.get(edge.node, 0) + 1
            ways = self._ways.setdefault(self.nodes[edge.node].run, [])
            heapq.heappush(ways, (-self._made(alias), -alias))
        return self._put((-1, alias), obj, edge, time)

    def _copies_between(self, edge: GradEdge, after: int = -1) -> Iterator[int]:
        """The copies through which a value was read, from the reader on, or from `after` on."""
        objects, obj = self.objects, after
        if after < 0:
            read = zip(self.graph.ops[edge.reader].inputs, self.walk.op_objects[edge.reader], strict=False)
            obj = next((obj for value, obj in read if value == edge.read), -1) if edge.reader >= 0 else -1
            obj = self.walk.given.get((edge.reader, edge.read), obj)
        else:
            obj = objects.source.get(after, -1)
        made = self.nodes[edge.node].made
        while obj in objects.source and made < self._made(obj):  # else it was written since
            yield obj
            obj = objects.source[obj]

    def _made(self, alias: int) -> float:
        return self.objects.way_back.get(alias, self.objects.buffer_born[self.objects.buffer[alias]])

    def _put(self, target: Target, obj: int, edge: GradEdge, time: float = -1) -> Target:
        """Add a gradient to what waits at a target; at op `time`, or between ops."""
        objects = self.objects
        device = self._device_of_node(target[0]) if target[0] >= 0 else objects.device_of(target[1])
        if objects.device_of(obj) != device and not objects.is_host_scalar(obj):
            obj = self._copy(obj, device, self._moment(), "")
        self._pass_on(obj)
        waiting = self._slots.get(target, -1)
        if waiting >= 0:
            when = time if time >= 0 else self._moment()
            total = self.nodes[edge.node].incoming[edge.slot]
            row = self.graph.values[total]
            for term in (waiting, obj):
                self.objects.use(term, when)
            obj = objects.new_object(total, objects.new_buffer(row.storage, device, row.nbytes, when))
            self._pass_on(obj)
        self._slots[target] = obj
        self.objects.use(obj, self._now)
        return target

    def _go_back(self, run: int, made: int) -> None:
        """Run the ways back of copies made after op `made`."""
        ways = self._ways.get(run)
        while ways and -ways[0][0] > made:
            self._go_back_once(run)

    def _go_back_once(self, run: int) -> None:
        """Run the way back of the copy made last: its gradient goes to the source."""
        alias = -heapq.heappop(self._ways[run])[1]
        edge = self._onward.pop(alias)
        obj = self._slots.pop((-1, alias))
        objects = self.objects
        device = objects.device_of(objects.source[alias])
        copy = self._copy(obj, device, self._moment(), objects.producer_of(objects.value[alias]))
        further = next(self._copies_between(edge, alias), -1)
        if further >= 0:
            self._pending[edge.node] += further not in self._onward
            if further not in self._onward:
                self._onward[further] = edge
                heapq.heappush(self._ways[run], (-self._made(further), -further))
        self._put((-1, further) if further >= 0 else (edge.node, edge.slot), copy, edge)
        self._pending[edge.node] -= 1
        if not self._pending[edge.node] and edge.node in self._late:
            self._fill(self.nodes[edge.node], self._slots.pop((edge.node, edge.slot)))

    def _fill(self, node: GradNode, obj: int) -> None:
        """Do what a node that fills a `.grad` was recorded to do: keep the gradient, or a copy of it, or add to one."""
        objects, values = self.objects, self.graph.values
        now = self._now if node.begin == node.end else self._moment()
        self.objects.use(obj, now)
        for op in self.graph.ops[node.begin : node.end]:
            for value in op.outputs:
                if values[value].storage == values[op.inputs[0]].storage and not op.mutates:
                    objects.current[value] = objects.new_object(value, objects.buffer[obj], view_of=obj)
                elif not op.mutates:
                    device, row = objects.device_of(obj), values[value]
                    buffer = objects.new_buffer(row.storage, device, row.nbytes, now)
                    objects.current[value] = objects.new_object(value, buffer)
                    self._pass_on(objects.current[value])

    def _copy(self, obj: int, device: int, time: float, path: str) -> int:
        self.objects.use(obj, time)
        copy = self.objects.copy(obj, device, time, "backward", path)
        self._pass_on(obj)
        self._pass_on(copy)
        return copy

    def _pass_on(self, obj: int) -> None:
        buffer = self.objects.buffer[obj]
        if self.objects.buffer_born[buffer] > self.begin - 1:  # not a tensor of the forward that is its own gradient
            self.passed_on.add(buffer)


def _outlived(graph: ModelGraph) -> set[int]:
    last: dict[int, int] = {}
    for node in graph.nodes:
        taken = [(value, node.end) for value in node.incoming if value >= 0]
        taken += [(value, edge.sum + 1) for edge in node.edges if edge.sum >= 0 for value in graph.ops[edge.sum].inputs]
        for value, time in taken:
            storage = graph.values[value].storage
            last[storage] = max(last.get(storage, 0), time)
    return {storage for storage, time in last.items() if graph.storages[storage].died > time}
