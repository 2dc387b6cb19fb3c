"""Estimates of plans that the engine prices: every figure that is shown of such a plan comes from here."""

from dataclasses import replace

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.engine.estimate import DeviceEstimate, Estimate, RankEstimate
from autoshard.engine.generation import answer_setting
from autoshard.engine.price import Setting, make_setting
from autoshard.engine.ranks import answer_ranks, equal_ranks, step_ranks
from autoshard.engine.recipe import Recipe
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.search.best import SearchTask, part_of, price_recipe
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
    """Price a plan's recipe: every class of equal ranks, and the whole. Raises `PlanError` without enough devices.

    Devices of one pipeline rank follow each other.
    """
    if part_of(task.topology, recipe.devices) is None:
        raise PlanError(f"the plan is for {recipe.devices} devices, which {task.devices} of these hosts do not have.")
    found, names = price_recipe(task, recipe), [device.name for device in plan.devices]
    setting, sequences = setting_of(task, recipe)
    if task.training:
        ranks = step_ranks(setting, names, found.seconds)
    else:
        ranks = answer_ranks(setting, names, found.seconds, sequences, task.new_tokens)
    rank_of = {name: ranks[at * recipe.pp // len(names)] for at, name in enumerate(names)}
    classes = equal_ranks(ranks)
    idle = sum(rank.idle_seconds for rank in ranks) / max(len(ranks) * found.seconds, 1e-12)
    return Estimate(
        devices=tuple(_device(device, rank_of.get(device.name)) for device in cluster.devices),
        objective=plan.objective,
        latency_seconds=found.seconds,
        bottleneck_seconds=found.seconds,
        tokens_per_second=found.tokens_per_second,
        prompt_seconds=found.prompt_seconds if task.new_tokens else 0.0,
        token_seconds=found.token_seconds if task.new_tokens else 0.0,
        exposed_seconds=found.exposed_seconds,
        bubble=found.bubble if task.training else idle,
        curve=max(classes, key=lambda one: one.peak_bytes).curve,
        ranks=classes,
        token_parts=found.token_parts if task.new_tokens else {},
    )


def setting_of(task: SearchTask, recipe: Recipe) -> tuple[Setting, int]:
    """What a recipe of a task is priced with, and the sequences of a replica."""
    topology = part_of(task.topology, recipe.devices)
    assert topology is not None
    if task.training:
        return make_setting(task.work, recipe, task.card, topology), recipe.micro_batch * recipe.num_microbatches
    sizes = task.limits.samples, task.prompt_tokens, task.new_tokens
    return answer_setting(task.work, recipe, task.card, topology, *sizes)


def _device(device: Device, rank: RankEstimate | None) -> DeviceEstimate:
    """One device of a rank; of none, it is left alone."""
    if rank is None:
        return DeviceEstimate(name=device.name, memory_bytes=device.memory_bytes)
    fields = dict.fromkeys(KINDS.values(), 0)
    for kind, nbytes in max(rank.curve, key=lambda moment: moment.total).bytes.items():
        if kind in KINDS:
            fields[KINDS[kind]] += int(nbytes)
    return DeviceEstimate(
        name=device.name,
        memory_bytes=device.memory_bytes,
        overhead_bytes=rank.peak_bytes - sum(fields.values()),
        peak_bytes=rank.peak_bytes,
        compute_seconds=rank.compute_seconds,
        transfer_seconds=rank.exposed_seconds,
        **fields,
    )
