"""Process groups that autoshard makes along a mesh, and ends when the plan is removed."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from autoshard import torch_private
from autoshard.runtime.collectives import ProcessRanks

Made = list[ProcessRanks]
"""Groups that were made for one applied model, in the order in which they were made."""


def group_of(
    lists: Sequence[Sequence[int]], ranks: ProcessRanks, made: Made, backend: str | None = None
) -> ProcessRanks:
    """Make a group of each list of ranks and return the one that this process is in; all ranks call it."""
    store = torch_private.default_store()
    timeout = None if store is None else store.timeout  # that of `init_process_group`, which groups do not inherit
    own: Any = None
    for members in lists:
        group = dist.new_group(list(members), timeout=timeout, backend=backend)
        if ranks.rank in members:
            own = ProcessRanks.of(group)
    made.append(own)
    return own


def control_group(lists: Sequence[Sequence[int]], ranks: ProcessRanks, usual: ProcessRanks, made: Made) -> ProcessRanks:
    """Return a group for tensors on the CPU: the usual one where it has them; all ranks call it."""
    if dist.get_backend(usual.group) == "gloo":
        return usual
    return group_of(lists, ranks, made, backend="gloo")


def end_groups(made: Made) -> None:
    """Destroy groups and their connections; all of their ranks call it. Nothing of them may be under way."""
    while made:
        group = made.pop().known()
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
