"""Torch's own attention, written out for modes: equal to torch's function, and cut by its heads."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import autoshard
from autoshard.common.attention import written_out


class Inside(TorchFunctionMode):
    """Runs what is written out, and lists the functions that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (inside := written_out(func, args, kwargs)) is not None:
            with self:
                return inside()
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def masks(kind, length):
    above = torch.ones(length, length, dtype=torch.bool).triu(1)
    return {
        "none": {},
        "boolean": {"attn_mask": above},
        "added": {"attn_mask": torch.randn(length, length, dtype=torch.float64)},
        "causal": {"attn_mask": above, "is_causal": True},
    }[kind]


@pytest.mark.parametrize("mask", ["none", "boolean", "added", "causal"])
@pytest.mark.parametrize("keys", ["itself", "others", "of another width"])
def test_what_is_written_out_is_equal(mask, keys):
    """In outputs, weights of attention and gradients, one sequence or several, first or second in the batch."""
    for weights, padded, is_one, batch_first, added in itertools.product((False, True), repeat=5):
        torch.manual_seed(0)
        width = 8 if keys == "of another width" else 16
        settings = {"batch_first": batch_first, "add_bias_kv": added, "add_zero_attn": added and padded}
        model = nn.MultiheadAttention(16, 4, kdim=width, vdim=width, **settings).double()
        query, other = (torch.randn(5, *([] if is_one else [5]), n, dtype=torch.float64) for n in (16, width))
        other = query if keys == "itself" else other
        options = masks(mask, 5) | {"need_weights": weights, "average_attn_weights": padded}
        if padded:
            options["key_padding_mask"] = torch.tensor([False] * 4 + [True]).expand(*([] if is_one else [5]), 5)
        found = []
        for mode in (nullcontext(), inside := Inside()):
            with mode:
                result = model(query, other, other, **options)
            found.append([one for one in result if one is not None])
            found[-1] += torch.autograd.grad(found[-1][0].square().sum(), list(model.parameters()))
        assert nn.functional.linear in inside.seen
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weights", [False, True])
def test_a_query_that_may_see_no_key_is_equal_where_weights_are_dropped(weights):
    """Torch gives it zeros, or NaN where weights of attention are wanted."""
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True).double(), torch.randn(2, 5, 16).double()
    padding, found = torch.tensor([[False] * 5, [True] * 5]), []
    for mode in (nullcontext(), Inside()):
        torch.manual_seed(1)
        with mode:
            result = model(x, x, x, key_padding_mask=padding, need_weights=weights)[0]
        found.append([result, *torch.autograd.grad(result.square().sum(), list(model.parameters()))])
    assert found[0][0].isnan().any() == weights
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12, equal_nan=True)


class Layers(nn.Module):
    """Layers of torch's transformer, and cross attention that gives out its weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.second = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.1)
        self.third = nn.MultiheadAttention(32, 4, kdim=24, vdim=24, bias=False)
        self.narrow = nn.Linear(32, 24)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        x = self.first(x, src_mask=mask, is_causal=True).transpose(0, 1)
        x = self.second(x, x)
        found, weights = self.third(x, self.narrow(x), self.narrow(x))
        return found, weights


@pytest.mark.parametrize("training", [False, True])
def test_layers_of_torch_are_cut(training):
    """Masks of dropout as well: every rank draws what the whole layer draws."""
    torch.manual_seed(0)
    model, x = Layers().train(training), torch.randn(2, 6, 32)
    plan = autoshard.plan(model, "2x1MiB", inputs=x, strategy="column-parallel", objective="memory")
    cut = {f"{block}.{shard.name}" for one in plan.cuts for block in one.blocks for shard in one.shards}
    packed = {f"{path}.in_proj_weight" for path in ("first.self_attn", "second.self_attn", "second.multihead_attn")}
    assert packed | {"third.q_proj_weight", "third.v_proj_weight"} <= {name.lstrip(".") for name in cut}
    assert autoshard.verify(model, plan, inputs=x).ok
