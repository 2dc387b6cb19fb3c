"""Parts of an applied model called by code around its forward: all that such code works with stays on one device."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.runtime.dispatch import apply_device_map, remove
from tests.hooks import is_hooked

D = 8
CPU = torch.device("cpu")


class Tower(nn.Module):
    """Layers in a list, which nobody calls."""

    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(D, D) for _ in range(2)), nn.LayerNorm(D)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return {"last": self.norm(x)}


class Inner(nn.Module):
    """A model of its own, whose tower is called from outside of it."""

    def __init__(self):
        super().__init__()
        self.embed, self.tower, self.head = nn.Embedding(D, D), Tower(), nn.Linear(D, D)

    def forward(self, ids, seen):
        return self.head(self.embed(ids) + seen.mean(1, keepdim=True))


class Captioner(nn.Module):
    """Its `generate` is no forward: it calls the parts one by one and compares what they say with its inputs."""

    def __init__(self):
        super().__init__()
        self.eyes, self.queries, self.bridge, self.inner = Tower(), nn.Parameter(torch.randn(1, 3, D)), Tower(), Inner()

    def forward(self, image, ids):
        seen = self.bridge(self.queries + self.eyes(image)["last"].mean(1, keepdim=True))["last"]
        return self.inner(ids, self.inner.tower(seen)["last"])

    def generate(self, image, ids, steps=4):
        seen = self.eyes(image)["last"]
        queries = self.queries.expand(len(image), -1, -1)
        seen = seen + self.bridge(queries)["last"].to(seen.device).mean(1, keepdim=True)
        seen = self.inner.tower(seen)["last"]
        for _ in range(steps):
            token = self.inner(ids, seen)[:, -1:].argmax(-1)
            token = torch.where(torch.isin(token, ids), token, (token + 1) % D)
            ids = torch.cat([ids, token], dim=1)
        return ids


class Mixing(nn.Module):
    """Its part takes queries, which are parameters, and inputs."""

    def __init__(self):
        super().__init__()
        self.queries, self.eyes = nn.Parameter(torch.randn(1, 3, D)), nn.Bilinear(D, D, D)

    def forward(self, image):
        return self.eyes(self.queries.expand(len(image), -1, -1), image)


def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 5, D), torch.randint(0, D, (2, 3))


SPREAD = {"queries": "cpu:0", "bridge": "cpu:0", "inner": "cpu:0", "eyes.layers.0": "cpu:1", "eyes.layers.1": "cpu:2",
          "eyes.norm": "cpu:2"}  # fmt: skip


def maps():
    """Cuts of the list of parameters, the devices one way or the other; and every parameter on another device."""
    names, found = [name for name, _ in Captioner().named_parameters()], []
    for start in ("eyes.layers.1", "inner"):
        cut = next(index for index, name in enumerate(names) if name.startswith(start))
        for first, second in (("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")):
            found.append({name: first if index < cut else second for index, name in enumerate(names)})
    return [*found, {name: f"cpu:{index % 3}" for index, name in enumerate(names)}]


@pytest.mark.parametrize("device_map", maps())
@pytest.mark.parametrize("where", ["cpu", "cpu:2"])
def test_a_generate_that_is_no_forward(device_map, where):
    torch.manual_seed(0)
    model = Captioner()
    with torch.no_grad():
        expected = model.generate(*inputs()), model(*inputs())
        with autoshard.simulate("3x1MiB"):
            apply_device_map(model, device_map)
            for _ in range(2):
                found = model.generate(*(x.to(where) for x in inputs()))
                assert found.device == torch.device(where) and torch.equal(found.cpu(), expected[0])
                assert torch.equal(model(*inputs()), expected[1])
            remove(model)
    assert not is_hooked(model)


def test_only_the_outermost_call_sends_its_outputs_back():
    model, seen = Captioner(), []
    with autoshard.simulate("3x1MiB"), torch.no_grad():
        apply_device_map(model, SPREAD)
        model.eyes.layers[0].register_forward_hook(lambda module, args, output: seen.append(output.device))
        assert model.eyes(inputs()[0])["last"].device == CPU
        assert model.eyes.layers[0](inputs()[0]).device == CPU
    assert seen[0] == torch.device("cpu:1")


def test_gradients_through_parts_called_one_by_one():
    torch.manual_seed(0)
    model = Captioner()
    image = inputs()[0]

    def gradients():
        model.zero_grad()
        x = image.clone().requires_grad_()
        (model.bridge(model.eyes(x)["last"])["last"] + x).square().mean().backward()
        return [x.grad, *(p.grad.cpu().clone() for p in model.parameters() if p.grad is not None)]

    expected = gradients()
    with autoshard.simulate("3x1MiB"):
        apply_device_map(model, SPREAD)
        found = gradients()
        remove(model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((D,), 2.0))

    def forward(self, x):
        x.mul_(self.scale)


def test_what_a_part_writes_into_its_argument_reaches_the_caller():
    model = nn.ModuleDict({"other": nn.Linear(D, D), "writer": Writer()})
    with autoshard.simulate("3x1MiB"), torch.no_grad():
        apply_device_map(model, {"other": "cpu:0", "writer": "cpu:1"})
        x = torch.ones(D)
        model["writer"](x)
        assert torch.equal(x, torch.full((D,), 2.0))


def test_a_view_of_a_parameter_that_is_passed_on_says_nothing_of_the_caller():
    """Which is what tells the device here, wherever the view is: the inputs of the part are elsewhere."""
    with autoshard.simulate("3x1MiB"), torch.no_grad():
        model = Mixing()
        apply_device_map(model, {"queries": "cpu:0", "eyes": "cpu:1"})
        image = torch.randn(2, 3, D, device="cpu:2")
        for queries in (model.queries[:, :3].expand(2, -1, -1), model.queries.expand(2, -1, -1)):
            assert model.eyes(queries, image).device == torch.device("cpu:2")
        assert model.eyes(model.queries.repeat(2, 1, 1), image).device == torch.device("cpu:0")
