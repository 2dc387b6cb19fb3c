"""Fill what this process has of a model from a checkpoint: its stages of a pipeline, or a whole replica.

    rank 0   embed ◀── file    layers.0 ◀── file    layers.1  meta        head  meta
    rank 1   embed  meta       layers.0  meta       layers.1 ◀── file     head ◀── file

Nobody reads what another process's stages have, and nobody gives it memory. Small buffers are read by all. Replicas
that share their parameters each read the rows that they have.
"""

from collections.abc import Mapping

import torch
from torch import nn

from autoshard.checkpoint.data import Checkpoint, Source, Target
from autoshard.checkpoint.reading import Progress, ReadReport, read_into
from autoshard.checkpoint.targets import FileLoader, check_complete, check_shardable, memory_like
from autoshard.errors import CheckpointError
from autoshard.packed import repacked
from autoshard.plan import Plan
from autoshard.runtime.agreement import Mark, agree
from autoshard.runtime.collectives import ProcessRanks, count_processes
from autoshard.runtime.dispatch import apply_plan, own_place
from autoshard.runtime.moves import named_tensors
from autoshard.runtime.sharded import shards
from autoshard.runtime.slices import Undo, replace_all
from autoshard.runtime.staged import SMALL_BUFFER, own_names


def divides_processes(plan: Plan) -> bool:
    """Whether several processes run that are stages or replicas under a plan."""
    mesh = plan.mesh
    return mesh is not None and (mesh.pipeline * mesh.data > 1 or shards(plan)) and count_processes() > 1


def load_own_part(
    model: nn.Module,
    plan: Plan,
    checkpoint: Checkpoint,
    sources: Mapping[str, Source],
    *,
    progress: Progress | None = None,
) -> ReadReport:
    """Read this process's tensors to its device and apply the plan; all processes call it.

    Raises what `load_applied` raises, on other processes `RankError`; the model is then as it was.
    """
    if shards(plan):
        return _load_shards(model, plan, checkpoint, sources, progress)
    ranks, tensors = ProcessRanks.of(), named_tensors(model)
    log: list[Undo] = []
    report, error = None, None
    try:
        try:
            device, problem = own_place(plan, ranks, None)
            if problem is not None:
                raise problem
            assert device is not None
            report = _fill(tensors, plan, ranks, device, checkpoint, sources, log, progress, model)
        except Exception as found:
            error = found
        agree(ranks, Mark(), error)
        apply_plan(model, plan)
    except BaseException:
        while log:
            log.pop()()
        raise
    assert report is not None
    return report


def _load_shards(
    model: nn.Module, plan: Plan, checkpoint: Checkpoint, sources: Mapping[str, Source], progress: Progress | None
) -> ReadReport:  # fmt: skip
    """Shard the model while it is on meta, and read what this rank then has."""
    loader, error = FileLoader(checkpoint, sources, progress, sharded=True), None
    try:
        check_shardable(model, sources)
    except CheckpointError as found:
        error = found
    agree(ProcessRanks.of(), Mark(), error)
    apply_plan(model, plan, loader=loader)
    assert loader.report is not None
    return loader.report


def _fill(
    tensors: Mapping[str, torch.Tensor], plan: Plan, ranks: ProcessRanks, device: torch.device, checkpoint: Checkpoint,
    sources: Mapping[str, Source], log: list[Undo], progress: Progress | None, model: nn.Module,
) -> ReadReport:  # fmt: skip
    staged = plan.mesh is not None and plan.mesh.pipeline > 1
    own = own_names(plan, ranks, tensors) if staged else set(tensors)
    check_complete(model, {name for name in own if tensors[name].is_meta}, sources)

    def memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in own or not tensor.is_meta:
            return tensor
        return repacked(tensor, lambda stored: memory_like(name, stored, device))

    def is_read(name: str) -> bool:
        tensor = tensors[name]
        small = not isinstance(tensor, nn.Parameter) and tensor.numel() <= SMALL_BUFFER
        return name in own or (small and not tensor.is_meta)

    replace_all(tensors, memory, log)
    targets = [Target(source=name, tensor=tensors[name]) for name in sources if is_read(name)]
    return read_into(checkpoint, sources, targets, progress=progress)
