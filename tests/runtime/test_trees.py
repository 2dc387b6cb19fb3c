"""Random module trees under random maps: any map runs, and gives the same bits."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autoshard
from autoshard.nested import map_tensors
from autoshard.runtime.dispatch import apply_device_map, remove
from tests.models import same

D = 4


class Node(nn.Module):
    """A random tree: children, own tensors, and glue between them chosen by `seed`; any tensor may meet any other."""

    def __init__(self, seed: int, depth: int, pool: list[nn.Module]) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.glue = [chance.randrange(7) for _ in range(4)]
        if chance.random() < 0.4:
            self.scale = nn.Parameter(torch.randn(D))
        if chance.random() < 0.4:
            self.register_buffer("shift", torch.randn(D), persistent=chance.random() < 0.5)
        self.children_list = nn.ModuleList()
        for _ in range(chance.randrange(1, 4)):
            kind = chance.random()
            if depth and kind < 0.6:
                child: nn.Module = Node(chance.randrange(10**6), depth - 1, pool)
            elif pool and kind < 0.75:
                child = chance.choice(pool)
            else:
                child = chance.choice([nn.Linear(D, D), nn.LayerNorm(D), nn.ReLU(inplace=True), nn.Tanh()])
            pool.append(child)
            self.children_list.append(child)

    def forward(self, x, store=None):
        store = {} if store is None else store
        kept = x
        for kind, child in zip(self.glue, self.children_list, strict=False):
            h = child(x, store) if isinstance(child, Node) else child(x.clone() if kind == 0 else x)
            if kind == 1:
                h = h + kept
            elif kind == 2:
                h = torch.cat([h, kept], -1)[..., ::2]
            elif kind == 3:
                store[len(store)] = h
            elif kind == 4 and store:
                h = h * torch.stack(list(store.values())).mean(0)
            elif kind == 5 and isinstance(child, nn.Linear):
                h = h + nn.functional.linear(kept, child.weight)
            elif kind == 6:
                h = h + torch.arange(D)
            x = h
        if hasattr(self, "scale"):
            x = x * self.scale
        if hasattr(self, "shift"):
            self.shift.mul_(0.5)
            x = x + self.shift
        return x


def atoms(module, path=""):
    """Every parameter and buffer by all its names."""
    yield from (name for name, _ in module.named_parameters(remove_duplicate=False))
    yield from (name for name, _ in module.named_buffers(remove_duplicate=False))


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.booleans())
def test_any_tree_under_any_map(seed, map_seed, gradients):
    torch.manual_seed(seed)
    original = Node(seed, 2, [])
    torch.manual_seed(seed)
    model = Node(seed, 2, [])
    chance = random.Random(map_seed)
    device_map = {name: f"cpu:{chance.randrange(3)}" for name in atoms(model)}
    if not device_map:
        device_map = {"": "cpu:1"}
    inputs = [torch.randn(2, D), torch.randn(3, D)]
    with torch.set_grad_enabled(gradients):
        expected = [map_tensors(original(x.clone()), lambda t: t.detach().clone()) for x in inputs]
        with autoshard.simulate("3x1MiB") as devices:
            apply_device_map(model, device_map)
            for x, wanted in zip(inputs, expected, strict=True):
                output = model(x.clone())
                assert same(output, wanted) and output.device == x.device
            del output
            remove(model)
            assert [devices.memory(name)[0] for name in devices] == [0, 0, 0]
    assert same(dict(original.named_buffers()), dict(model.named_buffers()))
