"""On accelerators attention is one kernel and a mask of dropout takes a byte, whatever the CPU computes."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.profile.accelerator import on_devices

TOKENS, WIDTH, HEADS, LAYERS = 512, 64, 4, 3
TRAINING = autoshard.Workload(mode="training", batch_size=2)
GPU, TWO = parse_devices("1xH100-80GB"), parse_devices("2xH100-80GB")


class Attention(nn.Module):
    """`values`: how wide values are; dropout in the attention, and behind it."""

    def __init__(self, attention, hidden, values=WIDTH):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, values)
        self.out, self.attention, self.dropout = nn.Linear(values, WIDTH), attention, nn.Dropout(hidden)

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        dropped = self.attention if self.training else 0.0
        made = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped)
        return x + self.dropout(self.out(made.transpose(1, 2).flatten(2)))


def torchs_own(dropout):
    """One layer of torch, whose attention is inside of one function; its dropout is everywhere."""
    return nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, dropout, batch_first=True)


def profile_of(layer, dtype=torch.bfloat16, workload=TRAINING):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer() for _ in range(LAYERS)]).to(dtype)
    return autoshard.profile(model, torch.randn(2, TOKENS, WIDTH, dtype=dtype, requires_grad=True), workload=workload)


def saved_on_gpu(profile):
    return on_devices(profile, GPU).modules[0].saved_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dropping_weights_of_attention_costs_nothing(dtype):
    dropping, plain = profile_of(lambda: Attention(0.1, 0.0), dtype), profile_of(lambda: Attention(0.0, 0.0), dtype)
    assert dropping.activation_peak_bytes > 3 * plain.activation_peak_bytes
    assert saved_on_gpu(dropping) == pytest.approx(saved_on_gpu(plain), rel=0.03)  # but for sums of rows
    assert on_devices(dropping, GPU).flops == dropping.flops
    assert set(on_devices(dropping, GPU).op_dtypes) <= {str(dtype).removeprefix("torch."), "int64"}


def test_a_mask_takes_a_byte_for_each_number():
    dropping, plain = profile_of(lambda: Attention(0.0, 0.1)), profile_of(lambda: Attention(0.0, 0.0))
    masks = saved_on_gpu(dropping) - saved_on_gpu(plain)
    assert masks == LAYERS * 2 * TOKENS * WIDTH


def test_the_attention_of_torchs_own_layers():
    dropping, plain = profile_of(lambda: torchs_own(0.1)), profile_of(lambda: torchs_own(0.0))
    masks = LAYERS * 3 * 2 * TOKENS * WIDTH
    between = LAYERS * 2 * TOKENS * WIDTH * 2  # what is dropped between the two matrices is kept before and after it
    assert dropping.activation_peak_bytes > 2 * plain.activation_peak_bytes
    assert saved_on_gpu(dropping) == pytest.approx(saved_on_gpu(plain) + masks + between, rel=0.02)


def test_values_of_another_width():
    answering = autoshard.Workload(batch_size=2)
    other = profile_of(lambda: Attention(0.0, 0.0, 32).eval(), workload=answering)
    same = profile_of(lambda: Attention(0.0, 0.0, 64).eval(), workload=answering)
    assert other.activation_peak_bytes > 3 * same.activation_peak_bytes
    assert on_devices(other, GPU).activation_peak_bytes <= same.activation_peak_bytes


def test_a_cpu_is_as_it_was_recorded():
    dropping = profile_of(lambda: Attention(0.1, 0.1))
    assert on_devices(dropping, parse_devices("2x1GiB", simulated=True)) is dropping
    plain = profile_of(lambda: Attention(0.0, 0.0))
    assert on_devices(plain, GPU) is plain
    smaller = on_devices(dropping, GPU)
    assert on_devices(smaller, GPU) is smaller and on_devices(dropping, GPU).graph is smaller.graph


def test_a_graph_goes_with_its_profile():
    for dropped in (0.0, 0.1):
        profile = profile_of(lambda dropped=dropped: Attention(dropped, 0.0))
        on_devices(profile, GPU)
        graph = weakref.ref(profile.graph)
        del profile
        gc.collect()
        assert graph() is None


@pytest.mark.parametrize("strategy", ["balanced", "pipeline", "column-parallel", "data-parallel"])
def test_plans_of_one_process_are_priced_so(strategy):
    """Over two devices, in parts of the batch, and cut: each counts the bytes in its own way."""
    torch.manual_seed(0)
    x = torch.randn(4, TOKENS, WIDTH, requires_grad=True)

    def peak(dropped):
        model = nn.Sequential(*[Attention(dropped, 0.0) for _ in range(LAYERS)])
        workload = autoshard.Workload(mode="training", batch_size=4)
        profile = autoshard.profile(model, x, workload=workload)
        settings = {"objective": "memory"} if strategy == "column-parallel" else {}
        plan = autoshard.plan(
            model, TWO, inputs=x, workload=workload, strategy=strategy, launch="one-process", **settings
        )
        return max(one.activation_bytes for one in autoshard.estimate(plan, profile, TWO).devices)

    assert peak(0.1) == pytest.approx(peak(0.0), rel=0.15)
