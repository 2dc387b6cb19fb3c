"""Why something is where it is under a plan: what bound it, and what the other choices would have cost.

Nothing is remembered from planning. Every alternative is a plan of its own (this module elsewhere, the model on one
device, another mesh) that is priced as plans always are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.text import Text

from autoshard.cluster.cluster import Cluster
from autoshard.common.module_paths import above, is_below, join
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import FULL, Estimate, Pipelining
from autoshard.engine.pricer import price
from autoshard.errors import SpecError
from autoshard.plan import Plan
from autoshard.plan.placement import covering_entry
from autoshard.plan.sharding import Cut, count_collectives
from autoshard.profile.profile import Profile
from autoshard.report.layout import print_item, print_section
from autoshard.report.terminal import as_sentence
from autoshard.search.reasons import WHAT, shown_mesh
from autoshard.search.study import Study
from autoshard.strategies.compare import value_of
from autoshard.strategies.paths import collapse

MOST_ALTERNATIVES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherDevice:
    """Another choice with everything else as it is. `value`: of the plan's objective, in `Explanation.unit`.

    `lacking_bytes`: what the fullest device lacks, 0 if all fits.
    """

    title: str
    value: float
    lacking_bytes: int
    latency_seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Where a module or device stands in a plan. `alternatives`: the best first; `chosen` is what the plan has."""

    subject: str
    kind: str
    sentences: tuple[str, ...]
    unit: str
    chosen: OtherDevice | None = None
    alternatives: tuple[OtherDevice, ...] = ()

    @property
    def choices(self) -> list[tuple[str, str]]:
        """(what, its figures) of what the plan has and of the alternatives; none without these."""
        rows = [self.chosen, *self.alternatives] if self.chosen is not None and self.alternatives else []
        return [(row.title, _figure(row, self.unit)) for row in rows]

    def __str__(self) -> str:
        lines = [self.subject or "the whole model", *(f"  {sentence}" for sentence in self.sentences)]
        return "\n".join([*lines, *(f"  - {title}: {estimate}" for title, estimate in self.choices)])


def print_explanation(console: Console, found: Explanation) -> None:
    """Print where a module or device stands, why, and what the other choices cost."""
    console.print(Text(found.subject or "the whole model", style="bold"))
    for sentence in found.sentences:
        print_item(console, sentence, "")
    if found.choices:
        same = "the best recipe of each mesh" if found.kind == "the plan" else "everything else as it is"
        print_section(console, "Choices", f"{found.unit}; {same}")
    for title, estimate in found.choices:
        print_item(console, title, estimate)


def _figure(one: OtherDevice, unit: str) -> str:
    value = f"{one.value:.1%}" if unit.startswith("share") else format_seconds(one.value)
    lacks = f", {format_bytes(one.lacking_bytes)} too little memory" if one.lacking_bytes else ""
    return f"{value}, the fullest device has {format_bytes(one.peak_bytes)} at its peak{lacks}"


def explain(plan: Plan, profile: Profile, cluster: Cluster, subject: str, study: Study | None = None) -> Explanation:
    """Explain a plan (""), or a device, module or tensor of it; `study`: of a plan for processes.

    Raises `SpecError` if `subject` is none of them.
    """
    estimate = study.estimate if study is not None else _price(plan, profile, cluster)
    names = {module.path for module in profile.graph.modules} | {tensor.name for tensor in profile.graph.tensors}
    aliases = {alias: module.path for module in profile.graph.modules for alias in module.aliases}
    subject, kind, said = aliases.get(subject, subject), "module", list[str]()
    if subject in {device.name for device in plan.devices}:
        kind, said = "device", [*_device(plan, estimate, subject)]
    elif subject not in names:
        raise SpecError(_unknown(subject, plan, profile))
    elif study is not None and not subject:
        subject = kind = "the plan"
        said = [*study.reasons[:-1], *study.changes, study.to_fit, study.reasons[-1]]
    else:
        describe = _over_mesh if study is not None else _cut_module if plan.cuts else _placed_module
        said = [*describe(plan, profile, estimate, subject)]
    if study is not None:
        unit = "seconds per step" if plan.workload.training else "seconds per answer"
        chosen, *found = (
            OtherDevice(title=shown_mesh(one.recipe), value=one.seconds, lacking_bytes=0, latency_seconds=one.seconds,
                        peak_bytes=int(one.memory.used))
            for one in sorted(study.rows, key=lambda one: one is not study.own)
        )  # fmt: skip
        found = found if kind == "the plan" else []
    else:
        unit, chosen = _UNITS.get(plan.objective, "seconds per pass"), _alternative("as planned", plan, estimate)
        others = _elsewhere(plan, profile, cluster, subject) if kind == "module" else ()
        found = [_alternative(title, other, _price(other, profile, cluster)) for title, other in others]
        found.sort(key=lambda one: (one.lacking_bytes > 0, one.value, one.title))
        said += _verdict(chosen, found)
    return Explanation(
        subject=subject, kind=kind, sentences=tuple(as_sentence(one) for one in said if one), unit=unit, chosen=chosen,
        alternatives=tuple(found[:MOST_ALTERNATIVES]),
    )  # fmt: skip


def _elsewhere(plan: Plan, profile: Profile, cluster: Cluster, subject: str) -> Iterator[tuple[str, Plan]]:
    """Yield (what, the plan) of other choices for a module: another device, or the whole model on one."""
    if plan.cuts:
        first = plan.devices[0].name
        yield (
            f"the whole model on {first}",
            replace(plan, cuts=(), whole=(), mesh=None, stages=(), placements={"": first}),
        )
    # What a mesh places is bound by its stages; streaming is planned as a whole: moving one module says nothing true.
    elif plan.mesh is None and not plan.offloaded:
        here = set(_entries(plan.placements, subject).values())
        for name in (device.name for device in cluster.devices if device.name != "disk"):
            if here != {name}:
                yield f"all of it on {name}", _moved(plan, profile, subject, name)


_UNITS = {"memory": "share of the fullest device", "throughput": "seconds of the busiest device"}


def _unknown(subject: str, plan: Plan, profile: Profile) -> str:
    last = subject.rpartition(".")[2]
    near = [m.path for m in profile.graph.modules if last and m.path.rpartition(".")[2] == last][:3]
    near = near or [module.path for module in profile.graph.modules if module.path.count(".") == 0 and module.path][:5]
    devices = ", ".join(device.name for device in plan.devices[:8])
    return f"{subject!r} is neither a module nor a device of this plan. Devices: {devices}. Modules: {', '.join(near)}…"


def _price(plan: Plan, profile: Profile, cluster: Cluster) -> Estimate:
    return price(plan, profile, cluster, lower_bound_seconds=0.0)  # bounds are not shown here


def _alternative(title: str, plan: Plan, estimate: Estimate) -> OtherDevice:
    return OtherDevice(
        title=title,
        value=value_of(estimate, plan.objective, training=False),
        lacking_bytes=max(0, *(-device.free_bytes for device in estimate.devices)),
        latency_seconds=estimate.latency_seconds,
        peak_bytes=estimate.fullest.peak_bytes,
    )


def _size(profile: Profile, path: str) -> int:
    """Bytes of the tensors in a module, tied ones once."""
    rows = {t.storage: t.nbytes for t in profile.graph.tensors if is_below(t.name, path)}
    return sum(rows.values())


# Placed modules


def _placed_module(plan: Plan, profile: Profile, estimate: Estimate, subject: str) -> Iterator[str]:
    """Say where a placed module is, how full its devices are, and what goes in and out."""
    placed = _entries(plan.placements, subject)
    devices_of_it = list(dict.fromkeys(placed.values()))
    yield _where(subject, devices_of_it, placed, _size(profile, subject))
    yield from _offloaded(plan, subject)
    if any(is_below(subject, pin) for pin in plan.pins):
        yield "It was pinned there by whoever asked for the plan."
    for row in estimate.devices:
        if row.name in devices_of_it:
            share = row.peak_bytes / max(row.memory_bytes, 1)
            yield f"{row.name} is {share:.0%} full at its peak ({format_bytes(row.free_bytes)} free)"
    if subject:
        yield from _crossing(estimate, subject, devices_of_it)
    if estimate.pipelining is not None:
        yield from _stage_sentences(plan, estimate.pipelining, [*placed])


def _stage_sentences(plan: Plan, run: Pipelining, paths: list[str]) -> Iterator[str]:
    """Say which stage the others wait for, how that of some placements compares with it, and how long devices wait."""
    here = [index for index, stage in enumerate(plan.stages) if any(path in stage.paths for path in paths)]
    seconds = [stage.forward_seconds + stage.backward_seconds for stage in run.stages]
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    passes = "forward and backward" if any(stage.backward_seconds for stage in run.stages) else "forward"
    text = (
        f"Stage {slowest} of {len(seconds)}, on {run.stages[slowest].device}, is the slowest, and the others wait for "
        f"it: {format_seconds(seconds[slowest])} for a micro-batch, {passes}"
    )
    if here == [slowest]:
        yield f"{text}. This is the stage that binds the time of a pass."
    elif len(here) == 1:
        less = 1 - seconds[here[0]] / max(seconds[slowest], 1e-30)
        yield f"{text}. Stage {here[0]}, which this is, takes {format_seconds(seconds[here[0]])}, {less:.0%} less."
    else:
        yield f"{text}."
    count = f"{run.num_microbatches} micro-batch{'es' if run.num_microbatches > 1 else ''}"
    yield (
        f"Devices wait {run.bubble:.0%} of a pass (the bubble): {len(seconds)} stages begin and end one after another, "
        f"with {count} in the order of {run.schedule}."
    )


def _entries(placements: Mapping[str, str], subject: str) -> dict[str, str]:
    """The placements that a module is in, or that are in it."""
    around = covering_entry(placements, subject)
    if around is not None:
        return {around: placements[around]}
    return {path: device for path, device in placements.items() if is_below(path, subject)}


def _moved(plan: Plan, profile: Profile, subject: str, device: str) -> Plan:
    """The plan with one module elsewhere; an entry around it is taken apart."""
    names, here = [tensor.name for tensor in profile.graph.tensors], plan.placements
    devices_of_it = {
        name: device if is_below(name, subject) else here[covering_entry(here, name) or ""] for name in names
    }
    return replace(plan, placements=collapse(devices_of_it, profile.graph))


def _where(subject: str, devices_of_it: list[str], placed: Mapping[str, str], size: int) -> str:
    name = subject or "the model"
    if len(devices_of_it) == 1:
        by = next(iter(placed))
        inside = f", as all of {by or 'the model'}" if is_below(subject, by) and by != subject else ""
        return f"{name} ({format_bytes(size)}) is on {devices_of_it[0]}{inside}."
    return f"{name} ({format_bytes(size)}) is spread over {', '.join(devices_of_it)}, in {len(placed)} parts."


def _offloaded(plan: Plan, subject: str) -> Iterator[str]:
    inside = {path: place for path, place in plan.offloaded.items() if is_below(path, subject)}
    around = next((path for path in above(subject) if path in plan.offloaded), None)
    if around is not None:
        yield f"With {around} it is kept on {plan.offloaded[around]} and brought to its device for each call."
    elif inside:
        kept = ", ".join(sorted(set(inside.values())))
        yield f"{len(inside)} modules of it are kept on {kept} and brought to their device for each call."


def _crossing(estimate: Estimate, subject: str, devices_of_it: list[str]) -> Iterator[str]:
    into = [t for t in estimate.transfers if is_below(t.consumer, subject) and t.destination in devices_of_it]
    out = [t for t in estimate.transfers if is_below(t.producer, subject) and t.source in devices_of_it]
    for rows, words in ((into, "comes to it from other devices"), (out, "goes from it to other devices")):
        if rows:
            nbytes, seconds = sum(row.nbytes for row in rows), sum(row.seconds for row in rows)
            yield f"{format_bytes(nbytes)} {words} in a pass ({format_seconds(seconds)})."


def _verdict(chosen: OtherDevice, found: Sequence[OtherDevice]) -> Iterator[str]:
    if not found:
        return
    fitting = [one for one in found if not one.lacking_bytes]
    if not fitting:
        least = min(one.lacking_bytes for one in found)
        yield f"Memory binds it: with any other choice a device lacks at least {format_bytes(least)}."
        return
    best = min(fitting, key=lambda one: one.value)
    if best.value < chosen.value * (1 - 1e-9):
        gain = 1 - best.value / chosen.value
        yield (
            f"By itself it would be better elsewhere ({best.title}, by {gain:.1%}): the strategy keeps modules in "
            "order, or was not asked for the optimum."
        )
    elif best.value <= chosen.value * (1 + 1e-9):
        yield f"It would cost the same with {best.title}."
    else:
        yield f"The next best, {best.title}, costs {best.value / max(chosen.value, 1e-30) - 1:.1%} more."


# Modules of a model that is cut, and of one over a mesh of processes


def _cut_module(plan: Plan, profile: Profile, estimate: Estimate, subject: str) -> Iterator[str]:
    """Say what of a module is cut, and what is whole and why."""
    cuts = [_cut_sentence(cut, subject) for cut in plan.cuts if _touched(cut, subject)]
    size = format_bytes(_size(profile, subject))
    yield f"{subject or 'the model'} ({size}) is on every rank{', cut' if cuts else ''}."
    yield from cuts
    for row in plan.whole:
        names = [join(block, name) for block in row.blocks for name in row.names]
        mine = [name for name in names if is_below(name, subject) or is_below(subject, name)]
        if mine:
            more = f" and {len(mine) - 1} more" if len(mine) > 1 else ""
            cuts.append(f"{mine[0]}{more} {'are' if more else 'is'} whole on every rank: {row.reason}.")
            yield cuts[-1]
    if not cuts:
        yield "Nothing of it is cut, and it has no matrices that could be."


def _touched(cut: Cut, subject: str) -> list[str]:
    """The tensors of a module that a cut divides."""
    names = (join(block, shard.name) for block in cut.blocks for shard in cut.shards)
    return [name for name in names if is_below(name, subject)]


def _cut_sentence(cut: Cut, subject: str) -> str:
    mine = _touched(cut, subject)
    reduces, gathers = count_collectives(cut.actions)
    collectives = [f"{count} {name}" for count, name in ((reduces, "all-reduce"), (gathers, "all-gather")) if count]
    shares = ", ".join(map(str, cut.shares)) if len(set(cut.shares)) > 1 else f"{cut.shares[0]} each"
    proof = f" Checked: {cut.proof}." if cut.proof else ""
    more = f" and {len(mine) - 1} more" if len(mine) > 1 else ""
    return (
        f"{mine[0]}{more} {'are' if more else 'is'} cut into {cut.size} slices over {cut.degree} ranks ({shares})"
        f"{', ended by ' + ' and '.join(collectives) + ' per block' if collectives else ''}.{proof}"
    )


def _over_mesh(plan: Plan, profile: Profile, estimate: Estimate, subject: str) -> list[str]:
    """Say how ranks of a mesh share a module."""
    assert plan.mesh is not None
    parts = []
    if plan.mesh.pp > 1:
        stages = [
            str(number) for number, stage in enumerate(plan.stages)
            if any(is_below(subject, path) or is_below(path, subject) for path in stage.paths)
        ]  # fmt: skip
        parts.append(f"it is in stage {', '.join(stages[:4])}{' …' if len(stages) > 4 else ''} of {len(plan.stages)}")
    degrees = [(name, degree) for name, degree in plan.mesh.degrees.items() if degree > 1 and name != "pp"]
    parts += [f"it is shared by {degree} {WHAT[name]}" for name, degree in degrees]
    return ["; ".join(parts) or "every rank has all of it"]


# Devices


def _device(plan: Plan, estimate: Estimate, name: str) -> Iterator[str]:
    """Say what a device has, what fills it when it is fullest, and what it does with the time."""
    row = next(device for device in estimate.devices if device.name == name)
    here = [path for path, device in plan.placements.items() if device == name]
    at, stages = [device.name for device in plan.devices].index(name), plan.mesh.pp if plan.mesh is not None else 1
    if plan.cuts or plan.mesh is not None:
        yield f"{name} is rank {at} of {len(plan.devices)}."
    own = None
    if estimate.ranks:
        rank = at // (len(plan.devices) // stages)
        own = next(one for one in estimate.ranks if rank in one.stages)
        mine = ", ".join(map(str, sorted(number for number in own.stages if number % stages == rank)))
        has = f"stage{'s' if ',' in mine else ''} {mine}" if stages > 1 else "the whole depth of the model"
        yield f"It has {has}."
    elif here:
        span = here[0] if len(here) == 1 else f"{here[0]} to {here[-1]}, {len(here)} entries"
        yield f"It has {span or 'the whole model'}."
    elif not plan.cuts and plan.mesh is None:
        yield "Nothing is on it: the plan is as good or better without it."
    if row.peak_bytes:
        parts = sorted(row.parts.items(), key=lambda part: -part[1])
        listed = ", ".join(f"{what} {format_bytes(size)}" for what, size in parts if size)
        when = "" if own is None else f" ({max(own.curve, key=lambda moment: moment.total).name})"
        peak = f"{format_bytes(row.peak_bytes)} of {format_bytes(row.memory_bytes)}"
        yield f"At its fullest moment{when} it holds {peak}: {listed}."
        idle = f", and is idle for {format_seconds(own.idle_seconds)}" if own is not None else ""
        yield (
            f"Of {format_seconds(estimate.latency_seconds)} it computes for {format_seconds(row.compute_seconds)} and "
            f"waits for communication for {format_seconds(row.transfer_seconds)}{idle}."
        )
    if row.peak_bytes > FULL * row.memory_bytes:
        yield "Its memory binds the plan: nothing sizeable can be added to it."
    if estimate.pipelining is not None and here:
        yield from _stage_sentences(plan, estimate.pipelining, here)
