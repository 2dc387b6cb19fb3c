"""Study: a plan for processes with everything that is shown of it, all of it from one search and one Estimate.

plan, run of two samples, cluster ─▶ search again ─▶ ranking, what would change ─▶ page, explain, comparison
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.topology import Topology
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import FULL, Estimate
from autoshard.engine.memory import RecipeEstimate
from autoshard.engine.played import Played, play_answer, play_step
from autoshard.errors import AutoshardError
from autoshard.plan import Plan
from autoshard.search.best import Searched, SearchTask, alone, price_recipe, search
from autoshard.search.estimates import estimate_recipe, setting_of
from autoshard.search.limits import Asked, limits_of
from autoshard.search.processes import asked_of, make_task, recipe_of
from autoshard.search.reasons import explain, remedy, shown_mesh, take_less
from autoshard.search.sizes import Cell
from autoshard.search.traced import Traced, trace, why_undivided

MOST_PRICED = 10_000
"""Recipes that the other sizes of a page may take, some seconds: each size takes about as many as the plan's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is shown of a plan for processes.

    Attributes:
        reasons: what, why, the runner-up and by how much, in sentences; the last is how to start it.
        to_fit: what would make it fit, or less full, as tried; "" where it fits.
        cells: other sizes, priced by the same search.
    """

    plan: Plan
    estimate: Estimate
    traced: Traced
    task: SearchTask
    own: RecipeEstimate
    searched: Searched
    reasons: tuple[str, ...]
    to_fit: str = ""
    cells: tuple[Cell, ...] = ()

    @property
    def rows(self) -> list[RecipeEstimate]:
        """The best recipe of every mesh that fits, best first; the plan's own stands for its mesh."""
        others = [one for one in self.searched.ranking if one.recipe.mesh != self.own.recipe.mesh]
        return sorted([self.own, *others], key=lambda one: one.value(self.task.goal))

    @property
    def changes(self) -> tuple[str, ...]:
        """What other batches, lengths and numbers of devices would change, in sentences."""
        own = next((cell for cell in self.cells if cell.own), None)
        sizes = ("batch", "tokens", "devices")
        return tuple(
            _changed(own, cell) for cell in self.cells
            if own is not None and sum(getattr(own, name) != getattr(cell, name) for name in sizes) == 1
        )  # fmt: skip

    def played(self) -> Played:
        """The step or answer as it is played, on the first device of each pipeline rank."""
        setting, _ = setting_of(self.task, self.own.recipe)
        names = [device.name for device in self.plan.devices[:: len(self.plan.devices) // self.own.recipe.pp]]
        if self.task.training:
            return play_step(setting, names, self.own.seconds)
        return play_answer(setting, names, self.own, self.task.new_tokens)


def study(plan: Plan, traced: Traced, cluster: Cluster, *, sizes: bool = True) -> Study:
    """Search again around a plan. `sizes`: other batches, lengths and numbers of devices, too, which takes seconds."""
    assert plan.mesh is not None
    # a plan that divides the batch was made where it was found divisible, or assumed so
    why = "" if plan.mesh.data > 1 or plan.num_microbatches > 1 else why_undivided(traced)
    task = make_task(traced, cluster, replace(asked_of(plan), why_undivided=why))
    recipe = recipe_of(plan)
    whole = replace(task, card=replace(task.card, memory_bytes=min(device.memory_bytes for device in plan.devices)))
    estimate = estimate_recipe(plan, recipe, whole, cluster)
    found, own = search(task), price_recipe(whole, recipe)
    one = None if found.best is None or recipe.devices > 1 else alone(task, found)
    reasons = explain(task, replace(found, best=own), instead_of=found.best if one is not None else None)
    done = Study(
        plan=plan, estimate=estimate, traced=traced, task=task, own=own, searched=found, reasons=reasons,
        to_fit=_to_fit(task, own, estimate),
    )  # fmt: skip
    return replace(done, cells=tuple(_cells(done))) if sizes else done


def _to_fit(task: SearchTask, own: RecipeEstimate, estimate: Estimate) -> str:
    """What would make a plan fit that does not, or leave what is kept free."""
    fullest = estimate.fullest
    if fullest.peak_bytes <= FULL * fullest.memory_bytes:
        return ""
    lacking = fullest.peak_bytes - fullest.memory_bytes
    said = (
        f"{fullest.name} lacks {format_bytes(lacking)}" if lacking > 0
        else f"{fullest.name} is {fullest.peak_bytes / fullest.memory_bytes:.1%} full: fragments may not fit any more"
    )  # fmt: skip
    recipe = own.recipe
    mesh = {name: degree for name, degree in recipe.mesh.items() if degree > 1}
    recompute = recipe.recompute if task.training else None
    same = Asked(objective=task.goal, mesh=mesh, micro_batch=recipe.micro_batch, recompute=recompute)
    return f"{said}. {remedy(replace(task, given=same)) or take_less()}"


def _cells(done: Study) -> Iterator[Cell]:
    """The plan's size first, then those one step away, then the rest, as long as they take few enough recipes."""
    left: float = MOST_PRICED // max(1, done.searched.priced)
    works: dict[int, Traced | None] = {done.task.work.tokens: done.traced}
    samples, tokens, devices = done.task.limits.samples, done.task.work.tokens, done.task.devices
    sizes = [(b, t, d) for t in (1, 0.5, 2) for b in (1, 0.5, 2) for d in (1, 0.5, 2)]
    for size in sorted(sizes, key=lambda size: (sum(part != 1 for part in size), sizes.index(size))):
        batch, length, count = (part * own for part, own in zip(size, (samples, tokens, devices), strict=True))
        topology = _scaled(done.task.topology, size[2])
        if topology is None or batch != int(batch) or length != int(length) or (tokens == 1 and length != 1):
            continue
        cost = 0 if size == (1, 1, 1) else max(1, size[2])
        if left < cost:
            continue
        left -= cost
        if length not in works:
            works[int(length)] = _longer(done.traced, int(length))
        traced = works[int(length)]
        if traced is not None:
            yield _cell(done, traced, int(batch), topology, int(count))


def _longer(traced: Traced, tokens: int) -> Traced | None:
    """The same model with sequences of another length; None where inputs are given, or it takes no such sequences."""
    if not traced.derived:
        return None
    try:
        return trace(traced.model, None, replace(traced.workload, sequence_length=tokens))
    except AutoshardError:
        return None


def _scaled(topology: Topology, factor: float) -> Topology | None:
    """So many times as many devices: whole hosts, or a part of the only one."""
    if factor < 1 and topology.hosts == 1:
        per_host = int(topology.devices_per_host * factor)
        return replace(topology, devices_per_host=per_host) if per_host else None
    return replace(topology, hosts=int(topology.hosts * factor)) if (topology.hosts * factor) % 1 == 0 else None


def _cell(done: Study, traced: Traced, batch: int, topology: Topology, devices: int) -> Cell:
    task, tokens = done.task, traced.work.tokens
    own = topology == task.topology and batch == task.limits.samples and tokens == task.work.tokens
    widest = topology.devices if task.new_tokens else topology.devices_per_host
    limits = limits_of(
        traced.work, batch, widest=widest, why_not=task.limits.why_not, why_not_staged=task.limits.why_not_staged,
        divides_tokens=task.limits.divides_tokens,
    )  # fmt: skip
    task = replace(task, work=traced.work, prompt_tokens=tokens, topology=topology, limits=limits)
    found = done.searched if own else search(task)
    best, memory = found.best, min(device.memory_bytes for device in done.plan.devices)
    if best is not None and not task.training and topology.hosts == 1:
        best = alone(task, found) or best
    cell = Cell(batch=batch, tokens=tokens, devices=devices, own=own)
    if best is None:
        return cell
    return replace(
        cell, mesh=shown_mesh(best.recipe), seconds=best.seconds, tokens_per_second=best.tokens_per_second,
        full=best.memory.used / max(memory, 1),
    )  # fmt: skip


def _changed(own: Cell, cell: Cell) -> str:
    what = (
        f"a batch of {cell.batch}" if cell.batch != own.batch
        else f"{cell.tokens} tokens" if cell.tokens != own.tokens
        else f"{cell.devices} devices"
    )  # fmt: skip
    if not cell.mesh:
        return f"with {what} nothing fits"
    shown = cell.mesh
    if cell.mesh == own.mesh:
        shown = "the same mesh" if "=" in cell.mesh else "still one device"
    return f"with {what}: {shown}, {format_seconds(cell.seconds)}, {cell.tokens_per_second:,.0f} tokens/s"
