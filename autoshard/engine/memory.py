"""Bytes of one rank over a training step, by kind.

    before │ forward ──▶ at the loss │ backward ──▶ its end │ optimizer
           │ activations grow        │ gradients grow       │ gradients shrink
           │ logits and their copies │ recomputed layer     │

States are there for good. Peaks are where the loss is made, in the first backward of a layer, or at the end of it, when
all gradients are there and the largest are reduced.

Beside tensors, a process on a card has a context, buffers of collectives, a workspace, and what its allocator holds and
can't hand out; on a CPU it has none of these.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoshard.engine.blocks import Block
from autoshard.engine.estimate import Moment
from autoshard.engine.local import Share, sums_of
from autoshard.engine.recipe import Recipe
from autoshard.engine.timing import Card

CONTEXT_BYTES = 768 * 2**20
"""Context and kernels of a process on a card, outside of torch's allocator."""
COMMUNICATOR_BYTES = 512 * 2**20
"""Buffers of the collectives' library for each mesh dimension of more than one rank, outside of the allocator."""
WORKSPACE_BYTES = 64 * 2**20
"""Of the matrix library, inside of it."""
RESERVED_PART, RESERVED_BYTES = 1.02, 512 * 2**20
"""What the allocator holds: pieces that fit no tensor grow with what is allocated, and some are there in any case."""
SCORE_BYTES, SCORE_GRADIENT_BYTES = 5, 4
"""Per score of unfused attention: softmax and dropout of 2 bytes and a mask of one are kept (5 a s^2 b in Korthikanti
et al., "Reducing activation recomputation", 2022); the gradients of both are made from them."""
GATHERED_LAYERS = 2
"""Layers whose whole parameters lie on a rank at one time: the one that is computed, and the next."""

Stage = Sequence[tuple[Block, int]]
"""Blocks of one stage, and how many of each are in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a rank over a step or an answer: `curve` has the moments between which they rise and fall.

    `outside`: context and buffers of collectives, which torch's allocator does not see. `pooled`: it holds more than it
    hands out. `flat_bytes`: large flat buffers of an optimizer, at the last moment: they fit in no piece that is held.
    """

    curve: tuple[Moment, ...]
    pooled: bool
    outside: Mapping[str, float] = field(default_factory=dict)
    flat_bytes: float = 0.0

    @property
    def kinds(self) -> Mapping[str, float]:
        """By name, at the fullest moment."""
        return max(self.curve, key=lambda moment: moment.total).bytes

    @property
    def allocated(self) -> float:
        """What torch's allocator has handed out at the fullest moment."""
        return max(moment.total for moment in self.curve)

    @property
    def reserved(self) -> float:
        """What the allocator holds of the device."""
        *before, last = (moment.total for moment in self.curve)
        if not self.pooled:
            return max(*before, last)
        held = RESERVED_PART * max(*before, last - self.flat_bytes) + self.flat_bytes
        return max(last, held) + RESERVED_BYTES

    @property
    def used(self) -> float:
        """What is taken of the device, as a driver's tool shows it."""
        return self.reserved + sum(self.outside.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeEstimate:
    """What a training step or an answer costs with one recipe.

    Attributes:
        recipe: as it was asked for.
        seconds: of one step, or of the whole answer; tokens_per_second: of the whole machine, those trained on, those
            generated, or those of the prompts.
        memory: of the fullest rank; fits: within the card.
        compute_seconds: of a step, of the busiest rank's kernels; exposed_seconds: in which it waits for
            communication, within layers too; bubble: part of the step in which the pipeline leaves ranks idle.
        prompt_seconds: of an answer, until the first token; token_seconds: for each further token of every sequence.
        token_parts: seconds of a further token by cause, of all stages that it passes through one after another.
    """

    recipe: Recipe
    seconds: float
    tokens_per_second: float
    memory: Memory
    fits: bool
    compute_seconds: float = 0.0
    exposed_seconds: float = 0.0
    bubble: float = 0.0
    prompt_seconds: float = 0.0
    token_seconds: float = 0.0
    token_parts: Mapping[str, float] = field(default_factory=dict)

    def value(self, objective: str) -> float:
        """What is made small: bytes for "memory", else seconds."""
        return self.memory.reserved if objective == "memory" else self.seconds


def workspace_bytes(card: Card) -> float:
    """Of the matrix library."""
    return 0.0 if card.is_cpu else float(WORKSPACE_BYTES)


def outside_bytes(recipe: Recipe, card: Card) -> dict[str, float]:
    """Context of the process, and buffers of its communicators."""
    if card.is_cpu:
        return {}
    groups = sum(degree > 1 for degree in recipe.mesh.values())
    return {"context": float(CONTEXT_BYTES), "collectives' buffers": float(groups * COMMUNICATOR_BYTES)}


def local_elements(block: Block, recipe: Recipe, *, trained: bool = False) -> tuple[float, float]:
    """Elements of a layer, or of those that are trained, on a rank before FSDP: (outside of experts, of experts)."""
    part = block.trained_part if trained else 1.0
    dense = float(block.elements - block.expert_elements)
    dense -= (block.cut_elements - block.expert_cut) * (1 - 1 / recipe.tp)
    experts = float(block.expert_elements) - block.expert_cut * (1 - 1 / recipe.tp)
    return part * dense, part * experts / recipe.ep


def unshared_elements(block: Block, recipe: Recipe, *, trained: bool = False) -> tuple[float, float]:
    """The same without weights that an earlier block has, too (tied ones)."""
    dense, experts = local_elements(block, recipe, trained=trained)
    part = block.trained_part if trained else 1.0
    return dense - part * block.shared / (recipe.tp if block.cut_elements else 1), experts


def stage_elements(stage: Stage, recipe: Recipe, *, trained: bool = False) -> Iterator[tuple[Block, float, float]]:
    """The same of all layers of each block of a stage; tied weights once where both ends are on it."""
    both_ends = any(block.path == "first" for block, _ in stage)
    elements_of = unshared_elements if both_ends else local_elements
    for block, count in stage:
        dense, experts = elements_of(block, recipe, trained=trained)
        yield block, count * dense, count * experts


def live_elements(stage: Stage, recipe: Recipe, *, trained: bool = False) -> tuple[float, float]:
    """The same for a whole stage."""
    dense = experts = 0.0
    for _, one, of_experts in stage_elements(stage, recipe, trained=trained):
        dense, experts = dense + one, experts + of_experts
    return dense, experts


def share_of(block: Block, share: Share, recipe: Recipe) -> Share:
    """What a rank has of a block: outside of layers whole sequences, unless the parts of the loss stay apart."""
    divided = block.layer or recipe.loss_parallel or divides_loss(block, recipe)
    return share if divided or share.cp == 1 else replace(share, cp=1)


def divides_loss(block: Block, recipe: Recipe) -> bool:
    """Whether `apply` leaves the logits of context parallelism in parts until their loss is known."""
    return recipe.cp > 1 and block.divides_loss and recipe.micro_batch == 1 and recipe.op_by_op


def cuts_loss(block: Block, recipe: Recipe) -> bool:
    """Whether `apply` leaves the logits of tensor parallelism in parts until their loss is known."""
    return recipe.cuts_losses and block.cuts_loss


def gathers_logits(block: Block, recipe: Recipe) -> bool:
    """Whether logits that `apply` leaves in parts until their loss is known are put together then."""
    in_parts = divides_loss(block, recipe) or cuts_loss(block, recipe)
    return in_parts and not recipe.loss_parallel and not recipe.divided_outputs


def kept_bytes(block: Block, share: Share, recipe: Recipe) -> float:
    """Bytes of activations that one layer keeps for its backward."""
    share = share_of(block, share, recipe)
    sums = sums_of(block)
    if recipe.recompute == "full" and block.recomputes:
        return _input_bytes(block, share, recipe)
    if recipe.recompute == "selective" and block.recomputes:
        return _input_bytes(block, share, recipe) + sums.selective.on(share)
    return _all_kept(block, share, recipe)


def _all_kept(block: Block, share: Share, recipe: Recipe) -> float:
    sums = sums_of(block)
    kept = sums.kept_fused if recipe.stack == "compiled" else sums.kept
    return kept.on(share) + SCORE_BYTES * _scores(block, share, recipe)


def _scores(block: Block, share: Share, recipe: Recipe) -> float:
    """Elements of the scores in one layer that attention writes out; of two bytes each, if they are larger."""
    unfused = (one for one in sums_of(block).attentions if recipe.unfused_attention or one.writes_scores(share))
    return sum(one.scores_on(share) for one in unfused) * max(1.0, recipe.precision.compute / 2)


def _input_bytes(block: Block, share: Share, recipe: Recipe) -> float:
    part = block.input_elements * share.rows * recipe.precision.compute
    return part / (recipe.tp if recipe.sequence_parallel else 1)


def step_memory(stage: Stage, share: Share, recipe: Recipe, card: Card, in_flight: float) -> Memory:
    """Bytes of a rank of one pipeline stage over a training step, `in_flight` micro-batches of activations at most."""
    precision = recipe.precision
    weights = sum(
        block.stored_bytes(precision) * (one / recipe.shards + of_experts / recipe.expert_shards)
        for block, one, of_experts in stage_elements(stage, recipe)
    )
    dense, experts = live_elements(stage, recipe, trained=True)
    replicas = recipe.dp if recipe.zero else 1
    optimizer = precision.optimizer_bytes * (
        dense / recipe.shards / replicas + experts / recipe.expert_shards / max(1, replicas // recipe.ep)
    )
    fixed = {
        "weights": weights, "gradients": 0.0, "optimizer": optimizer, "activations": 0.0,
        "unsharded parameters": 0.0, "transient": 0.0, "workspace": workspace_bytes(card),
    }  # fmt: skip
    sharded, whole = (dense / recipe.shards + experts / recipe.expert_shards) * precision.gradients, 0.0
    if recipe.gathers_once and recipe.num_microbatches > 1:
        whole = (dense + experts) * precision.reduce
    # Gradients of a step before, or of micro-batches before, are there when the fullest micro-batch is.
    earlier = whole or (sharded if recipe.num_microbatches > 1 or recipe.shards == 1 else 0.0)
    largest, outer, at_loss = _unsharded(stage, recipe)
    kept = in_flight * sum(count * kept_bytes(block, share, recipe) for block, count in stage)
    if recipe.pp > 1 and stage[-1][0].layer:  # what was sent to the next stage is kept until its gradient comes
        kept += in_flight * _input_bytes(stage[-1][0], share, recipe)
    loss = max((_loss_bytes(block, share, recipe) for block, _ in stage), default=0.0)
    backward = max((_backward_bytes(block, share, recipe) for block, _ in stage if block.layer), default=0.0)
    reducing = largest * (precision.compute + precision.reduce) if recipe.shards > 1 else 0.0
    first_reducing = outer * (precision.compute + precision.reduce) if recipe.shards > 1 else 0.0
    # An optimizer of float32 copies reads gradients of 16 bits from a flat buffer, and a second one in float32.
    copied = precision.gradients + 4 if precision.master and precision.gradients < 4 else 0
    optimizer_copies = copied * (dense / recipe.shards + experts / recipe.expert_shards) / replicas
    at_loss_kept = {"gradients": earlier, "activations": kept, "unsharded parameters": at_loss}
    end = {
        "gradients": max(sharded, earlier), "transient": first_reducing,
        "unsharded parameters": outer * precision.compute if recipe.shards > 1 else 0.0,
    }  # fmt: skip
    moments = {
        "before": {"gradients": earlier},
        "loss": at_loss_kept | {"transient": loss},
        "backward of a layer": at_loss_kept | {"transient": backward + reducing},
        "end of backward": end,
        "optimizer": {"gradients": sharded, "transient": optimizer_copies},
    }
    return Memory(
        curve=tuple(Moment(name=name, bytes=fixed | held) for name, held in moments.items()),
        pooled=not card.is_cpu, outside=outside_bytes(recipe, card), flat_bytes=optimizer_copies,
    )  # fmt: skip


def _unsharded(stage: Stage, recipe: Recipe) -> tuple[float, float, float]:
    """Trained elements of the largest layer, and of the largest block outside; bytes that are whole at the loss."""
    each = [(block, sum(local_elements(block, recipe))) for block, _ in stage if block.ops]
    inside = max((block.trained_part * elements for block, elements in each if block.layer), default=0.0)
    outside = max((block.trained_part * elements for block, elements in each if not block.layer), default=0.0)
    if recipe.shards < 2:
        return inside, outside, 0.0
    if recipe.stays_whole:
        dense, experts = live_elements(stage, recipe)
        return inside, outside, (dense + experts) * recipe.precision.compute
    largest = max((elements for block, elements in each if block.layer), default=0.0)
    whole = sum(elements for block, elements in each if not block.layer)
    return inside, outside, (whole + GATHERED_LAYERS * largest) * recipe.precision.compute


def _loss_bytes(block: Block, share: Share, recipe: Recipe) -> float:
    """Bytes of the logits where a loss is made: they, what the loss keeps of them, and their gradients.

    What `apply` divides is put together behind the loss, since the model gives it out, but for `divided_outputs`.
    """
    logits = sums_of(block).logits * share_of(block, share, recipe).rows
    over_tokens = divides_loss(block, recipe)
    over_classes = not over_tokens and cuts_loss(block, recipe)
    part = logits / (recipe.tp if recipe.loss_parallel or over_classes else 1)
    whole = logits * (share.cp if over_tokens else 1) if gathers_logits(block, recipe) else 0.0
    return part * recipe.logit_bytes + whole * recipe.precision.compute


def _backward_bytes(block: Block, share: Share, recipe: Recipe) -> float:
    """What the backward of one layer needs for a time: what it recomputes, and gradients of its largest tensors."""
    again = 0.0
    if recipe.recompute != "none" and block.recomputes:
        again = _all_kept(block, share, recipe)
    again += SCORE_GRADIENT_BYTES * _scores(block, share, recipe)
    return again + sums_of(block).widest.on(share)
