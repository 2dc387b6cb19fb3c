"""In which modules the gradients of a copy must not be added up before they go back.

Autograd adds the gradients of a value's uses, the last use first. Those of the uses of one copy come as one sum, at the
time of its making. That is the order of one device if and only if that sum comes first, or is of one gradient only:

    uses of x in forward order     norm, f inside layer 7 on device 1, by a copy    then x + … on device 0
    one device                     (g_add + g_f) + g_norm
    by one copy                    g_add + (g_f + g_norm)                           so layer 7 is unfolded
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autoshard.capture.graph import Op
from autoshard.flow.objects import Objects


@dataclass(slots=True)
class Uses:
    """Forward ops that used a value, per way back: an alias of a copy, or -1 for the value itself."""

    times: dict[int, list[int]] = field(default_factory=dict)

    def add(self, way: int, time: int) -> None:
        """Note a use."""
        self.times.setdefault(way, []).append(time)


def out_of_order(uses: Uses, way_back: Mapping[int, float]) -> list[int]:
    """Return the aliases whose gradients would not be added in the order of one device.

    `way_back`: alias -> when it was made. Such an alias has several uses and another way has a use after the first of
    them, or another way has a use between its making and its use.
    """
    found = []
    for alias, own in uses.times.items():
        if alias < 0:
            continue
        others = [time for way, times in uses.times.items() if way != alias for time in times]
        first = min(own) if len(own) > 1 else way_back[alias]
        late = any(time > first for time in others) if len(own) > 1 else any(first < time < own[0] for time in others)
        if late:
            found.append(alias)
    return found


class CopyUses:
    """The uses of all values with history in one walk.

    Attributes:
        given_to: alias of a copy -> the call it was made for.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects, self.graph = objects, objects.graph
        self.given_to: dict[int, int] = {}
        self._uses: dict[tuple[int, int], Uses] = {}  # (object, version of its memory) -> its uses

    def note_op(self, op: Op, read: tuple[int, ...]) -> None:
        """Note what a forward op reads, if it has a gradient."""
        if any(self.graph.values[value].requires_grad for value in op.outputs):
            for obj in set(read):
                self.note(obj, op.index)

    def note(self, obj: int, time: int) -> None:
        """Note one use of an object."""
        objects = self.objects
        if objects.grad and self.graph.values[objects.value[obj]].requires_grad:
            root = objects.root(obj)
            uses = self._uses.setdefault((root, objects.buffer_version[objects.buffer[root]]), Uses())
            uses.add(-1 if root == obj else obj, time)

    def out_of_order(self, watched: Collection[str]) -> set[str]:
        """Modules that were given a copy whose gradients would be added in another order, unless they are watched."""
        calls, found = self.graph.calls, set()
        for uses in self._uses.values():
            for alias in out_of_order(uses, self.objects.way_back):
                if alias in self.given_to:
                    around = index = self.given_to[alias]
                    while around >= 0 and calls[around].path not in watched:
                        around = calls[around].parent
                    if around < 0:
                        found.add(calls[index].path)
        return found
