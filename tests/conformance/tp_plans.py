"""Devices on which it pays to cut tiny models."""

from autoshard.cluster.device import Device
from tests.clusters import linked


def slow_devices(count, memory_bytes=1 << 34):
    """Devices on which a matrix of a tiny model takes about 20 times as long as a collective, as with large models."""
    devices = tuple(
        Device(name=f"cpu:{rank}", memory_bytes=memory_bytes, flops_per_second={"default": 1e8}, bytes_per_second=1e9)
        for rank in range(count)
    )
    return linked(devices, 1e9, 1e-4)
