"""What ranks do together because of cuts: the collectives of a recorded run, and their seconds both ways."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from numpy import ndarray

from autoshard.capture.graph import ModelGraph
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Collectives of one forward that are alike. `with_rows`: as many bytes as the batch has rows."""

    collective: Collective
    with_rows: bool
    count: int

    def seconds(self, cluster: Cluster, names: Sequence[str], share: float) -> tuple[float, float]:
        """Seconds of those of a forward and of those of its backward, with a share of the batch's rows."""
        part, forward = share if self.with_rows else 1.0, self.collective
        once = forward.seconds(cluster, names, part)
        back = forward.backward
        return self.count * once, self.count * (once if back is forward else back.seconds(cluster, names, part))


def count_alike(
    collectives: Iterable[Collective], graph: ModelGraph, places: "Sequence[int] | ndarray", carrying: Collection[int]
) -> dict[int, list[Alike]]:
    """Return place -> the collectives there. `places`: of every op; `carrying`: values that carry rows of the batch."""
    counts: Counter[tuple[int, Collective, bool]] = Counter()
    for one in collectives:
        with_rows = any(value in carrying for value in graph.ops[one.op].outputs)
        counts[int(places[one.op]), replace(one, op=-1, block=""), with_rows] += 1
    found: dict[int, list[Alike]] = {}
    for (place, one, with_rows), count in counts.items():
        found.setdefault(place, []).append(Alike(collective=one, with_rows=with_rows, count=count))
    return found
