"""Price an answer: the prompt in one forward, then one forward per new token with a growing cache.

A forward for few tokens reads every weight that it needs once, and the cache:

    seconds of a token = max(host, max(weights / bandwidth, FLOPs / peak) + cache / bandwidth + gaps between kernels)
                         + all-reduces of tensor parallelism, which are as long as their latency

What an encoder makes, or a tower for images, is made with the prompt, and so are keys and values of what it made. Of a
mixture of experts, only the experts are read that a token is sent to: 1 - (1 - k / E)^tokens of them.
"""

from dataclasses import replace
from math import ceil

from autoshard.cluster.topology import Topology
from autoshard.engine.blocks import Block, ModelWork
from autoshard.engine.efficiency import GRAPH_KERNEL_SECONDS
from autoshard.engine.estimate import Moment
from autoshard.engine.local import Share, cached_elements, sums_of
from autoshard.engine.memory import Memory, RecipeEstimate, Stage, outside_bytes, stage_elements, workspace_bytes
from autoshard.engine.price import Setting, expert_seconds, make_setting, send_seconds, split_stages, tensor_seconds
from autoshard.engine.recipe import Recipe
from autoshard.engine.timing import Card, host_seconds, layer_seconds
from autoshard.errors import SpecError
from autoshard.profile.experts import hit_part


def price_generation(
    work: ModelWork, recipe: Recipe, card: Card, topology: Topology, *, batch: int, prompt_tokens: int, new_tokens: int
) -> RecipeEstimate:
    """Price `new_tokens` tokens for each of `batch` sequences, divided over the replicas of `recipe.dp`.

    With pipeline stages a replica's sequences are divided into `recipe.num_microbatches` groups that take turns.
    Raises `SpecError` where the mesh does not fit the cluster or the model, or shards parameters.
    """
    setting, sequences = answer_setting(work, recipe, card, topology, batch, prompt_tokens, new_tokens)
    rows, groups = setting.recipe.micro_batch, setting.recipe.num_microbatches
    stages = split_stages(work, setting.recipe)
    prompts = [sum(prompt_parts(setting, stage)) for stage in stages]
    prompt = sum(prompts) + (groups - 1) * max(prompts)
    tokens = [token_parts(setting, stage, rows, new_tokens / 2) for stage in stages]
    seconds = [sum(parts.values()) for parts in tokens]
    busiest = max(range(len(stages)), key=seconds.__getitem__)
    passed = tokens if sum(seconds) > groups * seconds[busiest] else [tokens[busiest]] * groups
    parts = {cause: sum(one[cause] for one in passed) for cause in tokens[busiest]}
    token = sum(parts.values())
    total = prompt + max(0, new_tokens - 1) * token
    memories = (answer_memory(setting, stage, sequences, new_tokens) for stage in stages)
    fullest = max(memories, key=lambda memory: memory.allocated)
    return RecipeEstimate(
        recipe=recipe,
        seconds=total,
        tokens_per_second=batch * (new_tokens or prompt_tokens) / total,
        memory=fullest,
        fits=fullest.used <= card.memory_bytes,
        prompt_seconds=prompt,
        token_seconds=token,
        token_parts=parts,
    )


def answer_setting(
    work: ModelWork, recipe: Recipe, card: Card, topology: Topology, batch: int, prompt_tokens: int, new_tokens: int
) -> tuple[Setting, int]:  # fmt: skip
    """What an answer is priced with, its recipe with the sequences that are computed at once; sequences per replica."""
    if recipe.fsdp > 1 or recipe.cp > 1:
        raise SpecError("generation is priced with dp, tp, pp and ep, not with fsdp or cp: use dp for replicas.")
    if batch < 1 or prompt_tokens < 1 or new_tokens < 0:
        raise SpecError("an answer has at least one sequence and one token of a prompt, and new tokens from 0 up.")
    sequences = ceil(batch / recipe.dp)
    groups = min(recipe.num_microbatches if recipe.pp > 1 else 1, sequences)
    rows = ceil(sequences / groups)
    recipe = replace(recipe, micro_batch=rows, num_microbatches=groups, recompute="none")
    setting = make_setting(work, recipe, card, topology, length=prompt_tokens / work.tokens)
    return replace(setting, generates=new_tokens > 0), sequences


def _last_tokens(setting: Setting, rows: float) -> Setting:
    """The same for one token of each sequence."""
    length = 1 / setting.work.tokens
    return replace(setting, share=replace(setting.share, samples=rows / setting.work.samples, length=length))


def _of_prompt(setting: Setting, block: Block, rows: float) -> Setting:
    """What a block computes of a prompt of `rows` sequences: the last tokens after the layers, and in a decoder whose
    prompt an encoder has, if it generates."""
    short = block.path == "last" or (setting.work.encodes and not sums_of(block).once)
    return _last_tokens(setting, rows) if setting.generates and short else setting


def prompt_parts(setting: Setting, stage: Stage) -> tuple[float, float]:
    """Seconds of kernels and of communication of a prompt on one stage."""
    compute, network = 0.0, send_seconds(setting, setting.share)
    for block, count in stage:
        part = _of_prompt(setting, block, setting.recipe.micro_batch)
        compute += count * layer_seconds(block, part.share, part.recipe, part.card, part.reached).forward
        network += count * (tensor_seconds(part, block) + expert_seconds(part, block))
    return compute, network


def token_parts(setting: Setting, stage: Stage, rows: int, answered: float) -> dict[str, float]:
    """Seconds of one token of `rows` sequences on one stage, by cause, after so many tokens of the answer."""
    recipe, reached, card = setting.recipe, setting.reached, setting.card
    one = _last_tokens(setting, rows)
    bytes_per_second = card.bytes_per_second * reached.memory
    parts = dict.fromkeys(("weights", "arithmetic", "cache", "launches", "communication"), 0.0)
    host = 0.0
    for block, count in stage:
        sums = sums_of(block)
        if sums.once:
            continue
        products = [product for product in sums.products if not product.once]
        weights = weight_bytes(block, recipe, rows)
        flops = sum(_flops(product.flops, product.experts, product.cut, one.share) for product in products)
        read, computed = weights / bytes_per_second, flops / (card.flops_per_second * reached.matmul)
        cache = _cache_bytes(block, setting, rows, answered) / bytes_per_second
        kernels = len(products) + len(sums.attentions)
        kernels += sums.eager.kernels if recipe.op_by_op else sums.fused.kernels
        parts["weights" if read > computed else "arithmetic"] += count * max(read, computed)
        parts["cache"] += count * cache
        parts["launches"] += count * kernels * GRAPH_KERNEL_SECONDS
        parts["communication"] += count * (tensor_seconds(one, block) + expert_seconds(one, block))
        if recipe.op_by_op:
            host += count * host_seconds(block, recipe, reached)
    parts["communication"] += send_seconds(setting, one.share)
    device = sum(parts.values())
    parts["launches"] += max(0.0, host - device)
    return parts


def _flops(flops: float, experts: int, cut: str, share: Share) -> float:
    flops *= share.rows
    return flops / share.ep / share.tp if experts else flops / share.tp if cut else flops


def weight_bytes(block: Block, recipe: Recipe, tokens: float) -> float:
    """Bytes of weights that a forward of `tokens` new tokens of a replica reads on one rank: of experts, those hit."""
    dense = experts = routed = 0.0
    for product in sums_of(block).products:
        if product.once:
            continue
        if product.experts:
            experts += product.weight_elements / recipe.ep / (recipe.tp if product.cut else 1)
            routed = product.m / product.experts
        else:
            dense += product.weight_elements / (recipe.tp if product.cut else 1)
    hit = 1.0
    if experts:
        # A token goes to k of E experts; m rows of all experts came from the rows that the router read.
        dense_products = (one for one in sums_of(block).products if one.weight_elements and not one.experts)
        router_rows = max((one.m for one in dense_products), default=1)
        hit = hit_part(routed / max(1, router_rows), tokens * recipe.ep)
    return (dense + experts * hit) * stored_bytes(block, recipe)


def stored_bytes(block: Block, recipe: Recipe) -> float:
    """Bytes per element of a block's weights: where layers are quantised, tables and heads are not."""
    precision = recipe.precision
    return precision.parameters if block.layer else max(precision.parameters, float(precision.compute))


def _cache_bytes(block: Block, setting: Setting, rows: float, answered: float) -> float:
    """Bytes of keys and values of one layer on one rank after so many tokens of the answer."""
    work, recipe = setting.work, setting.recipe
    prompt, (growing, fixed) = setting.share.length, cached_elements(block, min(recipe.tp, block.most_shares))
    elements = growing * ((0 if work.encodes else prompt) + answered / work.tokens) + fixed * prompt
    return rows / work.samples * elements * recipe.precision.compute


def answer_memory(setting: Setting, stage: Stage, sequences: int, new_tokens: int) -> Memory:
    """Bytes of one rank: all of its weights, the cache of all sequences, activations of one forward of the prompt."""
    recipe, card = setting.recipe, setting.card
    elements = stage_elements(stage, recipe)
    weights = sum((dense + experts) * stored_bytes(block, recipe) for block, dense, experts in elements)
    widest = max(
        max(_working_bytes(setting, block, recipe.micro_batch), _joined_bytes(setting, block)) for block, _ in stage
    )
    loaded = {"weights": weights, "cache": 0.0, "activations": 0.0, "workspace": workspace_bytes(card)}
    curve = [Moment(name="weights loaded", bytes=loaded)]
    for name, answered in (("prompt", 0), ("last token", new_tokens))[: 2 if new_tokens else 1]:
        cache = sum(count * _cache_bytes(block, setting, sequences, answered) for block, count in stage)
        curve.append(Moment(name=name, bytes=loaded | {"cache": cache, "activations": widest}))
    return Memory(curve=tuple(curve), pooled=not card.is_cpu, outside=outside_bytes(recipe, card))


def _working_bytes(setting: Setting, block: Block, rows: int) -> float:
    """Bytes of the tensors that one layer has at the same time in a forward of the prompt.

    What tensor parallelism puts together is there twice: in the parts that come in, and as a whole.
    """
    share, recipe = _of_prompt(setting, block, rows).share, setting.recipe
    gathered = 2 * block.gathered_elements if recipe.tp > 1 else 0
    elements = (2 * block.input_elements + gathered) * share.rows
    return elements * recipe.precision.compute + sums_of(block).widest.on(share)


def _joined_bytes(setting: Setting, block: Block) -> float:
    """Bytes of what the groups of sequences have made in the last stage, and of the same put together, also of one."""
    recipe = setting.recipe
    if setting.generates or block.path != "last" or recipe.pp < 2:
        return 0.0
    return 2 * recipe.num_microbatches * sums_of(block).widest.on(setting.share)
