"""Calibration replaces rates, and only rates, of the devices that are on this machine."""

import pytest
import torch

from autoshard.cluster.calibrate import calibrate, measure_disk
from autoshard.cluster.links import LOOPBACK
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
    assert after.links == before.links
    assert after.between_processes().link("cpu:0", "cpu:1").latency_seconds == LOOPBACK[0]  # no copy in memory


def test_the_disk_is_measured(tmp_path, monkeypatch):
    """On a file that goes without a trace; within its seconds, also where writing is slow."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autoshard.cluster.calibrate.MOST_BLOCKS", 4)
    before = parse_devices({"cuda:0": "1GiB", "disk": "10GiB"})
    found = measure_disk(".")
    if found is None:
        pytest.skip("no reading past the page cache here")
    after = calibrate(before)
    assert [*tmp_path.iterdir()] == []
    disk, link = after.device("disk"), after.link("disk", "cuda:0")
    assert disk.measured and 1e6 < disk.bytes_per_second < 1e12 and disk.memory_bytes == 10 << 30
    assert link.bytes_per_second <= disk.bytes_per_second and 0 < link.latency_seconds < 1
    assert not any("disk" in note for note in after.notes)


def test_a_disk_that_cannot_be_written_to_keeps_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr("autoshard.cluster.calibrate.measure_disk", lambda _: measure_disk(str(tmp_path / "none")))
    before = parse_devices({"cuda:7": "1GiB", "disk": "10GiB"})
    after = calibrate(before)
    assert after.link("disk", "cuda:7") == before.link("disk", "cuda:7")
    assert any("disk" in note for note in after.notes)


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
