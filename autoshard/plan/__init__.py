"""What is asked for and what was decided: plans, how they are read and written, and the words they use."""

from autoshard.plan.plan import (
    PLAN_FORMAT,
    PLAN_VARIABLE,
    PLAN_VERSION,
    Mesh,
    Plan,
    PlanDevice,
    Stage,
    check_placements,
    refuse_priced_alone,
)

__all__ = [
    "PLAN_FORMAT",
    "PLAN_VARIABLE",
    "PLAN_VERSION",
    "Mesh",
    "Plan",
    "PlanDevice",
    "Stage",
    "check_placements",
    "refuse_priced_alone",
]
