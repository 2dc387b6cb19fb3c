"""What ranks do together because of cuts: the collectives of a recorded run, and their seconds both ways."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.cluster.cluster import Cluster
from autoshard.engine.links import all_gather_seconds, all_reduce_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What ranks do together after op `op` of a forward, in a block: a tensor is summed, or put together.

    `added`: so many tensors are put together to be added up, and `nbytes` is that of all; 0 for other collectives.
    """

    op: int
    block: str
    gathers: bool
    nbytes: int
    added: int = 0

    def seconds(self, cluster: Cluster, names: Sequence[str], part: float = 1.0) -> float:
        """Seconds of it over some devices, with a part of its bytes."""
        return (all_gather_seconds if self.gathers else all_reduce_seconds)(cluster, names, self.nbytes * part)

    def over(self, ranks: int) -> "Collective":
        """The same over so many ranks."""
        return replace(self, nbytes=self.tensor_bytes * ranks, added=ranks) if self.added else self

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensor that all ranks have then."""
        return self.nbytes // self.added if self.added else self.nbytes

    @property
    def backward(self) -> "Collective":
        """What backward does for it: sums where forward lets in, and the other way round."""
        return replace(self, gathers=False, nbytes=self.tensor_bytes, added=0) if self.added else self
