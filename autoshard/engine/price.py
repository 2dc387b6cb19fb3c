"""Price a training step: model, recipe and cluster → seconds and bytes of every class of equal ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

from autoshard.cluster.topology import Group, Topology, group_of
from autoshard.engine.blocks import Block, ModelWork
from autoshard.engine.collectives import Network
from autoshard.engine.efficiency import Efficiency, efficiency_of
from autoshard.engine.local import Share, cache_elements, sums_of
from autoshard.engine.memory import (
    Memory,
    RecipeEstimate,
    Stage,
    cuts_loss,
    divides_loss,
    gathers_logits,
    live_elements,
    local_elements,
    share_of,
    step_memory,
    unshared_elements,
)  # fmt: skip
from autoshard.engine.programs import Layer, pass_seconds
from autoshard.engine.recipe import Recipe
from autoshard.engine.timing import Card, layer_seconds
from autoshard.errors import SpecError
from autoshard.schedules.orders import check_schedule

OPTIMIZER_TRAFFIC = 2.0
"""Bytes read and written by a fused optimizer step for each byte of states, parameters and gradients."""
LAST_GRADIENTS = 0.1
"""Of the gradients of replicas, those that are made at the end of a backward, so that nothing hides their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the parts of the pricing share; `generates`: of a prompt, logits are made of the last tokens only."""

    work: ModelWork
    recipe: Recipe
    card: Card
    network: Network
    reached: Efficiency
    share: Share
    generates: bool = False

    def group(self, axis: str, size: int) -> Group:
        """The ranks of one mesh dimension."""
        return group_of(self.network.topology, size, self.recipe.stride(axis))


def make_setting(work: ModelWork, recipe: Recipe, card: Card, topology: Topology, *, length: float = 1.0) -> Setting:
    """Put together what is priced. Raises `SpecError` where the mesh does not fit the cluster."""
    if recipe.devices != topology.devices:
        raise SpecError(f"the mesh has {recipe.devices} ranks, and the cluster {topology.devices} devices.")
    reached = efficiency_of(card.generation, recipe.stack)
    itemsize = next((block.itemsize for block in work.blocks if block.layer), recipe.precision.compute)
    share = Share(
        samples=recipe.micro_batch / work.samples, cp=recipe.cp, tp=recipe.tp, length=length, ep=recipe.ep,
        sequence_parallel=recipe.sequence_parallel, scale=recipe.precision.compute / itemsize,
    )  # fmt: skip
    network = Network(topology=topology, reached=reached)
    return Setting(work=work, recipe=recipe, card=card, network=network, reached=reached, share=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step of which the memory of the fullest rank is known; `price_prepared` finds its seconds."""

    setting: Setting
    stages: Sequence[Stage]
    memory: Memory

    @property
    def recipe(self) -> Recipe:
        """How it is run."""
        return self.setting.recipe

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has room."""
        return self.memory.used <= self.setting.card.memory_bytes


def prepare_step(work: ModelWork, recipe: Recipe, card: Card, topology: Topology) -> Step:
    """Find the memory of a training step. Raises `SpecError` where the mesh does not fit the cluster or the model."""
    setting = make_setting(work, recipe, card, topology)
    if recipe.pp > 1:
        check_schedule(recipe.schedule, recipe.pp, recipe.num_microbatches, stages_per_device=recipe.stages_per_rank)
    stages = split_stages(work, recipe)
    fullest = max(rank_memories(setting, stages), key=lambda memory: memory.allocated)
    return Step(setting=setting, stages=stages, memory=fullest)


def price_step(work: ModelWork, recipe: Recipe, card: Card, topology: Topology) -> RecipeEstimate:
    """Price one training step. Raises `SpecError` where the mesh does not fit the cluster or the model."""
    return price_prepared(prepare_step(work, recipe, card, topology))


def price_prepared(step: Step) -> RecipeEstimate:
    """Price a training step of which the memory is known."""
    setting, stages, recipe = step.setting, step.stages, step.recipe
    passes = all_passes(setting, stages)
    if recipe.pp > 1:
        seconds, bubble = _pipelined(setting, passes)
    else:
        seconds, bubble = recipe.num_microbatches * (passes[0].forward + passes[0].backward), 0.0
    ends = {0, len(stages) - 1}
    synchronised = max(synchronised_seconds(setting, stages[index], passes[index].backward) for index in ends)
    optimizer = max(optimizer_seconds(setting, stages[index]) for index in ends)
    total = seconds + synchronised + optimizer
    compute, busy = _busiest(recipe, passes)
    return RecipeEstimate(
        recipe=recipe,
        seconds=total,
        tokens_per_second=recipe.global_batch * setting.work.tokens / total,
        compute_seconds=compute,
        exposed_seconds=max(0.0, busy - compute) + synchronised,
        bubble=bubble,
        memory=step.memory,
        fits=step.fits,
    )


def split_stages(work: ModelWork, recipe: Recipe) -> list[list[tuple[Block, int]]]:
    """Layers over the stages of a recipe, as evenly as whole layers allow; what is outside of them goes to the ends."""
    count = recipe.pp * recipe.stages_per_rank
    layers = sum(block.count for block in work.blocks if block.layer)
    if count > 1 and layers < count:
        raise SpecError(f"{layers} layers can't be divided into {count} stages.")
    part = layers / count
    if recipe.balanced_stages:  # each stage takes layers until it has its part of all products, the head's too
        flops = [sum(one.flops for one in sums_of(block).products) for block in work.blocks]
        each = sum(one * block.count for one, block in zip(flops, work.blocks, strict=True) if block.layer) / layers
        part += sum(one for one, block in zip(flops, work.blocks, strict=True) if not block.layer) / each / count
    boundaries = [0, *accumulate(layers_of_stages(layers, recipe.pp, recipe.stages_per_rank, part))]
    stages: list[list[tuple[Block, int]]] = []
    for index in range(count):
        stage, begin = [], 0
        for block in work.blocks:
            if not block.layer:
                if index == (count - 1 if block.path == "last" else 0):
                    stage.append((block, 1))
                continue
            inside = min(boundaries[index + 1], begin + block.count) - max(boundaries[index], begin)
            begin += block.count
            if inside > 0:
                stage.append((block.on_ranks(recipe.tp), inside))
        stages.append(_keeping(stage, recipe.kept_layers))
    return stages


def layers_of_stages(layers: int, ranks: int, per_rank: int, part: float) -> list[int]:
    """How many layers each stage has, with so many stages on each rank of the pipeline.

    Each rank takes `part` layers for each of its stages, as long as the ranks after it have some for theirs. Its stages
    share them evenly, the first of them one more.
    """
    begins = [min(layers - per_rank * (ranks - rank), ceil(rank * per_rank * part - 1e-9)) for rank in range(ranks)]
    own = [end - begin for begin, end in pairwise([*begins, layers])]
    ends = [[ceil(turn * n / per_rank) for n in own] for turn in range(per_rank + 1)]
    return [end - begin for before, after in pairwise(ends) for begin, end in zip(before, after, strict=True)]


def _keeping(stage: list[tuple[Block, int]], most: int) -> list[tuple[Block, int]]:
    """A stage whose last layers, so many, keep their activations."""
    found: list[tuple[Block, int]] = []
    for block, count in reversed(stage):
        kept = min(count, most) if block.layer else 0
        most -= kept
        found += [pair for pair in ((block.kept, kept), (block, count - kept)) if pair[1]]
    return found[::-1]


def rank_memories(setting: Setting, stages: Sequence[Stage]) -> list[Memory]:
    """Memory of each pipeline rank over a step."""
    recipe = setting.recipe
    known: dict[tuple[object, ...], Memory] = {}
    found = []
    for rank in range(recipe.pp):
        own = [pair for index in range(rank, len(stages), recipe.pp) for pair in stages[index]]
        flying = in_flight(recipe, rank)
        key = (flying, *((id(block), count) for block, count in own))
        if key not in known:
            known[key] = step_memory(own, setting.share, recipe, setting.card, flying)
        found.append(known[key])
    return found


def in_flight(recipe: Recipe, rank: int) -> float:
    """Micro-batches whose activations a rank of the pipeline has at most, for all of its layers."""
    pp, count, chunks = recipe.pp, recipe.num_microbatches, recipe.stages_per_rank
    if pp == 1:
        return 1
    if recipe.schedule == "gpipe":
        return count
    if chunks == 1:
        return min(count, pp - rank)
    return min(count, (2 * (pp - rank - 1) + (chunks - 1) * pp + 1) / chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of one micro-batch through one stage, and the part of them in which kernels run."""

    forward: float
    backward: float
    forward_compute: float
    backward_compute: float

    @property
    def compute(self) -> float:
        """Seconds of kernels, forward and backward."""
        return self.forward_compute + self.backward_compute


def all_passes(setting: Setting, stages: Sequence[Stage]) -> list[Passes]:
    """Of every stage; equal ones once."""
    layers: dict[int, tuple[Layer, Layer]] = {}
    known: dict[tuple[tuple[int, int], ...], Passes] = {}
    passes = []
    for stage in stages:
        key = tuple((id(block), count) for block, count in stage)
        if key not in known:
            for block, _ in stage:
                if id(block) not in layers:
                    layers[id(block)] = layer_passes(setting, block)
            known[key] = _stage_passes([(layers[id(block)], count) for block, count in stage])
        passes.append(known[key])
    return passes


def _stage_passes(stage: Sequence[tuple[tuple[Layer, Layer], int]]) -> Passes:
    forward = pass_seconds([(ahead, count) for (ahead, _), count in stage])
    backward = pass_seconds([(back, count) for (_, back), count in reversed(stage)])
    return Passes(
        forward=forward,
        backward=backward,
        forward_compute=sum(ahead.kernels * count for (ahead, _), count in stage),
        backward_compute=sum(back.kernels * count for (_, back), count in stage),
    )


def layer_passes(setting: Setting, block: Block) -> tuple[Layer, Layer]:
    """Forward and backward of one layer for one micro-batch."""
    recipe, slow = setting.recipe, setting.reached.overlap
    share = share_of(block, setting.share, recipe)
    seconds = layer_seconds(block, share, recipe, setting.card, setting.reached)
    again = seconds.recompute if block.recomputes else 0.0
    gather, reduce = _sharding_seconds(setting, block)
    inner = tensor_seconds(setting, block) + context_seconds(setting, block)
    routed = expert_seconds(setting, block)
    ahead = _slowed(seconds.forward, gather, slow) + inner + routed
    repeated = inner + routed if recipe.recompute == "full" and block.recomputes else 0.0
    kept = recipe.stays_whole or not block.layer
    kernels = seconds.backward + again + accumulate_seconds(setting, block)
    back = _slowed(kernels, gather + reduce, slow) + inner + routed + repeated
    return (
        Layer(name=block.path, compute=ahead, inner=inner + routed, gather=gather),
        Layer(
            name=block.path, compute=back, inner=inner + routed + repeated, gather=0.0 if kept else gather,
            reduce=reduce,
        ),
    )  # fmt: skip


def accumulate_seconds(setting: Setting, block: Block) -> float:
    """Adding one micro-batch's gradients of a layer to the sum of those before: both are read, and one is written.

    Of the first there is nothing to add. What `fsdp` reduces for each micro-batch is added up in shards.
    """
    recipe, precision = setting.recipe, setting.recipe.precision
    dense, experts = local_elements(block, recipe, trained=True)
    if not recipe.gathers_once:
        dense, experts = dense / recipe.shards, experts / recipe.expert_shards
    nbytes = (dense + experts) * (2 * min(4, precision.gradients) + precision.compute)
    again = 1 - 1 / recipe.num_microbatches
    return again * nbytes / (setting.card.bytes_per_second * setting.reached.memory)


def _slowed(compute: float, network: float, part: float) -> float:
    """Kernels beside which collectives run."""
    return compute + part * min(compute, network)


def _sharding_seconds(setting: Setting, block: Block) -> tuple[float, float]:
    """Gathering the parameters of one layer, and reducing its gradients, for one micro-batch."""
    recipe, network = setting.recipe, setting.network
    if recipe.shards < 2 or not block.ops:
        return 0.0, 0.0
    dense, experts = unshared_elements(block, recipe)
    trained = block.trained_part
    group = group_of(network.topology, recipe.shards, recipe.stride("cp"))
    gather = network.all_gather(group, dense * recipe.precision.compute)
    reduce = network.reduce_scatter(group, trained * dense * recipe.precision.reduce)
    if experts and recipe.expert_shards > 1:
        apart = group_of(network.topology, recipe.expert_shards, recipe.stride("cp") * recipe.ep)
        gather += network.all_gather(apart, experts * recipe.precision.compute)
        reduce += network.reduce_scatter(apart, trained * experts * recipe.precision.reduce)
    if recipe.dp > 1:
        nbytes = trained * (dense / recipe.shards + experts / recipe.expert_shards) * recipe.precision.reduce
        reduce += network.all_reduce(setting.group("dp", recipe.dp), nbytes)
    once = recipe.num_microbatches
    return (gather / once if recipe.stays_whole else gather), (reduce / once if recipe.gathers_once else reduce)


def tensor_seconds(setting: Setting, block: Block) -> float:
    """Collectives of tensor parallelism in one forward of one layer; its backward has as many."""
    recipe, share = setting.recipe, setting.share
    if recipe.tp < 2 or not (block.reduces or block.gathered_elements):
        return 0.0
    group = setting.group("tp", recipe.tp)
    itemsize = share.rows * recipe.precision.compute
    seconds = 0.0
    if block.reduces:
        nbytes = block.reduced_elements / block.reduces * itemsize
        seconds += block.reduces * setting.network.all_reduce(group, nbytes)
    in_parts = recipe.loss_parallel or (recipe.divided_outputs and cuts_loss(block, recipe))
    if block.gathered_elements and not (block.path == "last" and in_parts):
        seconds += setting.network.all_gather(group, block.gathered_elements * itemsize)
    return seconds


def context_seconds(setting: Setting, block: Block) -> float:
    """Keys and values of the other ranks of context parallelism, in one forward of one layer; or their logits."""
    recipe, share = setting.recipe, setting.share
    kept = cache_elements(block)
    if divides_loss(block, recipe) and gathers_logits(block, recipe):
        kept += sums_of(block).logits
    if recipe.cp < 2 or not kept:
        return 0.0
    nbytes = kept * share.rows * recipe.cp / recipe.tp * recipe.precision.compute
    return setting.network.all_gather(setting.group("cp", recipe.cp), nbytes)


def expert_seconds(setting: Setting, block: Block) -> float:
    """Sending tokens to their experts and back, in one forward of one layer."""
    recipe, share = setting.recipe, setting.share
    if recipe.ep < 2 or not block.routed_elements:
        return 0.0
    nbytes = block.routed_elements * share.rows * recipe.precision.compute
    if recipe.sequence_parallel:
        nbytes /= recipe.tp
    return 2 * setting.network.all_to_all(group_of(setting.network.topology, recipe.ep, recipe.tp), nbytes)


def _busiest(recipe: Recipe, passes: Sequence[Passes]) -> tuple[float, float]:
    """Seconds of a step in which the busiest rank's kernels run, and those with its collectives."""
    ranks = [passes[rank :: recipe.pp] for rank in range(recipe.pp)]
    own = max(ranks, key=lambda own: sum(one.forward + one.backward for one in own))
    each = sum(one.compute for one in own), sum(one.forward + one.backward for one in own)
    return recipe.num_microbatches * each[0], recipe.num_microbatches * each[1]


def _pipelined(setting: Setting, passes: Sequence[Passes]) -> tuple[float, float]:
    """Seconds of all micro-batches through all stages, and the part of it that is bubble.

    The busiest rank computes every micro-batch; before and after it waits for one to pass through the others, in
    pieces of a rank's part where stages are interleaved. Halves of backward fill a part of that with "zero-bubble".
    Where no more micro-batches are in flight than there are ranks, each waits for what it sent to come back: p of them
    per round trip of p (forward + backward) + 2 (p - 1) sends. The first one passes through every stage in turn,
    however many pieces they are; each further one is a piece behind it.
    """
    recipe = setting.recipe
    count, chunks = recipe.num_microbatches, recipe.stages_per_rank
    send = send_seconds(setting, setting.share)
    ranks = [passes[rank :: recipe.pp] for rank in range(recipe.pp)]
    each = [sum(one.forward + one.backward for one in own) for own in ranks]
    busiest = max(range(recipe.pp), key=each.__getitem__)
    waits = [
        sum(one.forward if recipe.schedule == "zero-bubble" else one.forward + one.backward for one in own)
        for index, own in enumerate(ranks)
        if index != busiest
    ]
    sends = 2 * chunks * send * (recipe.pp - 1) / recipe.pp if recipe.schedule != "gpipe" else 0.0
    halves = 0.5 if recipe.schedule == "zero-bubble" else 1.0
    first = sum(one.forward + halves * one.backward for one in passes)
    filled = count * (each[busiest] + sends) + sum(waits) / chunks
    seconds = max(filled, first + (count - 1) * each[busiest] / chunks) + 2 * (recipe.pp * chunks - 1) * send
    return seconds, 1 - count * sum(each) / (recipe.pp * seconds)


def send_seconds(setting: Setting, share: Share) -> float:
    """Seconds until the next stage has what one micro-batch, or one token of each sequence, made; 0 of one stage."""
    recipe, topology = setting.recipe, setting.network.topology
    if recipe.pp < 2:
        return 0.0
    block = next(block for block in setting.work.blocks if block.layer)
    nbytes = block.input_elements * share.rows * recipe.precision.compute
    if recipe.sequence_parallel or recipe.hand_fused:  # those stacks send a part of each, and gather it after
        nbytes /= recipe.tp
    return setting.network.send(nbytes, between_hosts=recipe.stride("pp") >= topology.devices_per_host)


def synchronised_seconds(setting: Setting, stage: Stage, backward: float) -> float:
    """Gradients of replicas at the end of a step, as far as the last backward, of so many seconds, does not hide them.

    What hides them is slower for it, and those that a backward makes last are summed when it is over.
    """
    recipe, network = setting.recipe, setting.network
    if recipe.dp * recipe.cp < 2 or recipe.shards > 1:
        return 0.0
    group = group_of(network.topology, recipe.dp * recipe.cp, recipe.stride("cp"))
    dense, experts = live_elements(stage, recipe, trained=True)
    elements = dense + experts / min(recipe.ep, group.size)
    if recipe.zero:
        reduced = network.reduce_scatter(group, elements * recipe.precision.reduce)
        return reduced + network.all_gather(group, elements * recipe.precision.compute)
    seconds = network.all_reduce(group, elements * recipe.precision.reduce)
    hidden = min(seconds, backward)
    return max(LAST_GRADIENTS * seconds, seconds - hidden) + setting.reached.overlap * hidden


def optimizer_seconds(setting: Setting, stage: Stage) -> float:
    """Seconds of the optimizer's step on one rank of a stage."""
    recipe, precision = setting.recipe, setting.recipe.precision
    dense, experts = live_elements(stage, recipe, trained=True)
    elements = dense / recipe.shards + experts / recipe.expert_shards
    if recipe.zero:
        elements /= recipe.dp
    nbytes = elements * (precision.parameters + precision.gradients + precision.optimizer_bytes)
    return OPTIMIZER_TRAFFIC * nbytes / (setting.card.bytes_per_second * setting.reached.memory)
