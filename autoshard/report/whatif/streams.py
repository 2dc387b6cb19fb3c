"""Streamed modules for the sliders: the calls of a pass, what is computed between and in them, and what is brought."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.cluster.cluster import Cluster
from autoshard.flow import HOST_NAME, Flow
from autoshard.profile.profile import Profile
from autoshard.profile.scaling import Scaling
from autoshard.report.whatif.links import Links
from autoshard.report.whatif.sparse import counted, terms
from autoshard.stream_cost import Streamed


def stream_data(
    modules: Sequence[Streamed], profile: Profile, cluster: Cluster, names: Sequence[str], scaling: Scaling,
    moves: Flow, of_op: Sequence[int], of_extra: Sequence[int], links: Links,
) -> dict[str, Any]:  # fmt: skip
    """Return what `formula_streams.streamed` takes. `names`: of the devices whose numbers it uses; `moves`: the flow.

    segments    per stretch of the pass, [device, kinds of ops …] and copies [device, link, how many, bytes]
    calls       [segment before, segment of the call, module]; tail: the segment after the last
    modules     [device, link, copies, bytes, from disk]
    """
    timed = [module for module in modules if module.store != module.device]
    spans = sorted((begin, end, i) for i, module in enumerate(timed) for begin, end in module.calls)
    segments: list[list[Any]] = []
    known: dict[str, int] = {}
    device_of = {index: names.index(name) for index, name in enumerate(moves.devices) if name in names}
    placed = _placed(device_of, scaling, moves, of_op, of_extra)
    times = np.array([time for time, _, _ in placed], np.int64)
    copied = [
        copy for copy in moves.copies
        if not copy.kept and moves.counts(copy) and HOST_NAME not in (copy.source, copy.destination)
    ]  # fmt: skip

    def segment(begin: int, end: int) -> int:
        """Number of what runs from one op up to another."""
        kinds: dict[int, Counter[int]] = {}
        for _, device, kind in placed[np.searchsorted(times, begin) : np.searchsorted(times, end)]:
            kinds.setdefault(device, Counter())[kind] += 1
        groups: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
        for copy in copied:
            if begin <= int(copy.born) < end:
                key = names.index(copy.destination), links.between(copy.source, copy.destination)
                count, total = groups.get(key, (0, np.zeros(len(scaling.monomials))))
                value = profile.graph.values[copy.value]
                share = copy.nbytes / value.nbytes if value.nbytes else 0.0
                groups[key] = count + 1, total + share * scaling.table[scaling.value[copy.value]]
        ops = [[device, counted(found.elements())] for device, found in sorted(kinds.items())]
        row = [ops, [[*key, count, terms(total)] for key, (count, total) in groups.items()]]
        if repr(row) not in known:
            known[repr(row)] = len(segments)
            segments.append(row)
        return known[repr(row)]

    calls, at = [], 0
    for begin, end, index in spans:
        calls.append([segment(at, begin), segment(begin, end), index])
        at = end
    graph = profile.graph
    return {
        "calls": calls,
        "tail": segment(at, moves.steps + 1),
        "segments": segments,
        "modules": [
            [names.index(one.device), links.between(one.store, one.device), len(one.storages),
             sum(graph.storages[storage].nbytes for storage in one.storages), int(one.store == "disk")]
            for one in timed
        ],
    }  # fmt: skip


def _placed(
    device_of: Mapping[int, int], scaling: Scaling, moves: Flow, of_op: Sequence[int], of_extra: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(time, device, kind) of everything that is computed on devices that count, in its order."""
    ops = [(op, moves.op_device[op], kind) for op, kind in enumerate(of_op)]
    more = [
        (extra.before, moves.op_device[extra.beside], kind)
        for extra, kind in zip(scaling.extra, of_extra, strict=True)
    ]  # fmt: skip
    return sorted(
        (time, device_of[where], kind) for time, where, kind in [*ops, *more] if kind >= 0 and where in device_of
    )
