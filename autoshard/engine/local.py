"""What one rank has of a block: volumes of tensors by what divides them, summed up once per block.

A search prices thousands of recipes of the same blocks. All that depends on the ops alone is computed the first time; a
recipe then costs a few multiplications per matrix product.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autoshard.engine.blocks import Block, OpWork, TensorPart
from autoshard.engine.kept import column_inputs, kept_parts, selective_parts

ALONE = frozenset({"bincount", "cumsum", "histc", "index_put_", "multinomial", "scatter_", "sort", "topk"})
"""Ops that order, count or scatter elements: no compiler makes one kernel of them and their neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What part of the traced work one rank has at once: `samples` of it, and the degrees that divide the rest.

    Attributes:
        length: tokens of a sample, as a multiple of those that were traced.
        ep: over how many ranks experts are divided.
        scale: bytes of an activation over those that were traced.
    """

    samples: float
    cp: int = 1
    tp: int = 1
    sequence_parallel: bool = True
    length: float = 1.0
    ep: int = 1
    scale: float = 1.0

    @property
    def rows(self) -> float:
        """Tokens of the rank, as a multiple of all that were traced."""
        return self.samples * self.length / self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Bytes of tensors, by what divides them; all for the samples that were traced.

    Attributes:
        rows: they grow with the samples, and sequence parallelism divides them; gathered: it does not.
        cut_rows: tensor parallelism divides them as well; cut: weights that it divides; whole: neither.
        experts: weights of experts.
    """

    rows: float = 0.0
    gathered: float = 0.0
    cut_rows: float = 0.0
    cut: float = 0.0
    whole: float = 0.0
    experts: float = 0.0

    def on(self, share: Share) -> float:
        """Bytes on one rank."""
        rows = self.rows / (share.tp if share.sequence_parallel else 1) + self.gathered + self.cut_rows / share.tp
        fixed = self.cut / share.tp + self.whole + self.experts / (share.ep * share.tp)
        return (rows * share.rows + fixed) * share.scale


def volume_of(parts: Iterable[TensorPart], gathered: Iterable[TensorPart] = ()) -> Volume:
    """Sum tensors up; `gathered`: those that are put together from the parts of sequence parallelism."""
    sums = dict.fromkeys(("rows", "gathered", "cut_rows", "cut", "whole", "experts"), 0.0)
    for part in parts:
        if part.experts:
            kind = "experts"
        elif part.batch:
            kind = "cut_rows" if part.cut else "rows"
        else:
            kind = "cut" if part.cut else "whole"
        sums[kind] += part.numel * part.itemsize
    sums["gathered"] = float(sum(part.numel * part.itemsize for part in gathered))
    return Volume(**sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product of m x k with k x n; `cut`: which of n and k tensor parallelism divides; `frozen`: with a weight
    that is not trained, so that backward makes one product of it and not two. `once`: as in `OpWork`."""

    flops: float
    m: int
    n: int
    k: int
    batch: bool
    cut: Literal["", "n", "k"]
    experts: int
    frozen: bool
    weight_elements: int
    moved: Volume
    once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """`width`: columns of a head; `keys`: keys and values. `once`, `fixed`, `drops`: as in `OpWork`."""

    flops: float
    cut: bool
    causal: bool
    drops: bool
    width: int
    keys: tuple[TensorPart, ...]
    moved: Volume
    once: bool = False
    fixed: bool = False

    def scores_on(self, share: Share) -> float:
        """Elements of the scores on one rank: a query times a key is 2 FLOPs per column, and as many with a value."""
        return self.flops / (4 * self.width) * share.rows * share.length / (share.tp if self.cut else 1)

    def writes_scores(self, share: Share) -> bool:
        """Whether ranks write scores out, as those that share heads do where they draw what is dropped."""
        return self.drops and self.cut and share.tp > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Kernels that only move memory: how many, and what they read and write in all."""

    kernels: int
    moved: Volume


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """A layer summed up.

    Attributes:
        views: ops that make no kernel; eager, fused: of element-wise ops.
        kept, kept_fused: of its activations, all that backward reads; selective: without what is computed again.
        widest: the two largest activations that are made; logits: elements of what the loss reads, which are not in
            `kept` and `widest`: they are there around the loss only.
    """

    products: tuple[Product, ...]
    attentions: tuple[Attention, ...]
    views: int
    eager: Stream
    fused: Stream
    kept: Volume
    kept_fused: Volume
    selective: Volume
    widest: Volume
    logits: int

    @property
    def once(self) -> bool:
        """Whether all of it is done with the prompt of an answer."""
        found = [one.once for one in self.products] + [one.once for one in self.attentions]
        return bool(found) and all(found)


def sums_of(block: Block) -> Sums:
    """Sum a block up, once."""
    found = block.known.get("sums")
    if found is None:
        found = block.known["sums"] = _sums(block)
    return found


def cache_elements(block: Block) -> float:
    """Keys and values of one layer for all tokens that were traced."""
    return sum(part.numel for attention in sums_of(block).attentions for part in attention.keys)


def cached_elements(block: Block, shares: int = 1) -> tuple[float, float]:
    """What one of `shares` ranks keeps of one layer for an answer: elements (that grow with its tokens, that do not).

    That is what the model was seen to keep, or the keys and values of attention where it keeps nothing.
    """
    kept = block.state or [
        (part, one.fixed) for one in sums_of(block).attentions if not one.once for part in one.keys
    ]  # fmt: skip
    each = [(part.numel / (shares if part.cut else 1), fixed) for part, fixed in kept]
    return sum(own for own, fixed in each if not fixed), sum(own for own, fixed in each if fixed)


def _sums(block: Block) -> Sums:
    kept, kept_fused = kept_parts(block, fused=False), kept_parts(block, fused=True)
    gathered = column_inputs(block)  # not where a product reads a small part of what is kept
    columns = {key: part for key, part in gathered.items() if key not in kept or kept[key].numel <= part.numel}
    losses = [max(op.inputs, key=lambda part: part.numel) for op in block.ops if op.kind == "loss"]
    logits = max((part.numel for part in losses), default=0)
    made = [part for op in block.ops if not op.free for part in op.outputs if part.batch and part.numel != logits]
    for stored in (kept, kept_fused):
        for key in [key for key, part in stored.items() if part.numel == logits]:
            del stored[key]
    plain = [op for op in block.ops if op.kind in ("other", "loss", "lookup") and not op.free]
    groups = _fused_groups(block.ops)
    return Sums(
        products=tuple(_product(op) for op in block.ops if op.kind == "matmul"),
        attentions=tuple(_attention(op) for op in block.ops if op.kind == "attention"),
        views=sum(op.free for op in block.ops),
        eager=Stream(kernels=len(plain), moved=volume_of(part for op in plain for part in _offloaded(op))),
        fused=Stream(kernels=len(groups), moved=volume_of(part for parts in groups for part in parts)),
        kept=volume_of((part for key, part in kept.items() if key not in columns), columns.values()),
        kept_fused=volume_of((part for key, part in kept_fused.items() if key not in columns), columns.values()),
        selective=volume_of(selective_parts(block)),
        widest=volume_of(sorted(made, key=lambda part: -part.numel * part.itemsize)[:2]),
        logits=logits,
    )


def _product(op: OpWork) -> Product:
    cut: Literal["", "n", "k"] = ""
    if op.cut:
        cut = "n" if any(part.cut for part in op.outputs) else "k"
    return Product(
        flops=op.flops, m=op.m, n=op.n, k=op.k, batch=op.batch, cut=cut, experts=op.experts,
        frozen=any(part.frozen for part in op.inputs), once=op.once,
        weight_elements=sum(part.numel for part in op.inputs if part.weight),
        moved=volume_of((*op.inputs, *op.outputs)),
    )  # fmt: skip


def _attention(op: OpWork) -> Attention:
    return Attention(
        flops=op.flops, cut=op.cut, causal=op.causal, drops=op.drops, once=op.once, fixed=op.fixed,
        width=max(1, op.k),
        keys=op.inputs[1:3],
        moved=volume_of((*op.inputs[:3], *op.outputs[:1])),
    )  # fmt: skip


def _offloaded(op: OpWork) -> list[TensorPart]:
    if op.kind == "lookup":  # of the table, only the rows that are looked up
        return [part for part in (*op.inputs, *op.outputs) if not part.weight] + list(op.outputs)
    if op.kind == "loss":  # the logarithm of the softmax is written and read
        return [*op.inputs, *op.inputs, *op.inputs]
    return [*op.inputs, *op.outputs]


def _fused_groups(ops: Sequence[OpWork]) -> list[list[TensorPart]]:
    """Element-wise ops that one makes of what another made are one kernel: what each reads and writes."""
    earlier: dict[int, int] = {}  # an op -> another one of its kernel; the first of all is its own
    made: dict[int, int] = {}

    def first(index: int) -> int:
        while earlier[index] != index:
            earlier[index] = index = earlier[earlier[index]]
        return index

    for index, op in enumerate(ops):
        if op.kind in ("matmul", "attention"):
            continue
        alone = op.name in ALONE
        before = [first(at) for part in op.inputs if (at := made.get(part.storage, -1)) >= 0 and not alone]
        earlier |= dict.fromkeys((*before, index), min(before, default=index))
        for part in op.outputs:
            made[part.storage] = -1 if alone else index
    members: dict[int, list[OpWork]] = {}
    for index in earlier:
        if not ops[index].free:
            members.setdefault(first(index), []).append(ops[index])
    readers: dict[int, list[OpWork]] = {}  # by the storage that they read
    for op in ops:
        for part in op.inputs:
            readers.setdefault(part.storage, []).append(op)
    return [_outer_parts(kernel, readers) for kernel in members.values()]


def _outer_parts(kernel: Sequence[OpWork], readers: Mapping[int, Sequence[OpWork]]) -> list[TensorPart]:
    """What a fused kernel reads from others, and what others read of it; nobody reads what is the block's result."""
    inside = {part.storage: part for op in kernel for part in op.outputs}
    members = set(map(id, kernel))
    read = {
        part.storage: part for op in kernel for part in _offloaded(op)
        if part.storage not in inside and not (op.kind == "lookup" and part.weight)
    }  # fmt: skip
    written = [
        part for storage, part in inside.items()
        if storage not in readers or any(id(op) not in members and not op.free for op in readers[storage])
    ]  # fmt: skip
    return [*read.values(), *written]
