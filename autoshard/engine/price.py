"""Price a training step: model, recipe and cluster → seconds and bytes of every class of equal ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.cluster.topology import Group, Topology, group_of
from autoshard.engine.blocks import Block, ModelWork
from autoshard.engine.collectives import Network
from autoshard.engine.efficiency import Efficiency, efficiency_of
from autoshard.engine.memory import CONTEXT_BYTES, Memory, local_elements, step_memory
from autoshard.engine.programs import Layer, pass_program, play
from autoshard.engine.recipe import Recipe
from autoshard.engine.timing import Card, Share, layer_seconds
from autoshard.errors import SpecError
from autoshard.schedules.orders import Order, in_flight, make_order
from autoshard.schedules.simulate import Times, simulate

STEADY = 2
"""Micro-batches, as a multiple of the stages, after which a schedule repeats itself."""
OPTIMIZER_TRAFFIC = 2.0
"""Bytes read and written by a fused optimizer step for each byte of states, parameters and gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """A training step of the whole machine.

    Attributes:
        seconds: of one step; compute_seconds: of the busiest rank's kernels; exposed_seconds: in which it waits for
            communication; bubble: part of the step in which the pipeline leaves ranks idle.
        memory: of the fullest rank; reserved_bytes: what the allocator holds of the device; fits: within the card.
    """

    seconds: float
    tokens_per_second: float
    compute_seconds: float
    exposed_seconds: float
    optimizer_seconds: float
    bubble: float
    memory: Memory
    reserved_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """What the parts of the pricing share."""

    work: ModelWork
    recipe: Recipe
    card: Card
    network: Network
    reached: Efficiency
    share: Share

    def group(self, axis: str, size: int) -> Group:
        """The ranks of one mesh dimension."""
        return group_of(self.network.topology, size, self.recipe.stride(axis))


def price_step(work: ModelWork, recipe: Recipe, card: Card, topology: Topology) -> StepEstimate:
    """Price one training step. Raises `SpecError` where the mesh does not fit the cluster or the model."""
    if recipe.devices != topology.devices:
        raise SpecError(f"the mesh has {recipe.devices} ranks, and the cluster {topology.devices} devices.")
    reached = efficiency_of(card.generation, recipe.stack)
    network = Network(topology=topology, local_efficiency=reached.local, network_efficiency=reached.network)
    share = Share(
        samples=recipe.micro_batch / work.samples, cp=recipe.cp, tp=recipe.tp,
        sequence_parallel=recipe.sequence_parallel,
    )  # fmt: skip
    setting = _Setting(work=work, recipe=recipe, card=card, network=network, reached=reached, share=share)
    stages = split_stages(work, recipe.pp * recipe.stages_per_rank)
    passes = [_stage_passes(setting, stage) for stage in stages]
    if recipe.pp > 1:
        seconds, bubble = _pipelined(setting, passes)
        flying = in_flight(_order(recipe, min(recipe.num_microbatches, STEADY * recipe.pp)))
    else:
        seconds, bubble = recipe.num_microbatches * (passes[0].forward + passes[0].backward), 0.0
        flying = {0: 1}
    synchronised = max(_synchronised(setting, stage) for stage in stages)
    optimizer = max(_optimizer_seconds(setting, stage) for stage in stages)
    total = seconds + synchronised + optimizer
    memories = []
    for rank in range(recipe.pp):
        own = [stages[index] for index in range(rank, len(stages), recipe.pp)]
        blocks = [block for stage in own for block in stage]
        most = max(flying[index] for index in range(rank, len(stages), recipe.pp))
        memories.append(step_memory(blocks, share, recipe, most))
    memory = max(memories, key=lambda one: one.allocated)
    reserved = memory.allocated * 1.04
    compute = max(one.compute for one in passes) * recipe.num_microbatches * recipe.stages_per_rank
    return StepEstimate(
        seconds=total,
        tokens_per_second=recipe.global_batch * work.tokens / total,
        compute_seconds=compute,
        exposed_seconds=max(0.0, total - compute - optimizer - bubble * seconds),
        optimizer_seconds=optimizer,
        bubble=bubble,
        memory=memory,
        reserved_bytes=reserved,
        fits=reserved + CONTEXT_BYTES <= card.memory_bytes,
    )


def split_stages(work: ModelWork, count: int) -> list[list[Block]]:
    """Layers over stages, as evenly as whole layers allow; what is outside of them goes to the ends."""
    if count == 1:
        return [list(work.blocks)]
    layers = [replace(block, count=1) for block in work.blocks if block.count > 1 for _ in range(block.count)]
    if len(layers) < count:
        raise SpecError(f"{len(layers)} layers can't be divided into {count} stages.")
    stages: list[list[Block]] = [[] for _ in range(count)]
    for index, layer in enumerate(layers):
        stages[index * count // len(layers)].append(layer)
    folded = [_folded(stage) for stage in stages]
    alone = [block for block in work.blocks if block.count == 1]
    folded[0] = [*(block for block in alone if block.path != "last"), *folded[0]]
    folded[-1] = [*folded[-1], *(block for block in alone if block.path == "last")]
    return folded


def _folded(stage: Sequence[Block]) -> list[Block]:
    found: dict[str, Block] = {}
    for block in stage:
        known = found.get(block.path)
        found[block.path] = block if known is None else replace(known, count=known.count + 1)
    return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Seconds of one micro-batch through one stage."""

    forward: float
    backward: float
    compute: float


def _stage_passes(setting: _Setting, stage: Sequence[Block]) -> _Passes:
    recipe = setting.recipe
    forward: list[Layer] = []
    backward: list[Layer] = []
    for block in stage:
        seconds = layer_seconds(block, setting.share, recipe, setting.card, setting.reached)
        again = seconds.recompute if block.count > 1 or len(stage) == 1 else 0.0
        gather, reduce = _sharding_seconds(setting, block)
        tensor = _tensor_seconds(setting, block)
        slow = setting.reached.overlap
        ahead = _slowed(seconds.forward, gather, slow) + tensor
        repeated = tensor if recipe.recompute == "full" and block.count > 1 else 0.0
        back = _slowed(seconds.backward + again, gather + reduce, slow) + tensor + repeated
        for _ in range(block.count):
            forward.append(Layer(name=block.path, compute=ahead, gather=gather))
            backward.append(
                Layer(name=block.path, compute=back, gather=gather if recipe.reshard else 0.0, reduce=reduce)
            )
    ran, back_ran = play(pass_program(forward)), play(pass_program(backward[::-1]))
    return _Passes(
        forward=ran.seconds, backward=back_ran.seconds, compute=ran.compute_seconds + back_ran.compute_seconds
    )


def _slowed(compute: float, network: float, part: float) -> float:
    """Kernels beside which collectives run."""
    return compute + part * min(compute, network)


def _sharding_seconds(setting: _Setting, block: Block) -> tuple[float, float]:
    """Gathering the parameters of one layer, and reducing its gradients, for one micro-batch."""
    recipe = setting.recipe
    if recipe.fsdp < 2:
        return 0.0, 0.0
    group = setting.group("fsdp", recipe.fsdp)
    elements = local_elements(block, recipe)
    gather = setting.network.all_gather(group, elements * recipe.precision.compute)
    reduce = setting.network.reduce_scatter(group, elements * recipe.precision.reduce)
    if recipe.dp > 1:
        across = setting.group("dp", recipe.dp)
        reduce += setting.network.all_reduce(across, elements * recipe.precision.reduce / recipe.fsdp)
    if recipe.pp > 1:  # once per step, not for each micro-batch
        return gather / recipe.num_microbatches, reduce / recipe.num_microbatches
    return gather, reduce


def _tensor_seconds(setting: _Setting, block: Block) -> float:
    """Collectives of tensor parallelism in one forward of one layer; its backward has as many."""
    recipe = setting.recipe
    if recipe.tp < 2 or not block.reduces:
        return 0.0
    group = setting.group("tp", recipe.tp)
    nbytes = block.reduced_elements / block.reduces * setting.share.samples / recipe.cp * recipe.precision.compute
    return block.reduces * setting.network.all_reduce(group, nbytes)


def _pipelined(setting: _Setting, passes: Sequence[_Passes]) -> tuple[float, float]:
    """Seconds of all micro-batches through all stages, and the part of it that is bubble."""
    recipe, topology = setting.recipe, setting.network.topology
    block = next(block for block in setting.work.blocks if block.count > 1)
    nbytes = block.input_elements * setting.share.samples / recipe.cp * recipe.precision.compute
    if recipe.sequence_parallel:
        nbytes /= recipe.tp
    across = recipe.stride("pp") >= topology.devices_per_host
    send = setting.network.send(nbytes, between_hosts=across)
    times = Times(
        forward=[one.forward for one in passes],
        backward=[one.backward for one in passes],
        weight=[one.backward / 2 for one in passes],
        sends=[send] * (len(passes) - 1),
        returns=[send] * (len(passes) - 1),
    )
    count, folded = recipe.num_microbatches, 0
    if count > 2 * STEADY * recipe.pp:  # every further round of `pp` micro-batches takes as long as the last one
        folded = (count - STEADY * recipe.pp) // recipe.pp
        count -= folded * recipe.pp
    seconds = simulate(_order(recipe, count), times).seconds
    if folded:
        seconds += folded * (seconds - simulate(_order(recipe, count - recipe.pp), times).seconds)
    busy = recipe.num_microbatches * sum(times.forward[i] + times.backward[i] for i in range(len(passes)))
    return seconds, 1 - busy / (recipe.pp * seconds)


def _order(recipe: Recipe, count: int) -> Order:
    return make_order(recipe.schedule, recipe.pp, count, stages_per_device=recipe.stages_per_rank)


def _synchronised(setting: _Setting, stage: Sequence[Block]) -> float:
    """Gradients of replicas at the end of a step, as far as backward does not hide them."""
    recipe = setting.recipe
    if recipe.dp < 2 or recipe.fsdp > 1:
        return 0.0
    group = setting.group("dp", recipe.dp)
    elements = sum(block.count * local_elements(block, recipe) for block in stage)
    if recipe.zero:
        reduced = setting.network.reduce_scatter(group, elements * recipe.precision.reduce)
        return reduced + setting.network.all_gather(group, elements * recipe.precision.compute)
    return 0.5 * setting.network.all_reduce(group, elements * recipe.precision.reduce)


def _optimizer_seconds(setting: _Setting, stage: Sequence[Block]) -> float:
    recipe, precision = setting.recipe, setting.recipe.precision
    elements = sum(block.count * local_elements(block, recipe) for block in stage) / recipe.fsdp
    if recipe.zero:
        elements /= recipe.dp
    nbytes = elements * (precision.parameters + precision.gradients + precision.optimizer_bytes)
    return OPTIMIZER_TRAFFIC * nbytes / (setting.card.bytes_per_second * setting.reached.memory)
