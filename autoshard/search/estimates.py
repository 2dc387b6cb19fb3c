"""Estimates of plans that the engine prices: every figure that is shown of such a plan comes from here."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from autoshard.cluster.cluster import Cluster
from autoshard.engine.estimate import DeviceEstimate, Estimate, Moment, RankEstimate
from autoshard.engine.generation import GenerationEstimate, answer_setting
from autoshard.engine.price import Setting, StepEstimate, make_setting
from autoshard.engine.ranks import RankCost, answer_ranks, step_ranks
from autoshard.engine.recipe import Recipe
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.search.best import RecipeEstimate, SearchTask, part_of, price_recipe
from autoshard.search.processes import asked_of, make_task, recipe_of
from autoshard.search.traced import Traced

KINDS = {
    "weights": "parameter_bytes", "gradients": "gradient_bytes", "optimizer": "optimizer_bytes",
    "activations": "activation_bytes", "cache": "cache_bytes", "unsharded parameters": "transfer_bytes",
    "transient": "activation_bytes",
}  # fmt: skip
"""Kinds of the engine -> fields of `DeviceEstimate`; what has none is overhead."""


def estimate_processes(plan: Plan, traced: Traced, cluster: Cluster) -> Estimate:
    """Price a plan with a mesh on the first devices of a cluster. Raises `PlanError` where it can't be carried out."""
    task = make_task(traced, cluster, replace(asked_of(plan), reserve=0.0))
    return estimate_recipe(plan, recipe_of(plan), task, cluster)


def estimate_recipe(plan: Plan, recipe: Recipe, task: SearchTask, cluster: Cluster) -> Estimate:
    """Price a plan's recipe: every class of equal ranks, and the whole. Raises `PlanError` without enough devices."""
    if part_of(task.topology, recipe.devices) is None:
        raise PlanError(f"the plan is for {recipe.devices} devices, which {task.devices} of these hosts do not have.")
    estimate = price_recipe(task, recipe).estimate
    setting, sequences = setting_of(task, recipe)
    if isinstance(estimate, StepEstimate):
        ranks = step_ranks(setting, estimate)
    else:
        ranks = answer_ranks(setting, sequences, estimate, task.new_tokens)
    return _estimate_of(plan, estimate, ranks, cluster)


def setting_of(task: SearchTask, recipe: Recipe) -> tuple[Setting, int]:
    """What a recipe of a task is priced with, and the sequences of a replica."""
    topology = part_of(task.topology, recipe.devices)
    assert topology is not None
    if task.training:
        return make_setting(task.work, recipe, task.card, topology), recipe.micro_batch * recipe.num_microbatches
    sizes = task.limits.samples, task.prompt_tokens, task.new_tokens
    return answer_setting(task.work, recipe, task.card, topology, *sizes)


def _estimate_of(plan: Plan, estimate: RecipeEstimate, ranks: Sequence[RankCost], cluster: Cluster) -> Estimate:
    """Write the figures of a plan as an estimate; devices of one pipeline rank follow each other."""
    each = len(plan.devices) // len(ranks)
    rank_of = {device.name: ranks[at // each] for at, device in enumerate(plan.devices)}
    rows = []
    for device in cluster.devices:
        if device.name in rank_of:
            rows.append(_device(device.name, device.memory_bytes, rank_of[device.name]))
        else:
            rows.append(DeviceEstimate(name=device.name, memory_bytes=device.memory_bytes))
    names = [device.name for device in plan.devices[::each]]
    classes = _classes(names, each, ranks)
    training = isinstance(estimate, StepEstimate)
    tokens = (plan.workload.batch_size or 1) * (plan.workload.sequence_length or 1)
    return Estimate(
        devices=tuple(rows),
        transfers=(),
        objective=plan.objective,
        latency_seconds=estimate.seconds,
        bottleneck_seconds=estimate.seconds,
        lower_bound_seconds=0.0,
        gap=0.0,
        tokens_per_second=rate(tokens, plan.workload.new_tokens, estimate),
        prompt_seconds=0.0 if isinstance(estimate, StepEstimate) else estimate.prompt_seconds,
        token_seconds=0.0 if isinstance(estimate, StepEstimate) else estimate.token_seconds,
        exposed_seconds=estimate.exposed_seconds if isinstance(estimate, StepEstimate) else 0.0,
        bubble=estimate.bubble if isinstance(estimate, StepEstimate) else 0.0,
        curve=max(classes, key=lambda one: one.peak_bytes).curve,
        ranks=classes,
        token_parts={} if training or not plan.workload.new_tokens else dict(cast(GenerationEstimate, estimate).parts),
    )


def _classes(names: Sequence[str], each: int, ranks: Sequence[RankCost]) -> tuple[RankEstimate, ...]:
    """Pipeline ranks as they are shown; neighbours that differ in their stages alone are one class."""
    found: list[RankEstimate] = []
    for name, rank in zip(names, ranks, strict=True):
        made = RankEstimate(
            first=name, devices=each, stages=rank.stages, compute_seconds=rank.compute_seconds,
            exposed_seconds=rank.exposed_seconds, idle_seconds=rank.idle_seconds, peak_bytes=int(rank.used_bytes),
            curve=tuple(Moment(name=at, bytes={kind: int(n) for kind, n in held.items()}) for at, held in rank.curve),
        )  # fmt: skip
        last = found[-1] if found else made
        if found and replace(made, first=last.first, devices=last.devices, stages=last.stages) == last:
            found[-1] = replace(last, devices=last.devices + each, stages=tuple(sorted((*last.stages, *made.stages))))
        else:
            found.append(made)
    return tuple(found)


def rate(tokens: int, new_tokens: int, estimate: RecipeEstimate) -> float:
    """Tokens per second of the whole machine: those trained on, those generated, else those of all prompts."""
    if isinstance(estimate, StepEstimate) or new_tokens:
        return estimate.tokens_per_second
    return tokens / estimate.seconds


def _device(name: str, memory_bytes: int, rank: RankCost) -> DeviceEstimate:
    fields = dict.fromkeys((*KINDS.values(),), 0)
    fullest = max((held for _, held in rank.curve), key=lambda held: sum(held.values()))
    for kind, nbytes in fullest.items():
        if kind in KINDS:
            fields[KINDS[kind]] += int(nbytes)
    peak = int(rank.used_bytes)
    return DeviceEstimate(
        name=name,
        memory_bytes=memory_bytes,
        overhead_bytes=peak - sum(fields.values()),
        peak_bytes=peak,
        compute_seconds=rank.compute_seconds,
        transfer_seconds=rank.exposed_seconds,
        **fields,
    )
