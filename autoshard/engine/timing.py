"""Seconds of a block on one rank: each op the larger of its arithmetic and its memory traffic, blocks never faster than
their host.

A product of m x k with k x n reaches `matmul * m/(m+r) * n/(n+h) * k/(k+h)` of the peak: r rows, or a dimension of h,
give half.
Attention has an efficiency of its own and, where it is causal, half of the FLOPs. Element-wise ops are as fast as
memory; a compiler makes one kernel of a connected group of them.

Plans for one process are priced op by op from the recorded run, with the rates of the cluster's devices, which are what
is commonly achieved or was measured: an op takes max(FLOPs / rate(dtype), bytes moved / bandwidth) + launch time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.capture.latest import Latest
from autoshard.cluster.device import Device
from autoshard.cluster.hardware import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY
from autoshard.cluster.links import table_row
from autoshard.engine.blocks import Block
from autoshard.engine.efficiency import Efficiency
from autoshard.engine.local import Attention, Product, Share, sums_of
from autoshard.engine.recipe import Recipe
from autoshard.flow import flow
from autoshard.plan.workload import OPTIMIZER_STATE_TENSORS, Workload
from autoshard.profile.profile import Profile

BACKWARD_ATTENTION = 2.5
"""FLOPs of the backward of attention for each of its forward: the scores once more, and four products of gradients."""
ALIGNED_ELEMENTS, UNALIGNED_PART = 8, 0.28
"""Rows of a matrix that are no multiple of 16 bytes are read element by element, by kernels of an older generation, at
a part of the rate; a compiler pads them. Measured on an H100: 588 columns take 3.5 times as long as 592
(https://github.com/m87-labs/kestrel/pull/143)."""
SCORE_BYTES, SCORE_BYTES_BACKWARD = 13, 19
"""Read and written per score of unfused attention, 2 each time and 1 of a mask. Forward: the product writes it, softmax
reads and writes, dropout too, the product with values reads. Backward: products read three times and write once,
dropout reads and writes, softmax reads twice and writes."""
VIEW_LAUNCH = 0.3
"""Host time of an op that only makes a view, as a part of that of a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A device as kernels see it: published peaks."""

    generation: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: int

    @property
    def is_cpu(self) -> bool:
        """Whether a process has no context there, and its tensors are all that it allocates."""
        return self.generation == "cpu"


def card_of(device: Device, dtype: str = "bfloat16") -> Card:
    """Return the published peaks of a device, for products in one dtype.

    A cluster's rates are what is commonly achieved, or measured; the engine has efficiencies of its own.
    """
    return Card(
        generation=table_row(device.kind).arch,
        flops_per_second=device.flops(dtype) / COMPUTE_EFFICIENCY,
        bytes_per_second=device.bytes_per_second / MEMORY_EFFICIENCY,
        memory_bytes=device.memory_bytes,
    )


def weakest_card(devices: Sequence[Device], dtype: str) -> Card:
    """Return a card that has of all devices the lowest rates and the least memory: what each of them can do."""
    cards = [card_of(device, dtype) for device in devices]
    slowest = min(cards, key=lambda card: card.flops_per_second)
    return replace(
        slowest,
        bytes_per_second=min(card.bytes_per_second for card in cards),
        memory_bytes=min(card.memory_bytes for card in cards),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """Seconds of one layer on one rank; `recompute`: what its backward runs again of its forward."""

    forward: float
    backward: float
    recompute: float


def layer_seconds(block: Block, share: Share, recipe: Recipe, card: Card, reached: Efficiency) -> LayerSeconds:
    """Seconds of the kernels of one layer, collectives left out."""
    sums = sums_of(block)
    fused, padded = not recipe.op_by_op, recipe.stack == "compiled"
    products = [product_seconds(product, share, card, reached, padded=padded) for product in sums.products]
    forward = sum(products)
    backward = sum(
        seconds * (1 if product.frozen else 2) for seconds, product in zip(products, sums.products, strict=True)
    )
    for attention in sums.attentions:
        seconds, back = attention_seconds(attention, share, recipe, card, reached)
        forward, backward = forward + seconds, backward + back
    stream = sums.fused if fused else sums.eager
    offloaded = stream.moved.on(share) / (card.bytes_per_second * reached.memory)
    host = host_seconds(block, recipe, reached)
    recompute = 0.0
    if recipe.recompute == "full":
        recompute = max(forward + offloaded, host)
    elif recipe.recompute == "selective":
        recompute = sum(products[1::2]) + offloaded
    return LayerSeconds(
        forward=max(forward + offloaded, host), backward=max(backward + 2 * offloaded, 2 * host), recompute=recompute
    )


def host_seconds(block: Block, recipe: Recipe, reached: Efficiency) -> float:
    """Seconds in which the host launches one forward of a layer."""
    sums = sums_of(block)
    fused = not recipe.op_by_op
    kernels = len(sums.products) + len(sums.attentions) + (sums.fused if fused else sums.eager).kernels
    return (kernels + (0.0 if fused else VIEW_LAUNCH * sums.views)) * reached.launch_seconds


def product_seconds(product: Product, share: Share, card: Card, reached: Efficiency, *, padded: bool) -> float:
    """Seconds of one matrix product on one rank; `padded`: a compiler pads what is not aligned."""
    flops, m, n, k = product.flops, float(product.m), float(product.n), float(product.k)
    if product.batch:
        m, flops = m * share.rows, flops * share.rows
    if product.experts:  # as many products as there are experts on the rank, each with the rows that are sent to it
        m = m * share.ep / product.experts
    if product.cut == "n":
        flops, n = flops / share.tp, n / share.tp
    elif product.cut == "k":
        flops, k = flops / share.tp, k / share.tp
    half = reached.half_size
    part = reached.matmul * m / (m + reached.half_rows) * n / (n + half) * k / (k + half)
    if not padded and (n % ALIGNED_ELEMENTS or k % ALIGNED_ELEMENTS):
        part *= UNALIGNED_PART
    moved = product.moved.on(share) / (card.bytes_per_second * reached.memory)
    return max(flops / (card.flops_per_second * part), moved)


def attention_seconds(
    op: Attention, share: Share, recipe: Recipe, card: Card, reached: Efficiency
) -> tuple[float, float]:
    """Forward and backward."""
    if recipe.unfused_attention or op.writes_scores(share):
        return _unfused_seconds(op, share, card, reached)
    flops = op.flops * share.rows * share.length / (share.tp if op.cut else 1)
    if op.causal:
        flops /= 2
    seconds = flops / card.flops_per_second
    moved = op.moved.on(share) / (card.bytes_per_second * reached.memory)
    forward = max(seconds / reached.attention, moved)
    return forward, max(BACKWARD_ATTENTION * seconds / reached.attention_backward, 2 * moved)


def _unfused_seconds(op: Attention, share: Share, card: Card, reached: Efficiency) -> tuple[float, float]:
    """Batched products, of masked scores too, and all passes over the scores."""
    part = 1.0 if op.width % ALIGNED_ELEMENTS == 0 else UNALIGNED_PART
    scores = op.scores_on(share)
    products = 4 * op.width * scores / (card.flops_per_second * reached.attention * part)
    rate = card.bytes_per_second * reached.memory
    return products + SCORE_BYTES * scores / rate, 2 * products + SCORE_BYTES_BACKWARD * scores / rate


_LATEST, _WITH_DEVICE = Latest[np.ndarray](), Latest[np.ndarray]()


def op_seconds(profile: Profile, device: Device) -> np.ndarray:
    """Return the seconds that every op of the graph adds on a device; the array must not be written.

    The device works through a queue (roofline seconds of an op), which the host fills: the larger of both counts, from
    where one of them is behind. A CPU is both, one after the other. Ops that run on the host are free.
    """

    def worked_out() -> np.ndarray:
        flops, moved = np.array([op.flops for op in profile.graph.ops], float), np.array(profile.op_bytes, float)
        flops[profile.graph.uncounted.start : profile.graph.uncounted.stop] = 0.0  # which a pass does not have
        rates = {name: device.flops(name) for name in set(profile.op_dtypes)}
        busy = np.maximum(flops / [rates[name] for name in profile.op_dtypes], moved / device.bytes_per_second)
        on_device = _WITH_DEVICE.of(profile.graph, None, lambda: _runs_on_device(profile.graph))
        works = ((flops > 0) | (moved > 0)) & on_device
        busy, launches = np.where(works, busy, 0.0), np.where(works, device.launch_seconds, 0.0)
        if device.kind == "cpu":
            found = busy + launches
        else:  # phase by phase: a token is awaited before the next
            starts = sorted({begin for _, begin, _ in profile.graph.phases if begin})
            parts = zip(np.split(busy, starts), np.split(launches, starts), strict=True)
            found = np.concatenate([_queued(*part) for part in parts])
        found.setflags(write=False)
        return found

    return _LATEST.of(profile.graph, (device.speed, profile.op_bytes), worked_out)


def _runs_on_device(graph: ModelGraph) -> np.ndarray:
    """Which ops run where the model is; the others run on the host, wherever that is (masks made without a device)."""
    return np.array(flow(graph, {"": "device"}).op_device) >= 0


def _queued(busy: np.ndarray, launches: np.ndarray) -> np.ndarray:
    """What each op adds to the time at which a queue is done; it begins not before its launch, nor before the last."""
    done = np.cumsum(busy)
    return np.diff(done + np.maximum.accumulate(np.cumsum(launches) - done + busy), prepend=0.0)


def optimizer_seconds(trained_bytes: float, workload: Workload, device: Device) -> float:
    """Return the seconds of an optimizer step: parameter, gradient and state are read, parameter and state written."""
    if not workload.training or workload.optimizer == "none":
        return 0.0
    return trained_bytes * (3 + 2 * OPTIMIZER_STATE_TENSORS[workload.optimizer]) / device.bytes_per_second
