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


class Notes:
    """An object that a forward changes: a list in it, a tensor, and a number."""

    def __init__(self, start):
        self.kept, self.total, self.calls = [], start, 0


class Noting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, notes):
        notes.calls += 1
        notes.kept.append(self.linear(x))
        notes.total = torch.cat([notes.total, notes.kept[-1]])
        return notes.total.mean(0) * notes.calls * len(notes.kept) + x


def test_objects_that_a_forward_changes_are_as_they_were():
    torch.manual_seed(0)
    original, x = torch.nn.ModuleList(Noting() for _ in range(3)), torch.randn(5, 4)
    model = copy.deepcopy(original)
    hook_recompute(dict(model.named_modules()), ("0", "1", "2"))
    for one in (original, model):
        notes, hidden = Notes(x), x
        for block in one:
            hidden = block(hidden, notes=notes)
        for _ in range(2):
            hidden.square().sum().backward(retain_graph=True)
        assert (notes.calls, len(notes.kept), len(notes.total)) == (3, 3, 20), "the caller's own, changed once"
    for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
