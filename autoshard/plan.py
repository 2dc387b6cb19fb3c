"""Plan: what goes where, as strings and ints. Made anywhere, saved as JSON, applied elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.workload import Workload

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDevice:
    """A device a plan was made for: enough to rebuild its cluster entry from the hardware table."""

    name: str
    memory_bytes: int
    kind: str = "generic"
    host: str = "host0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions only; consequences are an `Estimate`, always recomputed.

    Attributes:
        placements: module path or tensor name -> device name. Paths never overlap: every parameter and buffer has exactly
            one entry that is its name or a prefix of it. It is also the `device_map` that Transformers and Accelerate take.
        aligned: paths of modules inside which tensors of several devices meet (an op of theirs would mix devices), so the
            runtime watches their ops and moves what is elsewhere. Empty for most plans.
        written_back: paths of modules that write into an argument which was copied from another device; the runtime
            copies the result back.
        objective: "latency", "throughput" or "memory".
        reasons: why this plan, in sentences, for people.
        fingerprint: of the model's names, shapes and dtypes; apply refuses another model.
    """

    strategy: str
    objective: str
    workload: Workload
    devices: tuple[PlanDevice, ...]
    placements: Mapping[str, str]
    aligned: tuple[str, ...] = ()
    written_back: tuple[str, ...] = ()
    num_microbatches: int = 1
    schedule: str = "none"
    reasons: tuple[str, ...] = ()
    fingerprint: str = ""
    version: int = PLAN_VERSION
    pins: Mapping[str, str] = field(default_factory=dict)

    @property
    def device_map(self) -> dict[str, str]:
        """The dict that `from_pretrained(device_map=…)` and `accelerate.dispatch_model` take."""
        return dict(self.placements)
