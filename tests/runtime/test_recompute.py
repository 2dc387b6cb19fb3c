"""Modules that run again in backward are given what they were given, though their forward changed it."""

import copy

import torch

from autoshard.runtime.recompute import hook_recompute


class Notes:
    """An object that a forward changes: a list in it, a tensor, and a number."""

    def __init__(self, start):
        self.kept, self.total, self.calls = [], start, 0


class Noting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.runs = torch.nn.Linear(4, 4), 0

    def forward(self, x, store, notes):
        self.runs += 1
        notes.calls += 1
        store[f"of {notes.calls}"] = self.linear(x)
        notes.kept.append(store[f"of {notes.calls}"])
        notes.total = torch.cat([notes.total, notes.kept[-1]])
        seen = notes.total.mean(0) * notes.calls * len(notes.kept) * len(store)
        return seen.tanh() + x  # of which backward reads the result


def test_lists_dicts_and_objects_that_a_forward_changes_are_as_they_were():
    torch.manual_seed(0)
    original, x = torch.nn.ModuleList(Noting() for _ in range(3)), torch.randn(5, 4)
    model = copy.deepcopy(original)
    hook_recompute(dict(model.named_modules()), ("0", "1", "2"))
    for one in (original, model):
        notes, store, hidden = Notes(x), {}, x
        for block in one:
            hidden = block(hidden, store, notes=notes)
        for _ in range(2):
            hidden.square().sum().backward(retain_graph=True)
        changed = notes.calls, len(notes.kept), len(notes.total), len(store)
        assert changed == (3, 3, 20, 3), "the caller's own, changed once"
    assert [block.runs for block in model] == [3, 3, 3]
    for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
