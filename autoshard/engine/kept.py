"""What autograd keeps of a layer for its backward, and what a compiler makes again instead."""

from collections.abc import Iterator
from dataclasses import replace

from autoshard.engine.blocks import Block, OpWork, TensorPart

# What autograd keeps for the backward of an op in eager mode: its derivative formula reads these
# (tools/autograd/derivatives.yaml of torch).
KEEPS_INPUTS = (
    "div", "pow", "silu", "gelu", "relu", "softplus", "layer_norm", "rms_norm", "native_layer_norm", "matmul",
    "bmm", "baddbmm", "linear", "addmm", "mm", "einsum", "conv", "square", "_grouped_mm", "grouped_mm",
)  # fmt: skip
KEEPS_OUTPUTS = ("softmax", "_softmax", "sigmoid", "tanh", "exp", "rsqrt", "sqrt", "log_softmax", "_log_softmax")
KEEPS_STEPS = {"lstm": 6, "gru": 5, "rnn_tanh": 1, "rnn_relu": 1}
"""Numbers per number of the result that each recurrent layer of an op keeps: gates, and states of all steps."""
LAYER_WEIGHTS = 4
"""Two matrices and two biases. Of layers that go both ways twice as much is assumed as they keep."""


def kept_parts(block: Block, *, fused: bool) -> dict[int, TensorPart]:
    """Activations of one layer that are kept for its backward, by storage: what the derivative of each op reads.

    `fused`: a compiler makes again in backward what element-wise ops made, out of what they read of others.
    """

    def is_cheap(op: OpWork) -> bool:
        return fused and op.kind == "other" and not op.free

    made_again = {part.storage for op in block.ops if is_cheap(op) for part in op.outputs}
    needed: dict[int, TensorPart] = {}
    for op in block.ops:
        for part in op.inputs if is_cheap(op) else _read_by_derivative(op):
            known = needed.get(part.storage)
            kept = part.batch and not part.weight and part.itemsize > 1 and part.storage not in made_again
            if kept and (known is None or known.numel < part.numel):
                needed[part.storage] = part
    return needed


def _read_by_derivative(op: OpWork) -> Iterator[TensorPart]:
    """Tensors that the derivative of an op reads."""
    if op.free:
        return
    if op.kind == "attention":
        yield from (*op.inputs, *op.outputs)
    elif op.kind == "loss":
        yield from op.inputs
    elif op.name in KEEPS_STEPS:
        yield from op.inputs
        made, layers = op.outputs[0], max(1, sum(part.weight for part in op.inputs) // LAYER_WEIGHTS)
        yield replace(made, numel=made.numel * (1 + KEEPS_STEPS[op.name] * layers))
    elif op.name == "mul":
        for part, other in zip(op.inputs, reversed(op.inputs), strict=True):
            if other.batch or other.weight:
                yield part
    elif op.name.startswith(KEEPS_INPUTS):
        yield from op.inputs
    elif op.name.startswith(KEEPS_OUTPUTS):
        yield from op.outputs


def selective_parts(block: Block) -> list[TensorPart]:
    """What a layer keeps whose cheap ops are computed again: what attention makes, and every second product."""
    products = [part for op in block.ops if op.kind == "matmul" for part in op.outputs]
    attention = [part for op in block.ops if op.kind == "attention" for part in op.outputs[:1]]
    return [*products[::2], *attention]


def column_inputs(block: Block) -> dict[int, TensorPart]:
    """Activations that tensor-parallel products read whole: each rank gathers them and keeps them for its weights."""
    return {
        part.storage: part
        for op in block.ops
        if op.kind == "matmul" and any(one.weight and one.cut for one in op.inputs)
        for part in op.inputs
        if part.batch and not part.cut and not part.weight and any(one.cut for one in op.outputs)
    }
