"""How a batch is divided: pure data, made by planning, read by the runtime. Micro-batches and replicas both use it.

    inputs    input_ids      [B, S]      dim 0, axis "*8"      rows of the part
              pixel_values   [B*3, …]    dim 0, axis "*8x3"    three rows of it for every row of the batch
              position_ids   [1, S]      not listed            every part gets all of it
    outputs   logits         [B, S, V]   cat, dim 0            the parts one after the other
              loss           []          mean                  weighted by the rows of each part

An axis is written as in `sharding`: the batch is the starred factor.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

Part = TypeVar("Part", "BatchInput", "BatchOutput")
Merge = Literal["cat", "sum", "mean", "weighted", "same"]
ASSUMED = "rows assumed independent by the user, not checked"
"""What plans and reports say where `assume_independent_rows=True` was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput:
    """A dimension of an input that has the rows of the batch.

    `path` begins with the name of a parameter of the root's `forward` (for *args and **kwargs with theirs), followed by
    the path inside it as `nested.tensors_in` gives it: "input_ids", "images.0", "kwargs.labels".
    """

    path: str
    dim: int
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutput:
    """How one tensor of the output is made from those of the parts; `path` as `nested.tensors_in(output)` gives it.

    how        what
    cat        along dimension `dim`, an `axis`
    sum        the sum over parts
    mean       the mean over parts, weighted by their rows
    weighted   the mean over parts, weighted by the labels that count: elements of the input `weights` that are not
               `ignored`, after the first `skipped` along its last dimension (a loss that compares with the next token)
    same       every part makes the same: that of the first
    """

    path: str
    how: Merge
    dim: int = 0
    axis: str = ""
    weights: str = ""
    ignored: int = -100
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAxis:
    """The batch of a model, whose parts, run one by one, give the parts of its outputs.

    Attributes:
        size: rows at planning; runs may have others.
        whole: inputs (paths) that every part gets whole.
        plain: arguments of the checked call that are no tensors, as `runtime.chunks.plain_arguments` writes them.
        shapes: its tensors, as `runtime.chunks.shapes_of` writes them; () in plans of earlier versions.
        written: buffers that every part writes, one after another (counters, statistics): only if it is `assumed`.
        frozen: modules in evaluation mode that have to stay so: in training mode they mix rows (batch statistics), or
            may do so. "" is the model with all in it.
        flags: attributes of modules that were True or False and that no forward changes, as `runtime.flags.flags_of`
            writes them: with others a forward may mix rows.
        proof: how it was checked, for people.
        assumed: whether the user said that rows are independent (`assume_independent_rows=True`): nothing refused it.
    """

    size: int
    inputs: tuple[BatchInput, ...]
    outputs: tuple[BatchOutput, ...]
    whole: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    proof: str = ""
    assumed: bool = False


def with_rows(axis: str, rows: int) -> str:
    """The axis of a batch with other rows: "*8x3", 2 -> "*2x3"."""
    return re.sub(r"\*\d+", f"*{rows}", axis)


def of_size(batch: BatchAxis, size: int) -> BatchAxis:
    """The same division of a batch of another number of rows."""

    def resized(part: Part) -> Part:
        return replace(part, axis=with_rows(part.axis, size))

    return replace(
        batch, size=size, inputs=tuple(map(resized, batch.inputs)), outputs=tuple(map(resized, batch.outputs)),
    )  # fmt: skip
