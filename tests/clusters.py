"""Clusters of devices that tests make by hand."""

import itertools
from collections.abc import Sequence

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device, Link
from autoshard.cluster.links import make_links


def linked(devices: Sequence[Device], bytes_per_second: float, latency_seconds: float) -> Cluster:
    """Devices with equal links between all of them."""
    links = {
        (a.name, b.name): Link(
            source=a.name, destination=b.name, bytes_per_second=bytes_per_second, latency_seconds=latency_seconds
        ) for a, b in itertools.permutations(devices, 2)
    }  # fmt: skip
    return Cluster(devices=tuple(devices), links=make_links(devices, (), links))
