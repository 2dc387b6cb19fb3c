"""The devices of a plan, the mesh that they form, and the stages of a pipeline."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDevice:
    """A device a plan was made for: enough to rebuild its cluster entry from the hardware table.

    `memory_bytes` is 0 where nobody said how much there is (a device map that was imported). `network`: how its host
    differs from a usual one, in the words of a device spec ("4x100Gb/s, no nvlink").
    """

    name: str
    memory_bytes: int
    network: str = ""
    kind: str = "generic"
    host: str = "host0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How many devices there are along each dimension of a mesh.

    Attributes:
        dp: replicas that keep all parameters of their stage and rank.
        fsdp: replicas of which each keeps 1 / fsdp of parameters, gradients and optimizer state, and gathers the rest.
        pp: pipeline ranks. tp: tensor-parallel ranks of a stage.
        cp: parts of every sequence; its ranks keep 1 / cp of parameters, too.
        ep: groups of experts, among ranks that are replicas otherwise.
        shares: samples of the batch per replica, in proportion; empty: all alike.
        stages_outermost: devices of one stage follow each other, else those of one replica.
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    shares: tuple[int, ...] = ()
    stages_outermost: bool = False

    @property
    def size(self) -> int:
        """How many devices it has."""
        return self.data * self.pp * self.cp * self.tp

    @property
    def data(self) -> int:
        """How many replicas there are, sharded or not."""
        return self.dp * self.fsdp

    @property
    def cut_ranks(self) -> int:
        """How many ranks share what is cut: matrices, experts or sequences."""
        return self.tp * self.cp * self.ep

    @property
    def sharded(self) -> bool:
        """Whether replicas keep parts of the parameters."""
        return self.fsdp * self.cp > 1

    @property
    def degrees(self) -> dict[str, int]:
        """All six degrees by name."""
        return {"dp": self.dp, "fsdp": self.fsdp, "tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}

    def rank(self, *, data: int = 0, pipeline: int = 0, tensor: int = 0) -> int:
        """The number of a device in `Plan.devices`, and of its process, where sequences are not divided."""
        outer = pipeline * self.data + data if self.stages_outermost else data * self.pp + pipeline
        return outer * self.tp + tensor

    def place(self, rank: int) -> tuple[int, int, int]:
        """The (replica, pipeline rank, tensor-parallel rank) of a device, where sequences are not divided."""
        outer, tensor = divmod(rank, self.tp)
        pipeline, data = divmod(outer, self.data) if self.stages_outermost else divmod(outer, self.pp)[::-1]
        return data, pipeline, tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a pipeline: modules (or tensors) that run one after another. Stage i is on pipeline position i mod p.

    `recompute`: activations are not kept for backward but computed again from what came into the stage.
    """

    paths: tuple[str, ...]
    recompute: bool = False
