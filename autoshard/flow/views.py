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

    def given(self, depth: int, view: dict[int, int]) -> None:
        """The call at this depth, from now on the innermost that does, sees these objects."""
        if not view:
            return
        if self._levels[-1][0] == depth:
            self._levels[-1][1].update(view)
        else:
            self._levels.append((depth, view))

    def left(self, depth: int) -> dict[int, int]:
        """The call at this depth returned: what it saw, which nobody does any more."""
        return self._levels.pop()[1] if self._levels[-1][0] == depth else {}

    def depth_of(self, buffer: int) -> int:
        """How deep the innermost call is that sees an object in this buffer; 0 if there is none."""
        in_buffer = self._objects.buffer
        for depth, view in reversed(self._levels):
            if any(in_buffer[seen] == buffer for seen in view.values()):
                return depth
        return 0

    def sees(self, value: int, depth: int = -1) -> int:
        """The object that the running call means by a value, or the one around it at this depth."""
        if depth < 0 and value in self.function:
            return self.function[value]
        for level, view in reversed(self._levels):
            if value in view and (depth < 0 or level <= depth):
                return view[value]
        obj = self._objects.current[value]
        return obj if obj >= 0 else self._objects.original(value, HOST_DEVICE, 0)
