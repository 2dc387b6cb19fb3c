"""Estimates: rooflines and links by hand, parts that add up, bounds that hold, units and the chain made of them."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autoshard
from autoshard.capture.capture import capture
from autoshard.cluster.cluster import Cluster, Device, Link
from autoshard.cost import estimate, lower_bound, op_seconds, optimizer_seconds, relaxed_bound, unit_seconds
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.profile.measure import gradient_surplus, profile_graph
from autoshard.profile.units import find_units
from autoshard.strategies.chain import chain_from_profile
from autoshard.workload import Workload
from tests.conformance.checks import measured_peaks
from tests.models import by_name
from tests.profile.test_measure import two_linears

INFERENCE, TRAINING = Workload(), Workload(mode="training")


def device(name, memory=1 << 20, **figures):
    return Device(name=name, memory_bytes=memory, flops_per_second={"default": 1e3}, bytes_per_second=1e3, **figures)


def cluster(*devices):
    links = tuple(
        Link(source=a.name, destination=b.name, bytes_per_second=100.0, latency_seconds=0.5)
        for a, b in itertools.permutations(devices, 2)
    )
    return Cluster(devices=devices, links=links)


def plan(placements, objective="latency"):
    return Plan(strategy="by hand", objective=objective, workload=INFERENCE, devices=(), placements=placements)


def test_seconds_of_an_op_are_its_roofline_and_a_launch():
    profile = profile_graph(two_linears(), INFERENCE)
    seconds = op_seconds(profile, device("d", launch_seconds=0.25))
    # a: 200 FLOPs, 520 bytes; the view is free; b: 1000 FLOPs, 400 bytes
    assert seconds.tolist() == pytest.approx([0.52 + 0.25, 0.0, 1.0 + 0.25])


def test_estimate_by_hand():
    profile = profile_graph(two_linears(), INFERENCE)
    both = cluster(device("d0", launch_seconds=0), device("d1", launch_seconds=0))
    result = estimate(plan({"a": "d0", "b": "d1"}), profile, both)
    first, second = result.devices
    # h, 80 bytes, goes to d1 for b; y, 120 bytes, goes home to d0
    assert [(t.source, t.destination, t.nbytes, t.producer, t.consumer) for t in result.transfers] == [
        ("d0", "d1", 80, "a", "b"), ("d1", "d0", 120, "b", ""),
    ]  # fmt: skip
    assert (first.compute_seconds, second.compute_seconds) == pytest.approx((0.52, 1.0))
    assert (first.transfer_seconds, second.transfer_seconds) == pytest.approx((0.5 + 1.2, 0.5 + 0.8))
    assert result.latency_seconds == pytest.approx(1.52 + 1.7 + 1.3)
    assert result.bottleneck_seconds == pytest.approx(1.0 + 1.3)
    assert result.lower_bound_seconds == pytest.approx(1.52)
    assert result.gap == pytest.approx((1.52 + 3.0) / 1.52 - 1)
    assert (second.parameter_bytes, second.transfer_bytes, second.activation_bytes) == (200, 80, 120)
    assert (first.peak_bytes, second.peak_bytes, result.fits) == (4 * 140, 400, True)  # a's weight, x, y at the end


def test_overhead_rounding_and_what_does_not_fit():
    profile = profile_graph(two_linears(), INFERENCE)
    odd = device("d", memory=1000, overhead_bytes=300, block_bytes=512)
    (figures,) = estimate(plan({"": "d"}), profile, cluster(odd)).devices
    # weights, h and y in blocks of 512, x as well
    assert figures.peak_bytes == 300 + 5 * 512
    assert figures.free_bytes < 0
    assert not estimate(plan({"": "d"}), profile, cluster(odd)).fits


def test_training_counts_gradients_moments_and_the_step():
    profile = profile_graph(two_linears(training=True), TRAINING)
    whole = cluster(device("cpu"))
    (figures,) = estimate(plan({"": "cpu"}), profile, whole).devices
    assert figures.peak_bytes == profile.peak_bytes
    assert figures.optimizer_bytes == 1200
    assert figures.compute_seconds == pytest.approx(
        op_seconds(profile, whole.devices[0]).sum() + optimizer_seconds(600, TRAINING, whole.devices[0])
    )


def test_a_device_the_cluster_lacks_is_refused():
    with pytest.raises(PlanError, match="d9"):
        estimate(plan({"": "d9"}), profile_graph(two_linears(), INFERENCE), cluster(device("d0")))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["llama-tied", "t5", "vit", "convnext", "mixtral"])
def test_parts_add_up_and_one_device_is_the_profile(name, training):
    case, workload = by_name(name), TRAINING if training else INFERENCE
    profile = profile_graph(capture(case.model(), case.example(), workload=workload), workload)
    paths = find_units(profile).paths
    one, two = cluster(device("cpu:0")), cluster(device("cpu:0"), device("cpu:1"))
    (whole,) = estimate(plan({"": "cpu:0"}), profile, one).devices
    assert whole.peak_bytes == profile.peak_bytes
    half = {path: f"cpu:{int(2 * i >= len(paths))}" for i, group in enumerate(paths) for path in group}
    for objective in ("latency", "throughput"):
        result = estimate(plan(half, objective), profile, two)
        for figures in result.devices:
            parts = (
                figures.parameter_bytes + figures.buffer_bytes + figures.gradient_bytes + figures.optimizer_bytes
                + figures.activation_bytes + figures.cache_bytes + figures.transfer_bytes + figures.overhead_bytes
            )  # fmt: skip
            assert parts == figures.peak_bytes > 0
        value = result.latency_seconds if objective == "latency" else result.bottleneck_seconds
        assert result.lower_bound_seconds <= value * (1 + 1e-9)


@settings(max_examples=60)
@given(st.data())
def test_no_assignment_beats_the_bound(data):
    units, devices = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    numbers = st.integers(1, 20)
    seconds = np.array([[data.draw(numbers) for _ in range(units)] for _ in range(devices)], float)
    held = np.array([data.draw(numbers) for _ in range(units)], float)
    capacity = np.array([data.draw(st.integers(5, 60)) for _ in range(devices)], float)
    best = {"latency": np.inf, "throughput": np.inf}
    for choice in itertools.product(range(devices), repeat=units):
        place = np.array(choice)
        load = np.array([held[place == d].sum() for d in range(devices)])
        if (load > capacity).any():
            continue
        busy = np.array([seconds[d, place == d].sum() for d in range(devices)])
        best = {"latency": min(best["latency"], busy.sum()), "throughput": min(best["throughput"], busy.max())}
    for objective, value in best.items():
        assert relaxed_bound(seconds, held, capacity, objective) <= value * (1 + 1e-9)


def test_the_bound_knows_that_the_fast_device_is_small():
    seconds = np.array([[1.0] * 4, [3.0] * 4])
    held, capacity = np.ones(4), np.array([2.0, 4.0])
    assert relaxed_bound(seconds, held, capacity, "latency") == pytest.approx(2 * 1 + 2 * 3)
    assert relaxed_bound(seconds, held, np.array([4.0, 4.0]), "throughput") == pytest.approx(3.0)


def test_units_follow_the_order_of_execution():
    import torch
    from torch import nn

    class Backwards(nn.Module):
        """Registered first, run last; one layer is never run; a parameter of its own beside a layer."""

        def __init__(self):
            super().__init__()
            self.last, self.unused, self.first = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.scale, self.act = nn.Parameter(torch.ones(8)), nn.ReLU()

        def forward(self, x):
            return self.last(self.act(self.first(x)) * self.scale)

    profile = profile_graph(capture(Backwards(), {"x": torch.randn(2, 8)}, workload=INFERENCE), INFERENCE)
    units = find_units(profile)
    assert units.paths == (("first",), ("scale",), ("last",), ("unused",))
    assert units.home == 1  # the root has a tensor of its own, which decides
    edges = {(int(units.maker[row]), int(unit)) for row, unit in zip(units.edge_value, units.edge_unit, strict=True)}
    assert edges == {(-1, 0), (0, 1), (1, 2), (2, 4)}
    assert int(units.resident_bytes.sum()) == profile.parameter_bytes
    relu = next(op.index for op in profile.graph.ops if "relu" in str(op.target))
    assert units.op_unit[relu] == 0  # what has no tensors runs with the unit before it


class Extended(nn.Module):
    """A frozen table and rows that were added to it, and a leaf that the forward makes and the output leads to."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(60, 64), requires_grad=False)
        self.rows = nn.Parameter(torch.randn(4, 64))
        self.up = nn.Linear(64, 128)

    def forward(self, x):
        noise = x.new_zeros(2, 1, 128).requires_grad_()
        whole = torch.cat([self.table, self.rows])
        return self.up(x @ whole.t() @ whole) + noise


def test_what_backward_leaves_beyond_the_gradients_is_there_at_the_optimizer_step():
    model, inputs = Extended(), {"x": torch.randn(2, 1, 64)}
    profile = autoshard.profile(model, inputs, workload=TRAINING)
    assert gradient_surplus(profile.graph) == [("rows", 60 * 64 * 4)]
    placed = autoshard.plan(model, {"cpu:0": "1GiB"}, inputs=inputs, workload=TRAINING)
    measured = measured_peaks(model, placed, inputs, training=True)["cpu:0"]
    assert 0 <= autoshard.estimate(placed, profile).devices[0].peak_bytes - measured <= 8
    assert 0 <= profile.peak_bytes - measured <= 8


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["llama-tied", "t5", "mixtral", "convnext"])
def test_a_chain_covers_the_model(name, training):
    case, workload = by_name(name), TRAINING if training else INFERENCE
    profile = profile_graph(capture(case.model(), case.example(), workload=workload), workload)
    two = cluster(device("d0"), device("d1", overhead_bytes=1000))
    units = find_units(profile)
    chain = chain_from_profile(profile, two, units=units)
    paths = [path for group in chain.paths for path in group]
    for tensor in profile.graph.tensors:
        assert sum(tensor.name == path or tensor.name.startswith(path + ".") for path in paths) == 1
    assert chain.seconds.sum(axis=1) == pytest.approx(
        [op_seconds(profile, d).sum() + optimizer_seconds(profile.gradient_bytes, workload, d) for d in two.devices]
    )
    assert chain.capacity_bytes.tolist() == [1 << 20, (1 << 20) - 1000]
    assert len(chain.ties) == len([t for t in profile.graph.tied() if len({n.rpartition(".")[0] for n in t}) > 1])
    bound = lower_bound(profile, two, "latency", units)
    assert bound <= unit_seconds(profile, two, units).min(axis=0).sum() * (1 + 1e-9)
    # On one device the chain's memory is never less than what is needed there.
    assert chain.resident_bytes.sum() + chain.transient_bytes.max() >= profile.peak_bytes
