"""What code sees of a module's parameters and buffers while its model runs in every process of a pipeline.

self.weight in a module of this position      the parameter itself
self.weight anywhere else in a forward        a StageTensor of its position, with or without values
model.parameters(), state_dict(), a training   the parameters themselves, on meta where they are not here
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autoshard.runtime.pipeline_record import PipelineRecord
from autoshard.runtime.remote_tensor import StageTensor, staged
from autoshard.runtime.shape_rules import shape_of
from autoshard.runtime.stage_moves import Wire

_stored = dict.__getitem__


class Shown(dict):
    """The tensors of one module by name; `positions`: where each of them lives.

    Looking one up is what `module.name` does; whoever goes through all of them gets them as they are.
    """

    def __init__(self, tensors: Mapping[str, Any], positions: Mapping[str, int], wire: Wire) -> None:
        super().__init__(tensors)
        self.positions, self.wire = positions, wire
        self.faces: dict[str, tuple[Any, StageTensor]] = {}  # what was shown, and what it stands for

    def __getitem__(self, name: str) -> Any:
        tensor = _stored(self, name)
        wire = self.wire
        if tensor is None or wire.record.silent:  # hundreds of times in a step of a schedule
            return tensor
        position = self.positions.get(name)
        if position is None:
            return tensor
        if wire.depth:
            if wire.inside == position == wire.position and not wire.watched:
                return tensor
        elif torch.is_grad_enabled():
            return tensor
        known = self.faces.get(name)
        if known is None or known[0] is not tensor:
            value = tensor if position == wire.position else None
            face = staged(wire, position, value, shape_of(tensor))
            face.requires_grad_(tensor.requires_grad)  # torch reads it when it chooses how to multiply
            known = self.faces[name] = tensor, face
        return known[1]

    def __setitem__(self, name: str, tensor: Any) -> None:
        if self.wire.depth and isinstance(tensor, torch.Tensor):
            if type(tensor) is StageTensor:
                self.faces[name] = super().get(name), tensor
                if tensor.value is None:
                    return
                tensor = tensor.value
            if tensor.is_inference():  # it stays longer than the run
                with torch.inference_mode(False):
                    tensor = tensor.clone()
        super().__setitem__(name, tensor)

    def __deepcopy__(self, memo: dict) -> "Shown":
        from copy import deepcopy

        return Shown({name: deepcopy(tensor, memo) for name, tensor in self.items()}, self.positions, self.wire)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class Away(nn.Parameter):
    """A parameter of another position, on meta: it says that it is where this process computes.

    `inputs.to(model.device)` is common, and means the device of the first parameter.
    """

    record: PipelineRecord

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        record = vars(self).get("record")
        return torch.device("meta") if record is None or record.silent else record.device

    def __deepcopy__(self, memo: dict) -> "Away":
        made = super().__deepcopy__(memo)
        vars(made).update(vars(self))  # the record, too
        return made


def send_away(parameter: Any, record: PipelineRecord) -> None:
    """Let a parameter that is on meta say that it is here."""
    if type(parameter) is nn.Parameter and parameter.is_meta:
        parameter.__class__ = Away
        parameter.record = record  # type: ignore[attr-defined]


def call_back(parameter: Any) -> None:
    """Undo `send_away`."""
    if type(parameter) is Away:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        del parameter.record
