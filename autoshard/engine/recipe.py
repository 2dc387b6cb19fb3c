"""Recipe: how a model is run on a mesh of equal devices, every decision written down."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autoshard.engine.precision import PRECISIONS, Precision
from autoshard.errors import SpecError

Recompute = Literal["none", "selective", "full"]
Stack = Literal["eager", "compiled", "fused", "deepspeed", "early"]
"""Who makes the kernels: torch op by op; torch.compile; hand-fused training kernels, alone or run by DeepSpeed; torch
of 2023 op by op, with the first kernels of fused attention."""
MESH_AXES = ("pp", "dp", "fsdp", "cp", "tp")
"""Mesh dimensions from the outermost to the innermost; `ep` takes its ranks out of dp, fsdp and cp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Degrees of the mesh and how its ranks work.

    Attributes:
        micro_batch: samples that one replica computes at once; num_microbatches: how many of them are in a step.
        sequence_parallel: between the cuts of tensor parallelism, activations are divided along the sequence.
        zero: 0 replicates optimizer states over `dp`, 1 shards them.
        stages_per_rank: stages of the pipeline on each of its ranks (interleaved schedule).
        loss_parallel: ranks that share matrices or sequences keep their parts of the logits; else each has the whole.
        divided_outputs: what `apply` computes losses of in parts stays in parts, also where the model gives it out.
        logit_bytes: of all copies of one logit around the loss: two bytes as the head makes it, and in float32 the
            logarithm of its softmax, the gradient of that, and the logit or its gradient.
        accumulate_unsharded: `fsdp` reduces gradients after the last micro-batch only, and keeps them whole till then;
            so it does in a pipeline, where parameters are gathered once per step, too.
        regathers: in a pipeline, too, parameters of `fsdp` are freed and gathered again for each micro-batch.
        unfused_attention: attention makes its scores, whole, and its softmax and dropout read and write them.
        balanced_stages: stages are divided where their products are as many, those of the loss counted; else each has
            as many layers.
        kept_layers: layers at the end of each stage that are not recomputed, whatever `recompute` says.
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    micro_batch: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    loss_parallel: bool = True
    divided_outputs: bool = False
    logit_bytes: int = 16
    accumulate_unsharded: bool = False
    regathers: bool = False
    unfused_attention: bool = False
    balanced_stages: bool = False
    recompute: Recompute = "none"
    kept_layers: int = 0
    stack: Stack = "eager"
    precision: Precision = PRECISIONS["mixed"]
    sequence_parallel: bool = True
    zero: int = 0

    def __post_init__(self) -> None:
        for axis, degree in self.mesh.items():
            if degree < 1:
                raise SpecError(f"a mesh has at least one rank along {axis}, not {degree}.")
        if self.replicas * self.cp % self.ep:
            raise SpecError(
                f"experts are divided among replicas: the {self.replicas * self.cp} of dp, fsdp and cp are no multiple "
                f"of ep={self.ep}."
            )
        if self.micro_batch < 1 or self.num_microbatches < 1:
            raise SpecError("a step has at least one micro-batch of at least one sample.")

    @property
    def mesh(self) -> Mapping[str, int]:
        """All six degrees."""
        return {"dp": self.dp, "fsdp": self.fsdp, "tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}

    @property
    def devices(self) -> int:
        """How many ranks the mesh has."""
        return self.dp * self.fsdp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """How many different batches are computed at the same time."""
        return self.dp * self.fsdp

    @property
    def global_batch(self) -> int:
        """Samples of one step of all replicas."""
        return self.micro_batch * self.num_microbatches * self.replicas

    @property
    def shards(self) -> int:
        """Over how many ranks parameters are sharded: those of `fsdp`, and those that share a sequence.

        Stacks that shard the optimizer alone do that over replicas.
        """
        return self.fsdp * self.cp if self.fsdp > 1 or not self.zero else 1

    @property
    def expert_shards(self) -> int:
        """Over how many ranks `fsdp` divides the experts that one rank computes with."""
        return max(1, self.shards // self.ep)

    @property
    def hand_fused(self) -> bool:
        """Whether layers are made of hand-fused kernels."""
        return self.stack in ("fused", "deepspeed")

    @property
    def op_by_op(self) -> bool:
        """Whether each op is a kernel that the host launches."""
        return self.stack in ("eager", "early")

    @property
    def cuts_losses(self) -> bool:
        """Whether `apply` divides losses over the ranks that share matrices: in stages, heads stay whole."""
        return self.tp > 1 and self.pp == 1 and self.op_by_op

    @property
    def stays_whole(self) -> bool:
        """Whether parameters of `fsdp` are gathered once per step: all micro-batches of a pipeline go through them."""
        return self.pp > 1 and not self.regathers

    @property
    def gathers_once(self) -> bool:
        """Whether whole gradients are kept until the last micro-batch."""
        return self.shards > 1 and (self.pp > 1 or self.accumulate_unsharded)

    def stride(self, axis: str) -> int:
        """How many ranks lie between two neighbours along a mesh dimension."""
        inner = MESH_AXES[MESH_AXES.index(axis) + 1 :]
        stride = 1
        for other in inner:
            stride *= self.mesh[other]
        return stride
