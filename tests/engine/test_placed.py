"""Estimates: rooflines and links by hand, parts that add up, bounds that hold, units and the chain made of them."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.capture import capture
from autoshard.cluster.device import Device
from autoshard.engine.pricer import price
from autoshard.engine.timing import op_seconds, optimizer_seconds
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.profile.measure import profile_graph
from autoshard.profile.units import find_units
from tests.clusters import linked
from tests.models import by_name

INFERENCE, TRAINING = Workload(), Workload(mode="training")


def device(name, memory=1 << 20, **figures):
    return Device(name=name, memory_bytes=memory, flops_per_second={"default": 1e3}, bytes_per_second=1e3, **figures)


def cluster(*devices):
    return linked(devices, 100.0, 0.5)


def plan(placements, objective="latency"):
    return Plan(strategy="by hand", objective=objective, workload=INFERENCE, devices=(), placements=placements)


class Two(nn.Module):
    """a: 10 -> 20, b: 20 -> 30, without biases; a run has one row."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(10, 20, bias=False), nn.Linear(20, 30, bias=False)

    def forward(self, x):
        return self.b(self.a(x))


def two_linears(workload=INFERENCE):
    return profile_graph(capture(Two(), torch.ones(1, 10), workload=workload), workload)


def test_estimate_by_hand():
    """a: 400 FLOPs and 920 bytes, b: 1200 FLOPs and 2600 bytes; h, 80 bytes, goes to d1 and y, 120 bytes, back home."""
    profile, both = two_linears(), cluster(device("d0", launch_seconds=0), device("d1", launch_seconds=0))
    result = price(plan({"a": "d0", "b": "d1"}), profile, both)
    first, second = result.devices
    assert [(t.source, t.destination, t.nbytes, t.producer, t.consumer) for t in result.transfers] == [
        ("d0", "d1", 80, "a", "b"), ("d1", "d0", 120, "b", "(outputs)"),
    ]  # fmt: skip
    assert (first.compute_seconds, second.compute_seconds) == pytest.approx((0.92, 2.6))
    assert (first.transfer_seconds, second.transfer_seconds) == pytest.approx((0.5 + 1.2, 0.5 + 0.8))
    assert result.latency_seconds == pytest.approx(3.52 + 1.7 + 1.3)
    assert result.bottleneck_seconds == pytest.approx(2.6 + 1.3)
    assert result.lower_bound_seconds == pytest.approx(3.52)
    assert result.gap == pytest.approx((3.52 + 3.0) / 3.52 - 1)
    assert (second.parameter_bytes, second.transfer_bytes, second.activation_bytes) == (2400, 80, 120)
    assert (first.peak_bytes, second.peak_bytes, result.fits) == (800 + 40 + 120, 2600, True)  # x and y at the end
    late = price(plan({"": "d"}), profile, cluster(device("d", launch_seconds=0.25)))
    assert late.latency_seconds == pytest.approx(0.25 + 3.52)  # b is launched while a computes, and a view is not
    later = price(plan({"": "d"}), profile, cluster(device("d", launch_seconds=5)))
    assert later.latency_seconds == pytest.approx(2 * 5 + 2.6)  # the device waits for the host
    with pytest.raises(PlanError, match="d9"):
        price(plan({"": "d9"}), profile, both)


def test_overhead_rounding_and_what_does_not_fit():
    odd = cluster(device("d", memory=5000, overhead_bytes=300, block_bytes=512))
    found = price(plan({"": "d"}), two_linears(), odd)
    assert found.devices[0].peak_bytes == 300 + (2 + 5 + 1 + 1 + 1) * 512  # weights; x, h and y in blocks of 512
    assert found.devices[0].free_bytes < 0 and not found.fits


def test_training_counts_gradients_moments_and_the_step():
    profile, whole = two_linears(TRAINING), cluster(device("cpu"))
    (figures,) = price(plan({"": "cpu"}), profile, whole).devices
    assert figures.peak_bytes == profile.peak_bytes
    assert figures.optimizer_bytes == 2 * 3200
    assert figures.compute_seconds == pytest.approx(
        op_seconds(profile, whole.devices[0]).sum() + optimizer_seconds(3200, TRAINING, whole.devices[0])
    )


class Masked(nn.Module):
    """Linear layers with attention under a mask that is made without a device, on the host, and moved."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().to(x.device)
        x = x + nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=seen)
        return x + self.down(self.up(x).relu())


MADE_ON_HOST = {
    "masked": (Masked, lambda: torch.ones(4, 8, 16)),
    **{name: (by_name(name).model, by_name(name).example) for name in ("reads-devices", "t5")},
}


@pytest.mark.parametrize("workload", [INFERENCE, TRAINING], ids=["inference", "training"])
@pytest.mark.parametrize("name", MADE_ON_HOST)
def test_ops_of_the_host_count_in_no_plan_and_no_bound(name, workload):
    model, inputs = (make() for make in MADE_ON_HOST[name])
    profile, found = autoshard.profile(model, inputs, workload=workload), {}
    for count in (1, 2):
        for strategy in ("sequential", "data-parallel", "column-parallel"):
            settings = {"strategy": strategy, "workload": workload, "launch": "one-process", "profile": profile}
            made = autoshard.plan(model, f"{count}xH100-80GB", inputs=inputs, **settings)
            estimate = found[count, strategy] = autoshard.estimate(made, profile)
            assert estimate.lower_bound_seconds <= estimate.latency_seconds * (1 + 1e-9)
    alone = [found[1, strategy].latency_seconds for _, strategy in found]
    assert alone == pytest.approx([found[1, "sequential"].latency_seconds] * len(alone))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["llama-tied", "mixtral"])
def test_parts_add_up_and_one_device_is_the_profile(name, training):
    case, workload = by_name(name), TRAINING if training else INFERENCE
    profile = profile_graph(capture(case.model(), case.example(), workload=workload), workload)
    paths = find_units(profile).paths
    one, two = cluster(device("cpu:0")), cluster(device("cpu:0"), device("cpu:1"))
    (whole,) = price(plan({"": "cpu:0"}), profile, one).devices
    assert whole.peak_bytes == profile.peak_bytes
    half = {path: f"cpu:{int(2 * i >= len(paths))}" for i, group in enumerate(paths) for path in group}
    for objective in ("latency", "throughput"):
        result = price(plan(half, objective), profile, two)
        for figures in result.devices:
            parts = (
                figures.parameter_bytes + figures.buffer_bytes + figures.gradient_bytes + figures.optimizer_bytes
                + figures.activation_bytes + figures.cache_bytes + figures.transfer_bytes + figures.overhead_bytes
            )  # fmt: skip
            assert parts == figures.peak_bytes > 0
        value = result.latency_seconds if objective == "latency" else result.bottleneck_seconds
        assert result.lower_bound_seconds <= value * (1 + 1e-9)
