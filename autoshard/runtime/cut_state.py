"""The state of a cut model: what was done to it, and its state dict, in which all tensors are whole."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoshard.common.module_paths import join
from autoshard.errors import RankError
from autoshard.plan.sharding import Cut
from autoshard.runtime.agreement import RankState, agree
from autoshard.runtime.collectives import Ranks, layout
from autoshard.runtime.dtensors import is_sharded, whole_of
from autoshard.runtime.moves import named_tensors
from autoshard.runtime.rank_tensor import RankTensor
from autoshard.runtime.scales import Old
from autoshard.runtime.slices import CutTensor, merge, part_of


@dataclass(slots=True, kw_only=True)
class CutRecord:
    """What was applied to a model, and what undoes it.

    Attributes:
        fingerprint: of the model before.
        tensors: name -> how it is cut; `devices`: name -> where it was before.
        partial: name of a parameter -> how its gradient is summed: None all of it, else the cut whose replicated
            indices are.
        scales, handles: undo the integers and the hooks.
        caches: of functions that the model calls, where this process has all ranks.
        output_device: where this process computes, None where the model was.
        gathered: its parameters are sharded as well, and gathered for their use.
        running: ids of the blocks that run, and of the modules around them.
    """

    cuts: tuple[Cut, ...]
    ranks: Ranks
    fingerprint: str
    tensors: dict[str, CutTensor]
    devices: dict[str, torch.device]
    partial: dict[str, CutTensor | None]
    scales: list[Old] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    output_device: torch.device | None = None
    gathered: bool = False
    running: set[int] = field(default_factory=set)


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


def _meet(ranks: Ranks) -> None:
    """Raise `RankError` unless all ranks ask for the whole state; the first exchange would only say that it waited."""
    try:
        agree(ranks, RankState(plan="state_dict"))
    except RankError as error:
        raise RankError(
            f"{error} state_dict() of a model that is divided over processes puts tensors together: call it on all "
            "ranks, or autoshard.save(model, path), which never holds more than one."
        ) from error


class WholeState:
    """Hooks of a module of a divided model: its `state_dict()` has whole tensors, which all ranks put together.

    Every module has them, as code saves an encoder alone; those inside have done their part when one around them does.
    With `keep_vars=True` it has the parameters themselves, which are parts; nobody else is asked then.
    """

    def __init__(self, ranks: Ranks, path: str) -> None:
        self.ranks, self.path, self.keep = ranks, path, False

    def whole(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """Put one value together; it may be whole already. All ranks call it."""
        raise NotImplementedError

    def put_on(self, module: nn.Module) -> list[Any]:
        """Register the hooks; returns handles."""
        return [module.register_state_dict_pre_hook(self.begin), module.register_state_dict_post_hook(self)]

    def begin(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Hook before a state dict is made: who is called by itself meets the other ranks."""
        self.keep = keep_vars
        if not keep_vars and (not self.path or not prefix):
            _meet(self.ranks)

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        if self.keep:
            return
        tensors = named_tensors(module)
        made: dict[int, torch.Tensor] = {}  # tied names share one tensor, as ever
        for name, value in state.items():
            if name.startswith(prefix) and isinstance(value, torch.Tensor):
                own = name.removeprefix(prefix)
                key = id(tensors.get(own, value))
                if key not in made:
                    made[key] = self.whole(value, join(self.path, own))
                state[name] = made[key]


class CutState(WholeState):
    """The same for a module of a cut model, which also takes whole tensors when it loads."""

    def __init__(self, record: CutRecord, path: str) -> None:
        super().__init__(record.ranks, path)
        self.record = record

    def put_on(self, module: nn.Module) -> list[Any]:
        return [*super().put_on(module), module.register_load_state_dict_pre_hook(self.divide)]

    def whole(self, value: torch.Tensor, name: str) -> torch.Tensor:
        plain = not isinstance(value, RankTensor) and not is_sharded(value)
        if plain and tuple(value.shape) == whole_shape(value, name, self.record):
            return value
        return whole_tensor(value, name, self.record)

    def divide(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Take this rank's part of what is about to be loaded, where it is whole."""
        own, record = module.state_dict(keep_vars=True), self.record
        for key, value in state.items():
            name = key.removeprefix(prefix)
            mine = own.get(name) if key.startswith(prefix) else None
            if mine is None or not isinstance(value, torch.Tensor) or isinstance(value, RankTensor):
                continue
            name = join(self.path, name)
            if tuple(value.shape) == whole_shape(mine, name, record):
                state[key] = part_of(value, record.tensors.get(name), record.ranks, None)
