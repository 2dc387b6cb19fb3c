"""Bytes of one rank, by kind: states for good, activations as far as they are kept, and what comes and goes.

A step is fullest either where the loss is made, with the activations of all layers and some copies of the logits, or in
the backward of a layer, with what it recomputes and the gradients of its parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.engine.blocks import Block, kept_parts
from autoshard.engine.recipe import Recipe
from autoshard.engine.timing import Share

CONTEXT_BYTES = 768 * 2**20
"""Context and kernels of a process on a card, outside of torch's allocator."""
WORKSPACE_BYTES = 64 * 2**20
"""Of the matrix library, inside of it."""
GATHERED_LAYERS = 2
"""Layers whose whole parameters lie on a rank at one time: the one that is computed, and the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes at the peak of a step, by kind; `allocated` is what torch's allocator says, `reserved` what it holds."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    unsharded: float
    transient: float

    @property
    def kinds(self) -> Mapping[str, float]:
        """By name, in the order in which they are shown."""
        return {
            "weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer,
            "activations": self.activations, "unsharded parameters": self.unsharded, "transient": self.transient,
        }  # fmt: skip

    @property
    def allocated(self) -> float:
        return sum(self.kinds.values()) + WORKSPACE_BYTES


def local_elements(block: Block, recipe: Recipe) -> float:
    """Elements of the parameters of one layer on a tensor-parallel rank, unsharded by FSDP."""
    return block.trainable - block.cut_elements * (1 - 1 / recipe.tp)


def kept_bytes(block: Block, share: Share, recipe: Recipe) -> float:
    """Bytes of activations that one layer keeps for its backward."""
    if recipe.recompute == "full" and block.count > 1:
        return _input_bytes(block, share, recipe)
    parts = kept_parts(block, fused=recipe.stack != "eager")
    if recipe.recompute == "selective" and block.count > 1:
        # Kept are what attention makes, and every second product; the rest is computed again from the layer's input.
        products = [part for op in block.ops if op.kind == "matmul" for part in op.outputs]
        attention = [part for op in block.ops if op.kind == "attention" for part in op.outputs]
        return _input_bytes(block, share, recipe) + share.nbytes(products[::2]) + share.nbytes(attention)
    return share.nbytes(parts.values())


def _input_bytes(block: Block, share: Share, recipe: Recipe) -> float:
    part = block.input_elements * share.samples / share.cp * recipe.precision.compute
    return part / (recipe.tp if recipe.sequence_parallel else 1)


def step_memory(stage: Sequence[Block], share: Share, recipe: Recipe, in_flight: int) -> Memory:
    """Bytes of a rank of one pipeline stage at the fullest moment of a training step."""
    precision = recipe.precision
    held = sum(block.count * local_elements(block, recipe) for block in stage)
    shard = held / recipe.fsdp
    optimizer = shard * precision.optimizer_bytes / (recipe.dp if recipe.zero else 1)
    largest = max((local_elements(block, recipe) for block in stage), default=0.0)
    unsharded = 0.0
    if recipe.fsdp > 1:
        ordered = sorted(
            (local_elements(block, recipe) for block in stage for _ in range(min(2, block.count))), reverse=True
        )
        unsharded = sum(ordered[:GATHERED_LAYERS]) * precision.compute
    activations = in_flight * sum(block.count * kept_bytes(block, share, recipe) for block in stage)
    gradients = shard * precision.gradients
    if recipe.accumulate_unsharded and recipe.num_microbatches > 1:
        gradients += held * precision.compute
    at_loss = max((_loss_bytes(block, share, recipe) for block in stage), default=0.0)
    in_backward = max((_backward_bytes(block, share, recipe) for block in stage), default=0.0)
    if recipe.fsdp > 1:
        in_backward += largest * (precision.compute + precision.reduce)
    return Memory(
        weights=shard * precision.parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        unsharded=unsharded,
        transient=max(at_loss, in_backward),
    )


def _loss_bytes(block: Block, share: Share, recipe: Recipe) -> float:
    """What lies beside the kept activations where a loss is made: more copies of its input, and its gradient."""
    inputs = [max(op.inputs, key=lambda part: part.numel) for op in block.ops if op.kind == "loss"]
    if not inputs:
        return 0.0
    logits = max(share.part(part) for part in inputs) * (1 if recipe.loss_parallel else share.tp)
    copies = (4 + recipe.precision.compute) if recipe.stack != "eager" else (4 + 4 + recipe.precision.compute)
    return logits * copies


def _backward_bytes(block: Block, share: Share, recipe: Recipe) -> float:
    """What the backward of one layer needs for a time: what it recomputes, and gradients of its largest tensors."""
    if recipe.recompute == "none" or block.count == 1:
        again = 0.0
    else:
        again = share.nbytes(kept_parts(block, fused=recipe.stack != "eager").values())
    widest = sorted((share.nbytes([part]) for op in block.ops for part in op.outputs), reverse=True)
    return again + sum(widest[:2])
