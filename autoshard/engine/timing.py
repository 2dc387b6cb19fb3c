"""Seconds of a block on one rank: each op the larger of its arithmetic and its memory traffic, blocks never faster than
their host.

A product of m x k with k x n reaches `matmul * m/(m+h) * n/(n+h) * k/(k+h)` of the peak: a dimension of h gives half.
Attention has an efficiency of its own and, where it is causal, half of the FLOPs. Element-wise ops are as fast as
memory; a compiler makes one kernel of a connected group of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoshard.engine.blocks import Block, OpWork, TensorPart
from autoshard.engine.efficiency import Efficiency
from autoshard.engine.recipe import Recipe

ATTENTION_HALF = 256
"""Tokens at which attention reaches half of its efficiency."""
BACKWARD_ATTENTION = 2.5
"""FLOPs of the backward of attention for each of its forward: the scores once more, and four products of gradients."""
VIEW_LAUNCH = 0.3
"""Host time of an op that only makes a view, as a part of that of a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A device as kernels see it: published peaks."""

    generation: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What part of the traced work one rank has at once: `samples` of it, and the degrees that divide the rest."""

    samples: float
    cp: int = 1
    tp: int = 1
    sequence_parallel: bool = True

    def part(self, tensor: TensorPart) -> float:
        """Elements of a tensor on the rank."""
        count = float(tensor.numel)
        if tensor.batch:
            count *= self.samples / self.cp
        if tensor.cut or (self.sequence_parallel and tensor.batch and not tensor.weight):
            count /= self.tp
        return count

    def nbytes(self, tensors: Iterable[TensorPart]) -> float:
        """Bytes of tensors on the rank."""
        return sum(self.part(tensor) * tensor.itemsize for tensor in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """Seconds of one layer on one rank; `recompute`: what its backward runs again of its forward."""

    forward: float
    backward: float
    recompute: float


def layer_seconds(block: Block, share: Share, recipe: Recipe, card: Card, reached: Efficiency) -> LayerSeconds:
    """Seconds of the kernels of one layer, collectives left out."""
    fused = recipe.stack != "eager"
    forward = backward = 0.0
    products: list[float] = []
    kernels = 0.0
    for op in block.ops:
        if op.kind == "matmul":
            seconds = _product_seconds(op, share, card, reached)
            products.append(seconds)
            forward, backward, kernels = forward + seconds, backward + 2 * seconds, kernels + 1
        elif op.kind == "attention":
            seconds, back = _attention_seconds(op, share, card, reached)
            forward, backward, kernels = forward + seconds, backward + back, kernels + 1
        elif op.free and not fused:
            kernels += VIEW_LAUNCH
    groups = _element_wise(block.ops, fused)
    pace = card.bytes_per_second * reached.memory
    streamed = sum(share.nbytes(parts) for parts in groups) / pace
    host = (kernels + len(groups)) * reached.launch_seconds
    recompute = 0.0
    if recipe.recompute == "full":
        recompute = max(forward + streamed, host)
    elif recipe.recompute == "selective":
        recompute = sum(products[1::2]) + streamed
    return LayerSeconds(
        forward=max(forward + streamed, host), backward=max(backward + 2 * streamed, 2 * host), recompute=recompute
    )


def _product_seconds(op: OpWork, share: Share, card: Card, reached: Efficiency) -> float:
    flops, m, n, k = float(op.flops), float(op.m), float(op.n), float(op.k)
    if op.batch:
        m, flops = m * share.samples / share.cp, flops * share.samples / share.cp
    if op.cut:
        flops /= share.tp
        if any(part.cut for part in op.outputs):
            n /= share.tp
        else:
            k /= share.tp
    half = reached.half_size
    part = reached.matmul * m / (m + half) * n / (n + half) * k / (k + half)
    moved = share.nbytes((*op.inputs, *op.outputs)) / (card.bytes_per_second * reached.memory)
    return max(flops / (card.flops_per_second * part), moved)


def _attention_seconds(op: OpWork, share: Share, card: Card, reached: Efficiency) -> tuple[float, float]:
    """Forward and backward."""
    flops = op.flops * share.samples / share.cp / (share.tp if op.cut else 1)
    if op.causal:
        flops /= 2
    query = op.inputs[0]
    width = max(1, op.outputs[0].numel)
    tokens = op.flops / (4 * width)  # 4 x queries x keys x width
    peak = card.flops_per_second * tokens / (tokens + ATTENTION_HALF)
    moved = share.nbytes((query, *op.inputs[1:3], *op.outputs)) / (card.bytes_per_second * reached.memory)
    forward = max(flops / (peak * reached.attention), moved)
    backward = max(BACKWARD_ATTENTION * flops / (peak * reached.attention_backward), 2 * moved)
    return forward, backward


def _element_wise(ops: Sequence[OpWork], fused: bool) -> list[list[TensorPart]]:
    """What kernels that only stream memory read and write, kernel by kernel."""
    plain = [op for op in ops if op.kind in ("other", "loss", "lookup") and not op.free]
    if not fused:
        return [_streamed(op) for op in plain]
    group = _groups(ops)
    members: dict[int, list[OpWork]] = {}
    for index, op in enumerate(ops):
        if index in group:
            members.setdefault(group[index], []).append(op)
    return [_outer_parts(kernel, ops) for kernel in members.values()]


def _streamed(op: OpWork) -> list[TensorPart]:
    if op.kind == "lookup":  # of the table, only the rows that are looked up
        return [part for part in (*op.inputs, *op.outputs) if not part.weight] + list(op.outputs)
    if op.kind == "loss":  # the logarithm of the softmax is written and read
        return [*op.inputs, *op.inputs, *op.inputs]
    return [*op.inputs, *op.outputs]


def _groups(ops: Sequence[OpWork]) -> dict[int, int]:
    """Element-wise ops that one makes of what another made are one kernel: index of the op -> number of the kernel."""
    number: dict[int, int] = {}
    made: dict[int, int] = {}
    for index, op in enumerate(ops):
        if op.kind in ("matmul", "attention"):
            continue
        before = [number[made[part.storage]] for part in op.inputs if part.storage in made]
        number[index] = min(before, default=index)
        for other, current in list(number.items()):
            if current in before:
                number[other] = number[index]
        for part in op.outputs:
            made[part.storage] = index
    return {index: kernel for index, kernel in number.items() if not ops[index].free}


def _outer_parts(kernel: Sequence[OpWork], ops: Sequence[OpWork]) -> list[TensorPart]:
    """What a fused kernel reads from others, and what others read of it."""
    inside = {part.storage: part for op in kernel for part in op.outputs}
    members = set(map(id, kernel))
    later = {part.storage for op in ops if id(op) not in members and not op.free for part in op.inputs}
    everything = {part.storage for op in ops for part in op.inputs}
    read = {
        part.storage: part for op in kernel for part in _streamed(op)
        if part.storage not in inside and not (op.kind == "lookup" and part.weight)
    }  # fmt: skip
    written = [part for storage, part in inside.items() if storage in later or storage not in everything]
    return [*read.values(), *written]
