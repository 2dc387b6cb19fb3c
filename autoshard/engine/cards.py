"""A device of a cluster as the engine's kernels see it."""

from autoshard.cluster.device import Device
from autoshard.cluster.hardware import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY
from autoshard.cluster.links import table_row
from autoshard.engine.timing import Card


def card_of(device: Device, dtype: str = "bfloat16") -> Card:
    """Return the published peaks of a device, for products in one dtype.

    A cluster's rates are what is commonly achieved, or measured; the engine has efficiencies of its own.
    """
    return Card(
        generation=table_row(device.kind).arch,
        flops_per_second=device.flops(dtype) / COMPUTE_EFFICIENCY,
        bytes_per_second=device.bytes_per_second / MEMORY_EFFICIENCY,
        memory_bytes=device.memory_bytes,
    )
