"""A device of a cluster as the engine's kernels see it."""

from collections.abc import Sequence
from dataclasses import replace

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


def weakest_card(devices: Sequence[Device], dtype: str) -> Card:
    """Return a card that has of all devices the lowest rates and the least memory: what each of them can do."""
    cards = [card_of(device, dtype) for device in devices]
    slowest = min(cards, key=lambda card: card.flops_per_second)
    return replace(
        slowest,
        bytes_per_second=min(card.bytes_per_second for card in cards),
        memory_bytes=min(card.memory_bytes for card in cards),
    )
