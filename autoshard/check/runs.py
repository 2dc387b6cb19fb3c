"""Further runs of a model in which its ranks are followed, beside the one that was recorded for the plan.

    few      half as many tokens as there are heads; gradients are enabled, as in a training step
    heads    as many tokens as heads, then one more, where the model keeps a cache
    many     many tokens, those at the end of a row masked

`max(length, heads)` is `length` in a long run, and `heads` in a short one. So the lengths are sizes of what can be cut,
where such comparisons turn. A run that the model itself refuses (an image of another size) is left out, and so is one
that would be the run of the plan again.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard import nested
from autoshard.axes.axis import factors_of
from autoshard.axes.groups import AxisGroup, find_groups
from autoshard.capture.call_log import CallLog
from autoshard.capture.capture import capture, record_forward
from autoshard.capture.graph import ModelGraph
from autoshard.capture.run import own_random_numbers
from autoshard.check.local_sizes import numbers_in
from autoshard.check.modes import in_mode
from autoshard.check.rank import Arguments
from autoshard.errors import AutoshardError
from autoshard.plan.workload import Workload

LONGEST = 128
"""Longer sequences are not tried: masks of integers and of booleans have their values in a recording."""
MOST_OPS = 10_000
"""Ops of a run up to which a model that loops over tokens is tried with many of them."""
ROWS = 16
"""With a long sequence no more rows than this are tried."""
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRuns:
    """One recorded run of the whole model, and how the same is recorded of a rank.

    Attributes:
        what: the run in words, "" for that of the plan.
        groups: what can be cut by it, by size and parameters.
        record: a model -> its graph in such a run.
        call_log: what the graph doesn't tell of the run, if it was noted.
    """

    what: str
    graph: ModelGraph
    groups: Mapping[Key, Sequence[AxisGroup]]
    record: Callable[[nn.Module], ModelGraph]
    call_log: CallLog | None = None

    def of(self, group: AxisGroup) -> list[AxisGroup]:
        """The groups of this run that cut the same, [] if there are none.

        Blocks that are alike in one run may differ in another: some of them keep a window of the last tokens only, and
        mixtures of experts choose others in each.
        """
        alike = self.groups.get(_key_of(group), ())
        same = {part.blocks: part for one in alike if (part := one.within(group.blocks)) is not None}
        blocks = [block for one in same for block in one]
        return list(same.values()) if sorted(blocks) == sorted(group.blocks) else []


def _key_of(group: AxisGroup) -> Key:
    """What a group cuts in each of its blocks, whatever the run was."""
    return group.size, group.shards


def _by_key(groups: Sequence[AxisGroup]) -> dict[Key, list[AxisGroup]]:
    """Groups by what they cut."""
    found: dict[Key, list[AxisGroup]] = {}
    for group in groups:
        found.setdefault(_key_of(group), []).append(group)
    return found


def other_runs(model: nn.Module, call: Arguments, workload: Workload, groups: Sequence[AxisGroup]) -> list[RankRuns]:
    """Record the further runs. `call`: the arguments of the run of the plan; `groups`: what could be cut by it."""
    half, heads, most = _sizes(groups)
    few = _recorded(_calls(call, half, heads), partial(_with_gradients, model))
    cached = replace(workload, new_tokens=1)
    short = _recorded(_calls(call, heads, half), partial(_plain, model, cached, call))
    if groups and short is not None:
        most = _fewer(call, groups[0].walk.graph, short.graph, heads, most)
    many = _recorded(_calls(call, most, min(most, ROWS), masked=True), partial(_plain, model, workload, call))
    return [run for run in (few, short, many) if run is not None]


def _fewer(call: Arguments, planned: ModelGraph, short: ModelGraph, heads: int, most: int) -> int:
    """Halve a number of tokens until a run of so many has at most `MOST_OPS` ops, in models that loop over tokens.

    A loop in a loop is assumed: ops grow with the square of the tokens, from the run of the plan on. They are known to
    grow where that run has more ops than one of `heads` tokens.
    """
    first_decode = next((begin for name, begin, _ in short.phases if name == "decode"), len(short.ops))
    main = _main(call)
    if main is None or len(planned.ops) < 1.5 * first_decode:
        return most
    while most > 2 * heads and len(planned.ops) * (most / main.shape[1]) ** 2 > MOST_OPS:
        most //= 2
    return most


def _sizes(groups: Sequence[AxisGroup]) -> tuple[int, int, int]:
    """Half of a number of heads, that number, and a larger size: a few, as many, and many rows or tokens.

    Sizes of what can be cut, and of several factors of it (8 heads of keys for 32 of queries), if they are short.
    """
    found = {
        number.whole
        for group in groups
        for axes in group.walk.axes.values()
        for axis in axes
        if group.factor in factors_of(axis)
        for number in numbers_in(axis, group.factor)
    }
    sizes = sorted(size for size in found if 2 < size <= LONGEST) or [4]
    return max(2, sizes[0] // 2), sizes[0], sizes[-1] if len(sizes) > 1 else 2 * sizes[0]


def _recorded(calls: Sequence[Arguments], record: Callable[[Arguments], RankRuns | None]) -> RankRuns | None:
    """The first of several calls that the model takes; None if it takes none of them."""
    for call in calls:
        with suppress(AutoshardError), own_random_numbers():
            return record(call)
    return None


def _with_gradients(model: nn.Module, call: Arguments) -> RankRuns:
    args, kwargs = call

    def record(local: nn.Module) -> ModelGraph:
        return record_forward(local, args, kwargs, grad=True, histories=True, level=graph.level)[0]

    graph, call_log = record_forward(model, args, kwargs, grad=True, histories=True)
    groups = _by_key(find_groups(graph).groups)
    return RankRuns(
        what=f"with gradients and inputs {_shapes(call)}", graph=graph, groups=groups, record=record, call_log=call_log
    )


def _plain(model: nn.Module, workload: Workload, planned: Arguments, call: Arguments) -> RankRuns | None:
    """A forward without gradients and, where the model keeps a cache, one more token.

    A model that is trained is evaluated, too. None if it is the run of the plan again, with its arguments `planned`.
    """
    args, kwargs = call
    again = call is planned and not workload.training
    if again and not workload.new_tokens:
        return None

    def record(local: nn.Module, new_tokens: int, level: Any = None) -> ModelGraph:
        asked = replace(workload, mode="inference", new_tokens=new_tokens)
        with in_mode(local, False) if workload.training else nullcontext():
            return capture(local, kwargs or args, workload=asked, level=level, composite=True)

    graph = record(model, workload.new_tokens)
    decoded = any(name == "decode" for name, _, _ in graph.phases)
    if again and not decoded:
        return None
    groups = _by_key(find_groups(graph).groups)
    same = partial(record, new_tokens=workload.new_tokens if decoded else 0, level=graph.level)
    what = f"with inputs {_shapes(call)}{' and one more token' if decoded else ''}"
    return RankRuns(what=what, graph=graph, groups=groups, record=same)


def _calls(call: Arguments, length: int, rows: int, masked: bool = False) -> list[Arguments]:
    """Arguments to try: of another length with other rows, of another length, and those given."""
    main = _main(call)
    if main is None:
        return [call]
    old = main.shape[0], main.shape[1]
    wanted = [(count, length) for count in dict.fromkeys((rows, old[0])) if (count, length) != old]
    return [nested.map_tensors(call, partial(_resized, old=old, new=new, masked=masked)) for new in wanted] + [call]


def _main(call: Arguments) -> torch.Tensor | None:
    """The argument that tells how many rows and tokens there are: the first of whole numbers, else the first."""
    tensors = [tensor for _, tensor in nested.tensors_in(call) if tensor.dim() > 1]
    return next((one for one in tensors if not one.is_floating_point()), tensors[0] if tensors else None)


def _resized(tensor: torch.Tensor, *, old: tuple[int, int], new: tuple[int, int], masked: bool) -> torch.Tensor:
    """Repeat or leave out rows and tokens; `old`: how many of them there are. Masks of ones end in zeros."""
    made = tensor
    for dim, size in enumerate(tensor.shape):
        wanted = new[0] if dim == 0 and size == old[0] else new[1] if size == old[1] else size
        if wanted != size:
            made = made.index_select(dim, torch.arange(wanted, device=tensor.device) % size)
    if masked and tuple(made.shape) == new and new[1] > 2 and _is_ones(made):
        made = made.clone()
        made[-1, -(new[1] // 3) :] = 0
    return made


def _is_ones(tensor: torch.Tensor) -> bool:
    known = type(tensor) is torch.Tensor and not tensor.is_meta and not tensor.is_floating_point()
    return known and bool((tensor == 1).all())


def _shapes(call: Arguments) -> str:
    return ", ".join(str(list(tensor.shape)) for _, tensor in nested.tensors_in(call))
