"""Refusal: why no plan fits, and one change that was tried and works."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autoshard.axes.walk import where
from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.links import make_links
from autoshard.common.sizes import format_bytes
from autoshard.strategies.chain import Chain
from autoshard.strategies.partition import Room, most_even
from autoshard.strategies.placing import levels

_MOST_MORE_DEVICES = 64
_MOST_MORE_MEMORY = 8
"""Times the memory of a device: no card has more than that, and it is no advice."""


def refusal(chain: Chain, cluster: Cluster, graph: ModelGraph, works: Callable[[Cluster], bool] | None) -> str:
    """Say which device lacks how much, what takes most there, and one change for which `works` came out true.

    Without `works` no change is looked for: that takes as long as several plans.
    """
    room = Room.of(chain.capacity_bytes)
    joined_chains = [one for every in levels(chain, room) for one in every]
    if not joined_chains:
        return (
            "the pins contradict each other: modules that share a weight are pinned to different devices. "
            "Pin all of them to one device, or leave out all pins but one."
        )
    even = joined_chains[-1].whole(most_even(joined_chains[-1].costs, room))
    capacity = room.has_bytes
    device = int(np.argmax(np.array(even.cost.memory_bytes) - capacity))
    need, has = even.cost.memory_bytes[device], float(capacity[device])
    sizes = np.asarray(chain.resident_bytes, float) + np.asarray(chain.transient_bytes, float)
    mine = sorted((unit for unit, at in enumerate(even.assignment) if at == device), key=lambda unit: -sizes[unit])
    largest = ", ".join(f"{chain.paths[unit][0] or 'the model'} {format_bytes(sizes[unit])}" for unit in mine[:3])
    lack = f", {format_bytes(need - has)} too little" if need > has else ""
    return (
        f"the model does not fit: spread as evenly as possible, {chain.devices[device]} needs {format_bytes(need)} "
        f"and has {format_bytes(has)} for tensors{lack} (largest there: {largest})."
    ) + (
        f" {pairs_of_tokens(graph)}" + _remedy(chain, cluster, device, max(need - has, 1.0), float(sizes.max()), works)
        if works else ""
    )  # fmt: skip


def pairs_of_tokens(graph: ModelGraph) -> str:
    """That the largest tensor has a number for every pair of tokens, where that is so: attention in several ops."""
    values = graph.values
    ids = {shape[1]: shape[0] for one in graph.inputs if len(shape := values[one].shape) == 2}
    largest = max((value for value in values if value.op >= 0), key=lambda value: value.nbytes, default=None)
    shape = largest.shape if largest is not None else ()
    if largest is None or len(shape) < 4 or shape[-2] not in ids or shape[-1] - shape[-2] not in (0, 1):  # with a sink
        return ""
    return (
        f"{where(graph, graph.ops[largest.op])} makes a number for every pair of tokens, "
        f"{format_bytes(largest.nbytes // ids[shape[-2]])} for each sample: attention in one kernel, where the "
        "model has it (attn_implementation), makes none. "
    )


def _remedy(
    chain: Chain, cluster: Cluster, device: int, extra: float, largest: float, works: Callable[[Cluster], bool]
) -> str:  # fmt: skip
    """Find one change that makes it fit: a little more memory, else more devices, else much more memory.

    More devices help nothing where one is smaller than the `largest` unit.
    """
    short = cluster.devices[device]

    def with_memory() -> str:
        for factor in (1.0, 1.25, 2.0):
            more = round_up(extra * factor)
            if works(cluster.with_memory({short.name: short.memory_bytes + more})):
                return f"It was checked that it fits if {short.name} has {format_bytes(more)} more."
        return ""

    said = with_memory() if 0 < extra <= short.memory_bytes / 2 or short.name == "cpu" else ""  # there is one CPU
    if said:
        return said
    lack = float(np.sum(chain.resident_bytes)) - float(np.maximum(chain.capacity_bytes, 0).sum())
    first = max(1, math.ceil(lack / max(short.budget_bytes, 1)))
    last = min(first + 8, _MOST_MORE_DEVICES) if largest <= short.budget_bytes else first
    for count in range(first, last):
        if works(with_copies(cluster, device, count)):
            more = "one more device" if count == 1 else f"{count} more devices"
            return f"It was checked that it fits with {more} like {short.name}."
    said = with_memory() if 0 < extra <= _MOST_MORE_MEMORY * short.memory_bytes else ""
    return said or (
        "No change of one device that was tried makes it fit: leave out the pins, take larger devices, or give less at "
        "once (--max-seq and --max-batch find what fits)."
    )


def round_up(nbytes: float) -> int:
    """Return the least size not below `nbytes` that `format_bytes` prints exactly."""
    unit = 1
    while nbytes / unit >= 1000 and unit < 1 << 40:
        unit <<= 10
    value = nbytes / unit
    parts = 1 if unit == 1 or value >= 100 else 10 if value >= 10 else 100
    return math.ceil(math.ceil(value * parts) / parts * unit)


def with_copies(cluster: Cluster, device: int, count: int) -> Cluster:
    """The cluster with more devices like one of its own, on the same links."""
    model = cluster.devices[device]
    links = [*cluster.links.known.values()]
    near = [link for link in links if model.name in (link.source, link.destination)]
    names = [f"{model.name} (copy {k + 1})" for k in range(count)]
    for name in names:
        for link in near:
            copied = replace(link, source=name) if link.source == model.name else replace(link, destination=name)
            links.append(copied)
    copies = tuple(replace(model, name=name) for name in names)
    devices = (*cluster.devices, *copies)
    known = {(link.source, link.destination): link for link in links}
    return replace(cluster, devices=devices, links=make_links(devices, tuple(cluster.links.hosts.values()), known))
