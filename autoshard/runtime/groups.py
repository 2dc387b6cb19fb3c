"""Process groups along a mesh. Each is made once, and is there until torch.distributed ends: copies of a model use it,
and so does the next plan; DTensor remembers a mesh that looks like another one.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from autoshard import torch_private
from autoshard.plan import Mesh
from autoshard.runtime.collectives import ProcessRanks, lost

_known: "weakref.WeakKeyDictionary[Any, dict[Any, ProcessRanks]]" = weakref.WeakKeyDictionary()
"""Of each default group: (lists of ranks, backend) -> the group among these lists that this process is in."""


def group_of(lists: Sequence[Sequence[int]], ranks: ProcessRanks, backend: str | None = None) -> ProcessRanks:
    """Make a group of each list of ranks and return the one that this process is in; all ranks call it.

    Raises `RankError` if a rank is gone.
    """
    known, key = _known.setdefault(dist.group.WORLD, {}), (tuple(map(tuple, lists)), backend)
    if key not in known:
        store = torch_private.default_store()
        timeout = None if store is None else store.timeout  # that of `init_process_group`, which groups do not inherit
        for members in key[0]:
            try:
                group = dist.new_group(list(members), timeout=timeout, backend=backend)
            except RuntimeError as error:  # it meets the others in the store
                raise lost(ranks, error) from error
            if ranks.rank in members:
                known[key] = ProcessRanks.of(group)
    return known[key]


def cut_groups(mesh: Mesh, ranks: ProcessRanks) -> ProcessRanks:
    """The ranks that share a replica, or the experts of several, with this process; all ranks call it."""
    degree = mesh.tensor * mesh.cp * mesh.ep
    return group_of([range(first, first + degree) for first in range(0, mesh.size, degree)], ranks)


def shard_groups(mesh: Mesh, ranks: ProcessRanks) -> tuple[ProcessRanks, ProcessRanks | None]:
    """The ranks that share the parameters of a replica, by shards, and those that have the same shard, if several."""
    if mesh.fsdp == mesh.size:
        return ranks, None
    if mesh.cp > 1:
        return data_groups(mesh, ranks)
    replicas = [
        [[mesh.rank(data=d * mesh.fsdp + f, pipeline=p, tensor=t) for f in range(mesh.fsdp)] for d in range(mesh.dp)]
        for p in range(mesh.pipeline)
        for t in range(mesh.tensor)
    ]
    shared = group_of([members for same_part in replicas for members in same_part], ranks)
    if mesh.dp == 1:
        return shared, None
    alike = [members for same_part in replicas for members in zip(*same_part, strict=True)]
    return shared, group_of(alike, ranks)


def data_groups(mesh: Mesh, ranks: ProcessRanks, experts: bool = False) -> tuple[ProcessRanks, ProcessRanks | None]:
    """As `shard_groups`, where samples are divided along their tokens, or for the experts of a rank.

    Parameters are sharded over parts of a sequence, too; experts over those ranks of a replica that have the same.
    """
    step = mesh.ep if experts else 1
    width = max(mesh.fsdp * mesh.cp if mesh.fsdp > 1 else 1, step)
    shared = [range(first + own, first + width, step) for first in range(0, mesh.size, width) for own in range(step)]
    among = group_of(shared, ranks)
    if width == mesh.size:
        return among, None
    alike = [list(members) for own in range(step) for members in zip(*shared[own::step], strict=True)]
    return among, group_of(alike, ranks)


def control_group(lists: Sequence[Sequence[int]], ranks: ProcessRanks, usual: ProcessRanks) -> ProcessRanks:
    """Return a group for tensors on the CPU: the usual one where it has them; all ranks call it."""
    if dist.get_backend(usual.group) == "gloo":
        return usual
    return group_of(lists, ranks, backend="gloo")
