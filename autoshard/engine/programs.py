"""Programs: what happens in a pass as tasks on streams (a device, a link, a disk); and the simulator that plays them.

    network   [gather 0][gather 1]      [gather 2]
    compute             [forward 0][forward 1]    [forward 2]

A task begins when its streams are done with the tasks before and every task that it waits for has ended.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PREFETCH = 2
"""Layers whose parameters may be there before the one that is computed is done: its own and those of the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task: `after` are the numbers of tasks before it in the program; `shared` is a second stream it occupies."""

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    shared: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """When each task of a program began and ended, and the seconds in which each stream was busy."""

    begins: tuple[float, ...]
    ends: tuple[float, ...]
    busy: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Until the last task ends."""
        return max(self.ends, default=0.0)


def play(program: Sequence[Task]) -> Played:
    """Play a program by the clock."""
    free: dict[str, float] = defaultdict(float)
    busy: dict[str, float] = defaultdict(float)
    begins: list[float] = []
    ends: list[float] = []
    for task in program:
        begin = max(free[task.stream], max((ends[index] for index in task.after), default=0.0))
        if task.shared:
            begin = max(begin, free[task.shared])
            free[task.shared] = begin + task.seconds
            busy[task.shared] += task.seconds
        free[task.stream] = begin + task.seconds
        busy[task.stream] += task.seconds
        begins.append(begin)
        ends.append(begin + task.seconds)
    return Played(begins=tuple(begins), ends=tuple(ends), busy=busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Seconds of one layer of a pass: `gather` of its parameters before it, `reduce` of its gradients after it.

    `compute` is what nothing overlaps within the layer: its kernels, and `inner` of collectives that they wait for.
    """

    name: str
    compute: float
    inner: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0

    @property
    def kernels(self) -> float:
        """Seconds in which kernels run."""
        return self.compute - self.inner


def pass_program(layers: Sequence[Layer]) -> list[Task]:
    """The tasks of one pass: parameters are gathered ahead, gradients reduced behind."""
    program: list[Task] = []
    gathered: dict[int, int] = {}
    computed: dict[int, int] = {}

    def gather(index: int) -> None:
        if index < len(layers) and index not in gathered and layers[index].gather:
            before = computed.get(index - PREFETCH)
            gathered[index] = len(program)
            after = () if before is None else (before,)
            program.append(
                Task(name=f"gather {layers[index].name}", stream="network", seconds=layers[index].gather, after=after)
            )

    for index, layer in enumerate(layers):
        gather(index)
        after = (gathered[index],) if index in gathered else ()
        computed[index] = len(program)
        program.append(Task(name=layer.name, stream="compute", seconds=layer.compute, after=after))
        gather(index + 1)
        if layer.reduce:
            program.append(
                Task(name=f"reduce {layer.name}", stream="network", seconds=layer.reduce, after=(computed[index],))
            )
    return program


FOLDED = 4
"""Equal layers that are played one by one; every further one takes as long as the busier stream."""


def pass_seconds(runs: Sequence[tuple[Layer, int]]) -> float:
    """Seconds of one pass through runs of equal layers."""
    if not any(layer.gather or layer.reduce for layer, _ in runs):
        return sum(layer.compute * count for layer, count in runs)
    played = [layer for layer, count in runs for _ in range(min(count, FOLDED))]
    folded = sum(
        max(layer.compute, layer.gather + layer.reduce) * (count - FOLDED) for layer, count in runs if count > FOLDED
    )
    return play(pass_program(played)).seconds + folded
