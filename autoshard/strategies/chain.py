"""Chain: the placement problem as arrays. Units in execution order, devices, and what it costs to cut between them.

    unit      0     1     2     3     4     5
            [ a ] [ b ] [ c ] [ d ] [ e ] [ f ]         a plan gives every unit a device; without pins and ties each
            └── device 0 ──┘ └ dev. 2 ┘ └ dev. 1 ┘       device has one interval of units (or none)

The cost model, exactly (`cost_of` computes it in plain steps; the search is tested against it):

* A tensor is on the device of its producer. Unit -1 (the root's inputs) and unit n (where the root's outputs go) are
  on the device of unit `root_unit`. It is copied directly to every other device with a unit that consumes it, once per
  device. A copy from p to d takes `tensor_copies * (alpha[p, d] + tensor_bytes / beta[p, d])` seconds and keeps
  `tensor_bytes` on d. A tied weight is such a tensor, made by the first unit that holds it and copied 0 times.
* Seconds of a device: its units' seconds on it, plus the seconds of the copies that come to it.
* Memory of a device: sum of its units' resident bytes, plus the largest of their transient bytes, plus the bytes of the
  copies that come to it. It must not exceed `capacity_bytes`.
* latency = sum over devices of their seconds; bottleneck = the largest of them; load = the largest memory / capacity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.cluster.cluster import Cluster
from autoshard.engine.placed import unit_seconds
from autoshard.profile.answer import op_counts
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units, find_units

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """A placement problem with n units, D devices and T tensors that pass between units. See the module docstring.

    Attributes:
        paths: [n] per unit, the placement paths it stands for: module paths or tensor names; every parameter and buffer
            of the model is at or below exactly one path of one unit (tied names each in their own unit).
        devices: [D] names, in the order of the user.
        seconds: [D, n] compute time of a unit on a device, all its calls of one pass.
        resident_bytes: [n] held for the whole pass: weights, buffers, cache, saved, gradients, optimizer state.
        transient_bytes: [n] most live activation bytes while the unit runs; of an interval the largest counts.
        tensor_unit: [T] the unit that makes each tensor, -1 for the root's inputs.
        tensor_bytes: [T] bytes of a copy of it.
        tensor_copies: [T] how often it is copied per pass and device: 1, 2 if its gradient goes back, 0 if it is kept.
        edge_tensor, edge_unit: [E] tensor `edge_tensor[e]` is consumed by unit `edge_unit[e]`; n for the root's
            outputs. A consumer may come before its producer (a module called in a loop).
        capacity_bytes: [D] what tensors may take.
        link_seconds: [D, D] latency of a copy from row to column.
        link_bytes_per_second: [D, D] its bandwidth; the diagonal of both is not read.
        ties: units (ascending) that hold one shared tensor. It is resident with the first of them.
        duplicate_ties: a second device may hold its own copy of a tied tensor (inference only).
        pins: unit -> index of the device it must be on.
        root_unit: the unit whose device has the root's inputs and receives its outputs.
    """

    paths: tuple[tuple[str, ...], ...]
    devices: tuple[str, ...]
    seconds: Array
    resident_bytes: Array
    transient_bytes: Array
    tensor_unit: Array
    tensor_bytes: Array
    tensor_copies: Array
    edge_tensor: Array
    edge_unit: Array
    capacity_bytes: Array
    link_seconds: Array
    link_bytes_per_second: Array
    ties: tuple[tuple[int, ...], ...] = ()
    duplicate_ties: bool = True
    pins: Mapping[int, int] = field(default_factory=dict)
    root_unit: int = 0

    @property
    def num_units(self) -> int:
        return len(self.paths)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def ends(self) -> tuple[Array, Array]:
        """[E] units that make and that consume the tensor of every edge, the root's with the root unit."""
        source = np.where(self.tensor_unit < 0, self.root_unit, self.tensor_unit)[self.edge_tensor]
        return source, np.where(self.edge_unit >= self.num_units, self.root_unit, self.edge_unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an assignment costs under the chain's model. `seconds` and `memory_bytes` are per device."""

    latency: float
    bottleneck: float
    load: float
    seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    feasible: bool


def cost_of(chain: Chain, assignment: Sequence[int]) -> Cost:
    """Price an assignment (device index per unit) by the model in the module docstring, step by step."""
    place = np.asarray(assignment)
    seconds = [0.0] * chain.num_devices
    memory = [0.0] * chain.num_devices
    for device in range(chain.num_devices):
        mine = np.flatnonzero(place == device)
        if len(mine):
            seconds[device] += float(chain.seconds[device, mine].sum())
            memory[device] += float(chain.resident_bytes[mine].sum()) + float(chain.transient_bytes[mine].max())
    source, user = chain.ends
    apart = place[source] != place[user]
    pairs = np.unique(chain.edge_tensor[apart] * chain.num_devices + place[user[apart]])  # once per tensor and device
    for tensor, target in zip(*divmod(pairs, chain.num_devices), strict=True):
        made_by = int(chain.tensor_unit[tensor])
        origin = place[chain.root_unit if made_by < 0 else made_by]
        nbytes = float(chain.tensor_bytes[tensor])
        once = float(chain.link_seconds[origin, target]) + nbytes / float(chain.link_bytes_per_second[origin, target])
        seconds[target] += float(chain.tensor_copies[tensor]) * once
        memory[target] += nbytes
    used = set(place.tolist())
    feasible = all(place[unit] == device for unit, device in chain.pins.items())
    feasible = feasible and all(memory[d] <= float(chain.capacity_bytes[d]) for d in used)
    load = max((memory[d] / max(float(chain.capacity_bytes[d]), 1e-9) for d in used), default=0.0)
    return Cost(
        latency=sum(seconds), bottleneck=max(seconds), load=load, seconds=tuple(seconds), memory_bytes=tuple(memory),
        feasible=feasible,
    )  # fmt: skip


def chain_from_profile(
    profile: Profile, cluster: Cluster, *, pins: Mapping[int, int] | None = None, units: Units | None = None
) -> Chain:
    """Pose the placement of a profiled model on a cluster as arrays. `pins`: unit -> device index."""
    units = units or find_units(profile)
    latency, bandwidth = cluster.link_tables
    accelerated = not any(device.name.startswith("cpu") for device in cluster.devices)
    tied = [(tensor, unit) for tensor, (group, _) in enumerate(units.ties, len(units.maker)) for unit in group[1:]]
    return Chain(
        paths=units.paths,
        devices=cluster.names,
        seconds=unit_seconds(profile, cluster, units),
        resident_bytes=units.stepped_bytes if accelerated else units.resident_bytes,
        transient_bytes=units.transient_bytes,
        tensor_unit=np.append(units.maker, np.array([group[0] for group, _ in units.ties], np.int64)),
        tensor_bytes=np.append(units.nbytes, np.array([nbytes for _, nbytes in units.ties], np.int64)),
        tensor_copies=np.append(units.copies * _times_made(profile, units), np.zeros(len(units.ties), np.int64)),
        edge_tensor=np.append(units.edge_value, np.array([tensor for tensor, _ in tied], np.int64)),
        edge_unit=np.append(units.edge_unit, np.array([unit for _, unit in tied], np.int64)),
        capacity_bytes=np.array([device.budget_bytes for device in cluster.devices], np.int64),
        link_seconds=latency,
        link_bytes_per_second=bandwidth,
        ties=tuple(group for group, _ in units.ties),
        duplicate_ties=not profile.workload.training,
        pins=dict(pins or {}),
        root_unit=units.root_unit,
    )


def _times_made(profile: Profile, units: Units) -> Array:
    """How often each value that passes between units is made: in every token of an answer, or once."""
    if profile.further is None:
        return np.ones(len(units.value), np.int64)
    made_by = np.array([profile.graph.values[value].op for value in units.value.tolist()], np.int64)
    counts = np.append(op_counts(profile), 1.0)  # -1: an input
    return counts[made_by].astype(np.int64)


def join(chain: Chain, group: Array) -> Chain | None:
    """Join the units of each group (numbered by their first units); None if they are pinned to different devices.

    The cost of an assignment is the same in both chains.
    """
    count = int(group.max()) + 1
    pins: dict[int, int] = {}
    for unit, device in chain.pins.items():
        if pins.setdefault(int(group[unit]), device) != device:
            return None
    paths: list[list[str]] = [[] for _ in range(count)]
    for unit, own in enumerate(chain.paths):
        paths[group[unit]] += own
    transient = np.zeros(count, chain.transient_bytes.dtype)
    np.maximum.at(transient, group, chain.transient_bytes)
    inner = chain.edge_unit < chain.num_units
    ties = [tuple(sorted({int(group[unit]) for unit in tie})) for tie in chain.ties]
    return replace(
        chain,
        paths=tuple(map(tuple, paths)),
        seconds=np.stack([np.bincount(group, row, count) for row in chain.seconds]),
        resident_bytes=np.bincount(group, chain.resident_bytes, count),
        transient_bytes=transient,
        tensor_unit=np.where(chain.tensor_unit < 0, -1, group[np.maximum(chain.tensor_unit, 0)]),
        edge_unit=np.where(inner, group[np.minimum(chain.edge_unit, chain.num_units - 1)], count),
        ties=tuple(tie for tie in ties if len(tie) > 1),
        pins=pins,
        root_unit=int(group[chain.root_unit]),
    )


def tie_choices(chain: Chain) -> list[tuple[Chain, Array]]:
    """Return the chain with tied units apart (if they may be) and with them together, each with its [n] groups.

    Together they run where the first of them does. Empty if pins contradict each other.
    """
    apart = np.arange(chain.num_units)
    found = [(chain, apart)] if chain.duplicate_ties or not chain.ties else []
    if chain.ties:
        leader = apart.copy()
        for tie in chain.ties:
            members = np.isin(leader, leader[list(tie)])
            leader[members] = leader[members].min()
        group = np.unique(leader, return_inverse=True)[1]
        joined = join(chain, group)
        if joined is not None:
            found.append((joined, group))
    return found
