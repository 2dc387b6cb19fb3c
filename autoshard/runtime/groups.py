"""Process groups that autoshard makes along a mesh, and ends when the plan is removed."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch.distributed as dist

from autoshard import torch_private
from autoshard.plan import Mesh
from autoshard.runtime.collectives import ProcessRanks, lost


@dataclass(slots=True, eq=False)
class Made:
    """Groups that were made for one applied model and its copies, in the order in which they were made.

    `users`: what stands for each of these models, and is gone with it.
    """

    groups: list[ProcessRanks] = field(default_factory=list)
    users: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)


def group_of(
    lists: Sequence[Sequence[int]], ranks: ProcessRanks, made: Made, backend: str | None = None
) -> ProcessRanks:
    """Make a group of each list of ranks and return the one that this process is in; all ranks call it.

    Raises `RankError` if a rank is gone.
    """
    store = torch_private.default_store()
    timeout = None if store is None else store.timeout  # that of `init_process_group`, which groups do not inherit
    own: Any = None
    for members in lists:
        try:
            group = dist.new_group(list(members), timeout=timeout, backend=backend)
        except RuntimeError as error:  # it meets the others in the store
            raise lost(ranks, error) from error
        if ranks.rank in members:
            own = ProcessRanks.of(group)
    made.groups.append(own)
    return own


def cut_groups(mesh: Mesh, ranks: ProcessRanks, made: Made) -> ProcessRanks:
    """The ranks that share a replica, or the experts of several, with this process; all ranks call it."""
    degree = mesh.cut_ranks
    return group_of([range(first, first + degree) for first in range(0, mesh.size, degree)], ranks, made)


def lines(grid: numpy.ndarray, axis: int) -> list[list[int]]:
    """The ranks of a grid in lists, in each of which they differ along one axis only."""
    return numpy.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]).tolist()


def grid_of(mesh: Mesh) -> numpy.ndarray:
    """The ranks of a mesh as [replicas, shards of a replica, pipeline ranks, ranks of a stage]."""
    ranks, last = numpy.arange(mesh.size), mesh.size // (mesh.data * mesh.pp)
    if mesh.stages_outermost:
        return ranks.reshape(mesh.pp, mesh.dp, mesh.fsdp, last).transpose(1, 2, 0, 3)
    return ranks.reshape(mesh.dp, mesh.fsdp, mesh.pp, last)


def shard_groups(
    mesh: Mesh, ranks: ProcessRanks, made: Made, experts: bool = False
) -> tuple[ProcessRanks, ProcessRanks | None]:
    """The ranks that share the parameters of a replica, by shards, and those that have the same shard, if several.

    Parameters are sharded over parts of a sequence, too; `experts`: those of a rank, over the ranks of a replica that
    have the same experts.
    """
    if experts or mesh.cp > 1:
        step = mesh.ep if experts else 1
        width = max(mesh.fsdp * mesh.cp, step)
        grid = numpy.arange(mesh.size).reshape(-1, width // step, step)
    elif mesh.fsdp == mesh.size:
        return ranks, None
    else:
        grid = grid_of(mesh)
    shared = _known_group(lines(grid, 1), ranks)
    return shared, group_of(lines(grid, 0), ranks, made) if len(grid) > 1 else None


def _known_group(lists: list[list[int]], ranks: ProcessRanks) -> ProcessRanks:
    """The group of this process among such lists, made once: DTensor remembers a mesh that looks like another one."""
    known, key = _made.setdefault(dist.group.WORLD, {}), tuple(map(tuple, lists))
    if key not in known:
        known[key] = group_of(lists, ranks, Made())
    return known[key]


_made: "weakref.WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], ...], ProcessRanks]]" = weakref.WeakKeyDictionary()


def control_group(lists: Sequence[Sequence[int]], ranks: ProcessRanks, usual: ProcessRanks, made: Made) -> ProcessRanks:
    """Return a group for tensors on the CPU: the usual one where it has them; all ranks call it."""
    if dist.get_backend(usual.group) == "gloo":
        return usual
    return group_of(lists, ranks, made, backend="gloo")


def end_groups(made: Made, user: Any = None) -> None:
    """Destroy groups and their connections, unless a copy of the model uses them; all of their ranks call it.

    `user`: of these groups, which needs them no more. Nothing of them may be under way.
    """
    if user is not None:
        made.users.discard(user)
    if made.users:
        gc.collect()  # a copy that is gone but for a cycle
    while made.groups and not made.users:
        group = made.groups.pop().known()
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
