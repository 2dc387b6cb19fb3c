"""Which object a value means: calls that were given copies see those, and so do the calls inside them."""

from autoshard.flow.objects import HOST_DEVICE, Objects


class Views:
    """What the running calls see, the innermost last, by their depth; at depth 0 is the code around the model.

    Attributes:
        function: what the ops of the torch function that is running see, above all calls.
    """

    def __init__(self, objects: Objects) -> None:
        self.function: dict[int, int] = {}
        self._objects = objects
        self._levels: list[tuple[int, dict[int, int]]] = [(0, {})]  # (depth of the call, value -> object it sees)
        self._all: list[dict[int, int]] = [{}]  # per level, what it and those around it see

    def given(self, depth: int, view: dict[int, int]) -> None:
        """The call at this depth, from now on the innermost that does, sees these objects."""
        if not view:
            return
        if self._levels[-1][0] == depth:
            self._levels[-1][1].update(view)
            self._all[-1].update(view)
        else:
            self._levels.append((depth, view))
            self._all.append(self._all[-1] | view)

    def left(self, depth: int) -> dict[int, int]:
        """The call at this depth returned: what it saw, which nobody does any more."""
        if self._levels[-1][0] != depth:
            return {}
        self._all.pop()
        return self._levels.pop()[1]

    def depth_of(self, buffer: int) -> int:
        """How deep the innermost call is that sees an object in this buffer; 0 if there is none."""
        in_buffer = self._objects.buffer
        for depth, view in reversed(self._levels):
            if any(in_buffer[seen] == buffer for seen in view.values()):
                return depth
        return 0

    def sees(self, value: int) -> int:
        """The object that the running call means by a value."""
        obj = self.function.get(value, -1)
        if obj < 0:
            obj = self._all[-1].get(value, self._objects.current[value])
        return obj if obj >= 0 else self._objects.original(value, HOST_DEVICE, 0)
