"""Shared by the capture tests: the model's own answer, an independent memory count, and the peak a graph predicts."""

import gc
from collections import Counter

import torch
from torch import nn

from autoshard import nested
from autoshard.capture.backward import training_loss
from autoshard.capture.graph import ModelGraph
from autoshard.capture.inputs import as_call
from tests.live_bytes import LiveBytes


def measured_peak(model: nn.Module, inputs, *, training: bool) -> int:
    """Run the model for real and count."""
    args, kwargs = as_call(inputs, model)
    gc.collect()
    gc.disable()
    try:
        tensors = [*model.parameters(), *model.buffers()]
        with torch.set_grad_enabled(training), LiveBytes(tensors, args, kwargs) as live:
            output = model(*args, **kwargs)
            if training:
                training_loss(output, "model").backward()
    finally:
        gc.enable()
    return live.peak


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
