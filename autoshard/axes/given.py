"""What ops are given that is no tensor, by name or as a list, and numbers that code alone decides."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from autoshard.capture.graph import ModelGraph, Op, maker_of, name_of, sole_maker, written_storages
from autoshard.capture.traits import traits_of
from autoshard.common.schemas import arguments_of_op
from autoshard.torch_private import OpOverload


def arguments_of(op: Op) -> dict[str, Any]:
    """The arguments of an op by name, with defaults for those that it was not given."""
    assert op.node is not None
    return named(op.target, op.node.args, op.node.kwargs)


def named(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with defaults; those of which an op does not say the names by their places."""
    defaults = _defaults(target)
    names = [*defaults, *map(str, range(len(defaults), len(args)))]
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@cache
def _defaults(target: Any) -> dict[str, Any]:
    return {argument.name: argument.default_value for argument in arguments_of_op(target)}


def with_tensors(op: Op, made: Callable[[torch.fx.Node], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op with what is made of each node in its place, in their order."""
    assert op.node is not None
    found: Any = torch.fx.map_arg((op.node.args, op.node.kwargs), made)
    return found


def plain(op: Op) -> list[Any]:
    """The arguments of an op in order, with an ellipsis in place of each tensor, and then the names of keywords."""
    assert op.node is not None
    return [_plain(item) for item in (*op.node.args, *op.node.kwargs.values(), *op.node.kwargs)]


def _plain(item: Any) -> Any:
    if isinstance(item, torch.fx.Node):
        return ...
    return [_plain(part) for part in item] if isinstance(item, (list, tuple)) else item


def literals(graph: ModelGraph) -> dict[int, torch.Tensor]:
    """The content of tensors that the model's code brings with it, by value."""
    return {
        node.meta["value"]: node.meta["content"]
        for node in graph.fx_graph.nodes
        if node.op == "placeholder" and node.meta.get("kind") == "constant" and "content" in node.meta
    }


def overwritten_by(graph: ModelGraph, op: Op, values: Iterable[int]) -> list[int]:
    """Those of some values into whose memory an op writes."""
    storages = {graph.values[value].storage for value in op.mutates}
    return [value for value in values if graph.values[value].storage in storages]


def writes_elsewhere(graph: ModelGraph) -> bool:
    """Whether ops write into tensors that were there before the run, and are neither state of the model nor inputs."""
    known = {graph.values[value].storage for value in (*graph.inputs, *(tensor.value for tensor in graph.tensors))}
    there = {value.storage for value in graph.values if value.op < 0}
    return not written_storages(graph).isdisjoint(there - known)


def computed(op: Op, given: Sequence[torch.Tensor | None]) -> list[Any] | None:
    """What an op makes of the contents of its tensors; None where one is not known, or chance decides."""
    if op.node is None or not isinstance(op.target, OpOverload) or traits_of(op.target).random:
        return None
    if any(content is None for content in given):
        return None
    rest = iter(given)
    args, kwargs = with_tensors(op, lambda node: next(rest))
    try:
        made = op.target(*args, **{**kwargs, **({"device": "cpu"} if kwargs.get("device") is not None else {})})
    except (RuntimeError, TypeError, NotImplementedError, IndexError):
        return None
    listed = list(made) if isinstance(made, (list, tuple)) else [made]
    return listed if len(listed) == len(op.outputs) else None


def is_sized_by_values(graph: ModelGraph, op: Op) -> bool:
    """Whether values decide how large the results of an op are."""
    name = name_of(op)
    if name in ("index", "_unsafe_index"):
        return any(graph.values[value].dtype in (torch.bool, torch.uint8) for value in op.inputs[1:])
    if name == "one_hot":
        return arguments_of(op)["num_classes"] == -1
    return isinstance(op.target, OpOverload) and torch.Tag.dynamic_output_shape in op.target.tags


def reads_bits(op: Op) -> bool:
    """Whether an op is a view of the same bits as numbers of another type."""
    return name_of(op) == "view" and op.node is not None and any(isinstance(a, torch.dtype) for a in op.node.args)


def origin(graph: ModelGraph, value: int, *through: str) -> int:
    """The value that a value is made of by ops of these names alone, each of one tensor."""
    while (op := sole_maker(graph, value)) is not None and name_of(op) in through and len(op.inputs) == 1:
        value = op.inputs[0]
    return value


def ops_behind(graph: ModelGraph, value: int, until: Iterable[int] = (), *, writes: bool = False) -> Iterator[Op]:
    """The ops that a value is made of, back to some values; with `writes`, those that write into its memory as well."""
    writers: dict[int, list[Op]] = {}
    for op in graph.ops if writes else ():
        for written in op.mutates:
            writers.setdefault(graph.values[written].storage, []).append(op)
    seen, waiting = set(until), [value]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        made = maker_of(graph, one)
        for op in (*([made] if made is not None else []), *writers.get(graph.values[one].storage, ())):
            yield op
            waiting += op.inputs
