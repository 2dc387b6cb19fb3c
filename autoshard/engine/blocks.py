"""Blocks: the work of a model, equal layers once, as ops whose local size on a rank can be computed.

    first ─▶ layers.0 … layers.31 (one block, 32 times) ─▶ last

Every tensor of an op knows which mesh dimensions divide it: a tensor with samples of the batch is divided by
micro-batches and context parallelism, one that is cut by tensor parallelism has `cut`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import ceil, prod
from typing import Any, Literal, cast

import torch

from autoshard.axes.axis import factors_of, size_of
from autoshard.axes.communication import Lookup
from autoshard.axes.given import arguments_of
from autoshard.axes.groups import AxisGroup, AxisGroups, find_groups
from autoshard.axes.losses import cut_loss, token_loss
from autoshard.axes.regions import OUTSIDE, outside_ops
from autoshard.axes.walk import AxisWalk
from autoshard.capture.decode import TOKENS, answered_values
from autoshard.capture.graph import ModelGraph, Op, TensorInfo, name_of
from autoshard.common.module_paths import is_below
from autoshard.engine.precision import Precision
from autoshard.errors import PlanError
from autoshard.profile.experts import dispatched_weights, expert_weights

Kind = Literal["matmul", "attention", "loss", "lookup", "other"]
ATTENTION = ("scaled_dot_product", "_flash_attention", "_efficient_attention")
LOSSES = ("cross_entropy_loss", "nll_loss", "_log_softmax", "log_softmax")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """A tensor as an op reads or makes it.

    `storage`: which one it is in, so that views count once; `numel`: for the samples that were traced; `frozen`: a
    weight that is not trained; `experts`: of how many experts it is the weights, 0 otherwise.
    """

    storage: int
    numel: int
    itemsize: int
    batch: bool = False
    cut: bool = False
    weight: bool = False
    frozen: bool = False
    experts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """One op: `flops` of the whole, for the samples that were traced; `m`, `n`, `k` of a matrix product, of attention
    `k` of its scores: columns of a head. `once`: it is done with the prompt, not for each token of an answer; `fixed`:
    so are the keys and values of attention. `drops`: attention drops some weights."""

    name: str
    kind: Kind
    flops: int = 0
    m: int = 0
    n: int = 0
    k: int = 0
    inputs: tuple[TensorPart, ...] = ()
    outputs: tuple[TensorPart, ...] = ()
    free: bool = False
    causal: bool = False
    drops: bool = False
    once: bool = False
    fixed: bool = False

    @property
    def experts(self) -> int:
        """Of how many experts it reads the weights: all of a grouped product, or one."""
        return max((part.experts for part in self.inputs), default=0)

    @property
    def cut(self) -> bool:
        """Whether tensor parallelism divides the work."""
        return any(part.cut for part in (*self.inputs, *self.outputs))

    @property
    def batch(self) -> bool:
        """Whether the work grows with the samples."""
        return any(part.batch for part in (*self.inputs, *self.outputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Equal layers of a model.

    Attributes:
        count: how many there are; elements: of their parameters, of one of them; frozen: those of them that are not
            trained; cut: those of them that tensor parallelism divides; most_shares: in how many slices (heads,
            columns), so over so many ranks at most.
        frozen_in_16_bits: elements of parameters that are not trained, and have 16 bits.
        shared: elements of parameters that an earlier block reads, too (tied weights).
        experts: how many experts a token is routed to some of, 0 without; expert_elements: of all of them in one layer;
            expert_cut: those of them that tensor parallelism divides; routed_elements: of what is sent to experts.
        reduces: all-reduces of tensor parallelism in one forward of one layer; reduced_elements: of all of them;
            gathered_elements: of what its ranks put together.
        input_elements: what the block before hands over, for the samples that were traced.
        state: what the model keeps of a layer for the next token (a cache), and whether it stays as large.
        itemsize: bytes per element of most activations, as traced.
        cuts_loss: tensor parallelism divides the logits of its loss, which `apply` puts together behind it.
        divides_loss: context parallelism divides the tokens of its loss, if there is one sample; `apply` puts the
            logits together behind it.
        keeps: whether its layers keep all activations, whatever a recipe says.
        known: what was computed of it before.
    """

    path: str
    count: int
    ops: tuple[OpWork, ...]
    elements: int
    cut_elements: int
    most_shares: int
    reduces: int
    reduced_elements: int
    input_elements: int
    gathered_elements: int = 0
    state: tuple[tuple[TensorPart, bool], ...] = ()
    frozen: int = 0
    frozen_in_16_bits: int = 0
    shared: int = 0
    experts: int = 0
    expert_elements: int = 0
    expert_cut: int = 0
    routed_elements: int = 0
    itemsize: int = 2
    cuts_loss: bool = False
    divides_loss: bool = False
    keeps: bool = False
    known: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def trained_part(self) -> float:
        """The part of its parameters that has gradients and optimizer state."""
        return 1 - self.frozen / self.elements if self.elements else 1.0

    def stored_bytes(self, precision: Precision) -> float:
        """Bytes per element of its parameters, on average, as training keeps them."""
        if not precision.keeps_frozen or not self.elements:
            return precision.parameters
        return precision.parameters - (precision.parameters - 2) * self.frozen_in_16_bits / self.elements

    @property
    def layer(self) -> bool:
        """Whether it is a layer, not what comes before or after all of them."""
        return self.path not in _ENDS

    @property
    def recomputes(self) -> bool:
        """Whether recomputation, where a recipe has it, is for this block."""
        return self.layer and not self.keeps

    @property
    def kept(self) -> "Block":
        """The same layers without recomputation: always the same object."""
        if "kept" not in self.known:
            self.known["kept"] = replace(self, keeps=True)
        return cast(Block, self.known["kept"])

    def is_shared_by(self, ranks: int) -> bool:
        """Whether so many ranks can have about equally many slices of what tensor parallelism divides."""
        return ceil(self.most_shares / ranks) * ranks <= _UNEVEN * self.most_shares

    def on_ranks(self, ranks: int) -> "Block":
        """The same layers for so many ranks of tensor parallelism; undivided, and one object, if they share unevenly.

        Ranks would have parts of quite different sizes, and be as slow as the largest.
        """
        if not self.layer or not self.cut_elements or self.is_shared_by(ranks):
            return self
        if "whole" not in self.known:
            ops = tuple(
                replace(op, inputs=_uncut(op.inputs), outputs=_uncut(op.outputs)) if op.cut else op for op in self.ops
            )
            self.known["whole"] = replace(
                self, ops=ops, cut_elements=0, expert_cut=0, most_shares=1, reduces=0, reduced_elements=0,
                gathered_elements=0, known={},
            )  # fmt: skip
        return cast(Block, self.known["whole"])


def _uncut(parts: tuple[TensorPart, ...]) -> tuple[TensorPart, ...]:
    return tuple(replace(part, cut=False) for part in parts)


_ENDS = ("first", "last")
"""What comes before and after all layers; of a model without layers, all of it."""
_UNEVEN = 1.05
"""How much more than an equal part the largest part of a rank may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """The blocks of a model in their order, for `samples` samples of `tokens` tokens.

    `layers`: module paths of the layers, in the order in which they run. `encodes`: the tokens that were traced are an
    encoder's, and an answer begins with the first one of its decoder.
    """

    blocks: tuple[Block, ...]
    samples: int
    tokens: int
    layers: tuple[str, ...]
    encodes: bool = False

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(block.count * block.elements - block.shared for block in self.blocks)

    @property
    def trained(self) -> float:
        """Elements of those that have gradients."""
        return sum(block.trained_part * (block.count * block.elements - block.shared) for block in self.blocks)

    def stored_bytes(self, precision: Precision) -> float:
        """Bytes of all parameters as training keeps them."""
        return sum(
            block.stored_bytes(precision) * (block.count * block.elements - block.shared) for block in self.blocks
        )


def model_work(walk: AxisWalk, samples: int, tokens: int, *, batch_dim: int = 0) -> ModelWork:
    """Fold a run that was captured with `composite=True` and at least two samples into blocks.

    Raises `PlanError` where no input has a dimension for the batch.
    """
    graph = walk.graph
    inputs = (axes for value in graph.inputs if len(axes := walk.axes.get(value, ())) > batch_dim)
    majors = (axes[batch_dim][:1] for axes in inputs)
    rows = next((set(factors_of(major)) for major in majors if major and size_of(major) == samples), None)
    if rows is None:
        raise PlanError(
            "no input has a dimension for the batch: it can't be priced for other batches. Give inputs of two samples."
        )
    batch = {value for value, axes in walk.axes.items() if not rows.isdisjoint(chain(*map(factors_of, axes)))}
    found, lookup = find_groups(graph), Lookup(graph)
    argument, grows = answered_values(graph)
    blocks: list[Block] = []
    seen: set[int] = set()
    for path, count, indices in _sections(graph, found):
        if indices:
            groups = _chosen(found, path)
            block = _block(graph, batch, grows, groups, path, count, indices, seen, tokens)
            cuts_loss = any(cut_loss(lookup, group) is not None for group in groups)
            divides_loss = path == "last" and _divides_loss(lookup, found)
            blocks.append(replace(block, cuts_loss=cuts_loss, divides_loss=divides_loss))
    read = {value for op in graph.ops for value in op.inputs}
    unread = [one for one in graph.tensors if one.kind == "parameter" and one.value not in read]
    blocks += [_unread(unread)] if unread else []
    layers = _layers(found, {block.path for block in blocks if block.layer})
    encodes = argument == TOKENS[0]
    return ModelWork(blocks=tuple(blocks), samples=samples, tokens=tokens, layers=layers, encodes=encodes)


def _unread(parameters: Sequence[TensorInfo]) -> Block:
    """Parameters that the run did not read: they take memory, whole on every rank of tensor parallelism."""
    elements = sum(prod(one.shape) for one in parameters)
    return Block(
        path="first", count=1, ops=(), elements=elements, frozen=elements,
        frozen_in_16_bits=_frozen_in_16_bits(parameters), cut_elements=0, most_shares=1, reduces=0, reduced_elements=0,
        input_elements=0,
    )  # fmt: skip


def _frozen_in_16_bits(parameters: Iterable[TensorInfo]) -> int:
    """Elements of those that are not trained, and have 16 bits."""
    floats = (torch.bfloat16, torch.float16)
    return sum(prod(one.shape) for one in parameters if not one.trainable and one.dtype in floats)


def _layers(found: AxisGroups, wanted: set[str]) -> tuple[str, ...]:
    """Module paths of repeated layers, in the order in which they run."""
    begins = [
        (ops[0], path) for region in found.regions if region.path in wanted and region.path != OUTSIDE
        for path, ops in zip(region.paths, region.each or [region.ops], strict=True)
    ]  # fmt: skip
    return tuple(path for _, path in sorted(begins))


def _divides_loss(lookup: Lookup, found: AxisGroups) -> bool:
    """Whether the tokens that a last layer gives may stay divided until the loss."""
    graph = lookup.graph
    last = {region.paths[-1] for region in found.regions if region.path != OUTSIDE}
    given = {value for call in graph.calls if call.path in last for value in call.outputs}
    return any(
        token_loss(lookup, value, dim) is not None
        for value in given for dim in range(1, len(graph.values[value].shape) - 1)
    )  # fmt: skip


def _sections(graph: ModelGraph, found: AxisGroups) -> Iterator[tuple[str, int, Sequence[int]]]:
    """(path, how many, ops) of repeated layers, and of what comes before and after them."""
    layers = [region for region in found.regions if region.path != OUTSIDE]
    outside = outside_ops(graph, losses=True)
    first = min((region.ops[0] for region in layers if region.ops), default=len(graph.ops))
    yield "first", 1, [index for index in outside if index < first]
    for region in sorted(layers, key=lambda region: region.ops[0] if region.ops else 0):
        yield region.path, len(region.paths), region.ops
    yield "last", 1, [index for index in outside if index >= first]


def _chosen(found: AxisGroups, path: str) -> list[AxisGroup]:
    """Groups of a section that are cut together: those that save most per collective, none that conflict."""
    chosen: list[AxisGroup] = []
    if path in _ENDS:  # modules outside of layers may be cut alone: a table, a head
        layers = tuple(name for region in found.regions if region.path != OUTSIDE for name in region.paths)
        candidates = [group for group in found.groups if not any(is_below(group.blocks[0], one) for one in layers)]
    else:
        candidates = [group for group in found.groups if path in group.blocks]
    for group in sorted(candidates, key=lambda group: -group.nbytes / (1 + group.sent_bytes)):
        if all(group.index not in other.conflicts for other in chosen):
            chosen.append(group)
    return chosen


def _most_shares(groups: Sequence[AxisGroup], parameters: Sequence[TensorInfo], outside: bool) -> int:
    """In how many slices ranks can share a block: the fewest of what is cut in a layer.

    Outside of layers those of the group with the most elements: what ranks don't share evenly is whole on each.
    """

    def elements(group: AxisGroup) -> int:
        return sum(prod(one.shape) for one in parameters if group.walk.cut_dims(one.value, group.factor))

    if outside and groups:
        return max(groups, key=elements).size
    return min((group.size for group in groups), default=1)


def _block(
    graph: ModelGraph, batch: set[int], grows: set[int], groups: Sequence[AxisGroup], path: str, count: int,
    indices: Sequence[int], earlier: set[int], tokens: int,
) -> Block:  # fmt: skip
    """One block; `earlier`: the parameters that blocks before it read, to which its own are added; `tokens`: traced."""
    tensors = {tensor.value: tensor for tensor in graph.tensors}
    stored = {graph.values[value].storage for value in tensors}
    frozen = {graph.values[tensor.value].storage for tensor in graph.tensors if not tensor.trainable}
    read = {value for index in indices for value in graph.ops[index].inputs if value in tensors}
    parameters = [tensors[value] for value in read if tensors[value].kind == "parameter"]
    groups = [group for group in groups if any(group.walk.cut_dims(value, group.factor) for value in read)]
    cut = {value for group in groups for value in group.walk.values_with(group.factor)}
    grouped = expert_weights(graph, (graph.ops[index] for index in indices))
    read_here = {graph.values[value].storage for value in read}
    experts = {storage: count for storage, count in dispatched_weights(graph).items() if storage in read_here} | grouped

    def part(value: int) -> TensorPart:
        seen = graph.values[value]
        weight = seen.storage in stored
        return TensorPart(
            storage=seen.storage, numel=prod(seen.shape), itemsize=seen.dtype.itemsize,
            batch=value in batch, cut=value in cut, weight=weight, frozen=seen.storage in frozen,
            experts=grouped.get(seen.storage, int(seen.storage in experts)) if weight else 0,
        )  # fmt: skip

    ops = [_op(graph, graph.ops[index], part, grows) for index in indices]
    made = {value for index in indices for value in graph.ops[index].outputs}
    kept = {graph.values[value].storage: value for value in graph.state if value in made and value in batch}
    given = [
        prod(graph.values[value].shape)
        for index in indices
        for value in graph.ops[index].inputs
        if value in batch and value not in made and graph.values[value].dtype.is_floating_point
    ]
    routed = [op.m * op.k * (max(experts.values()) if op.experts == 1 else 1) for op in ops if op.experts and op.m]
    of_experts = [tensor for tensor in parameters if graph.values[tensor.value].storage in experts]
    tied = [tensor for tensor in parameters if tensor.value in earlier]
    earlier.update(tensor.value for tensor in parameters)
    return Block(
        path=path, count=count, ops=tuple(ops),
        elements=sum(prod(tensor.shape) for tensor in parameters),
        frozen=sum(prod(tensor.shape) for tensor in parameters if not tensor.trainable),
        frozen_in_16_bits=_frozen_in_16_bits(parameters),
        cut_elements=sum(prod(tensor.shape) for tensor in parameters if tensor.value in cut),
        most_shares=_most_shares(groups, parameters, path in _ENDS),
        reduces=sum(group.reductions for group in groups),
        reduced_elements=sum(group.reduced_bytes for group in groups) // _itemsize(ops),
        gathered_elements=sum(group.gathered_bytes + group.added_bytes for group in groups) // _itemsize(ops),
        input_elements=max(given, default=0),
        state=tuple(
            (part(value), value not in grows or tokens not in graph.values[value].shape) for value in kept.values()
        ),
        shared=sum(prod(tensor.shape) for tensor in tied),
        experts=max(experts.values(), default=0),
        expert_elements=sum(prod(tensor.shape) for tensor in of_experts),
        expert_cut=sum(prod(tensor.shape) for tensor in of_experts if tensor.value in cut),
        routed_elements=routed[0] if routed else 0,
        itemsize=_itemsize(ops),
    )  # fmt: skip


def _itemsize(ops: Iterable[OpWork]) -> int:
    """Bytes per element of most activations."""
    sizes = [part.itemsize for op in ops if op.kind == "matmul" for part in op.outputs]
    return max(set(sizes), key=sizes.count) if sizes else 4


def _op(graph: ModelGraph, op: Op, part: Callable[[int], TensorPart], grows: set[int]) -> OpWork:
    name = name_of(op)
    inputs, outputs = tuple(map(part, op.inputs)), tuple(map(part, op.outputs))
    storages = {graph.values[value].storage for value in op.inputs}
    free = bool(op.outputs) and not op.mutates and all(graph.values[v].storage in storages for v in op.outputs)
    kind: Kind = "other"
    m = n = k = 0
    if name.startswith(ATTENTION):
        kind = "attention"
        k = graph.values[op.inputs[0]].shape[-1]
    elif op.flops:
        kind = "matmul"
        shape = graph.values[op.outputs[0]].shape
        n = shape[1 if name.startswith("conv") and len(shape) > 2 else -1] if shape else 1  # channels come second
        m = max(1, prod(shape) // max(1, n))
        k = max(1, op.flops // (2 * max(1, prod(shape))))
    elif name.startswith(LOSSES):
        kind = "loss"
    elif name.startswith("embedding"):
        kind = "lookup"
    causal, drops = (kind == "attention" and bool(arguments_of(op).get(name)) for name in ("is_causal", "dropout_p"))
    return OpWork(
        name=name, kind=kind, flops=op.flops, m=m, n=n, k=k, inputs=inputs, outputs=outputs, free=free,
        causal=causal, drops=drops, once=grows.isdisjoint(op.inputs),
        fixed=kind == "attention" and grows.isdisjoint(op.inputs[1:3]),
    )  # fmt: skip
