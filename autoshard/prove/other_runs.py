"""Further runs of a model in which its ranks are followed, beside the one that was recorded for the plan.

    few      a short sequence; gradients are enabled, as in a training step
    many     a long one, the last tokens of some rows masked; then one more token, where the model keeps a cache

`max(length, heads)` is `length` in a long run, and `heads` in a short one. So the lengths are sizes of what can be cut,
where such comparisons turn. A run that the model itself refuses (an image of another size) is left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard import nested
from autoshard.axes.groups import AxisGroup, find_groups
from autoshard.capture.capture import capture, record_forward
from autoshard.capture.graph import ModelGraph
from autoshard.capture.inputs import Call
from autoshard.capture.run import own_random_numbers
from autoshard.errors import AutoshardError
from autoshard.workload import Workload

LONGEST = 128
"""Longer sequences are not tried: masks of integers and of booleans have their values in a recording."""
ROWS = 16
"""As many rows are tried at most."""
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """One recorded run of the whole model, and how the same is recorded of a rank.

    Attributes:
        what: the run in words, "" for that of the plan.
        groups: what can be cut by it.
        record: a model -> its graph in such a run.
        functions: (ops, name) of the calls of autograd functions that are not torch's own.
    """

    what: str
    graph: ModelGraph
    groups: Mapping[Key, AxisGroup]
    record: Callable[[nn.Module], ModelGraph]
    functions: tuple[tuple[range, str], ...] = field(default=())

    def of(self, group: AxisGroup) -> AxisGroup | None:
        """The group of this run that cuts the same, None if there is none."""
        return self.groups.get(key_of(group))


def key_of(group: AxisGroup) -> Key:
    """What a group cuts, whatever the run was."""
    return group.blocks, group.size, group.shards


def by_key(groups: Sequence[AxisGroup]) -> dict[Key, AxisGroup]:
    """Groups by what they cut."""
    return {key_of(group): group for group in groups}


def other_runs(model: nn.Module, call: Call, workload: Workload, groups: Sequence[AxisGroup]) -> list[Seen]:
    """Record the further runs. `call`: the arguments of the run of the plan; `groups`: what could be cut by it."""
    short, long = _lengths(groups)
    found = [_few(model, _calls(call, short)), _many(model, _calls(call, long, masked=True), workload)]
    return [one for one in found if one is not None]


def _lengths(groups: Sequence[AxisGroup]) -> tuple[int, int]:
    """A short length and a long one, both above 1: sizes of what can be cut, if any of them is short enough."""
    sizes = sorted({group.size for group in groups if 1 < group.size <= LONGEST}) or [2]
    return sizes[0], sizes[-1] if len(sizes) > 1 else 2 * sizes[0] + 1


def _few(model: nn.Module, calls: Sequence[Call]) -> Seen | None:
    for args, kwargs in calls:

        def record(local: nn.Module, args: tuple = args, kwargs: dict[str, Any] = kwargs) -> ModelGraph:
            return record_forward(local, args, kwargs, grad=True)[0]

        try:
            with own_random_numbers():
                graph, tape = record_forward(model, args, kwargs, grad=True)
        except AutoshardError:
            continue
        return Seen(
            what=f"with gradients and inputs {_shapes((args, kwargs))}",
            graph=graph,
            groups=by_key(find_groups(graph).groups),
            record=record,
            functions=tuple((range(row.begin, row.end), row.function.__name__) for row in tape.functions),
        )
    return None


def _many(model: nn.Module, calls: Sequence[Call], workload: Workload) -> Seen | None:
    asked = replace(workload, mode="inference", new_tokens=1)
    for args, kwargs in calls:
        given: Any = kwargs if kwargs and not args else args
        if args and kwargs:
            continue
        try:
            with own_random_numbers(), _evaluated(model, workload.training):
                graph = capture(model, given, workload=asked, composite=True)
        except AutoshardError:
            continue

        def record(local: nn.Module, given: Any = given, level: Any = graph.level) -> ModelGraph:
            with _evaluated(local, workload.training):
                return capture(local, given, workload=asked, level=level, composite=True)

        decoded = any(name == "decode" for name, _, _ in graph.phases)
        return Seen(
            what=f"with inputs {_shapes((args, kwargs))}{' and one more token' if decoded else ''}",
            graph=graph,
            groups=by_key(find_groups(graph).groups),
            record=record,
        )
    return None


@contextmanager
def _evaluated(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Put a model into evaluation mode inside, if `wanted`: one that is trained is evaluated, too."""
    before = [(module, module.training) for module in model.modules()] if wanted else []
    try:
        if wanted:
            model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


def _calls(call: Call, length: int, masked: bool = False) -> list[Call]:
    """Arguments to try: with as many rows as tokens, if these are few, with other tokens alone, and those given."""
    tensors = [tensor for _, tensor in nested.tensors_in(call) if tensor.dim()]
    ids = next((one for one in tensors if one.dim() > 1 and not one.is_floating_point()), None)
    main = ids if ids is not None else next((one for one in tensors if one.dim() > 1), None)
    if main is None:
        return [call]
    old = main.shape[0], main.shape[1]
    wanted = [(rows, length) for rows in dict.fromkeys((min(length, ROWS), old[0])) if (rows, length) != old]
    return [nested.map_tensors(call, partial(_resized, old=old, new=new, masked=masked)) for new in wanted] + [call]


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


def _shapes(call: Call) -> str:
    return ", ".join(str(list(tensor.shape)) for _, tensor in nested.tensors_in(call))
