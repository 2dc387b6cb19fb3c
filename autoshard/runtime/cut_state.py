"""The state of a cut model: what was done to it, and its state dict, in which all tensors are whole."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoshard.errors import RankError
from autoshard.runtime.agreement import Mark, agree
from autoshard.runtime.collectives import Ranks, layout
from autoshard.runtime.draws import Unplanned
from autoshard.runtime.local_ranks import LocalRanks
from autoshard.runtime.moves import named_tensors
from autoshard.runtime.rank_tensor import RankTensor
from autoshard.runtime.scales import Old
from autoshard.runtime.sharded import whole_of
from autoshard.runtime.slices import CutTensor, merge, slice_of
from autoshard.sharding import Cut


@dataclass(slots=True, kw_only=True)
class CutRecord:
    """What was applied to a model, and what undoes it.

    Attributes:
        fingerprint: of the model before.
        tensors: name -> how it is cut; `devices`: name -> where it was before.
        partial: name of a parameter -> how its gradient is summed: None all of it, else the cut whose replicated
            indices are.
        unplanned: blocks that may not draw random numbers in training.
        scales, handles: undo the integers and the hooks.
        home: where this process computes, None where the model was.
        gathered: its parameters are sharded as well, and gathered for their use.
    """

    cuts: tuple[Cut, ...]
    ranks: Ranks
    fingerprint: str
    tensors: dict[str, CutTensor]
    devices: dict[str, torch.device]
    partial: dict[str, CutTensor | None]
    unplanned: Unplanned
    scales: list[Old] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    home: torch.device | None = None
    gathered: bool = False


def whole_tensor(value: torch.Tensor, name: str, record: CutRecord | None) -> torch.Tensor:
    """One value of a model's state dict as it is when the model is not cut; all ranks call it."""
    if record is None:
        return value
    value = whole_of(value)
    return merge(value, record.tensors.get(name), record.ranks).to(value.device)


def whole_shape(value: torch.Tensor, name: str, record: CutRecord | None) -> tuple[int, ...]:
    """The shape that `whole_tensor` will have, known without asking the other ranks."""
    cut = None if record is None else record.tensors.get(name)
    if cut is None:
        return tuple(value.shape)
    return *value.shape[: cut.dim], layout(cut.axis, cut.shares).size, *value.shape[cut.dim + 1 :]


def local_values(state: Mapping[str, Any], record: CutRecord, prefix: str = "") -> dict[str, Any]:
    """This process's parts of whole tensors, under their names with a prefix."""
    if isinstance(record.ranks, LocalRanks):
        devices = record.ranks.devices
        return {
            prefix + name: RankTensor(
                [
                    (slice_of(value, record.tensors[name], rank) if name in record.tensors else value).to(one)
                    for rank, one in enumerate(devices)
                ],
                devices,
            )
            for name, value in state.items()
        }
    rank = record.ranks.rank or 0
    return {
        prefix + name: slice_of(value, record.tensors[name], rank) if name in record.tensors else value
        for name, value in state.items()
    }


def _meet(ranks: Ranks) -> None:
    """Raise `RankError` unless all ranks ask for the whole state; the first exchange would only say that it waited."""
    try:
        agree(ranks, Mark(plan="state_dict"))
    except RankError as error:
        raise RankError(
            f"{error} state_dict() of a model that is cut over processes puts every tensor together: call it on all "
            "ranks, or autoshard.save(model, path), which never holds more than one."
        ) from error


class Whole:
    """Hooks of a cut model: its `state_dict()` has whole tensors, which all ranks put together; and loading takes them.

    With `keep_vars=True` it has the parameters themselves, which are parts; nobody else is asked then.
    """

    def __init__(self, record: CutRecord) -> None:
        self.record = record

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        if any(isinstance(value, nn.Parameter) for value in state.values()):
            return
        _meet(self.record.ranks)
        tensors = named_tensors(module)
        made: dict[int, torch.Tensor] = {}  # tied names share one tensor, as ever
        for name, value in state.items():
            if name.startswith(prefix) and isinstance(value, torch.Tensor):
                own = name.removeprefix(prefix)
                key = id(tensors.get(own, value))
                if key not in made:
                    made[key] = whole_tensor(value, own, self.record)
                state[name] = made[key]

    def divide(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Take this rank's part of what is about to be loaded, where it is whole."""
        own = module.state_dict(keep_vars=True)
        for name, value in state.items():
            mine = own.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
            if mine is None or not isinstance(value, torch.Tensor) or isinstance(value, RankTensor):
                continue
            if tuple(value.shape) == whole_shape(mine, name.removeprefix(prefix), self.record):
                state |= local_values({name.removeprefix(prefix): value}, self.record, prefix)
