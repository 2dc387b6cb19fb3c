"""Shared by the capture tests: the model's own answer, an independent memory count, and the peak a graph predicts."""

import gc
import weakref
from collections import Counter

import torch
from torch import nn

from autoshard import nested
from autoshard.capture.backward import training_loss
from autoshard.capture.graph import ModelGraph
from autoshard.capture.inputs import as_call
from autoshard.torch_private import DispatchMode


class Memory(DispatchMode):
    """Counts the bytes of all live storages that ops made or that were entered by hand; views count once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(item, torch.Tensor):
                self.enter(item)
        self.peak = max(self.peak, self.live)
        return out

    def enter(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def forget(_: weakref.ref) -> None:
            self.live -= nbytes
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, forget)
        self.live += nbytes


def measured_peak(model: nn.Module, inputs, *, training: bool) -> int:
    """Run the model for real and count."""
    args, kwargs = as_call(inputs, model)
    gc.collect()
    gc.disable()
    try:
        with torch.set_grad_enabled(training), Memory() as memory:
            given = [tensor for _, tensor in nested.tensors_in((args, kwargs))]
            for tensor in [*model.parameters(), *model.buffers(), *given]:
                memory.enter(tensor)
            output = model(*args, **kwargs)
            if training:
                training_loss(output, "model").backward()
    finally:
        gc.enable()
    return memory.peak


def predicted_peak(graph: ModelGraph) -> int:
    """Most bytes alive at once, from the births and deaths in the graph."""
    changes: Counter[int] = Counter()
    for storage in graph.storages:
        changes[storage.born] += storage.nbytes
        changes[storage.died] -= storage.nbytes
    live = peak = 0
    for time in range(len(graph.ops)):
        live += changes[time]
        peak = max(peak, live)
    return peak


def own_answer(model: nn.Module, inputs, *, training: bool):
    """The model's outputs in order and its gradients by name."""
    args, kwargs = as_call(inputs, model)
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(training):
        output = model(*args, **kwargs)
        if training:
            training_loss(output, "model").backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return [tensor.detach() for _, tensor in nested.tensors_in(output)], gradients


def bitwise(left: torch.Tensor, right: torch.Tensor) -> bool:
    same = left.shape == right.shape and left.dtype == right.dtype
    return same and torch.equal(
        left.nan_to_num() if left.is_floating_point() else left,
        right.nan_to_num() if right.is_floating_point() else right,
    )
