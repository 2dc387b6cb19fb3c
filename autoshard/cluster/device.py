"""Devices, hosts, and links between devices, as plain data that can be written on a machine that has none of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a plan.

    Attributes:
        name: what torch calls it, e.g. "cuda:0", "cpu", "cpu:1" (simulated), or "disk".
        kind: row of the hardware table, e.g. "H100-SXM"; "generic" if only the memory is known.
        memory_bytes: what autoshard may use of it (free, not total, when detected).
        flops_per_second: by dtype name; "default" is used for a dtype not listed.
        bytes_per_second: of its own memory.
        launch_seconds: host time of one op: a card that works faster waits for the next, a CPU does both in turn.
        overhead_bytes: taken before the first tensor: context, workspaces. 0 on CPU and simulated devices.
        block_bytes: the allocator's rounding, 512 on CUDA, 1 where allocations are exact.
        host: machine it is in.
        network: how that differs from a usual one, in the words of a device spec ("4x100Gb/s, no nvlink").
        measured: figures come from a calibration, not from the table.
    """

    name: str
    kind: str = "generic"
    memory_bytes: int
    flops_per_second: Mapping[str, float] = field(default_factory=dict)
    bytes_per_second: float = 1e12
    launch_seconds: float = 5e-6
    overhead_bytes: int = 0
    block_bytes: int = 1
    host: str = "host0"
    network: str = ""
    measured: bool = False

    def flops(self, dtype: str) -> float:
        """Achievable FLOP/s for one dtype name such as "bfloat16"."""
        return self.flops_per_second.get(dtype) or self.flops_per_second.get("default") or 1e13

    @property
    def speed(self) -> tuple[object, ...]:
        """What devices have in common that take equally long for any op."""
        return tuple(sorted(self.flops_per_second.items())), self.bytes_per_second, self.launch_seconds

    @property
    def budget_bytes(self) -> int:
        """Bytes left for tensors."""
        return self.memory_bytes - self.overhead_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two devices. A copy of n bytes takes latency_seconds + n / bytes_per_second."""

    source: str
    destination: str
    bytes_per_second: float
    latency_seconds: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine, or the machines of one NVLink domain, and its network.

    Attributes:
        nics: network cards for the model's traffic: as many as devices, or shared by them.
        nic_bytes_per_second: of one of them, one direction, as it is sold.
        latency_seconds: of the smallest copy to another host.
        peer_links: its cards use their own links (NVLink and others); else they copy through the host.
    """

    name: str
    nics: int
    nic_bytes_per_second: float
    latency_seconds: float
    peer_links: bool = True
