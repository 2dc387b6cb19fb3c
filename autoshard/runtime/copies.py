"""The memo of copies: a tensor that several modules of a device need is copied there once.

    mask (cuda:0) ──▶ copy on cuda:1, shared by layers 8 … 15, gone when the mask is gone
    hidden        ──▶ copy on cuda:1, gone when the hidden state is gone
    weight        ──▶ copy on cuda:1, kept between forwards, made anew when the weight has been written

A source is held weakly and its copy strongly. What may change without torch noticing is not trusted for long: copies of
tensors other than parameters are used within one run only, since the user may write an input through
numpy between two calls; and tensors made in inference mode, whose writes nobody counts, are copied every time. What is
left is a parameter written through `.data` between two forwards without gradients: torch does not count that, and its
copy is renewed only at the next forward with gradients.

Under autograd a copy has history: the gradients of all who read it are added up where it is, and travel back once.
"""

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard.common.packed import stored_tensors
from autoshard.runtime.devices import copy_tensor
from autoshard.torch_private import is_transformed, version_of

Key = tuple[int, torch.device, bool]


@dataclass(slots=True)
class _Entry:
    """A copy, what it was made of, and the versions of both by which writes are noticed.

    `source` is a weak reference, or the tensor itself if that is a parameter: those live as long as the model anyway,
    and torch refuses to convert a parameter that someone refers to weakly.
    """

    source: Any
    copy: torch.Tensor
    source_version: tuple[int, int]
    copy_version: int
    stays: bool


def _forget(memo: "weakref.ref[Copies]", key: Key, _source: Any) -> None:
    """Take the copy of a source that is gone out of the memo."""
    copies = memo()
    if copies is not None:
        copies._entries.pop(key, None)


class Copies:
    """Copies made for one applied model."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self.in_run = False
        self.runs = 0  # begun so far
        self.carry = copy_tensor  # `devices.send` where parts of a batch follow one another

    def begin(self) -> None:
        """Forget, at the start of a run, what may have changed since the last one."""
        training = torch.is_grad_enabled()  # weights change after it, perhaps by `.data`, which leaves no trace
        if self._entries:
            for key, entry in list(self._entries.items()):
                if not entry.stays or (training and entry.source.requires_grad):
                    self._entries.pop(key, None)
        self.in_run = True
        self.runs += 1

    def end(self) -> None:
        """Let go, at the end of a run, of copies with autograd history; the graph holds those it needs."""
        for key in list(self._entries):
            if key[2]:
                self._entries.pop(key, None)
        self.in_run = False

    def clear(self) -> None:
        """Forget all copies."""
        self._entries.clear()
        self.in_run = False

    def get(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return `source` on `device`: a copy that exists already, or a new one; with a way back for gradients."""
        if is_transformed(source):  # an inner tensor of `torch.func`: it has no memory by which writes could be told
            return copy_tensor(source, device)
        if source.is_inference():
            return self._tracked_copy(source, device)
        differentiable = source.requires_grad and torch.is_grad_enabled()
        key = (id(source), device, differentiable)
        entry = self._entries.get(key)
        if entry is not None:
            if version_of(entry.copy) != entry.copy_version:
                self.write_back(source, entry.copy)
            if entry.source_version == _version(source):
                return entry.copy
        copy = self._tracked_copy(source, device)
        stays = isinstance(source, nn.Parameter) and not differentiable
        if self.in_run or stays:
            is_parameter = isinstance(source, nn.Parameter)
            held: Any = source if is_parameter else weakref.ref(source, partial(_forget, weakref.ref(self), key))
            self._entries[key] = _Entry(held, copy, _version(source), version_of(copy), stays)
        return copy

    def _tracked_copy(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy as an ordinary tensor, also in inference mode: one that counts its writes and may be used outside later.

        A copy of a weight says that it requires grad as the weight does, also without gradients: torch reads it when it
        chooses how to multiply, and other choices give other bits.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                copy = self.carry(source, device)
        else:
            copy = self.carry(source, device)
        if source.requires_grad and not copy.requires_grad:
            copy.requires_grad_()
        return copy

    def write_back(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """Bring what was written into `copy` to its source; the copy stays valid."""
        source.copy_(copy)
        for key, entry in list(self._entries.items()):
            if key[0] == id(source) and entry.copy is copy:
                entry.source_version, entry.copy_version = _version(source), version_of(entry.copy)


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Counts the writes torch saw; the address tells of memory exchanged by `tensor.data = …`."""
    stored = stored_tensors(tensor)[0]
    return version_of(stored), stored.data_ptr() if stored.layout is torch.strided else 0
