"""Cut models of which a part is not trained, as in fine-tuning: the gradients of the rest are those of the plain model.

Equal blocks share one list of actions, and the first of them may be frozen where others are trained.
"""

import pytest
import torch
from torch import nn

import autoshard

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # sums over devices have another order


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Adapted(nn.Module):
    """A frozen layer, and a small one beside it that is trained."""

    def __init__(self, layer):
        super().__init__()
        self.layer, sizes = layer.requires_grad_(False), (layer.in_features, layer.out_features)
        self.down, self.up = nn.Linear(sizes[0], 2, bias=False), nn.Linear(2, sizes[1], bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, ids):
        return self.blocks(self.embed(ids))


def first_half(model):
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].norm.requires_grad_(False)


def adapters(model):
    model.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)


def net(freeze):
    torch.manual_seed(0)
    model = Net()
    freeze(model)
    return model


def gradients(model, ids):
    model(ids).square().mean().backward()
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("freeze", [first_half, adapters])
def test_gradients_where_some_parameters_are_frozen(freeze):
    """As they were when the plan was made, and thawed afterwards."""
    original, model, ids = net(freeze), net(freeze), torch.arange(6).reshape(2, 3)
    with autoshard.simulate("2x1MiB") as devices:
        plan = autoshard.plan(model, devices, inputs=ids, strategy="column-parallel", objective="memory")
        assert any(cut.blocks[0] == "blocks.0" for cut in plan.cuts)
        for thawed in (False, True):
            autoshard.apply(model, plan)
            for one in (original, model):
                one.zero_grad()
                one.requires_grad_(True) if thawed else None
            wanted, _ = gradients(original, ids), gradients(model, ids)
            autoshard.remove(model)
            found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
            torch.testing.assert_close(found, wanted, **TOLERANCE)
