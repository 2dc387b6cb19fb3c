"""Limits of memory and pins as people write them: devices by any of their names, sizes in any unit."""

from collections.abc import Mapping
from typing import Any

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.parse import canonical_name
from autoshard.common.sizes import parse_bytes
from autoshard.errors import SpecError


def limited_to(cluster: Cluster, max_memory: Mapping[Any, Any] | None) -> Cluster:
    """The cluster with the memory that may be used."""
    limits, _ = limits_and_pins(cluster, max_memory, None)
    return cluster.with_memory({name: min(n, cluster.device(name).memory_bytes) for name, n in limits.items()})


def limits_and_pins(
    cluster: Cluster, max_memory: Mapping[Any, Any] | None, pins: Mapping[str, Any] | None
) -> tuple[dict[str, int], dict[str, str]]:
    """Limits and pins with the names of the cluster's devices and sizes in bytes."""
    limits = {
        _known(canonical_name(name), cluster, "max_memory"): parse_bytes(size)
        for name, size in (max_memory or {}).items()
    }
    fixed = {path: _known(canonical_name(name), cluster, f"the pin of {path!r}") for path, name in (pins or {}).items()}
    return limits, fixed


def _known(name: str, cluster: Cluster, where: str) -> str:
    if name not in cluster.names:
        raise SpecError(f"{where} names device {name!r}, which is not among the devices: {', '.join(cluster.names)}.")
    return name
