"""Estimates: rooflines and links by hand, parts that add up, bounds that hold, units and the chain made of them."""

import itertools

import pytest

from autoshard.capture.capture import capture
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device, Link
from autoshard.engine.placed import lower_bound, unit_seconds
from autoshard.engine.pricer import price
from autoshard.engine.timing import op_seconds, optimizer_seconds
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.profile.measure import profile_graph
from autoshard.profile.units import find_units
from autoshard.strategies.chain import chain_from_profile
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
    result = price(plan({"a": "d0", "b": "d1"}), profile, both)
    first, second = result.devices
    # h, 80 bytes, goes to d1 for b; y, 120 bytes, goes home to d0
    assert [(t.source, t.destination, t.nbytes, t.producer, t.consumer) for t in result.transfers] == [
        ("d0", "d1", 80, "a", "b"), ("d1", "d0", 120, "b", "(outputs)"),
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
    (figures,) = price(plan({"": "d"}), profile, cluster(odd)).devices
    # weights, h and y in blocks of 512, x as well
    assert figures.peak_bytes == 300 + 5 * 512
    assert figures.free_bytes < 0
    assert not price(plan({"": "d"}), profile, cluster(odd)).fits


def test_training_counts_gradients_moments_and_the_step():
    profile = profile_graph(two_linears(training=True), TRAINING)
    whole = cluster(device("cpu"))
    (figures,) = price(plan({"": "cpu"}), profile, whole).devices
    assert figures.peak_bytes == profile.peak_bytes
    assert figures.optimizer_bytes == 1200
    assert figures.compute_seconds == pytest.approx(
        op_seconds(profile, whole.devices[0]).sum() + optimizer_seconds(600, TRAINING, whole.devices[0])
    )


def test_a_device_the_cluster_lacks_is_refused():
    with pytest.raises(PlanError, match="d9"):
        price(plan({"": "d9"}), profile_graph(two_linears(), INFERENCE), cluster(device("d0")))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", ["llama-tied", "t5", "vit", "convnext", "mixtral"])
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
    bound = lower_bound(profile, two, divided=False)
    assert bound <= unit_seconds(profile, two, units).min(axis=0).sum() * (1 + 1e-9)
    # On one device the chain's memory is never less than what is needed there.
    assert chain.resident_bytes.sum() + chain.transient_bytes.max() >= profile.peak_bytes
