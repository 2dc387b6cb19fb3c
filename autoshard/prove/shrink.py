"""A smaller block of the same making, for a proof where the block itself is too large to be run.

    128 heads, width 53248, 2048 tokens   ──▶   2 heads, width 2, 8 tokens: the same Python code on the same axes

What can be cut can as well be left out: a rank that keeps 2 slices of every axis, without the others, is such a block.
The scales that make it run are those of the cuts. Axes that no parameter has (batch, tokens) are shortened too.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import nn

from autoshard.axes.axis import Axis, Leaf, describe, leaves, local_size
from autoshard.axes.groups import AxisGroup
from autoshard.capture.fake import SMALL_FLOATS
from autoshard.capture.graph import Call, ModelGraph
from autoshard.capture.observe import TensorSpec
from autoshard.packed import is_packed
from autoshard.prove.ranks import LoneRank
from autoshard.runtime.actions import install
from autoshard.runtime.cuts import apply_cuts, cut_record
from autoshard.runtime.steps import Memo, Step
from autoshard.sharding import Cut, Scale, coordinates_of
from autoshard.torch_private import FakeTensorMode, fake_from_meta

SLICES = 2
"""Slices of a cut axis that a smaller block keeps: one for each of two ranks."""
LENGTH = 8
"""What axes without parameters are shortened to."""
Arguments = tuple[tuple, dict[str, Any]]


def on_meta(block: nn.Module) -> nn.Module:
    """Copy a block with its parameters and buffers on meta; small buffers keep their values, which code may ask."""
    memo: dict[int, Any] = {}
    for tensor in (*block.parameters(), *block.buffers()):
        kept_values = not isinstance(tensor, nn.Parameter) and tensor.numel() <= SMALL_FLOATS
        if is_packed(tensor):  # its class decides which ops run: shared, since nothing cuts it
            memo[id(tensor)] = tensor
        if id(tensor) not in memo and not tensor.is_meta and not kept_values:
            made = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(block, memo)


def elements_of(block: nn.Module) -> int:
    """Elements of all parameters and buffers, tied ones once."""
    return sum(tensor.numel() for tensor in {id(t): t for t in (*block.parameters(), *block.buffers())}.values())


def as_fake(block: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Replace what is on meta by fake CPU tensors, in place: code that asks for a device sees the CPU."""
    made: dict[int, torch.Tensor] = {}
    for module in block.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        fake = fake_from_meta(mode, tensor.detach())
                        made[id(tensor)] = nn.Parameter(fake) if isinstance(tensor, nn.Parameter) else fake
                    table[name] = made[id(tensor)]  # type: ignore[assignment]
    return block


def smaller_block(block: nn.Module, cuts: Sequence[Cut]) -> nn.Module:
    """Keep what the first rank of every cut keeps: parameters and integers, on meta; of the actions, the lengths."""
    made = on_meta(block)
    first = LoneRank(rank=0, size=2)
    for cut in cuts:
        apply_cuts(made, (replace(cut, actions=(), summed=()),), first, shapes_only=True)
        record = cut_record(made)
        assert record is not None
        for handle in record.handles:
            handle.remove()
        for path in dict.fromkeys(action.module for action in cut.actions):
            lengths = [action for action in cut.actions if action.kind == "length" and action.module == path]
            install(made.get_submodule(path), [Step(one, cut.shares, first, Memo(), path) for one in lengths])
    return made


def smaller_cut(cut: Cut, scales: tuple[Scale, ...]) -> Cut:
    """The same cut of the smaller block over two ranks, one slice each, with the scales that take it there."""

    def axis(text: str) -> str:
        return re.sub(r"\*\d+", f"*{SLICES}", text)

    return replace(
        cut,
        size=SLICES,
        shares=(1,) * SLICES,
        shards=tuple(replace(shard, axis=axis(shard.axis)) for shard in cut.shards),
        actions=tuple(
            # The length of an axis that code has read is what it was, in the smaller block, too.
            action if action.kind == "length" else replace(action, axis=axis(action.axis))
            for action in cut.actions
        ),
        scales=scales,
    )


def smaller_arguments(
    given: Arguments, call: Call, graph: ModelGraph, groups: Sequence[AxisGroup], cuts: Sequence[Cut]
) -> Arguments:
    """Shorten the arguments of a call to what the smaller block takes, with `TensorSpec` for tensors as before."""
    axes = groups[0].walk.axes
    slices = _short(call, axes, {leaf for tensor in graph.tensors for leaf in _leaves(axes.get(tensor.value, ()))})
    slices.update({group.leaf: SLICES for group in groups})
    rows = max((SLICES for cut in cuts for action in cut.actions if action.kind == "lookup"), default=0)
    by_path = dict(zip(call.input_paths, call.inputs, strict=True))
    memo: dict[int, TensorSpec] = {}

    def shrink(path: str, spec: TensorSpec) -> TensorSpec:
        if id(spec) not in memo:
            memo[id(spec)] = _smaller_spec(spec, axes.get(by_path.get(path, -1), ()), slices, rows)
        return memo[id(spec)]

    return _mapped(given, "", shrink)


def _leaves(axes: Sequence[Axis]) -> set[Leaf]:
    return {leaf for axis in axes for leaf in leaves(axis)}


def _short(call: Call, axes: Mapping[int, tuple[Axis, ...]], in_parameters: set[Leaf]) -> dict[Leaf, int]:
    """Long axes of the arguments that no parameter has, shortened."""
    found = {leaf for value in call.inputs for leaf in _leaves(axes.get(value, ()))}
    return {leaf: LENGTH for leaf in found - in_parameters if leaf.size > LENGTH}


def _smaller_spec(spec: TensorSpec, axes: Sequence[Axis], slices: dict[Leaf, int], rows: int) -> TensorSpec:
    value = spec.value
    shape = list(spec.shape)
    for dim, axis in enumerate(axes):
        size = local_size(axis, slices)
        if not axis or size == shape[dim]:
            continue
        if value is not None:
            value = value.index_select(dim, torch.from_numpy(_first(axis, slices)))
        shape[dim] = size
    if rows and value is not None and value.dtype in (torch.int64, torch.int32):
        value = value % rows  # what is looked up must be among the rows that are left
    return TensorSpec(shape=tuple(shape), dtype=spec.dtype, value=value)


def _first(axis: Axis, slices: dict[Leaf, int]) -> numpy.ndarray:
    """Indices along an axis that lie in the first slices of every leaf."""
    good = numpy.ones(local_size(axis, {}), dtype=bool)
    for leaf in leaves(axis):
        if leaf in slices:
            coordinates = coordinates_of(describe(axis, leaf))
            good &= coordinates < slices[leaf]
    return numpy.flatnonzero(good)


def _mapped(value: Any, path: str, change: Any) -> Any:
    """As `nested.map_tensors`, of specs in place of tensors, with their paths."""
    if isinstance(value, TensorSpec):
        return change(path, value)
    if isinstance(value, dict) and type(value) is dict:
        return {key: _mapped(item, f"{path}.{key}" if path else str(key), change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(
            _mapped(item, f"{path}.{index}" if path else str(index), change) for index, item in enumerate(value)
        )
    return value
