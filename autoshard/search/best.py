"""Best: price candidates, drop what can't fit before it is priced, and rank what is left."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from autoshard.cluster.topology import Topology
from autoshard.engine.blocks import ModelWork
from autoshard.engine.generation import price_generation
from autoshard.engine.memory import RecipeEstimate, outside_bytes
from autoshard.engine.precision import Precision
from autoshard.engine.price import Step, prepare_step, price_prepared, price_step
from autoshard.engine.recipe import Recipe, Stack
from autoshard.engine.timing import Card
from autoshard.errors import SpecError
from autoshard.plan.choices import Objective
from autoshard.search.candidates import answer_recipes, device_counts, meshes, step_recipes
from autoshard.search.limits import Asked, Limits

Made = TypeVar("Made")
WORTH_STARTING = 2.0
"""A process per device must be so much faster than one process on one device: it has to be started and kept alive."""
AS_GOOD = 1.02
"""Recipes that take so little longer than the best one count as equal, and the simplest of them is taken: the figures
are off by more on published runs (4 % in the median)."""
WORTH_KEEPING = 1.35
"""How much longer a recipe may take than the best one to be tried with fewer layers recomputed: all of them recomputed
are a third of a step that computes nothing twice."""
FILLED = 0.95
"""How much of the memory that a plan may use is filled with activations that could be computed again, which saves a few
percent of a step at most: predicted peaks are off by 3 to 4 % in the median on published runs."""
NEARLY_FITS = 1.25
"""Stages of equally many layers that need so much more than there is may fit with fewer where the head is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask:
    """What is searched: the work of a model on a cluster of equal devices.

    `prompt_tokens`, `new_tokens`: of an answer; a training step has none. `leanest`: look at the recipe of each mesh
    alone that needs least memory, though it can not fit.
    """

    work: ModelWork
    card: Card
    topology: Topology
    limits: Limits
    given: Asked
    precision: Precision
    stack: Stack
    training: bool
    prompt_tokens: int = 0
    new_tokens: int = 0
    leanest: bool = False

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self.topology.devices

    @property
    def goal(self) -> Objective:
        """What is made small."""
        return self.given.objective


Tried = RecipeEstimate | Step
"""A recipe with its figures, or of what does not fit, with its memory alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a search found.

    Attributes:
        best: that is taken, None where nothing fits; ranking: the best recipe of every mesh that fits, best first.
        closest: of what does not fit, the recipe that lacks least; priced: how many were priced.
    """

    best: RecipeEstimate | None
    ranking: tuple[RecipeEstimate, ...]
    closest: RecipeEstimate | None
    priced: int


def search(task: SearchTask) -> Searched:
    """Price every candidate and take the best; of recipes that are nearly as good, the one with the simplest mesh."""
    rows: dict[tuple[int, ...], RecipeEstimate] = {}
    nearest: Tried | None = None
    count = 0
    for one in _tried(task):
        count += 1
        if isinstance(one, RecipeEstimate) and one.fits:
            key = (*one.recipe.mesh.values(), one.recipe.stages_per_rank)
            if key not in rows or one.value(task.goal) < rows[key].value(task.goal):
                rows[key] = one
        elif nearest is None or one.memory.reserved < nearest.memory.reserved:
            nearest = one
    if not rows and nearest is None and task.training:
        nearest = min(_tried(replace(task, leanest=True)), key=lambda one: one.memory.reserved, default=None)
    closest = price_prepared(nearest) if isinstance(nearest, Step) else nearest
    if not rows:
        return Searched(best=None, ranking=(), closest=closest, priced=count)
    found = list(rows.values())
    if task.training and task.goal != "memory":
        longest = WORTH_KEEPING * min(one.seconds for one in found)
        found = [_changed(task, one) if one.seconds <= longest else one for one in found]
    ranking = _best_of_meshes(found, task.goal)
    able = ranking
    if task.given.strategy == "fsdp":
        able = [one for one in ranking if one.recipe.fsdp > 1] or ranking  # whole replicas are ddp
    good = [one for one in able if one.value(task.goal) <= able[0].value(task.goal) * AS_GOOD]
    return Searched(best=min(good, key=_simplicity), ranking=tuple(ranking), closest=closest, priced=count)


def _best_of_meshes(found: Iterable[RecipeEstimate], goal: Objective) -> list[RecipeEstimate]:
    """The best recipe of every mesh, best first."""
    best: dict[tuple[int, ...], RecipeEstimate] = {}
    for one in sorted(found, key=lambda one: one.value(goal)):
        best.setdefault(tuple(one.recipe.mesh.values()), one)
    return list(best.values())


def _changed(task: SearchTask, one: RecipeEstimate) -> RecipeEstimate:
    """The same recipe with other stages, or with fewer layers recomputed, where that is faster."""
    return _balancing(task, one) if one.recipe.pp > 1 else _keeping(task, one)


def _keeping(task: SearchTask, one: RecipeEstimate) -> RecipeEstimate:
    """The same recipe with as many layers that keep their activations as have room, by bisection."""
    if one.recipe.recompute == "none" or task.given.recompute:
        return one
    best, fits, room = one, 0, FILLED * task.card.memory_bytes
    too_many = sum(block.count for block in task.work.blocks if block.layer)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        tried = price_recipe(task, replace(one.recipe, kept_layers=middle))
        if tried.memory.used <= room:
            best, fits = tried, middle
        else:
            too_many = middle
    return best


def _balancing(task: SearchTask, one: RecipeEstimate) -> RecipeEstimate:
    """The same recipe with fewer layers in the stage that has the head, as its products count, where that is faster."""
    other = price_recipe(task, replace(one.recipe, balanced_stages=True))
    return other if other.fits and other.seconds < one.seconds else one


def on_one_device(task: SearchTask) -> SearchTask:
    """The same task for the first device alone."""
    return replace(task, topology=replace(task.topology, hosts=1, devices_per_host=1))


def alone(task: SearchTask, found: Searched) -> RecipeEstimate | None:
    """The answer on one device, where more of them are not faster by enough; None where they are."""
    best = found.best
    assert best is not None
    one = search(on_one_device(task)).best
    worth = AS_GOOD if task.goal == "memory" else WORTH_STARTING
    if one is None or one.value(task.goal) > worth * best.value(task.goal):
        return None
    return one


SIMPLER = (
    "takes more devices", "computes layers twice", "divides the model in more ways", "has more stages",
    "divides sequences more", "divides experts more", "divides matrices more", "recomputes more", "shards parameters",
)  # fmt: skip
"""What a recipe does that is less simple, by the place in `_simplicity`."""


def less_simple(one: RecipeEstimate, than: RecipeEstimate) -> str:
    """The first thing that makes a recipe less simple than another; "" if it is as simple."""
    pairs = zip(SIMPLER, _simplicity(one), _simplicity(than), strict=False)  # seconds are the last
    word, own, other = next((row for row in pairs if row[1] != row[2]), ("", 0, 0))
    return word if own > other else ""


def _simplicity(one: RecipeEstimate) -> tuple[float, ...]:
    """Fewer devices first, then no layer computed twice, then fewer ways in which the model is divided, then seconds.

    Replicas divide the batch alone; whole ones come before sharded ones.
    """
    recipe = one.recipe
    divided = sum(degree > 1 for axis, degree in recipe.mesh.items() if axis not in ("dp", "fsdp"))
    twice = recipe.recompute == "full"
    degrees = recipe.pp, recipe.cp, recipe.ep, recipe.tp
    return recipe.devices, twice, divided, *degrees, recipe.recompute != "none", recipe.shards > 1, one.seconds


def _tried(task: SearchTask) -> Iterator[Tried]:
    counts: Iterable[int] = (task.devices,)
    if not task.given.mesh and not task.given.everyone:
        counts = device_counts(task.devices, task.topology.devices_per_host)
        if task.given.named and task.devices > 1:  # one device is none of the strategies
            counts = [count for count in counts if count > 1]
    for devices in counts:
        topology = part_of(task.topology, devices)
        if topology is not None:
            yield from _steps(task, devices, topology) if task.training else _answers(task, devices)


def part_of(topology: Topology, devices: int) -> Topology | None:
    """The first so many devices of a cluster, as whole hosts; None where they are not."""
    per_host = min(devices, topology.devices_per_host)
    if devices % per_host:
        return None
    return replace(topology, hosts=devices // per_host, devices_per_host=per_host)


def price_recipe(task: SearchTask, recipe: Recipe) -> RecipeEstimate:
    """Price one recipe on the first devices. Raises `SpecError` where it does not go with the devices or the model."""
    topology = part_of(task.topology, recipe.devices)
    if topology is None:
        raise SpecError(f"{recipe.devices} of {task.devices} devices are no whole hosts.")
    if task.training:
        return price_step(task.work, recipe, task.card, topology)
    return price_generation(
        task.work, recipe, task.card, topology, batch=task.limits.samples, prompt_tokens=task.prompt_tokens,
        new_tokens=task.new_tokens,
    )  # fmt: skip


def _steps(task: SearchTask, devices: int, topology: Topology) -> Iterator[Tried]:
    """The recipes of a step; of those that do not fit, and they are most, the seconds are not asked for."""

    def prepare(recipe: Recipe) -> Step:
        return prepare_step(task.work, recipe, task.card, topology)

    room = task.card.memory_bytes
    for mesh in meshes(devices, topology.devices_per_host, task.limits, task.given, training=True):
        for modes in step_recipes(mesh, task.limits, task.given, task.precision, task.stack):
            if task.leanest:
                modes = modes[-1:]
            elif not task.given.mesh and _least_bytes(task, modes[0]) > room:
                break  # neither smaller micro-batches nor recomputation change the states
            found = list(_least_recomputed(task, modes, prepare))
            if modes[0].pp > 1 and found and not found[-1].fits and found[-1].memory.reserved < NEARLY_FITS * room:
                balanced = [replace(one, balanced_stages=True) for one in modes]  # the head is what has no room
                found += _least_recomputed(task, balanced, prepare)
            yield from found
            if task.leanest:
                break


def _least_recomputed(task: SearchTask, modes: list[Recipe], prepare: Callable[[Recipe], Step]) -> Iterator[Tried]:
    """Of recipes that differ in recomputation, the least of it first, those that are looked at."""
    *others, leanest = modes
    for last in _those_that_run([leanest], prepare):
        for one in _those_that_run(others, prepare) if last.fits else ():  # what keeps more takes more
            yield price_prepared(one) if one.fits else one
            if one.fits and task.goal != "memory":
                break  # more recomputation only takes longer
        else:
            yield price_prepared(last) if last.fits else last


def _answers(task: SearchTask, devices: int) -> Iterator[Tried]:
    for mesh in meshes(devices, task.topology.devices_per_host, task.limits, task.given, training=False):
        recipes = answer_recipes(
            mesh, task.limits, task.given, task.precision, task.stack, generates=task.new_tokens > 0
        )
        yield from _those_that_run(recipes, partial(price_recipe, task))


def _those_that_run(recipes: Iterable[Recipe], make: Callable[[Recipe], Made]) -> Iterator[Made]:
    """What is made of recipes; a schedule that can't have these numbers, or stages without layers, are no recipes."""
    for recipe in recipes:
        with suppress(SpecError):
            yield make(recipe)


def _least_bytes(task: SearchTask, recipe: Recipe) -> float:
    """Bytes of parameters, gradients and optimizer state of a rank, if all were divided evenly."""
    precision = recipe.precision
    ranks = recipe.pp * recipe.tp * recipe.shards
    optimizer = precision.optimizer_bytes / (recipe.dp if recipe.zero else 1)
    states = task.work.stored_bytes(precision) + task.work.trained * (precision.gradients + optimizer)
    return 0.9 * states / ranks + sum(outside_bytes(recipe, task.card).values())
