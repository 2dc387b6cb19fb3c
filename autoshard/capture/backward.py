"""The backward half of a training step: the loss, and what autograd keeps for it, told apart from what Python keeps.

    y = x @ w            Python holds x until its frame ends        Value.died
                         autograd holds x until this node has run   Save.released
                         the memory lives as long as either         Storage.died

A saved-tensor hook gives autograd a handle in place of the tensor, so the tensor object dies when Python lets go of it.
"""

import weakref
from typing import Any

import torch

from autoshard import nested
from autoshard.capture.ledger import Ledger
from autoshard.capture.record import Recorder
from autoshard.errors import CaptureError


class _Kept:
    """What autograd holds: an alias of the saved tensor, which keeps the memory but not the tensor object."""

    __slots__ = ("alias", "ledger", "origin", "save", "version")

    def __init__(self, alias: torch.Tensor, origin: weakref.ref | None, ledger: Ledger, save: int) -> None:
        self.alias = alias
        self.origin = origin
        self.version = _version(origin)
        self.ledger = ledger
        self.save = save

    def __del__(self) -> None:
        self.ledger.release(self.save)


def saved_tensor_hooks(recorder: Recorder) -> torch.autograd.graph.saved_tensors_hooks:
    """Hooks that note in the ledger what autograd saves and when it lets go."""
    ledger = recorder.ledger

    def pack(tensor: torch.Tensor) -> _Kept:
        value, op, origin = recorder.saved(tensor)
        save = ledger.save(value, op)
        recorder.unpacked = id(tensor)
        # A detached tensor is a view and holds its base, with all of its history; `.data` holds the memory alone.
        return _Kept(tensor.data, origin, ledger, save)

    def unpack(kept: _Kept) -> torch.Tensor:
        version = _version(kept.origin)
        if version is not None and version != kept.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {kept.alias.dtype} tensor of shape {tuple(kept.alias.shape)}"
            )
        recorder.unpacked = id(kept.alias)
        return kept.alias

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def training_loss(output: Any, name: str) -> torch.Tensor:
    """The output's own `.loss` if it has a differentiable one, else the sum of all its differentiable floating tensors.

    Raises:
        CaptureError: nothing in the output can be differentiated.
    """
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad:
        return own if own.dim() == 0 else own.sum()
    total = None
    seen: set[int] = set()
    for _, tensor in nested.tensors_in(output):
        if tensor.requires_grad and tensor.is_floating_point() and id(tensor) not in seen:
            seen.add(id(tensor))
            part = tensor.sum()
            total = part if total is None else total + part
    if total is None:
        raise CaptureError(
            f"{name} can't be trained: no tensor in its output depends on a parameter that requires grad. "
            "Plan it with mode='inference', or pass inputs (labels, for example) that make it return a loss."
        )
    return total


def _version(origin: weakref.ref | None) -> int | None:
    """How often the saved tensor was written; None once it is gone (whoever then runs the model is told by torch)."""
    tensor = origin() if origin is not None else None
    return None if tensor is None else tensor._version
