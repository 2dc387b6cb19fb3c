"""From a profile to the chain that strategies plan on: one unit per module with tensors, in order of execution."""

from collections.abc import Mapping

import numpy as np

from autoshard.cluster.cluster import Cluster
from autoshard.cost import unit_seconds
from autoshard.profile.answer import op_counts
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units, find_units
from autoshard.strategies.chain import Chain, Tie


def chain_from_profile(
    profile: Profile, cluster: Cluster, *, pins: Mapping[int, int] | None = None, units: Units | None = None
) -> Chain:
    """Pose the placement of a profiled model on a cluster as arrays. `pins`: unit -> device index."""
    units = units or find_units(profile)
    devices = cluster.devices
    latency, bandwidth = cluster.link_tables
    accelerated = not any(device.name.startswith("cpu") for device in devices)
    return Chain(
        paths=units.paths,
        devices=cluster.names,
        seconds=unit_seconds(profile, cluster, units),
        resident_bytes=units.stepped_bytes if accelerated else units.resident_bytes,
        transient_bytes=units.transient_bytes,
        tensor_unit=units.maker,
        tensor_bytes=units.nbytes,
        tensor_copies=units.copies * _times_made(profile, units),
        edge_tensor=units.edge_value,
        edge_unit=units.edge_unit,
        capacity_bytes=np.array([device.budget_bytes for device in devices], np.int64),
        link_seconds=latency,
        link_bytes_per_second=bandwidth,
        ties=tuple(Tie(units=group, nbytes=nbytes) for group, nbytes in units.ties),
        duplicate_ties=not profile.workload.training,
        pins=dict(pins or {}),
        home=units.home,
    )


def _times_made(profile: Profile, units: Units) -> np.ndarray:
    """How often each value that passes between units is made: in every token of an answer, or once."""
    if profile.further is None:
        return np.ones(len(units.value), np.int64)
    made_by = np.array([profile.graph.values[value].op for value in units.value.tolist()], np.int64)
    counts = np.append(op_counts(profile), 1.0)  # -1: an input
    return counts[made_by].astype(np.int64)
