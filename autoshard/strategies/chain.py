"""Chain: the placement problem as arrays. Units in execution order, devices, and what it costs to cut between them.

    unit      0     1     2     3     4     5
            [ a ] [ b ] [ c ] [ d ] [ e ] [ f ]         a plan gives every unit a device; without pins and ties each
            └── device 0 ──┘ └ dev. 2 ┘ └ dev. 1 ┘       device has one interval of units (or none)

The cost model, exactly (`cost_of` computes it in plain steps; every solver here is tested against it):

* Where things are. A tensor is on the device of its producer. Unit -1 (the root's inputs) and unit n (where the
  root's outputs go) are on the device of unit `home`.
* Copies. A tensor is copied directly from its device to every other device with a unit that consumes it, once per
  device however many units there use it. A copy from p to d takes
  `tensor_copies * (alpha[p, d] + tensor_bytes / beta[p, d])` seconds and keeps `tensor_bytes` on d.
* Ties. Units of a tie read one shared tensor, which is counted in `resident_bytes` of the first of them. Every other
  device with a unit of the tie holds its own copy: tie bytes more, no time. If `duplicate_ties` is false all units of
  a tie must be on one device.
* Which assignments are planned: every device has one interval of the units (or none), leaving out units that are pinned
  and units that are kept together with the first unit of their tie. The order of the devices is part of the plan.
* Seconds of a device: its units' seconds on it, plus the seconds of the copies that come to it.
* Memory of a device: sum of its units' resident bytes, plus the largest of their transient bytes, plus the bytes of the
  copies that come to it, plus its copies of tied tensors. It must not exceed `capacity_bytes`.
* latency = sum over devices of their seconds; bottleneck = the largest of them; load = the largest memory / capacity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autoshard.errors import SpecError

if TYPE_CHECKING:
    from autoshard.strategies.peaks import Peaks

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """Units (ascending) that read one shared tensor of `nbytes`; its bytes are in `resident_bytes` of the first."""

    units: tuple[int, ...]
    nbytes: int


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
        ties: groups of units that share a tensor.
        duplicate_ties: a second device may hold its own copy of a tied tensor (inference only).
        capacity_bytes: [D] what tensors may take.
        link_seconds: [D, D] latency of a copy from row to column.
        link_bytes_per_second: [D, D] its bandwidth; the diagonal of both is not read.
        pins: unit -> index of the device it must be on.
        home: the unit whose device has the root's inputs and receives its outputs.
        peaks: what intervals hold, if it is known better than by the sums above; for solvers with dense tables.
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
    ties: tuple[Tie, ...] = ()
    duplicate_ties: bool = True
    pins: Mapping[int, int] = field(default_factory=dict)
    home: int = 0
    peaks: "Peaks | None" = None

    def __post_init__(self) -> None:
        units, devices, tensors = len(self.paths), len(self.devices), len(self.tensor_unit)
        shapes = {
            "seconds": (devices, units), "resident_bytes": (units,), "transient_bytes": (units,),
            "tensor_bytes": (tensors,), "tensor_copies": (tensors,), "edge_unit": (len(self.edge_tensor),),
            "capacity_bytes": (devices,), "link_seconds": (devices, devices),
            "link_bytes_per_second": (devices, devices),
        }  # fmt: skip
        for name, shape in shapes.items():
            if np.shape(getattr(self, name)) != shape:
                raise SpecError(f"chain.{name} has shape {np.shape(getattr(self, name))}, expected {shape}.")
        if not units or not devices:
            raise SpecError(f"a chain needs at least one unit and one device, got {units} and {devices}.")

    @property
    def num_units(self) -> int:
        return len(self.paths)

    @property
    def num_devices(self) -> int:
        return len(self.devices)


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
    source = np.where(chain.tensor_unit < 0, chain.home, chain.tensor_unit)[chain.edge_tensor]
    user = np.where(chain.edge_unit >= chain.num_units, chain.home, chain.edge_unit)
    apart = place[source] != place[user]
    pairs = np.unique(chain.edge_tensor[apart] * chain.num_devices + place[user[apart]])  # once per tensor and device
    for tensor, target in zip(*divmod(pairs, chain.num_devices), strict=True):
        made_by = int(chain.tensor_unit[tensor])
        origin = place[chain.home if made_by < 0 else made_by]
        nbytes = float(chain.tensor_bytes[tensor])
        once = float(chain.link_seconds[origin, target]) + nbytes / float(chain.link_bytes_per_second[origin, target])
        seconds[target] += float(chain.tensor_copies[tensor]) * once
        memory[target] += nbytes
    feasible = all(place[unit] == device for unit, device in chain.pins.items())
    for tie in chain.ties:
        others = {int(place[unit]) for unit in tie.units} - {int(place[tie.units[0]])}
        feasible = feasible and (chain.duplicate_ties or not others)
        for device in others:
            memory[device] += tie.nbytes
    used = set(place.tolist())
    feasible = feasible and all(memory[d] <= float(chain.capacity_bytes[d]) for d in used)
    load = max((memory[d] / max(float(chain.capacity_bytes[d]), 1e-9) for d in used), default=0.0)
    return Cost(
        latency=sum(seconds), bottleneck=max(seconds), load=load, seconds=tuple(seconds), memory_bytes=tuple(memory),
        feasible=feasible,
    )  # fmt: skip
