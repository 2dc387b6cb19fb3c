"""For which op an autograd node was made: the one that made the tensor whose `grad_fn` it is, or wrote it last.

    op 30: y = x @ w         op 31: z = y.exp() reads y, which has its node by now: the node is noted as that of op 30

Torch makes a node when the mode that sees its op has returned; whoever reads the result next finds it there.
"""

from typing import Any


class Nodes:
    """The ops of nodes, noted on the nodes themselves, which nothing here keeps alive."""

    def __init__(self) -> None:
        self._key = object()  # of this run
        self._written: dict[int, int] = {}  # storage -> op that wrote to it last

    def written(self, storage: int, op: int) -> None:
        """An op writes to a storage: who shares it may get another node."""
        self._written[storage] = op

    def last_op(self, storage: int, made: int) -> int:
        """The op that made or wrote last what is in a storage, of a tensor that was made by op `made`."""
        return max(made, self._written.get(storage, made))

    def note(self, node: Any, op: int) -> None:
        """Note for which op a node was made, unless it is known."""
        node.metadata.setdefault(self._key, op)

    def op_of(self, node: Any) -> int | None:
        """The op for which a node was made, None if nothing read what it gave."""
        return node.metadata.get(self._key)
