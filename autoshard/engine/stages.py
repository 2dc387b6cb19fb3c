"""What every stage of a pipeline costs for one micro-batch: seconds by the roofline, and bytes (see `stage_memory`).

stage 0   forward 3.1 ms, backward 6.2 ms
  boundary  2 tensors, 4 MiB go over it; the gradient of one of them comes back
stage 1   …
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.capture.stages import Staged, divide
from autoshard.cluster.device import Device
from autoshard.engine.stage_memory import StageBytes, StageMemory
from autoshard.engine.timing import op_seconds
from autoshard.plan import Stage
from autoshard.profile.measure import trained_sizes
from autoshard.profile.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBoundary:
    """What crosses from a stage to the next for one micro-batch: tensors (value, bytes), and those with gradients."""

    tensors: tuple[tuple[int, int], ...]
    returned: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """One stage for one micro-batch.

    `launch_seconds`: the part of all its seconds that ops need to be launched. `trained`: bytes of the parameters that
    it trains, in the model's order.
    """

    forward_seconds: float
    backward_seconds: float
    recompute: bool
    nbytes: StageBytes
    trained: tuple[int, ...]
    launch_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesCost:
    """All stages of a pipeline for one micro-batch.

    `boundaries`: between each stage and the next. `aligned`, `written_back`: as in `Plan`.
    """

    stages: tuple[StageFigures, ...]
    boundaries: tuple[StageBoundary, ...]
    aligned: tuple[str, ...] = ()
    written_back: tuple[str, ...] = ()


def stage_figures(whole: Profile, part: Profile, stages: Sequence[Stage], devices: Sequence[Device]) -> StagesCost:
    """Work out what every stage costs; `part` is the profile of one micro-batch, `devices` that of every stage.

    Outputs go to the root's home, and a parameter that several stages read is copied to them. Raises `PlanError` if the
    stages don't have all parameters.
    """
    graph = part.graph
    staged = divide(graph, [stage.paths for stage in stages])
    forward, backward = _seconds(part, staged, devices)
    memory = StageMemory(whole, graph, stages)
    training = whole.workload.training
    trained = trained_sizes(graph) if training else []
    found = []
    for index, (stage, device) in enumerate(zip(stages, devices, strict=True)):
        again = forward[index][memory.runs_again]
        own = tuple(nbytes for name, nbytes in trained if memory.held[name] == index)
        launches = sum(map(np.count_nonzero, (forward[index], backward[index], again)))
        found.append(
            StageFigures(
                forward_seconds=float(forward[index].sum()),
                backward_seconds=float(backward[index].sum() + again.sum()),
                recompute=stage.recompute and training,
                nbytes=memory.of(index, device, own),
                trained=own,
                launch_seconds=device.launch_seconds * launches,
            )
        )
    return StagesCost(
        stages=tuple(found), boundaries=boundaries_of(graph, staged, len(stages)), aligned=memory.moves.aligned,
        written_back=memory.moves.written_back,
    )  # fmt: skip


def _seconds(part: Profile, staged: Staged, devices: Sequence[Device]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Per stage, seconds of every op: those of its forward, and those of its backward."""
    graph = part.graph
    of_op = np.array(staged.op_stage, np.int64)
    is_forward = np.arange(len(graph.ops)) < graph.backward_begin
    known: dict[object, np.ndarray] = {}
    forward, backward = [], []
    for stage, device in enumerate(devices):
        if device.speed not in known:
            known[device.speed] = op_seconds(part, device)
        mine = np.where(of_op == stage, known[device.speed], 0.0)
        forward.append(np.where(is_forward, mine, 0.0))
        backward.append(np.where(is_forward, 0.0, mine))
    return forward, backward


def boundaries_of(graph: ModelGraph, staged: Staged, count: int) -> tuple[StageBoundary, ...]:
    """Return what goes over every boundary, from neighbour to neighbour; its gradient comes back the same way."""
    tensors: list[list[tuple[int, int]]] = [[] for _ in range(count - 1)]
    returned: list[list[tuple[int, int]]] = [[] for _ in range(count - 1)]
    training = graph.backward_begin < len(graph.ops)
    outputs = set(graph.outputs)
    for crossing in staged.crossings:
        row = graph.values[crossing.value]
        nbytes = graph.copied_bytes(crossing.value)
        for boundary in range(crossing.source, crossing.readers[-1]):
            tensors[boundary].append((crossing.value, nbytes))
            if training and row.requires_grad and not (crossing.value in outputs and crossing.readers == (count - 1,)):
                returned[boundary].append((crossing.value, nbytes))
    return tuple(StageBoundary(tensors=tuple(a), returned=tuple(b)) for a, b in zip(tensors, returned, strict=True))
