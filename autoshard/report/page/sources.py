"""What the figures of a plan rest on: formulas, and what of published peaks is counted on."""

from autoshard.cluster.hardware import COMPUTE_EFFICIENCY, LINK_EFFICIENCY, MEMORY_EFFICIENCY
from autoshard.plan import Plan

FORMULAS = (
    ("Seconds of an op", "max(FLOPs ÷ rate of its dtype, bytes moved ÷ memory bandwidth) + launch time"),
    ("Seconds of a copy", "latency of the link + bytes ÷ its bandwidth"),
    ("Seconds of the optimizer", "bytes it reads and writes ÷ memory bandwidth"),
    ("Peak memory", "tensors alive at the fullest moment of the recorded run, in the allocator's blocks, + overhead"),
    ("Lower bound", "every op on the device that is fastest for it, copies free, memory without end"),
)


def formulas(plan: Plan) -> tuple[tuple[str, str], ...]:
    """What a plan of one process is priced by; for processes there is more to it."""
    return () if plan.launch else FORMULAS


def efficiency(plan: Plan) -> str:
    """What of published peaks is counted on."""
    if plan.launch:
        return "What kernels and collectives reach of these peaks is fitted on published runs, per generation of cards."
    return (
        f"Published peaks count {COMPUTE_EFFICIENCY:.0%} for compute, {MEMORY_EFFICIENCY:.0%} for memory and "
        f"{LINK_EFFICIENCY:.0%} for links, unless the figures were measured."
    )
