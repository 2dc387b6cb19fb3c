"""For which forward op an autograd node was made, by the numbers that torch gives to nodes as it makes them.

op        30        31        32
numbers   … 12    13 14     15 …        noted before each op: from 13 on op 31, from 15 on op 32
"""

from bisect import bisect_left, bisect_right

from autoshard.torch_private import sequence_number


class Sequences:
    """The numbers that nodes had got by each op of the forward."""

    def __init__(self) -> None:
        self._below: list[int] = []  # autograd nodes numbered below below[i] …
        self._ops: list[int] = []  # … were made no later than by op ops[i]
        self._seen = sequence_number()

    def note(self, op: int) -> None:
        """This forward op comes next; the nodes made since the last one are that one's."""
        seen = sequence_number()
        if seen != self._seen:
            self._below.append(seen)
            self._ops.append(op)
            self._seen = seen

    def numbered(self, number: int) -> bool:
        """Whether a node of this number was made before the op noted last."""
        return number < self._seen

    def is_ahead(self, op: int) -> bool:
        """Whether the node of this op, which comes next, has its number already."""
        return sequence_number() != self._seen or self._ops[-1:] == [op]

    def op_of(self, number: int, after: bool, default: int) -> int:
        """The op for which the node of this number was made; `after`: the node was made after the op, not before it."""
        place = bisect_left(self._below, number) if after else bisect_right(self._below, number)
        return self._ops[place] if place < len(self._ops) else default
