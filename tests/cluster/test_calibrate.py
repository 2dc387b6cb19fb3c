"""Calibration replaces rates, and only rates, of the devices that are on this machine."""

import pytest
import torch

from autoshard.cluster.calibrate import calibrate
from autoshard.cluster.parse import parse_devices


def test_measured_devices_keep_their_memory():
    before = parse_devices({"cpu:0": "1GiB", "cpu:1": "2GiB"})
    after = calibrate(before)
    for old, new in zip(before.devices, after.devices, strict=True):
        assert new.measured and not old.measured
        assert (new.name, new.memory_bytes, new.host, new.block_bytes) == (
            old.name,
            old.memory_bytes,
            old.host,
            old.block_bytes,
        )
        # Any machine does between 100 MFLOP/s and 1 EFLOP/s, and moves between 100 MB/s and 100 TB/s.
        assert all(1e8 < rate < 1e18 for rate in new.flops_per_second.values())
        assert set(new.flops_per_second) == {"float32", "bfloat16", "float16", "default"}
        assert 1e8 < new.bytes_per_second < 1e14
        assert 0 < new.launch_seconds < 1e-2
    assert after.devices[0].flops_per_second == after.devices[1].flops_per_second
    assert [(k.source, k.destination) for k in after.links] == [(k.source, k.destination) for k in before.links]
    assert all(link.bytes_per_second > 1e7 and link.latency_seconds > 0 for link in after.links)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_absent_devices_keep_the_table_and_are_named():
    before = parse_devices("2xT4")
    after = calibrate(before)
    assert after.devices == before.devices and after.links == before.links
    assert any("cuda:0, cuda:1" in note for note in after.notes)


@pytest.mark.gpu
def test_a_real_accelerator_is_measured():
    after = calibrate(parse_devices(1))
    device = after.devices[0]
    assert device.measured and device.flops("bfloat16") > 1e12 and device.bytes_per_second > 1e10
