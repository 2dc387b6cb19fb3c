"""Random masks of cut tensors: drawn for the whole tensor, or the cut is refused."""

import torch
import torch.nn.functional as F
from torch import nn

from autoshard.axes.groups import find_groups
from autoshard.capture.capture import capture


class Block(nn.Module):
    def __init__(self, shared: bool):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.inner = nn.Dropout(0.5)
        self.outer = self.inner if shared else nn.Dropout(0.5)

    def forward(self, x):
        return x + self.outer(self.down(self.inner(F.gelu(self.up(self.norm(x))))))


def groups(training, shared=False):
    model = nn.Sequential(Block(shared), Block(shared)).train(training)
    return find_groups(capture(model, torch.randn(2, 3, 8), composite=True)).groups


def test_a_mask_for_a_cut_tensor_is_an_action():
    (group,) = [group for group in groups(True) if len(group.shards) == 3]
    (action,) = [action for action in group.actions if action.kind == "dropout"]
    assert (action.module, action.function, action.dim, action.axis) == ("inner", "dropout", 2, "*32")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 * self.training)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


def test_the_scores_of_attention_are_dropped_for_the_heads_of_a_rank():
    model = nn.Sequential(Attention(), Attention()).train()
    groups = find_groups(capture(model, torch.randn(2, 3, 16), composite=True)).groups
    (group,) = [group for group in groups if len(group.shards) == 3]
    (action,) = [action for action in group.actions if action.kind == "dropout"]
    assert (action.function, action.dim, action.axis) == ("scaled_dot_product_attention", 1, "*4")


def test_nothing_is_drawn_in_evaluation():
    (group,) = [group for group in groups(False) if len(group.shards) == 3]
    assert {action.kind for action in group.actions} == {"reduce", "copy_to"}


def test_one_module_that_draws_for_cut_and_whole_tensors_refuses_the_cut():
    assert not [group for group in groups(True, shared=True) if len(group.shards) == 3]
