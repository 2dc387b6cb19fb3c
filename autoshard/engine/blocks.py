"""Blocks: the work of a model, equal layers once, as ops whose local size on a rank can be computed.

    first ─▶ layers.0 … layers.31 (one block, 32 times) ─▶ last

Every tensor of an op knows which mesh dimensions divide it: a tensor with samples of the batch is divided by
micro-batches and context parallelism, one that is cut by tensor parallelism has `cut`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from autoshard.axes.batch import follow, walk_all
from autoshard.axes.groups import AxisGroup, AxisGroups, find_groups
from autoshard.axes.regions import OUTSIDE
from autoshard.axes.walk import name_of
from autoshard.capture.graph import ModelGraph, Op
from autoshard.errors import PlanError

Kind = Literal["matmul", "attention", "loss", "lookup", "other"]
ATTENTION = ("scaled_dot_product", "_flash_attention", "_efficient_attention")
LOSSES = ("cross_entropy_loss", "nll_loss", "_log_softmax", "log_softmax")
# What autograd keeps for the backward of an op in eager mode: its derivative formula reads these
# (tools/autograd/derivatives.yaml of torch).
KEEPS_INPUTS = (
    "div", "pow", "silu", "gelu", "relu", "softplus", "layer_norm", "rms_norm", "native_layer_norm", "matmul",
    "bmm", "baddbmm", "linear", "addmm", "mm", "einsum", "conv", "square", "_grouped_mm", "grouped_mm",
)  # fmt: skip
KEEPS_OUTPUTS = ("softmax", "_softmax", "sigmoid", "tanh", "exp", "rsqrt", "sqrt", "log_softmax", "_log_softmax")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """A tensor as an op reads or makes it.

    `storage`: which one it is in, so that views count once; `numel`: for the samples that were traced.
    """

    storage: int
    numel: int
    itemsize: int
    batch: bool = False
    cut: bool = False
    weight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """One op: `flops` of the whole, for the samples that were traced; `m`, `n`, `k` of a matrix product."""

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
        count: how many there are; trainable: elements of their parameters, of one of them; cut: those of them that
            tensor parallelism divides; most_shares: over how many ranks at most.
        reduces: all-reduces of tensor parallelism in one forward of one layer; reduced: elements of each, in all.
        input_elements: what the block before hands over, for the samples that were traced.
    """

    path: str
    count: int
    ops: tuple[OpWork, ...]
    trainable: int
    cut_elements: int
    most_shares: int
    reduces: int
    reduced_elements: int
    input_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """The blocks of a model in their order, for `samples` samples of `tokens` tokens."""

    blocks: tuple[Block, ...]
    samples: int
    tokens: int

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(block.count * block.trainable for block in self.blocks)


def model_work(graph: ModelGraph, samples: int, tokens: int, *, causal: bool = True) -> ModelWork:
    """Fold a run that was captured with `composite=True` and at least two samples into blocks.

    Raises `PlanError` where no input has a dimension for the batch.
    """
    walk = walk_all(graph)
    places = (follow(walk, value, 0) for value in graph.inputs)
    rows = next((found for found in places if found is not None and found.leaf.size == samples), None)
    if rows is None:
        raise PlanError("no input has a dimension for the batch: it can't be priced for other batches.")
    batch = {value for value in walk.axes if walk.cut_dims(value, rows.leaf)}
    found = find_groups(graph)
    blocks = [
        made
        for path, count, indices in _sections(graph, found)
        if (made := _block(graph, batch, _chosen(found, path), path, count, indices, causal)) is not None
    ]
    return ModelWork(blocks=tuple(blocks), samples=samples, tokens=tokens)


def _sections(graph: ModelGraph, found: AxisGroups) -> Iterator[tuple[str, int, Sequence[int]]]:
    """(path, how many, ops) of repeated layers, and of what comes before and after them."""
    layers = [region for region in found.regions if region.path != OUTSIDE]
    outside = next((region.ops for region in found.regions if region.path == OUTSIDE), ())
    first = min((region.ops[0] for region in layers if region.ops), default=len(graph.ops))
    yield "first", 1, [index for index in outside if index < first]
    for region in sorted(layers, key=lambda region: region.ops[0] if region.ops else 0):
        yield region.path, len(region.paths), region.ops
    yield "last", 1, [index for index in outside if index >= first]


def _chosen(found: AxisGroups, path: str) -> list[AxisGroup]:
    """Groups of a section that are cut together: those that save most per collective, none that conflict."""
    section = OUTSIDE if path in ("first", "last") else path
    chosen: list[AxisGroup] = []
    candidates = [group for group in found.groups if section in group.blocks]
    for group in sorted(candidates, key=lambda group: -group.nbytes / (1 + group.reductions + group.gathers)):
        if all(group.index not in other.conflicts for other in chosen):
            chosen.append(group)
    return chosen


def _block(
    graph: ModelGraph, batch: set[int], groups: Sequence[AxisGroup], path: str, count: int, indices: Sequence[int],
    causal: bool,
) -> Block | None:  # fmt: skip
    if not indices:
        return None
    cut = {value for group in groups for value in group.walk.axes if group.walk.cut_dims(value, group.leaf)}
    tensors = {tensor.value: tensor for tensor in graph.tensors}
    read = {value for index in indices for value in graph.ops[index].inputs if value in tensors}
    parameters = [tensors[value] for value in read if tensors[value].kind == "parameter"]

    def part(value: int) -> TensorPart:
        seen = graph.values[value]
        return TensorPart(
            storage=seen.storage, numel=prod(seen.shape), itemsize=seen.dtype.itemsize,
            batch=value in batch, cut=value in cut, weight=value in tensors,
        )  # fmt: skip

    ops = [_op(graph, graph.ops[index], part, causal) for index in indices]
    made = {value for index in indices for value in graph.ops[index].outputs}
    given = [
        prod(graph.values[value].shape)
        for index in indices
        for value in graph.ops[index].inputs
        if value in batch and value not in made and graph.values[value].dtype.is_floating_point
    ]
    return Block(
        path=path,
        count=count,
        ops=tuple(ops),
        trainable=sum(prod(tensor.shape) for tensor in parameters),
        cut_elements=sum(prod(tensor.shape) for tensor in parameters if tensor.value in cut),
        most_shares=min((group.size for group in groups), default=1),
        reduces=sum(group.reductions for group in groups),
        reduced_elements=sum(group.reduced_bytes for group in groups) // _itemsize(ops),
        input_elements=max(given, default=0),
    )


def _itemsize(ops: Iterable[OpWork]) -> int:
    """Bytes per element of most activations."""
    sizes = [part.itemsize for op in ops if op.kind == "matmul" for part in op.outputs]
    return max(set(sizes), key=sizes.count) if sizes else 4


def _op(graph: ModelGraph, op: Op, part: Callable[[int], TensorPart], causal: bool) -> OpWork:
    name = name_of(op)
    inputs, outputs = tuple(map(part, op.inputs)), tuple(map(part, op.outputs))
    storages = {graph.values[value].storage for value in op.inputs}
    free = bool(op.outputs) and not op.mutates and all(graph.values[v].storage in storages for v in op.outputs)
    kind: Kind = "other"
    m = n = k = 0
    if name.startswith(ATTENTION):
        kind = "attention"
    elif op.flops:
        kind = "matmul"
        shape = graph.values[op.outputs[0]].shape
        n = shape[-1] if shape else 1
        m = max(1, prod(shape) // max(1, n))
        k = max(1, op.flops // (2 * max(1, prod(shape))))
    elif name.startswith(LOSSES):
        kind = "loss"
    elif name.startswith("embedding"):
        kind = "lookup"
    is_causal = kind == "attention" and causal
    return OpWork(
        name=name, kind=kind, flops=op.flops, m=m, n=n, k=k, inputs=inputs, outputs=outputs, free=free,
        causal=is_causal,
    )  # fmt: skip


def kept_parts(block: Block, *, fused: bool) -> dict[int, TensorPart]:
    """Activations of one layer that are kept for its backward, by storage.

    `fused`: a compiler recomputes in backward what element-wise ops made, where what they read is kept anyway or is no
    larger; else each op keeps what its derivative reads.
    """
    needed: dict[int, TensorPart] = {}
    for op in block.ops:
        for part in _read_by_derivative(op):
            known = needed.get(part.storage)
            if part.batch and not part.weight and part.itemsize > 1 and (known is None or known.numel < part.numel):
                needed[part.storage] = part
    if not fused:
        return needed
    made_by = {part.storage: op for op in block.ops if not op.free for part in op.outputs}
    kept = {storage: part for storage, part in needed.items() if _is_source(made_by.get(storage))}
    for storage, part in needed.items():
        if storage not in kept:
            missing = {one.storage: one for one in _sources(part, made_by) if one.storage not in kept}
            if sum(one.numel for one in missing.values()) < part.numel:
                kept.update(missing)
            else:
                kept[storage] = part
    return kept


def _read_by_derivative(op: OpWork) -> Iterator[TensorPart]:
    """Tensors that the derivative of an op reads."""
    if op.free:
        return
    if op.kind == "attention":
        yield from (*op.inputs, *op.outputs)
    elif op.kind == "loss":
        yield from op.inputs
    elif op.name == "mul":
        for part, other in zip(op.inputs, reversed(op.inputs), strict=True):
            if other.batch or other.weight:
                yield part
    elif op.name.startswith(KEEPS_INPUTS):
        yield from op.inputs
    elif op.name.startswith(KEEPS_OUTPUTS):
        yield from op.outputs


def _is_source(op: OpWork | None) -> bool:
    """Whether an op is too dear to be run again: a product, or what another block did."""
    return op is None or op.kind in ("matmul", "attention", "lookup")


def _sources(part: TensorPart, made_by: Mapping[int, OpWork]) -> list[TensorPart]:
    """What a tensor can be computed from again by element-wise ops."""
    found: dict[int, TensorPart] = {}
    seen: set[int] = set()
    waiting = [part]
    while waiting:
        one = waiting.pop()
        if one.storage in seen:
            continue
        seen.add(one.storage)
        op = made_by.get(one.storage)
        if _is_source(op):
            found[one.storage] = one
        elif op is not None:
            waiting += [given for given in op.inputs if given.batch and not given.weight]
    return list(found.values())


def elements(parts: Mapping[int, TensorPart]) -> int:
    """Elements of tensors in all, of the whole."""
    return sum(part.numel for part in parts.values())
