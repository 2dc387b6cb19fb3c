"""What every interval [i, j) of a chain's free units costs on every device, as dense (m+1) x (m+1) tables.

Pinned units are set aside; what stays is m free units in a row, and a stage is an interval of them on one device. A
tensor made at p and next used at v must be copied to every stage that starts in (p, v] and ends after v:

    units     p . . . . v . . .            gap (p, v) = the rectangle  p < i <= v < j  in the plane of (i, j)
    stage         [ i . . . j )

and the mirror image for a consumer before the producer (a loop, or the outputs that go back). A sum of rectangles is a
difference array and two cumulative sums, so the tables cost O(E + m^2), and all counts and bytes in them are exact.
What a copy takes depends on where it comes from: it is priced as if all came over the fastest link.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.strategies.chain import Array, Chain


@dataclass(frozen=True, slots=True, eq=False)
class ParameterCopies:
    """What comes in to stage [i, j): number of copies, bytes copied (both per pass) and bytes kept; `idle`: to none."""

    count: Array
    moved: Array
    kept: Array
    idle: tuple[float, float, float]


class StageCosts:
    """Tables of one chain, made when they are asked for and kept. Its capacities are not read."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.pinned_to = np.full(chain.num_units, -1)
        for unit, device in chain.pins.items():
            self.pinned_to[unit] = device
        self.free = np.flatnonzero(self.pinned_to < 0)
        self.size = len(self.free)
        self.pinned = sorted(set(chain.pins.values()))
        self.position = np.full(chain.num_units, -1)
        self.position[self.free] = np.arange(self.size)
        at = np.arange(self.size + 1)
        self.valid = at[:, None] < at[None, :]
        self._copies: dict[int, ParameterCopies] = {}
        self._held: dict[int, Array] = {}
        self._seconds: dict[object, Array] = {}
        self._rows = [row.tobytes() for row in chain.seconds]

    @cached_property
    def _edges(self) -> tuple[Array, Array, Array, Array, Array]:
        """Makers and consumers as positions or pinned devices, sorted by tensor and position of the consumer."""
        chain = self.chain
        source = np.where(chain.tensor_unit < 0, chain.root_unit, chain.tensor_unit)
        made, used = chain.ends
        keep = made != used
        pairs = np.unique(chain.edge_tensor[keep].astype(np.int64) * chain.num_units + used[keep])
        tensor, user = divmod(pairs, chain.num_units)
        order = np.lexsort((self.position[user], tensor))
        tensor, user = tensor[order], user[order]
        return self.position[source], self.pinned_to[source], tensor, self.position[user], self.pinned_to[user]

    def copies(self, device: int) -> ParameterCopies:
        """Return the incoming copies of a device; all without pinned units have the same."""
        key = device if device in self.pinned else -1
        if key not in self._copies:
            self._copies[key] = self._find_copies(device)
        return self._copies[key]

    def _find_copies(self, device: int) -> ParameterCopies:
        source, source_device, tensor, at, at_device = self._edges
        last, chain = self.size, self.chain
        fed = np.zeros(len(source), bool)  # needed by a unit pinned here: copied in unless the stage makes it
        fed[tensor[at_device == device]] = True
        here = source_device == device
        keep = (at >= 0) & ~(fed | here)[tensor]
        x, at = tensor[keep], at[keep]
        forward = at > source[x]
        fx, fv = x[forward], at[forward]
        previous = source[fx]
        previous[1:] = np.where(fx[1:] == fx[:-1], fv[:-1], previous[1:])
        bx, bv = x[~forward], at[~forward]
        following = source[bx]
        following[:-1] = np.where(bx[1:] == bx[:-1], bv[1:], following[:-1])
        px = np.flatnonzero(fed & ~here)
        made, elsewhere = px[source[px] >= 0], px[source[px] < 0]
        zero, full = np.zeros_like, lambda a: np.full_like(a, last)
        rows = np.concatenate([fx, bx, made, made, elsewhere])
        corners = (
            np.concatenate([previous + 1, zero(bv), source[made] + 1, zero(made), zero(elsewhere)]),
            np.concatenate([fv, bv, full(made), full(made), full(elsewhere)]),
            np.concatenate([fv + 1, bv + 1, zero(made), zero(made), zero(elsewhere)]),
            np.concatenate([full(fv), following, full(made), source[made], full(elsewhere)]),
        )
        nbytes, times = np.asarray(chain.tensor_bytes, float), np.asarray(chain.tensor_copies, float)
        weights = times, times * nbytes, nbytes
        count, moved, kept = (_plane(corners, weight[rows], last) for weight in weights)
        return ParameterCopies(count, moved, kept, tuple(float(weight[px].sum()) for weight in weights))  # type: ignore[arg-type]

    def held(self, device: int) -> Array:
        """[m+1, m+1] bytes that a device holds with a stage."""
        key = device if device in self.pinned else -1
        if key not in self._held:
            chain = self.chain
            resident = np.concatenate([[0.0], np.cumsum(chain.resident_bytes[self.free])])
            # largest transient of [i, j): row i starts to count at column i + 1
            columns = np.concatenate([[0.0], chain.transient_bytes[self.free]])
            transient = np.maximum.accumulate(np.where(self.valid, columns[None, :], 0.0), axis=1)
            base, least = self._base(device)
            held = resident[None, :] - resident[:, None] + np.maximum(transient, least) + base
            self._held[key] = held + self.copies(device).kept
        return self._held[key]

    def seconds(self, device: int) -> Array:
        """[m+1, m+1] seconds of a stage on a device, copies over the fastest link into it."""
        latency, bandwidth = self.link(device)
        key = self._rows[device], latency, bandwidth, device if device in self.pinned else -1
        if key not in self._seconds:
            copies = self.copies(device)
            own = np.concatenate([[0.0], np.cumsum(self.chain.seconds[device, self.free])])
            seconds = own[None, :] - own[:, None] + latency * copies.count + copies.moved / bandwidth
            if len(self._seconds) >= 32:  # many unequal devices: rebuilding a table is cheaper than keeping them all
                self._seconds.clear()
            self._seconds[key] = seconds + self.chain.seconds[device, self.pinned_to == device].sum()
        return self._seconds[key]

    def idle(self, device: int) -> tuple[float, float]:
        """Seconds and bytes of a device with pinned units and no stage."""
        latency, bandwidth = self.link(device)
        count, moved, kept = self.copies(device).idle
        own = float(self.chain.seconds[device, self.pinned_to == device].sum())
        return own + latency * count + moved / bandwidth, sum(self._base(device)) + kept

    def _base(self, device: int) -> tuple[float, float]:
        """Resident and transient bytes of the units that are pinned to a device."""
        mine = self.pinned_to == device
        return float(self.chain.resident_bytes[mine].sum()), float(self.chain.transient_bytes[mine].max(initial=0))

    def link(self, device: int) -> tuple[float, float]:
        """Latency and bandwidth of the fastest copies into a device."""
        chain = self.chain
        others = np.arange(chain.num_devices) != device
        latency = chain.link_seconds[others, device].min(initial=np.inf)
        bandwidth = chain.link_bytes_per_second[others, device].max(initial=0.0)
        return (float(latency), float(bandwidth)) if others.any() else (0.0, 1.0)

    def kinds(self, *costs: Array) -> list[list[int]]:
        """Devices that can be swapped: of one speed, on the same links, with equal figures, without pins."""
        found: list[list[int]] = []
        for device in range(self.chain.num_devices):
            for kind in found:
                if self._swappable(kind[0], device, costs):
                    kind.append(device)
                    break
            else:
                found.append([device])
        return found

    def _swappable(self, a: int, b: int, costs: Sequence[Array]) -> bool:
        if a in self.pinned or b in self.pinned or self._rows[a] != self._rows[b]:
            return False
        if any(row[a] != row[b] for row in costs):
            return False
        others = np.ones(self.chain.num_devices, bool)
        others[[a, b]] = False
        return all(
            links[a, b] == links[b, a]
            and np.array_equal(links[a, others], links[b, others])
            and np.array_equal(links[others, a], links[others, b])
            for links in (self.chain.link_seconds, self.chain.link_bytes_per_second)
        )


def _plane(corners: tuple[Array, Array, Array, Array], weight: Array, size: int) -> Array:
    """Sum the weights of rectangles i_low <= i <= i_high, j_low <= j <= j_high at every (i, j), both in 0..size."""
    i_low, i_high, j_low, j_high = corners
    low, high, right = i_low * (size + 2), (i_high + 1) * (size + 2), j_high + 1
    cells = np.concatenate([low + j_low, high + j_low, low + right, high + right])
    signed = np.concatenate([weight, -weight, -weight, weight])
    plane = np.bincount(cells, signed, (size + 2) ** 2).reshape(size + 2, size + 2)
    np.cumsum(plane, 0, out=plane)  # in place: memory is what takes the time here
    return np.cumsum(plane, 1, out=plane)[: size + 1, : size + 1]
