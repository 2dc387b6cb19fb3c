"""What is asked for and what was decided: plans, how they are read and written, and the words they use."""

from autoshard.plan.mesh import Mesh, PlanDevice, Stage
from autoshard.plan.placement import check_placements
from autoshard.plan.plan import PLAN_VARIABLE, Plan
from autoshard.plan.reading import PLAN_FORMAT, PLAN_VERSION

__all__ = [
    "PLAN_FORMAT",
    "PLAN_VARIABLE",
    "PLAN_VERSION",
    "Mesh",
    "Plan",
    "PlanDevice",
    "Stage",
    "check_placements",
]
