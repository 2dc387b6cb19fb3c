"""Grid: the orders of the devices as arrays of nodes and edges, for the search with narrow windows.

A node says how many devices of each kind have a stage. Where links differ from pair to pair it also says the kind of
the device with the first stage, the kind of the one with the last stage so far, whether that stage is short, and what
kind the very last device is promised to be (the first one may have to wait for it):

    (0,0) ──▶ (1,0) ──▶ (2,0)        (2 of the first kind, 1 of the second; the first stage on the first kind,
      └─▶ (0,1) ──▶ (1,1) ...         the last one on the second, not short)
"""

from dataclasses import dataclass

import numpy as np

from autoshard.strategies.chain import Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """N nodes and E edges, both sorted by level (the number of devices with a stage); node 0 is the start.

    What a node does not keep is 0.

    Attributes:
        members: per kind, its devices; they are used in this order.
        counts: [N, K] devices of each kind with a stage.
        first: [N] kind of the device with the first stage, times `lengths`, plus 1 if that stage is short.
        last: [N] kind of the device with the last stage.
        is_short: [N] 1 where the last stage is short, else 0.
        lengths: 2 if nodes keep that, else 1.
        promise: [N] kind that the device with the very last stage is to be of; -1 where that is not kept.
        node_levels, edge_levels: [levels + 1] where the nodes of a level, and the edges that leave it, begin.
        source, target, kind: [E] nodes, and the kind of the device that takes the next stage.
    """

    members: tuple[tuple[int, ...], ...]
    counts: Array
    first: Array
    last: Array
    is_short: Array
    lengths: int
    promise: Array
    node_levels: Array
    edge_levels: Array
    source: Array
    target: Array
    kind: Array

    @property
    def num_levels(self) -> int:
        return len(self.node_levels) - 1

    @property
    def num_kinds(self) -> int:
        return len(self.members)


def devices_by_kind(kinds: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each kind, in order."""
    return tuple(tuple(d for d, k in enumerate(kinds) if k == kind) for kind in range(max(kinds) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What nodes keep of the way to them, besides the devices used."""

    ends: bool = False
    lengths: int = 1
    promise: bool = False


NOTHING = Kept()


def grid_nodes(kinds: tuple[int, ...], kept: Kept = NOTHING) -> int:
    """Number of nodes that `all_orders` would make, or a little more."""
    members = devices_by_kind(kinds)
    ends = len(members) ** 2 * kept.lengths if kept.ends else 1
    promises = len(members) if kept.promise else 1
    return int(np.prod([len(of) + 1.0 for of in members])) * ends * kept.lengths * promises


def all_orders(kinds: tuple[int, ...], kept: Kept = NOTHING) -> Grid:
    """Build the grid of devices in any order."""
    members = devices_by_kind(kinds)
    sizes = np.array([len(of) for of in members])
    num, ends, lengths = len(sizes), len(sizes) if kept.ends else 1, kept.lengths
    counts = np.stack(np.unravel_index(np.arange(int(np.prod(sizes + 1))), tuple(sizes + 1)), axis=1)
    stride = np.cumprod(np.append(1, (sizes + 1)[:0:-1]))[::-1]
    used = counts.sum(axis=1)
    valid = np.ones((len(counts), ends * lengths, ends, lengths, num if kept.promise else 1), bool)
    if kept.ends:
        one, two = counts > 0, (counts > 1) | (used == 1)[:, None]
        valid &= (np.repeat(one, lengths, axis=1)[:, :, None] & one[:, None, :])[..., None, None]
        for kind in range(num):
            valid[:, kind * lengths : (kind + 1) * lengths, kind] &= two[:, kind, None, None, None]
    valid[0] = False
    valid[0, 0, 0, 0, 0] = True
    nodes = np.stack(np.nonzero(valid))
    nodes = nodes[:, np.argsort(used[nodes[0]], kind="stable")]
    count, first, last, short, promise = nodes
    number = np.full(valid.shape, -1)
    number[tuple(nodes)] = np.arange(len(count))
    sources, targets, takers = [], [], []
    for kind in range(num):
        movable = np.flatnonzero(counts[count, kind] < sizes[kind])
        for length in range(lengths):
            begin = np.where(movable == 0, kind * lengths + length, first[movable]) if kept.ends else first[movable]
            for promised in range(valid.shape[-1]):
                here = (movable == 0) | (promise[movable] == promised)
                source, end = movable[here], kind if kept.ends else 0
                sources.append(source)
                targets.append(number[count[source] + stride[kind], begin[here], end, length, promised])
                takers.append(np.full(len(source), kind))
    source, target, taker = np.concatenate(sources), np.concatenate(targets), np.concatenate(takers)
    by_level = np.argsort(used[count[source]], kind="stable")
    source, target, taker = source[by_level], target[by_level], taker[by_level]
    levels = np.arange(len(kinds) + 2)
    return Grid(
        members=members, counts=counts[count], first=first, last=last, is_short=short, lengths=lengths,
        promise=promise if kept.promise else np.full(len(count), -1), node_levels=np.searchsorted(used[count], levels),
        edge_levels=np.searchsorted(used[count[source]], levels), source=source, target=target, kind=taker,
    )  # fmt: skip


def one_order(kinds: tuple[int, ...], order: tuple[int, ...], kept: Kept = NOTHING) -> Grid:
    """Build the part of the grid in which the devices have their stages in one order, until all units are placed."""
    members = devices_by_kind(kinds)
    lengths, promises = kept.lengths, len(members) if kept.promise else 1
    each = lengths * lengths * promises
    level = np.append(0, np.repeat(np.arange(1, len(order) + 1), each))
    within = np.append(0, np.tile(np.arange(each), len(order)))
    begun, short, promise = np.unravel_index(within, (lengths, lengths, promises))
    taken = np.array([kinds[device] for device in order])
    counts = np.cumsum(np.eye(len(members), dtype=int)[taken], axis=0)
    counts = np.concatenate([np.zeros((1, len(members)), int), counts])[level]
    follows = level[:, None] + 1 == level[None, :]
    same = (promise[:, None] == promise[None, :]) & (begun[:, None] == begun[None, :])
    follows &= np.where((level == 0)[:, None], (begun == short)[None, :], same)
    source, target = np.nonzero(follows)
    known, levels = kept.ends & (level > 0), np.arange(len(order) + 2)
    return Grid(
        members=members, counts=counts, first=np.where(known, taken[0] * lengths + begun, 0),
        last=np.where(known, taken[level - 1], 0), is_short=short, lengths=lengths,
        promise=promise if kept.promise else np.full(len(level), -1), node_levels=np.searchsorted(level, levels),
        edge_levels=np.searchsorted(level[source], levels), source=source, target=target, kind=taken[level[source]],
    )  # fmt: skip
