"""Problem: a chain made ready for the solvers. Tied units merged (or not), pinned units set aside, copies rectangles.

What stays is m free units in a row; a stage is an interval [i, j) of them on one device. Everything a stage costs
depends on i, j and the device alone as long as a copy costs the same from every source. A tensor made at p and next
used at v must be copied to every stage that starts in (p, v] and ends after v:

    units     p . . . . v . . .            gap (p, v) = the rectangle  p < i <= v < j  in the plane of (i, j)
    stage         [ i . . . j )

and the mirror image for a consumer before the producer (a loop, or the outputs that go home). A sum of rectangles is a
difference array and two cumulative sums, so the tables cost O(E + m^2), and all counts and bytes in them are exact.
"""

from dataclasses import dataclass

import numpy as np

from autoshard.strategies.chain import Array, Chain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Free units in a row, what is pinned to each device, and the tensors between them.

    Attributes:
        position: [n] free position of every original unit (tied units that were merged have the same), -1 if pinned.
        pinned_to: [n] the device a pinned unit is on, else -1.
        pinned: [D] whether a device has pinned units.
        seconds, resident, transient: of the free positions ([D, m], [m], [m]).
        base_seconds, base_resident, base_transient: [D] of the pinned units of each device.
        source: [X] position that makes tensor x, -1 if it is pinned; source_device: [X] where it is pinned, else -1.
        nbytes, copies: [X] bytes, and how often it is copied (0 for a tied weight: bytes but no time).
        edge_x, edge_at: consumers that are free positions, sorted by tensor then position.
        pinned_x, pinned_at: consumers that are pinned, as devices.
        kinds: [D] devices with the same number are interchangeable.
    """

    chain: Chain
    position: Array
    pinned_to: Array
    pinned: tuple[bool, ...]
    seconds: Array
    resident: Array
    transient: Array
    base_seconds: Array
    base_resident: Array
    base_transient: Array
    source: Array
    source_device: Array
    nbytes: Array
    copies: Array
    edge_x: Array
    edge_at: Array
    pinned_x: Array
    pinned_at: Array
    kinds: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.resident)

    def assignment(self, stages: list[tuple[int, int, int]]) -> tuple[int, ...]:
        """Turn stages (i, j, device) into a device index per original unit."""
        device = np.full(self.size + 1, -1)
        for start, stop, at in stages:
            device[start:stop] = at
        return tuple(np.where(self.position >= 0, device[self.position], self.pinned_to).tolist())


def make_problem(chain: Chain, merged: tuple[bool, ...] | None = None) -> Problem | None:
    """Build the problem in which tie g follows its first unit where `merged[g]`; None if pins contradict that.

    Where a tie is not merged each device that uses it holds a copy.
    """
    merged = merged if merged is not None else (False,) * len(chain.ties)
    group = _merge(chain, merged)
    leaders, group = np.unique(group, return_inverse=True)
    count = len(leaders)
    pin = np.full(count, -1)
    for unit, device in chain.pins.items():
        if pin[group[unit]] not in (-1, device):
            return None
        pin[group[unit]] = device
    free = np.flatnonzero(pin < 0)
    position = np.full(count, -1)
    position[free] = np.arange(len(free))

    seconds = np.stack([np.bincount(group, row, count) for row in chain.seconds])
    resident, transient = np.bincount(group, chain.resident_bytes, count), np.zeros(count)
    np.maximum.at(transient, group, chain.transient_bytes)
    base_seconds, base_resident, base_transient = np.zeros((3, chain.num_devices))
    for at in np.flatnonzero(pin >= 0):
        base_seconds[pin[at]] += seconds[pin[at], at]
        base_resident[pin[at]] += resident[at]
        base_transient[pin[at]] = max(base_transient[pin[at]], transient[at])

    tensors = _tensors(chain, group, merged)
    source, edge_x, edge_to = tensors["source"], tensors["edge_x"], tensors["edge_to"]
    to_free = position[edge_to] >= 0
    return Problem(
        chain=chain,
        position=position[group], pinned_to=pin[group],
        pinned=tuple((pin == device).any() for device in range(chain.num_devices)),
        seconds=seconds[:, free], resident=resident[free], transient=transient[free],
        base_seconds=base_seconds, base_resident=base_resident, base_transient=base_transient,
        source=position[source], source_device=pin[source],
        nbytes=tensors["nbytes"], copies=tensors["copies"],
        edge_x=edge_x[to_free], edge_at=position[edge_to[to_free]],
        pinned_x=edge_x[~to_free], pinned_at=pin[edge_to[~to_free]],
        kinds=device_kinds(chain),
    )  # fmt: skip


def _merge(chain: Chain, merged: tuple[bool, ...]) -> Array:
    """Return for every unit the first unit of its merged group (itself if it is in none)."""
    leader = np.arange(chain.num_units)
    for tie, merge in zip(chain.ties, merged, strict=True):
        if merge:
            roots = {int(leader[unit]) for unit in tie.units}
            leader[np.isin(leader, list(roots))] = min(roots)
    return leader


def _tensors(chain: Chain, group: Array, merged: tuple[bool, ...]) -> dict[str, Array]:
    """Tensors and their consumers between merged units; -1 and n stand for `home`; ties not merged come last."""
    source = group[np.where(chain.tensor_unit < 0, chain.home, chain.tensor_unit)]
    consumer = group[np.where(chain.edge_unit >= chain.num_units, chain.home, chain.edge_unit)]
    edge_x, nbytes, copies = chain.edge_tensor, chain.tensor_bytes, chain.tensor_copies
    for tie, merge in zip(chain.ties, merged, strict=True):
        if not merge:
            edge_x = np.append(edge_x, np.full(len(tie.units) - 1, len(source)))
            consumer = np.append(consumer, group[list(tie.units[1:])])
            source = np.append(source, group[tie.units[0]])
            nbytes, copies = np.append(nbytes, tie.nbytes), np.append(copies, 0)
    count = int(group.max()) + 1
    keep = source[edge_x] != consumer if len(edge_x) else np.zeros(0, bool)
    pairs = np.sort(edge_x[keep].astype(np.int64) * count + consumer[keep])
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    return {
        "source": source.astype(np.int64), "nbytes": np.asarray(nbytes, float), "copies": np.asarray(copies, float),
        "edge_x": pairs // count, "edge_to": pairs % count,
    }  # fmt: skip


def device_kinds(chain: Chain) -> tuple[int, ...]:
    """Number devices so that swapping two of the same number changes nothing: not their cost, links, memory or pins."""
    kinds: list[int] = []
    representatives: list[int] = []
    held = set(chain.pins.values())
    rows = [chain.seconds[d].tobytes() for d in range(chain.num_devices)]
    for device in range(chain.num_devices):
        for kind, other in enumerate(representatives):
            if device in held or other in held or chain.capacity_bytes[device] != chain.capacity_bytes[other]:
                continue
            if chain.peaks is not None and chain.peaks.look(device) != chain.peaks.look(other):
                continue
            if rows[device] == rows[other] and _swappable(chain, device, other):
                kinds.append(kind)
                break
        else:
            kinds.append(len(representatives))
            representatives.append(device)
    return tuple(kinds)


def _swappable(chain: Chain, a: int, b: int) -> bool:
    """Whether two devices have the same links: with each other in both directions, and with every other device."""
    others = np.ones(chain.num_devices, bool)
    others[[a, b]] = False
    return all(
        links[a, b] == links[b, a]
        and np.array_equal(links[a, others], links[b, others])
        and np.array_equal(links[others, a], links[others, b])
        for links in (chain.link_seconds, chain.link_bytes_per_second)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Rectangles:
    """Where in the plane of stages [i, j) each tensor must be copied in: i_low <= i <= i_high, j_low <= j <= j_high."""

    x: Array
    i_low: Array
    i_high: Array
    j_low: Array
    j_high: Array

    def table(self, weight: Array, size: int) -> Array:
        """Sum the weights of the rectangles at every (i, j), both in 0..size."""
        low, high, w = self.i_low * (size + 2), (self.i_high + 1) * (size + 2), weight[self.x]
        left, right = self.j_low, self.j_high + 1
        corners = np.concatenate([low + left, high + left, low + right, high + right])
        plane = np.bincount(corners, np.concatenate([w, -w, -w, w]), (size + 2) ** 2).reshape(size + 2, size + 2)
        np.cumsum(plane, 0, out=plane)  # in place: memory is what takes the time here
        return np.cumsum(plane, 1, out=plane)[: size + 1, : size + 1]


def rectangles(problem: Problem, device: int) -> Rectangles:
    """Find which stages on `device` need a copy of which tensor. The same for all devices without pinned units."""
    source, edge_x, edge_at, last = problem.source, problem.edge_x, problem.edge_at, problem.size
    fed = np.zeros(len(source), bool)
    fed[problem.pinned_x[problem.pinned_at == device]] = True
    here = problem.source_device == device
    keep = ~(fed | here)[edge_x]
    x, at = edge_x[keep], edge_at[keep]
    forward = at > source[x]
    fx, fv = x[forward], at[forward]
    previous = source[fx]
    previous[1:] = np.where(fx[1:] == fx[:-1], fv[:-1], previous[1:])
    bx, bv = x[~forward], at[~forward]
    following = source[bx]
    following[:-1] = np.where(bx[1:] == bx[:-1], bv[1:], following[:-1])
    # needed by a unit pinned here: copied in unless the stage makes it
    px = np.flatnonzero(fed & ~here)
    made = px[source[px] >= 0]
    before, after = np.zeros_like, lambda a: np.full_like(a, last)
    elsewhere = px[source[px] < 0]
    return Rectangles(
        np.concatenate([fx, bx, made, made, elsewhere]),
        np.concatenate([previous + 1, before(bv), source[made] + 1, before(made), before(elsewhere)]),
        np.concatenate([fv, bv, after(made), after(made), after(elsewhere)]),
        np.concatenate([fv + 1, bv + 1, before(made), before(made), before(elsewhere)]),
        np.concatenate([after(fv), following, after(made), source[made], after(elsewhere)]),
    )


def base_copies(problem: Problem, device: int) -> tuple[float, float, float]:
    """Copies, bytes copied and bytes kept that come to a device which has pinned units but no stage."""
    fed = np.zeros(len(problem.source), bool)
    fed[problem.pinned_x[problem.pinned_at == device]] = True
    x = np.flatnonzero(fed & (problem.source_device != device))
    copies, nbytes = problem.copies[x], problem.nbytes[x]
    return float(copies.sum()), float((copies * nbytes).sum()), float(nbytes.sum())
