"""Estimates of plans that the engine prices: every figure that is shown of such a plan comes from here."""

from collections.abc import Mapping

from autoshard.cluster.cluster import Cluster
from autoshard.engine.generation import GenerationEstimate
from autoshard.engine.memory import outside_bytes
from autoshard.engine.price import StepEstimate, price_step
from autoshard.engine.recipe import Recipe
from autoshard.errors import PlanError
from autoshard.estimate import DeviceEstimate, Estimate, Moment
from autoshard.plan import Plan
from autoshard.search.best import Figures, part_of, price_answer
from autoshard.search.limits import Given
from autoshard.search.processes import Asked, make_task, recipe_of
from autoshard.search.traced import Traced

KINDS = {
    "weights": "parameter_bytes", "gradients": "gradient_bytes", "optimizer": "optimizer_bytes",
    "activations": "activation_bytes", "cache": "cache_bytes", "unsharded parameters": "transfer_bytes",
    "transient": "activation_bytes",
}  # fmt: skip
"""Kinds of the engine -> fields of `DeviceEstimate`; what has none is overhead."""


def estimate_processes(plan: Plan, traced: Traced, cluster: Cluster) -> Estimate:
    """Price a plan with a mesh on the first devices of a cluster. Raises `PlanError` where it can't be carried out."""
    assert plan.mesh is not None
    recipe = recipe_of(plan)
    asked = Asked(precision=plan.precision if plan.workload.training else "auto", compiled=plan.compiled, reserve=0.0,
                  dtype="auto" if plan.workload.training else plan.precision,
                  given=Given(), goal=plan.objective)  # type: ignore[arg-type]  # fmt: skip
    task = make_task(traced, cluster, asked)
    topology = part_of(task.topology, recipe.devices)
    if topology is None:
        raise PlanError(f"the plan is for {recipe.devices} devices, which {task.devices} of these hosts do not have.")
    figures: Figures
    if plan.workload.training:
        figures = price_step(task.work, recipe, task.card, topology)
    else:
        figures = price_answer(task, recipe, topology)
    return estimate_of(plan, recipe, figures, cluster)


def estimate_of(plan: Plan, recipe: Recipe, figures: Figures, cluster: Cluster) -> Estimate:
    """Write the figures of a recipe as an estimate: the fullest rank stands for all ranks."""
    used = {device.name for device in plan.devices}
    rows = []
    for device in cluster.devices:
        if device.name in used:
            rows.append(_device(device.name, device.memory_bytes, recipe, figures))
        else:
            rows.append(DeviceEstimate.unused(device.name, device.memory_bytes))
    training = isinstance(figures, StepEstimate)
    return Estimate(
        devices=tuple(rows),
        transfers=(),
        objective=plan.objective,
        latency_seconds=figures.seconds,
        bottleneck_seconds=figures.seconds,
        lower_bound_seconds=0.0,
        gap=0.0,
        tokens_per_second=_rate(plan, figures),
        prompt_seconds=0.0 if isinstance(figures, StepEstimate) else figures.prompt_seconds,
        token_seconds=0.0 if isinstance(figures, StepEstimate) else figures.token_seconds,
        exposed_seconds=figures.exposed_seconds if isinstance(figures, StepEstimate) else 0.0,
        bubble=figures.bubble if isinstance(figures, StepEstimate) else 0.0,
        curve=_curve(figures) if training else (),
    )


def _rate(plan: Plan, figures: Figures) -> float:
    """Tokens per second of the whole machine: those trained on, those generated, else those of the prompt."""
    if isinstance(figures, StepEstimate) or plan.workload.new_tokens:
        return figures.tokens_per_second
    tokens = (plan.workload.batch_size or 1) * (plan.workload.sequence_length or 1)
    return tokens / figures.seconds


def _kinds(figures: Figures) -> Mapping[str, float]:
    return figures.memory if isinstance(figures, GenerationEstimate) else figures.memory.kinds


def _curve(figures: Figures) -> tuple[Moment, ...]:
    if isinstance(figures, GenerationEstimate):
        return ()
    return tuple(
        Moment(name=moment.name, bytes={name: int(n) for name, n in moment.kinds.items()})
        for moment in figures.memory.curve
    )


def _device(name: str, memory_bytes: int, recipe: Recipe, figures: Figures) -> DeviceEstimate:
    fields = dict.fromkeys((*KINDS.values(),), 0)
    for kind, nbytes in _kinds(figures).items():
        if kind in KINDS:
            fields[KINDS[kind]] += int(nbytes)
    peak = int(figures.reserved_bytes + sum(outside_bytes(recipe).values()))
    return DeviceEstimate(
        name=name,
        memory_bytes=memory_bytes,
        buffer_bytes=0,
        overhead_bytes=peak - sum(fields.values()),
        peak_bytes=peak,
        compute_seconds=figures.compute_seconds if isinstance(figures, StepEstimate) else figures.seconds,
        transfer_seconds=figures.exposed_seconds if isinstance(figures, StepEstimate) else 0.0,
        **fields,
    )
