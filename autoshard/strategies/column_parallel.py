"""column_parallel: cut parameters over devices that all work on the same input, where that pays.

    one pass  =  the slowest rank: what is not cut, and its shares of what is  +  all-reduces and gathers of every cut

For every set of devices worth a look the best compatible groups are found exactly (`cut_choice`); the engine prices
the sets, the most promising first, and the best that fits is checked. What is refused is out, and it is chosen
again. What lacks memory by the engine's figures is chosen again with that much more cut. One device without cuts takes
part like the others, so a plan is never slower than one device by its own estimate unless one device can't hold the
model, or cuts were asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.axes.unchecked import as_cut, unchecked
from autoshard.axes.walk import where
from autoshard.capture.graph import name_of
from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.cluster.device import Device
from autoshard.common.sizes import format_bytes
from autoshard.engine.pricer import Pricer
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.sharding import Cut, Refusal
from autoshard.profile.profile import Profile
from autoshard.strategies.cut_choice import Option, choose
from autoshard.strategies.cut_reasons import explain_cuts, explain_whole, lacking_memory, no_such_degree
from autoshard.strategies.cut_results import find_results
from autoshard.strategies.cut_savings import savings_of
from autoshard.strategies.cut_task import Choice, CutTask, allows, full_names
from autoshard.strategies.refusal import round_up, with_copies
from autoshard.strategies.shares import divide

_READ_BY_TORCH = frozenset({"_pack_padded_sequence"})
"""Ops after which torch's own code reads tensors that in one process are several, one per rank."""
MOST_DEGREE = 64
"""Degrees above are not listed as valid; more devices than this are not used."""
_TRIES = 8
"""Rounds in which more is cut on the same devices, since by the engine's figures it does not fit."""
CheckCuts = Callable[[Sequence[AxisGroup], Sequence[tuple[int, ...]]], Sequence[Cut | Refusal]]
"""All groups that are to be cut at once, and the shares of each -> for each a checked cut, or why not."""


def column_parallel(
    profile: Profile,
    cluster: Cluster,
    found: AxisGroups,
    check: CheckCuts,
    *,
    objective: str = "latency",
    degree: int | None = None,
    even: bool = False,
    asked: bool = False,
    price: Pricer | None = None,
) -> Plan:
    """Plan what is cut over the devices of a cluster.

    `found`: the axis groups of the same model. `degree`: cut over exactly so many devices, also if that is slower; None
    takes as many as pay, one included. `asked`: for cuts; then as much is cut as can be where one device would be
    faster. `even`: all ranks must keep as much, as where one process runs them all. With "throughput" as with "latency"
    the seconds of a pass count, since all ranks work on the same pass; with "memory" as much is cut as can be. `price`:
    of the same profile and cluster. Raises `PlanError` for a degree that nothing allows, with those that are possible,
    and for a model that does not fit.
    """
    if even:
        _check_one_process(profile)
    price = price or Pricer(profile, cluster)
    blocks = {region.paths for region in found.regions}
    fallback = frozenset(group.index for group in found.groups if blocks and group.blocks not in blocks)
    task = CutTask(
        profile=profile, cluster=cluster, groups=found.groups, conflicts=_conflicts(found.groups), objective=objective,
        savings=savings_of(profile, found.groups, fallback, price.tracer), wanted=objective, even=even,
        fallback=fallback, price=price,
        state=1 + (profile.gradient_bytes + profile.optimizer_bytes) / max(profile.parameter_bytes, 1),
    )  # fmt: skip
    if degree is not None:
        _check_degree(task, degree)
    alone = _alone(task) if degree in (None, 1) else None
    best, cuts = _checked(task, check, degree, asked=asked or alone is None)
    beside = alone if degree is None else _alone(task)
    if best is None and alone is None:
        raise PlanError(_refusal(task, degree))
    if alone is not None and (best is None or (not asked and alone.value(objective) <= best.value(objective))):
        best, beside, cuts = alone, best or _best(replace(task, objective="memory"), None, limited=False), ()
    assert best is not None
    return replace(
        _draft(task, best, cuts),
        devices=tuple(map(plan_device, best.devices if cuts else cluster.devices)),
        reasons=explain_cuts(task, best, beside, cuts, valid_degrees(task)),
        whole=explain_whole(task, found, best) if cuts else (),
        results=find_results(found, cuts),
    )


def _checked(
    task: CutTask, check: CheckCuts, degree: int | None, *, asked: bool
) -> tuple[Choice | None, tuple[Cut, ...]]:  # fmt: skip
    """The best choice with cuts, checked; None if none fits. What is refused is banned, and it is chosen again."""
    by_index = {group.index: group for group in task.groups}
    while degree != 1:
        best = _best(task, degree)
        if best is None and task.objective != "memory" and (asked or degree is not None):
            task.objective = "memory"  # nothing pays: as much is cut as can be
            continue
        if best is None:
            if degree is not None and not any(allows(group, degree, task.even) for group in task.groups):
                break
            if degree is not None and _best(task, degree, limited=False) is None:
                raise PlanError(no_such_degree(degree, valid_degrees(task), task.even, task.banned.values()))
            break
        together: dict[tuple[str, ...], list[Option]] = {}  # block by block, as plans list it
        for option in best.picked:
            together.setdefault(by_index[option.index].blocks, []).append(option)
        picked = [option for options in together.values() for option in options]
        outcomes = check([by_index[one.index] for one in picked], [one.shares for one in picked])
        pairs = list(zip(picked, outcomes, strict=True))
        refused = {(one.index, one.shares): made.reason for one, made in pairs if isinstance(made, Refusal)}
        if refused:
            task.banned.update(refused)
            continue
        cuts = tuple(made for made in outcomes if isinstance(made, Cut))
        figures = task.price(_draft(task, best, cuts))
        return replace(best, figures=figures, seconds=figures.latency_seconds), cuts
    return None, ()


def _best(task: CutTask, degree: int | None, *, limited: bool = True) -> Choice | None:
    """The best set of devices with the best groups for it that fits by the engine; None if none does.

    `limited`: by the devices' memory.
    """
    solved = []
    for devices in _device_sets(task, degree):
        need = [_held(task, devices) - one.budget_bytes for one in devices] if limited else [0] * len(devices)
        options = list(_options(task, devices))
        every = [options]
        if len({one.budget_bytes for one in devices}) > 1 and not task.even:
            every += [list(_options(task, devices, most)) for most in _rooms(task, devices, options)]
        solved += [(one, own) for own in every if (one := _choice(task, devices, own, need)) is not None]
    best: Choice | None = None
    for found, options in sorted(solved, key=lambda one: one[0].seconds if task.objective != "memory" else 0.0):
        if not limited:
            return found
        if best is not None and task.objective != "memory" and found.seconds >= best.seconds:
            break
        fitting = _fitting(task, found, options)
        if fitting is not None and (best is None or fitting.value(task.objective) < best.value(task.objective)):
            best = fitting
    return best


def _fitting(task: CutTask, found: Choice, options: Sequence[Option]) -> Choice | None:
    """The choice with the engine's figures; where it does not fit, one with as much more cut as it lacks."""
    chosen: Choice | None = found
    for _ in range(_TRIES):
        if chosen is None:
            return None
        cuts = tuple(as_cut(group, one.shares) for one in chosen.picked for group in task.groups
                     if group.index == one.index)  # fmt: skip
        figures = task.price(_draft(task, chosen, cuts))
        priced = replace(chosen, figures=figures, seconds=figures.latency_seconds)
        lacking = [peak - one.budget_bytes for peak, one in zip(priced.peaks, chosen.devices, strict=True)]
        if max(lacking) <= 0:
            return priced
        saved = [sum(one.saved_bytes[rank] for one in chosen.picked) for rank in range(len(chosen.devices))]
        need = [own + max(lack, 1) for own, lack in zip(saved, lacking, strict=True)]
        chosen = _choice(task, chosen.devices, options, need)
    return None


def _choice(
    task: CutTask, devices: tuple[Device, ...], options: Sequence[Option], need: Sequence[int]
) -> Choice | None:  # fmt: skip
    """The best of these options that save so many bytes per rank; None if there are none, or nothing pays."""
    seconds = [task.seconds_alone(device) for device in devices]

    def pick(some: Sequence[Option]) -> tuple[Option, ...] | None:
        return choose(some, seconds, need, task.objective)

    usual = [option for option in options if option.index not in task.fallback]
    picked = pick(usual)
    if picked is None:
        picked = pick(options)
    elif len(usual) < len(options):
        taken = {option.index for option in picked}
        beside = [one for one in options if one.index in task.fallback and taken.isdisjoint(one.conflicts)]
        picked = pick([*picked, *beside])
    if not picked:
        return None
    slowest = max(own - sum(option.saved_seconds[rank] for option in picked) for rank, own in enumerate(seconds))
    return Choice(devices=devices, picked=picked, seconds=slowest + sum(one.collective_seconds for one in picked))


def _held(task: CutTask, devices: Sequence[Device]) -> int:
    """Bytes that each of these devices holds if no parameter is cut, and all else is shared."""
    profile = task.profile
    parameters = profile.parameter_bytes + profile.gradient_bytes + profile.optimizer_bytes
    shared = max(profile.activation_peak_bytes, profile.peak_bytes - parameters) * (1 - 1 / len(devices))
    return profile.peak_bytes - int(shared)


def _device_sets(task: CutTask, degree: int | None) -> Iterator[tuple[Device, ...]]:
    """Sets of devices worth a look, in the cluster's order: the fastest, the fastest of one host, the largest."""
    devices = task.cluster.devices
    orders = [sorted(devices, key=task.seconds_alone)]
    orders += [[one for one in orders[0] if one.host == host] for host in dict.fromkeys(one.host for one in devices)]
    orders.append(sorted(devices, key=lambda device: -device.budget_bytes))
    for count in range(2, min(len(devices), MOST_DEGREE) + 1) if degree is None else [degree]:
        sets = dict.fromkeys(frozenset(one.name for one in order[:count]) for order in orders if len(order) >= count)
        for names in sets:
            yield tuple(device for device in devices if device.name in names)


def _rooms(task: CutTask, devices: tuple[Device, ...], options: Sequence[Option]) -> Iterator[list[float]]:
    """The part of what is cut that each device has room for, if as much is cut as can be; at first with some left."""
    most = _choice(replace(task, objective="memory"), devices, options, [0] * len(devices))
    groups = {group.index: group for group in task.groups}
    picked = [groups[one.index] for one in most.picked] if most is not None else []
    cut = sum(len(group.blocks) * group.nbytes for group in picked) * task.state
    for left in (0.9, 1.0) if cut else ():
        yield [left * (one.budget_bytes - _held(task, devices) + cut) / cut for one in devices]


def _options(task: CutTask, devices: tuple[Device, ...], most: Sequence[float] | None = None) -> Iterator[Option]:
    """Every group that these devices can share, in shares that follow their speed; `most`: the part each may get."""
    names = [device.name for device in devices]
    for group, saving, conflicts in zip(task.groups, task.savings, task.conflicts, strict=True):
        pace = [saving.seconds(task.profile, one, 0.5) for one in devices]
        limits = None if most is None else [int(part * group.size) for part in most]
        even = (group.size // len(devices),) * len(devices) if group.size % len(devices) == 0 else None
        ways = [even] if task.even else [divide(group.size, pace, limits), even]
        shares = next((one for one in ways if one and (group.index, one) not in task.banned), None)
        if shares is None:
            continue
        parts, count = [share / group.size for share in shares], len(group.blocks)
        known = {(one.speed, part): saving.seconds(task.profile, one, part)
                 for one, part in zip(devices, parts, strict=True)}  # fmt: skip
        yield Option(
            index=group.index, shares=shares, conflicts=conflicts,
            saved_seconds=tuple(count * known[one.speed, part] for one, part in zip(devices, parts, strict=True)),
            saved_bytes=tuple(int(count * group.nbytes * task.state * (1 - part)) for part in parts),
            collective_seconds=count * saving.collective_seconds(task.cluster, names), places=len(group.actions),
        )  # fmt: skip


def _alone(task: CutTask) -> Choice | None:
    """The fastest device that holds the whole model; None if none does."""
    found = []
    for device in {(one.speed, one.budget_bytes): one for one in reversed(task.cluster.devices)}.values():
        whole = Choice(devices=(device,), picked=(), seconds=0.0)
        figures = task.price(_draft(task, whole, ()))
        if figures.fits:
            found.append(replace(whole, figures=figures, seconds=figures.latency_seconds))
    return min(reversed(found), key=lambda one: one.value(task.wanted), default=None)


def _draft(task: CutTask, best: Choice, cuts: tuple[Cut, ...]) -> Plan:
    return Plan(
        strategy="column-parallel", objective=task.wanted, workload=task.profile.workload,
        devices=tuple(map(plan_device, best.devices)), placements={"": best.devices[0].name},
        fingerprint=task.profile.graph.fingerprint, cuts=cuts,
    )  # fmt: skip


def _check_one_process(profile: Profile) -> None:
    packed = next((op for op in profile.graph.ops if name_of(op) in _READ_BY_TORCH), None)
    if packed is not None:
        raise PlanError(
            f"{where(profile.graph, packed)} packs sequences, whose lengths torch reads from memory itself: it can't "
            "where one process holds all ranks. Start one process per device with torchrun, or place modules "
            '(strategy="balanced").'
        )


def _check_degree(task: CutTask, degree: int) -> None:
    count = len(task.cluster.devices)
    if not 1 <= degree <= count:
        raise PlanError(f"a model can't be cut over {degree} devices where there are {count}. Ask for 1 to {count}.")
    if degree > 1 and not any(allows(group, degree, task.even) for group in task.groups):
        raise PlanError(no_such_degree(degree, valid_degrees(task), task.even))


def valid_degrees(task: CutTask) -> tuple[int, ...]:
    """Degrees at which as many bytes can be cut as at any, by sizes: nothing is checked here.

    What only single modules can be cut into does not count.
    """
    found = {
        degree: sum(len(group.blocks) * group.nbytes for group in task.groups
                    if group.index not in task.fallback and allows(group, degree, task.even))
        for degree in range(2, MOST_DEGREE + 1)
    }  # fmt: skip
    most = max(found.values())
    return tuple(degree for degree, nbytes in found.items() if nbytes == most > 0)


def _conflicts(groups: Sequence[AxisGroup]) -> tuple[frozenset[int], ...]:
    """The groups' own conflicts, and those with groups of other analyses that cut the same parameter."""
    cutters: dict[str, list[int]] = {}
    for group in groups:
        for name in full_names(group):
            cutters.setdefault(name, []).append(group.index)
    return tuple(
        frozenset({*group.conflicts, *(other for name in full_names(group) for other in cutters[name])} - {group.index})
        for group in groups
    )


def _refusal(task: CutTask, degree: int | None) -> str:
    """Why nothing fits, with one change that was tried and works."""
    task.objective = "memory"
    count = len(task.cluster.devices)
    closest = _best(task, count if degree is None else degree, limited=False)
    if closest is None:
        closest = Choice(devices=task.cluster.devices[:1], picked=(), seconds=0.0)
    cuts = unchecked(
        [group for one in closest.picked for group in task.groups if group.index == one.index],
        [one.shares for one in closest.picked],
    )
    figures = task.price(_draft(task, closest, tuple(one for one in cuts if isinstance(one, Cut))))
    closest = replace(closest, figures=figures)
    first = task.cluster.names.index(closest.devices[0].name)
    for more in (1, 2, 4, 8, 16) if degree is None else ():
        larger = with_copies(task.cluster, first, more)
        price = Pricer(task.profile, larger)
        other = replace(task, cluster=larger, price=price, banned=dict(task.banned))
        if _best(other, count + more) is not None:
            many = "one more device" if more == 1 else f"{more} more devices"
            return lacking_memory(closest, f"It was checked that it fits with {many} like {closest.devices[0].name}.")
    lack = max(peak - one.budget_bytes for peak, one in zip(closest.peaks, closest.devices, strict=True))
    for factor in (1.01, 1.5):
        extra = round_up(max(lack, 1) * factor)
        larger = task.cluster.with_memory({one.name: one.memory_bytes + extra for one in task.cluster.devices})
        other = replace(task, cluster=larger, price=Pricer(task.profile, larger), banned=dict(task.banned))
        if _best(other, degree) is not None:
            return lacking_memory(
                closest, f"It was checked that it fits if every device has {format_bytes(extra)} more."
            )
    return lacking_memory(
        closest, 'Take larger devices, or use strategy="balanced", which keeps each module on one device only.'
    )
