"""The memory of simulated devices: what is live on each, the peak, and the error when it does not fit.

Counted are the storages of live tensors, whole and once, however many views there are. A storage is found again by
its address and leaves the count the moment torch frees it (a weak reference to it tells), so a loop that leaks or a
temporary that lives too long shows. Memory that a kernel takes and gives back within one op is not seen.
"""

import weakref

import torch

from autoshard.common.sizes import format_bytes


class SimulatedOutOfMemoryError(torch.OutOfMemoryError):
    """A simulated device is full.

    Attributes:
        device: its name.
        asked_bytes, live_bytes, limit_bytes: what was asked for, what was live before, what the device has.
    """

    def __init__(self, device: str, asked_bytes: int, live_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"simulated device {device} is out of memory: tried to allocate {format_bytes(asked_bytes)} "
            f"({asked_bytes} B) while {format_bytes(live_bytes)} ({live_bytes} B) of {format_bytes(limit_bytes)} "
            f"({limit_bytes} B) are in use. Place less on {device}, or simulate a larger device."
        )
        self.device = device
        self.asked_bytes = asked_bytes
        self.live_bytes = live_bytes
        self.limit_bytes = limit_bytes


class SimulatedDevice:
    """One device's counters, in bytes. `peers` are the devices it was made with, by index, itself among them."""

    __slots__ = ("device", "limit_bytes", "live_bytes", "name", "peak_bytes", "peers")

    def __init__(self, index: int, limit_bytes: int, peers: "list[SimulatedDevice]") -> None:
        self.name = f"cpu:{index}"
        self.device = torch.device("cpu", index)
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peers = peers

    def count(self, plain: torch.Tensor) -> None:
        """Count the storage of an ordinary tensor as living here, unless it is counted already.

        Raises `SimulatedOutOfMemoryError` if it does not fit; then nothing is counted.
        """
        storage = plain.untyped_storage()
        entry = _storages.get(id(storage))
        nbytes = storage.nbytes()
        if entry is None:
            self._grow(nbytes)
            entry = _CountedStorage(storage, _uncount)
            entry.key, entry.owner, entry.nbytes = id(storage), self, nbytes
            _storages[entry.key] = entry
        elif entry.nbytes != nbytes:  # resized in place
            entry.owner._grow(nbytes - entry.nbytes)
            entry.nbytes = nbytes

    def _grow(self, nbytes: int) -> None:
        live = self.live_bytes + nbytes
        if live > self.limit_bytes and nbytes > 0:
            raise SimulatedOutOfMemoryError(self.name, nbytes, self.live_bytes, self.limit_bytes)
        self.live_bytes = live
        if live > self.peak_bytes:
            self.peak_bytes = live


class _CountedStorage(weakref.ref):
    """A weak reference to a storage, with the device that pays for it."""

    __slots__ = ("key", "nbytes", "owner")
    key: int
    nbytes: int
    owner: SimulatedDevice


_storages: dict[int, _CountedStorage] = {}


def _uncount(entry: weakref.ref) -> None:
    assert isinstance(entry, _CountedStorage)
    del _storages[entry.key]
    entry.owner.live_bytes -= entry.nbytes
