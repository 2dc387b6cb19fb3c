"""Modules that run again in backward are given what they were given, though their forward changed it."""

import copy

import pytest
import torch

from autoshard.runtime.recompute import hook_recompute
from tests.models import by_name


@pytest.mark.parametrize("name", ["mutated-dict", "growing-list"])
def test_changed_arguments_are_as_they_were(name):
    case = by_name(name)
    original, inputs = case.model(), case.example(case.shapes[0])
    model = copy.deepcopy(original)
    modules = dict(model.named_modules())
    hook_recompute(modules, tuple(f"layers.{index}" for index in range(4)))
    runs = []
    model.layers[1].fc.register_forward_pre_hook(lambda module, args: runs.append(len(runs)))
    for one in (original, model):
        output = one(**inputs)
        loss = sum(part.sum() for part in (output if isinstance(output, tuple) else (output,)))
        for _ in range(2):
            loss.backward(retain_graph=True)
    assert len(runs) == 3
    for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
