"""The other plans that were considered, as rows of a table."""

from collections.abc import Sequence
from typing import Any

from autoshard.plan import Plan
from autoshard.strategies.compare import Alternative


def alternative_rows(alternatives: Sequence[Alternative], plan: Plan) -> list[dict[str, Any]]:
    """Return rows for the page, the best first; the one that is the plan shown is marked."""
    rows: list[dict[str, Any]] = []
    shown = _decisions(plan)
    for one in sorted(alternatives, key=lambda one: one.value):
        figures = one.estimate
        same = one.plan is not None and _decisions(one.plan) == shown
        fits = "no plan" if figures is None else "yes" if figures.fits else "no"
        remark = one.refused or ("" if one.usable else "needs one process per device (torchrun)")
        rows.append(
            {
                "name": one.name,
                "chosen": same and not any(row["chosen"] for row in rows),
                "fits": fits,
                "latency_seconds": figures.latency_seconds if figures else 0.0,
                "bottleneck_seconds": figures.bottleneck_seconds if figures else 0.0,
                "peak_bytes": figures.fullest.peak_bytes if figures else 0,
                "moved_bytes": figures.moved_bytes if figures else 0,
                "remark": remark,
            }
        )
    return rows


def _decisions(plan: Plan) -> tuple[object, ...]:
    """What makes two plans the same."""
    order = plan.mesh, plan.stages, plan.num_microbatches, plan.schedule
    return dict(plan.placements), plan.cuts, dict(plan.streamed), *order
