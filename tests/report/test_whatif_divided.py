"""The sliders of plans that divide more than modules keep their division: what they say is the estimate."""

from dataclasses import replace

import pytest

import autoshard
from autoshard.cluster.cluster import plan_device
from autoshard.cluster.parse import parse_devices
from autoshard.report.whatif import predict
from tests.report.divided_plans import BASE, CASES, at_size, divided, profile_of

NEAR = 1e-4
"""How near seconds are at other sizes: what an op moves for a part of a batch is taken to grow as its tensors do."""
ROUNDED = 1e-4
"""Of a peak: the allocator's blocks, likewise."""


def compare(found, want, seconds, nbytes):
    assert found["latency"] == pytest.approx(want.latency_seconds, rel=seconds)
    assert found["bottleneck"] == pytest.approx(want.bottleneck_seconds, rel=seconds)
    assert found["fits"] == want.fits
    for row, device in zip(found["devices"], want.devices, strict=True):
        assert row[0] == device.name and row[2] == device.memory_bytes
        assert row[1] == pytest.approx(device.peak_bytes, rel=nbytes)
        assert row[3] == pytest.approx(device.compute_seconds, rel=seconds)


@pytest.mark.parametrize("case", CASES)
def test_a_divided_plan_is_its_estimate_there_and_at_other_sizes(case):
    plan, cluster, data, mode = divided(case)
    own = autoshard.estimate(plan, profile_of(mode, *BASE), cluster)
    compare(predict(data, *BASE, 0), own, 1e-9, 1e-9)
    assert bool(plan.streamed) == ("streamed" in case)
    assert data["planned"]["way"] == ("stages" if own.pipelining else "replicas" if plan.mesh else
                                      "ranks" if plan.cuts else "placed")  # fmt: skip
    for size, length in ((16, 20), (24, 40)):
        want = autoshard.estimate(at_size(plan, size), profile_of(mode, size, length), cluster)
        compare(predict(data, size, length, 0), want, NEAR, ROUNDED)


@pytest.mark.parametrize("case", ["1f1b", "interleaved", "replicas of stages of ranks", "replicas of processes"])
def test_another_kind_of_device_keeps_the_division(case):
    plan, cluster, data, mode = divided(case)
    count = len(cluster.names)
    other = parse_devices(f"{count}xH100-SXM")
    hosts = {device.name: device.host for device in cluster.devices}  # so that each device has a process
    other = replace(other, devices=tuple(replace(device, host=hosts[device.name]) for device in other.devices))
    want = autoshard.estimate(plan, profile_of(mode, *BASE), other)
    for chosen in (0, count):
        found = predict(data, *BASE, 0, kind="H100-SXM", count=chosen)
        assert found["latency"] == pytest.approx(want.latency_seconds, rel=NEAR)
        for row, device in zip(found["devices"], want.devices, strict=True):
            assert row[1] == pytest.approx(device.peak_bytes, rel=ROUNDED) and row[2] == device.memory_bytes


@pytest.mark.parametrize(
    ("case", "spec"),
    [("replicas", "{}x1GiB"), ("replicas, inference", "{}xA100-40GB"), ("sharded replicas", "{}xA100-40GB")],
)
def test_any_number_of_replicas_is_the_estimate_of_so_many(case, spec):
    plan, _, data, mode = divided(case)
    for count in (1, 4, 5):
        cluster = parse_devices(spec.format(count))
        more = replace(
            plan,
            devices=tuple(map(plan_device, cluster.devices)),
            mesh=replace(plan.mesh, **{"fsdp" if plan.mesh.sharded else "dp": count}),
        )
        want = autoshard.estimate(more, profile_of(mode, *BASE), cluster)
        found = predict(data, *BASE, 0, count=count)
        assert found["latency"] == pytest.approx(want.latency_seconds, rel=NEAR)
        for row, device in zip(found["devices"], want.devices, strict=True):
            assert row[1] == pytest.approx(device.peak_bytes, rel=10 * ROUNDED)
    assert len(predict(data, *BASE, 0, count=BASE[0] + 1)["devices"]) == BASE[0] + 1  # split anew: too few rows


def test_other_numbers_of_devices_split_the_model_anew():
    *_, data, _ = divided("one process, gpipe")
    assert len(predict(data, *BASE, 0, count=3)["devices"]) == 3
    assert data["words"] == [
        "With the plan's 2 stages and 4 micro-batches, in the order of gpipe. "
        "A batch has 4 rows at least, one for every part.",
        " That leaves out the plan's 2 stages and 4 micro-batches; "
        "`autoshard plan` makes such a plan for other devices.",
    ]
    assert divided("uneven replicas of stages")[2]["least"] == 7
