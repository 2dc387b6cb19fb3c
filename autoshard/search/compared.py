"""Compared: what every kind of recipe would give for a model on the same devices, out of the same ranking."""

from dataclasses import replace

from autoshard.cluster.cluster import Cluster
from autoshard.common.sizes import format_bytes
from autoshard.engine.memory import RecipeEstimate
from autoshard.engine.recipe import Recipe
from autoshard.search.best import Searched, SearchTask, on_one_device, search
from autoshard.search.choose import Chosen
from autoshard.search.estimates import estimate_recipe
from autoshard.search.processes import asked_of, write_plan
from autoshard.search.reasons import shown_mesh
from autoshard.strategies.compare import Alternative, Comparison

AXES: dict[str, tuple[str, ...]] = {
    "one device": (),
    "ddp": ("dp",),
    "fsdp": ("dp", "fsdp"),
    "tensor-parallel": ("tp",),
    "pipeline": ("pp",),
    "expert-parallel": ("dp", "ep"),
}
"""Kinds of recipes by the mesh dimensions that they may have; what has others is "hybrid"."""


def kind_of(recipe: Recipe) -> str:
    """The kind of a recipe: the first whose dimensions are those that are larger than 1."""
    used = {name for name, degree in recipe.mesh.items() if degree > 1}
    return next((kind for kind, axes in AXES.items() if used <= set(axes)), "hybrid")


def compare_processes(chosen: Chosen, cluster: Cluster) -> Comparison:
    """The best recipe of every kind, each with its plan and estimate, beside the one that was chosen."""
    own, task, rows = chosen.searched.best, chosen.task, list[Alternative]()
    asked = asked_of(chosen.plan)
    assert own is not None
    for kind in (*AXES, "hybrid"):
        found = _searched(task, kind) if kind in AXES else chosen.searched
        able = [own, found.best, *found.ranking]
        one = next((one for one in able if one is not None and kind_of(one.recipe) == kind), None)
        if one is None:
            rows.append(Alternative(name=kind, refused=_why_not(task, kind, found.closest), usable=False))
            continue
        plan = write_plan(chosen.traced, cluster, asked, one.recipe)
        plan = replace(plan, reasons=chosen.plan.reasons if one is own else (shown_mesh(one.recipe),))
        estimate = estimate_recipe(plan, one.recipe, task, cluster)
        alone = one.recipe.devices == 1
        name = kind if kind == "one device" else f"{kind}: {shown_mesh(one.recipe)}"
        rows.append(Alternative(name=name, plan=plan, estimate=estimate, value=one.value(task.goal), usable=alone))
    taken = next(row for row in rows if row.plan is not None and row.plan.reasons == chosen.plan.reasons)
    kept = [row for row in rows if row.plan is not None or not row.name.startswith("expert") or task.limits.experts]
    return Comparison(
        objective=task.goal, training=task.training, alternatives=tuple(kept), chosen=taken, bound=0.0,
    )  # fmt: skip


def _searched(task: SearchTask, kind: str) -> Searched:
    """What a search finds that is asked for recipes of one kind alone, as by the strategy of that name."""
    if kind == "one device":
        task = on_one_device(task)
    return search(replace(task, given=replace(task.given, axes=AXES[kind], strategy=kind)))


def _why_not(task: SearchTask, kind: str, closest: RecipeEstimate | None) -> str:
    """Why no recipe of a kind is there: by how much the closest does not fit, or that there is none."""
    if task.devices == 1:
        return "it takes several devices, and there is one"
    if kind == "hybrid":
        return "no recipe with several dimensions fits, or has as many devices"
    if kind == "fsdp" and not task.training:
        return "parameters are gathered for training steps only; answers keep them whole"
    if closest is None:
        return "no such mesh goes with the model, the batch and these devices"
    lacking = closest.memory.used - task.card.memory_bytes
    return f"{shown_mesh(closest.recipe)} lacks {format_bytes(lacking)} on its fullest rank"
