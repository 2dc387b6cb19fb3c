"""The backward half of a training step: the loss, and what autograd keeps for it, told apart from what Python keeps.

    y = x @ w            Python holds x until its frame ends        Value.died
                         autograd holds x until this node has run   Save.released
                         the memory lives as long as either         Storage.died

A saved-tensor hook gives autograd a handle in place of the tensor, so the tensor object dies when Python lets go of it.
"""

from typing import Any

import torch

from autoshard import nested
from autoshard.capture.allocations import AllocationLog
from autoshard.capture.record import Recorder
from autoshard.errors import CaptureError


class _Kept:
    """What autograd holds: an alias of the saved tensor, which keeps the memory but not the tensor object."""

    __slots__ = ("alias", "log", "save")

    def __init__(self, alias: torch.Tensor, log: AllocationLog, save: int) -> None:
        self.alias, self.log, self.save = alias, log, save

    def __del__(self) -> None:
        self.log.release(self.save)


def saved_tensor_hooks(recorder: Recorder) -> torch.autograd.graph.saved_tensors_hooks:
    """Hooks that note in the log what autograd saves and when it lets go."""
    log = recorder.log

    def pack(tensor: torch.Tensor) -> _Kept:
        value, op = recorder.saved(tensor)
        recorder.unpacked = id(tensor)
        # A detached tensor is a view and holds its base, with all of its history; `.data` holds the memory alone.
        return _Kept(tensor.data, log, log.save(value, op))

    def unpack(kept: _Kept) -> torch.Tensor:
        recorder.unpacked = id(kept.alias)
        log.read_by(kept.save, recorder.op_of_node())
        return kept.alias

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def training_loss(output: Any, name: str) -> torch.Tensor:
    """The output's own `.loss` if it has a differentiable one, else the sum of all its differentiable tensors.

    Raises:
        CaptureError: nothing in the output can be differentiated.
    """
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad:
        return own if own.dim() == 0 else own.sum()
    total = None
    seen: set[int] = set()
    for _, tensor in nested.tensors_in(output):
        if tensor.requires_grad and id(tensor) not in seen:
            seen.add(id(tensor))
            part = (tensor.real if tensor.is_complex() else tensor).sum()
            total = part if total is None else total + part
    if total is None:
        raise CaptureError(
            f"{name} can't be trained: no tensor in its output depends on a parameter that requires grad. "
            "Plan it with mode='inference', or pass inputs (labels, for example) that make it return a loss."
        )
    return total
