"""Modules that run again in backward are given what they were given, though their forward changed it."""

import copy

import pytest
import torch
import transformers

import autoshard
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


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_plan_for_one_device_recomputes_what_it_says(recompute):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, vocab_size=50)
    original = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=4, **sizes))
    model, ids = copy.deepcopy(original), torch.randint(50, (2, 8))
    batch = {"input_ids": ids, "labels": ids}
    workload = autoshard.Workload(batch_size=2, sequence_length=8, mode="training")
    asked = dict(launch="processes", recompute=recompute, inputs=batch, workload=workload)
    plan = autoshard.plan(model, "cpu", **asked)
    assert plan.launch == "one-process" and len(plan.layers) == 3 and plan.kept_layers < 3
    runs = []
    autoshard.apply(model, autoshard.Plan.from_json(plan.to_json()))
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda *_: runs.append(1))
    for one in (original, model):
        one(**batch).loss.backward()
    assert len(runs) == 3 + 3 - plan.kept_layers
    for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    autoshard.remove(model)
    model(**batch).loss.backward()
    assert len(runs) == 3 + 3 - plan.kept_layers + 3
