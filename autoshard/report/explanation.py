"""Why something is where it is under a plan: what bound it, and what the other choices would have cost.

Nothing is remembered from planning. Every alternative is a plan of its own (this module elsewhere, the model on one
device) that is priced as plans always are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autoshard.cluster.cluster import Cluster
from autoshard.common.module_paths import above, is_below, join
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import DeviceEstimate, Estimate, Pipelining
from autoshard.engine.pricer import price
from autoshard.errors import SpecError
from autoshard.plan import Plan
from autoshard.plan.sharding import Cut, count_collectives
from autoshard.profile.profile import Profile

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

    def __str__(self) -> str:
        lines = [self.subject or "the whole model", *(f"  {sentence}" for sentence in self.sentences)]
        rows = [self.chosen, *self.alternatives] if self.chosen is not None and self.alternatives else []
        return "\n".join([*lines, *(f"  - {row.title}: {_figure(row, self.unit)}" for row in rows)])


def _figure(one: OtherDevice, unit: str) -> str:
    value = f"{one.value:.1%}" if unit.startswith("share") else format_seconds(one.value)
    lacks = f", {format_bytes(one.lacking_bytes)} too little memory" if one.lacking_bytes else ""
    return f"{value}, the fullest device has {format_bytes(one.peak_bytes)} at its peak{lacks}"


def explain(plan: Plan, profile: Profile, cluster: Cluster, subject: str) -> Explanation:
    """Explain a device or a module (or tensor) of a plan. Raises `SpecError` if `subject` is neither."""
    if subject in {device.name for device in plan.devices}:
        return _device(plan, profile, cluster, subject)
    names = {module.path for module in profile.graph.modules} | {tensor.name for tensor in profile.graph.tensors}
    aliases = {alias: module.path for module in profile.graph.modules for alias in module.aliases}
    subject = aliases.get(subject, subject)
    if subject not in names:
        raise SpecError(_unknown(subject, plan, profile))
    if plan.cuts:
        return _cut_module(plan, profile, cluster, subject)
    return _placed_module(plan, profile, cluster, subject)


def _unknown(subject: str, plan: Plan, profile: Profile) -> str:
    last = subject.rpartition(".")[2]
    near = [m.path for m in profile.graph.modules if last and m.path.rpartition(".")[2] == last][:3]
    near = near or [module.path for module in profile.graph.modules if module.path.count(".") == 0 and module.path][:5]
    devices = ", ".join(device.name for device in plan.devices[:8])
    return f"{subject!r} is neither a module nor a device of this plan. Devices: {devices}. Modules: {', '.join(near)}…"


def _price(plan: Plan, profile: Profile, cluster: Cluster) -> Estimate:
    return price(plan, profile, cluster, lower_bound_seconds=0.0)  # bounds are not shown here


def _alternative(title: str, plan: Plan, figures: Estimate) -> OtherDevice:
    fullest = figures.fullest
    value = {
        "memory": fullest.peak_bytes / max(fullest.memory_bytes, 1),
        "throughput": figures.bottleneck_seconds,
    }.get(plan.objective, figures.latency_seconds)
    return OtherDevice(
        title=title,
        value=value,
        lacking_bytes=max(0, *(-device.free_bytes for device in figures.devices)),
        latency_seconds=figures.latency_seconds,
        peak_bytes=fullest.peak_bytes,
    )


def _unit(plan: Plan) -> str:
    return {"memory": "share of the fullest device", "throughput": "seconds of the busiest device"}.get(
        plan.objective, "seconds per pass"
    )


def _sorted(found: list[OtherDevice]) -> tuple[OtherDevice, ...]:
    return tuple(sorted(found, key=lambda one: (one.lacking_bytes > 0, one.value, one.title))[:MOST_ALTERNATIVES])


def _size(profile: Profile, path: str) -> int:
    """Bytes of the tensors in a module, tied ones once."""
    rows = {t.storage: t.nbytes for t in profile.graph.tensors if is_below(t.name, path) or t.name == path}
    return sum(rows.values())


# Placed modules


def _placed_module(plan: Plan, profile: Profile, cluster: Cluster, subject: str) -> Explanation:
    placed = _entries(plan.placements, subject)
    homes = list(dict.fromkeys(placed.values()))
    figures = _price(plan, profile, cluster)
    chosen = _alternative("as planned", plan, figures)
    size = _size(profile, subject)
    sentences = [_where(subject, homes, placed, size)]
    sentences += _ties(profile, subject, plan)
    sentences += _streamed(plan, subject)
    if subject in plan.pins or any(is_below(subject, pin) for pin in plan.pins):
        sentences.append("It was pinned there by whoever asked for the plan.")
    by_name = {device.name: device for device in figures.devices}
    sentences += [_pressure(by_name[home], plan, figures) for home in homes if home in by_name]
    sentences += _crossing(figures, subject)
    if figures.pipelining is not None:
        sentences += _stage_sentences(plan, figures.pipelining, [*placed])
    found: list[OtherDevice] = []
    # What a mesh places is bound by its stages; streaming is planned as a whole: moving one module says nothing true.
    if plan.mesh is None and not plan.streamed:
        for name in (device.name for device in cluster.devices if device.name != "disk"):
            if homes != [name]:
                moved = replace(plan, placements=_moved(plan.placements, profile, subject, name))
                found.append(_alternative(f"all of it on {name}", plan, _price(moved, profile, cluster)))
    sentences += _verdict(chosen, found, plan)
    return Explanation(
        subject=subject, kind="module", sentences=tuple(sentences), unit=_unit(plan), chosen=chosen,
        alternatives=_sorted(found),
    )  # fmt: skip


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
    around = next((path for path in (subject, *above(subject)) if path in placements), None)
    if around is not None:
        return {around: placements[around]}
    return {path: device for path, device in placements.items() if is_below(path, subject)}


def _moved(placements: Mapping[str, str], profile: Profile, subject: str, device: str) -> dict[str, str]:
    """Placements with one module elsewhere; the entry around it is taken apart."""
    made: dict[str, str] = {}
    for path, home in placements.items():
        if is_below(path, subject) or path == subject:
            continue
        if path == "" or is_below(subject, path):
            made |= {name: home for name in _beside(profile, path, subject)}
        else:
            made[path] = home
    return {**made, subject: device}


def _beside(profile: Profile, outer: str, inner: str) -> Iterator[str]:
    """Paths that together hold what `outer` holds without `inner`."""
    modules = {module.path: module for module in profile.graph.modules}
    chain = [path for path in (inner, *above(inner)) if path == outer or is_below(path, outer)]
    held = [tensor.name for tensor in profile.graph.tensors]
    for path in chain:
        if path == inner:
            continue
        yield from (name for name in modules[path].tensors if name not in chain) if path in modules else ()
        for child in modules:
            if child and _parent(child) == path and child not in chain and any(is_below(name, child) for name in held):
                yield child


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _where(subject: str, homes: list[str], placed: Mapping[str, str], size: int) -> str:
    name = subject or "the model"
    if len(homes) == 1:
        by = next(iter(placed)) if placed else ""
        inside = f", as all of {by or 'the model'}" if by != subject else ""
        return f"{name} ({format_bytes(size)}) is on {homes[0]}{inside}."
    return f"{name} ({format_bytes(size)}) is spread over {', '.join(homes)}, in {len(placed)} parts."


def _ties(profile: Profile, subject: str, plan: Plan) -> Iterator[str]:
    for names in profile.graph.tied():
        inside = [name for name in names if is_below(name, subject) or name == subject]
        others = [name for name in names if name not in inside]
        if inside and others:
            homes = {_home(plan.placements, name) for name in names}
            how = "all on one device" if len(homes) == 1 else f"with a copy on each of {', '.join(sorted(homes))}"
            yield f"{inside[0]} is one tensor with {others[0]}, {how}."


def _home(placements: Mapping[str, str], name: str) -> str:
    return next(placements[path] for path in (name, *above(name)) if path in placements)


def _streamed(plan: Plan, subject: str) -> Iterator[str]:
    inside = {path: place for path, place in plan.streamed.items() if is_below(path, subject) or path == subject}
    around = next((path for path in above(subject) if path in plan.streamed), None)
    if around is not None:
        yield f"With {around} it is kept on {plan.streamed[around]} and brought to its device for each call."
    elif inside:
        kept = ", ".join(sorted(set(inside.values())))
        yield f"{len(inside)} modules of it are kept on {kept} and brought to their device for each call."


def _pressure(device: DeviceEstimate, plan: Plan, figures: Estimate) -> str:
    share = device.peak_bytes / max(device.memory_bytes, 1)
    busiest = max(figures.devices, key=lambda one: one.compute_seconds + one.transfer_seconds)
    text = f"{device.name} is {share:.0%} full at its peak ({format_bytes(device.free_bytes)} free)"
    if plan.objective == "throughput":
        text += ", and the busiest device" if busiest.name == device.name else f"; the busiest device is {busiest.name}"
    return text + "."


def _crossing(figures: Estimate, subject: str) -> Iterator[str]:
    into = [t for t in figures.transfers if is_below(t.consumer, subject) or t.consumer == subject]
    out = [t for t in figures.transfers if is_below(t.producer, subject) or t.producer == subject]
    for rows, words in ((into, "comes to it from other devices"), (out, "goes from it to other devices")):
        if rows:
            nbytes, seconds = sum(row.nbytes for row in rows), sum(row.seconds for row in rows)
            yield f"{format_bytes(nbytes)} {words} in a pass ({format_seconds(seconds)})."


def _verdict(chosen: OtherDevice, found: list[OtherDevice], plan: Plan) -> Iterator[str]:
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


# Modules of a model that is cut


def _cut_module(plan: Plan, profile: Profile, cluster: Cluster, subject: str) -> Explanation:
    figures = _price(plan, profile, cluster)
    chosen = _alternative("as planned", plan, figures)
    cuts = [cut for cut in plan.cuts if _touches(cut, subject)]
    size = format_bytes(_size(profile, subject))
    sentences = [f"{subject or 'the model'} ({size}) is on every rank{', cut' if cuts else ''}."]
    found: list[OtherDevice] = []
    for cut in cuts:
        sentences.append(_cut_sentence(cut, subject))
    for row in plan.whole:
        names = [join(block, name) for block in row.blocks for name in row.names]
        mine = [name for name in names if is_below(name, subject) or name == subject or is_below(subject, name)]
        if mine:
            more = f" and {len(mine) - 1} more" if len(mine) > 1 else ""
            verb = "are" if more else "is"
            sentences.append(f"{mine[0]}{more} {verb} whole on every rank: {row.reason}.")
    if not cuts and len(sentences) == 1:
        sentences.append("Nothing of it is cut, and it has no matrices that could be.")
    first = plan.devices[0].name
    alone = replace(plan, cuts=(), whole=(), mesh=None, stages=(), placements={"": first})
    found.append(_alternative(f"the whole model on {first}", plan, _price(alone, profile, cluster)))
    sentences += _verdict(chosen, found, plan)
    return Explanation(
        subject=subject, kind="module", sentences=tuple(sentences), unit=_unit(plan), chosen=chosen,
        alternatives=_sorted(found),
    )  # fmt: skip


def _touches(cut: Cut, subject: str) -> bool:
    names = (join(block, shard.name) for block in cut.blocks for shard in cut.shards)
    return any(is_below(name, subject) or name == subject for name in names)


def _cut_sentence(cut: Cut, subject: str) -> str:
    mine = [
        join(block, shard.name) for block in cut.blocks for shard in cut.shards
        if is_below(join(block, shard.name), subject) or join(block, shard.name) == subject
    ]  # fmt: skip
    reduces, gathers = count_collectives(cut.actions)
    ways = [f"{count} {name}" for count, name in ((reduces, "all-reduce"), (gathers, "all-gather")) if count]
    shares = ", ".join(map(str, cut.shares)) if len(set(cut.shares)) > 1 else f"{cut.shares[0]} each"
    proof = f" Checked: {cut.proof}." if cut.proof else ""
    more = f" and {len(mine) - 1} more" if len(mine) > 1 else ""
    return (
        f"{mine[0]}{more} {'are' if more else 'is'} cut into {cut.size} slices over {cut.degree} ranks ({shares})"
        f"{', ended by ' + ' and '.join(ways) + ' per block' if ways else ''}.{proof}"
    )


# Devices


def _device(plan: Plan, profile: Profile, cluster: Cluster, name: str) -> Explanation:
    figures = _price(plan, profile, cluster)
    row = next(device for device in figures.devices if device.name == name)
    here = [path for path, device in plan.placements.items() if device == name]
    sentences = []
    if plan.cuts or plan.mesh is not None:
        sentences.append(f"{name} is rank {[d.name for d in plan.devices].index(name)} of {len(plan.devices)}.")
    if here:
        span = here[0] if len(here) == 1 else f"{here[0]} to {here[-1]}, {len(here)} entries"
        sentences.append(f"It has {span or 'the whole model'}.")
    elif not plan.cuts and plan.mesh is None:
        sentences.append("Nothing is on it: the plan is as good or better without it.")
    parts = {
        "weights": row.parameter_bytes + row.buffer_bytes, "activations": row.activation_bytes + row.transfer_bytes,
        "gradients": row.gradient_bytes, "optimizer state": row.optimizer_bytes, "cache": row.cache_bytes,
        "slots for streamed modules": row.slot_bytes, "overhead": row.overhead_bytes,
    }  # fmt: skip
    listed = ", ".join(f"{format_bytes(size)} {what}" for what, size in parts.items() if size)
    if row.peak_bytes:
        sentences.append(
            f"At its peak it holds {format_bytes(row.peak_bytes)} of {format_bytes(row.memory_bytes)}: {listed}."
        )
        busy = f"In a pass it computes for {format_seconds(row.compute_seconds)}"
        sentences.append(f"{busy} and waits for transfers for {format_seconds(row.transfer_seconds)}.")
    full = row.peak_bytes / max(row.memory_bytes, 1)
    if full > 0.95:
        sentences.append("Its memory binds the plan: nothing sizeable can be added to it.")
    if figures.pipelining is not None and here:
        sentences += _stage_sentences(plan, figures.pipelining, here)
    chosen = _alternative("as planned", plan, figures)
    return Explanation(subject=name, kind="device", sentences=tuple(sentences), unit=_unit(plan), chosen=chosen)
