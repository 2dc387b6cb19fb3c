"""The formula of the sliders: the estimate itself where the plan's division is kept, near a real plan elsewhere."""

import json

import pytest
import torch

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.profile.scaling import find_scaling, other_size
from autoshard.report.whatif import predict, what_if_data
from autoshard.workload import Workload
from tests.timeline.test_timeline import Net

MEMORY = 1e-6
"""How near the bytes are to those of a profile at the size; what is left is the rounding to the allocator's blocks."""


def profiled(batch, length, mode="inference"):
    workload = Workload(batch_size=batch, sequence_length=length, mode=mode)
    inputs = torch.zeros(batch, length, dtype=torch.long)
    return autoshard.profile(Net().train(mode == "training"), inputs, workload=workload)


def made(mode, spec="3xA100-40GB"):
    profile, cluster = profiled(1, 16, mode), parse_devices(spec)
    names = cluster.names
    placements = {"embed": names[0], "head": names[0]}
    for part in ("ups", "downs"):
        placements |= {f"{part}.{i}": names[i % len(names)] for i in range(4)}
    plan = autoshard.Plan.from_device_map(placements, profile)
    other = other_size(profile.workload)
    scaling = find_scaling(profile, profiled(other.batch_size, other.sequence_length, mode))
    estimate = autoshard.estimate(plan, profile, cluster)
    return plan, cluster, estimate, what_if_data(plan, estimate, profile, cluster, scaling)


@pytest.mark.parametrize("spec", ["3xA100-40GB", "cpu:0=1GiB,cpu:1=1GiB"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_the_plan_at_other_sizes_is_its_estimate_there(mode, spec):
    plan, cluster, _, data = made(mode, spec)
    data = json.loads(json.dumps(data))
    for batch, length in ((1, 16), (1, 64), (4, 16), (2, 30)):
        found = predict(data, batch, length, 0)
        want = autoshard.estimate(plan, profiled(batch, length, mode), cluster)
        assert found["latency"] == pytest.approx(want.latency_seconds, rel=1e-9)
        assert found["bottleneck"] == pytest.approx(want.bottleneck_seconds, rel=1e-9)
        assert found["fits"] == want.fits
        for row, device in zip(found["devices"], want.devices, strict=True):
            blocks = 512 * 64 if "cuda" in device.name else 0
            assert row[0] == device.name and row[2] == device.memory_bytes
            assert row[1] == pytest.approx(device.peak_bytes, rel=MEMORY, abs=blocks)
            assert row[3] == pytest.approx(device.compute_seconds, rel=1e-9)


def test_more_devices_are_less_full():
    *_, data = made("inference")
    peaks = [max(row[1] for row in predict(data, 1, 16, 0, count=count)["devices"]) for count in range(1, 9)]
    assert peaks == sorted(peaks, reverse=True) and peaks[3] < peaks[0]
    assert len(predict(data, 1, 16, 0, count=12)["devices"]) == 12


def test_split_anew_is_near_a_real_plan():
    _, _, _, data = made("inference")
    profile = profiled(1, 16)
    for count in (1, 2, 4):
        found = predict(data, 1, 16, 0, kind="T4", count=count)
        spec = parse_devices(f"{count}xT4")
        plan = autoshard.plan(Net(), spec, inputs=torch.zeros(1, 16, dtype=torch.long), strategy="balanced",
                              objective="memory")  # fmt: skip
        want = autoshard.estimate(plan, profile, spec)
        assert found["latency"] == pytest.approx(want.latency_seconds, rel=0.15)
        fullest = max(device.peak_bytes for device in want.devices)
        assert max(row[1] for row in found["devices"]) == pytest.approx(fullest, rel=0.05)


def test_a_faster_card_is_faster_and_a_small_one_does_not_fit():
    *_, data = made("training")
    slow, fast = (predict(data, 256, 4096, 0, kind=kind, count=2) for kind in ("T4", "H100-SXM"))
    assert fast["latency"] < slow["latency"]
    assert predict(data, 4096, 65536, 0, kind="T4", count=1)["fits"] is False


CUT = 0.03
"""How near the seconds of ranks are: what an op of a rank moves is taken to grow as what the whole op moves does."""


def cut(mode):
    cluster = parse_devices("2xA100-40GB")
    inputs, workload = torch.zeros(1, 16, dtype=torch.long), Workload(batch_size=1, sequence_length=16, mode=mode)
    plan = autoshard.plan(Net().train(mode == "training"), cluster, inputs=inputs, workload=workload,
                          strategy="column-parallel", objective="memory")  # fmt: skip
    assert plan.cuts
    profile = profiled(1, 16, mode)
    scaling = find_scaling(profile, profiled(3, 8, mode))
    data = what_if_data(plan, autoshard.estimate(plan, profile, cluster), profile, cluster, scaling)
    return plan, cluster, json.loads(json.dumps(data))


def test_what_ranks_run_on_the_host_takes_no_time():
    class Biased(Net):
        def forward(self, ids):
            return super().forward(ids) + torch.arange(ids.shape[1]).float().add(1.0)[:, None]

    cluster, inputs = parse_devices("2xA100-40GB"), torch.zeros(2, 16, dtype=torch.long)
    plan = autoshard.plan(Biased(), cluster, inputs=inputs, strategy="column-parallel", objective="memory")
    workload = Workload(batch_size=2, sequence_length=16)
    profile = autoshard.profile(Biased(), inputs, workload=workload)
    other = autoshard.profile(
        Biased(), torch.zeros(6, 8, dtype=torch.long), workload=Workload(batch_size=6, sequence_length=8)
    )
    want = autoshard.estimate(plan, profile, cluster)
    data = what_if_data(plan, want, profile, cluster, find_scaling(profile, other))
    assert predict(data, 2, 16, 0)["latency"] == pytest.approx(want.latency_seconds, rel=1e-9)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_ranks_at_other_sizes_are_near_the_estimate_there(mode):
    plan, cluster, data = cut(mode)
    for batch, length in ((1, 16), (1, 64), (4, 16)):
        found = predict(data, batch, length, 0)
        want = autoshard.estimate(plan, profiled(batch, length, mode), cluster)
        near = 1e-9 if (batch, length) == (1, 16) else CUT
        assert found["latency"] == pytest.approx(want.latency_seconds, rel=near)
        for row, device in zip(found["devices"], want.devices, strict=True):
            assert row[1] == pytest.approx(device.peak_bytes, rel=MEMORY, abs=512 * 64)
            assert row[3] == pytest.approx(device.compute_seconds, rel=near)
