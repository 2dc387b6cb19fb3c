"""column_parallel: cut parameters over devices that all work on the same input, where that pays.

    one pass  =  what is not cut, on every rank  +  for every cut: the slowest share, then its all-reduces and gathers

Groups and degree are chosen together: for every set of devices worth a look the best compatible groups are found
exactly (`cut_choice`), the best set of devices wins, and its cuts are proved. What can't be proved is out, and the
choice is made again. One device without cuts takes part like the others, so a plan is never slower than one device by
its own estimate unless one device can't hold the model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.axes.walk import name_of, where
from autoshard.cluster.cluster import Cluster, Device, plan_device
from autoshard.errors import PlanError
from autoshard.mesh_cost import Pricer
from autoshard.plan import Plan
from autoshard.plan_cuts import Refusal
from autoshard.profile.profile import Profile
from autoshard.progress import tell
from autoshard.sharding import Cut
from autoshard.strategies.cut_choice import Option, choose
from autoshard.strategies.cut_reasons import explain_cuts, explain_whole, lacking_memory, no_such_degree
from autoshard.strategies.cut_results import find_results
from autoshard.strategies.cut_task import Choice, Shares, Task, allows, cut_bytes, held_bytes, make_task, options_on

MOST_DEGREE = 64
"""Degrees above are not listed as valid; more devices than this are not used."""
_READ_BY_TORCH = frozenset({"_pack_padded_sequence"})
"""Ops after which torch's own code reads tensors that in one process are several, one per rank."""
_TRIES = 3
"""Most rounds of choosing, taking exact figures and asking for what a device turned out to lack."""
Prove = Callable[[Sequence[AxisGroup], Sequence[tuple[int, ...]]], Sequence[Cut | Refusal]]
"""Groups of the same blocks, to be cut together, and the shares of each -> for each a proved cut, or why not."""


def column_parallel(
    profile: Profile,
    cluster: Cluster,
    found: AxisGroups,
    prove: Prove,
    *,
    objective: str = "latency",
    degree: int | None = None,
    even: bool = False,
    price: Pricer | None = None,
) -> Plan:
    """Plan what is cut over the devices of a cluster.

    `found`: the axis groups of the same model. `degree`: cut over exactly so many devices, also if that is slower; None
    takes as many as pay, one included. `even`: all ranks must keep as much, as where one process runs them all. With
    "throughput" as with "latency" the seconds of a pass count, since all ranks work on the same pass; with "memory" as
    much is cut as can be. `price`: of the same profile and cluster. Raises `PlanError` for a degree that nothing
    allows, with those that are possible, and for a model that does not fit.
    """
    if even:
        _check_one_process(profile)
    task = make_task(profile, cluster, found, objective, even)
    if degree is not None:
        _check_degree(task, degree)
    task, best, cuts = _fitting_choice(task, degree, prove, price or Pricer(profile, cluster))
    compared = best_choice(task, 1) if cuts else _best_cut(task)
    if cuts and degree is None and objective != "memory" and compared is not None and compared.seconds <= best.seconds:
        best, cuts, compared = compared, (), best  # by the exact figures it does not pay
    return replace(
        _draft(task, best, cuts),
        devices=tuple(map(plan_device, best.devices if cuts else cluster.devices)),
        reasons=explain_cuts(task, best, compared, cuts, valid_degrees(task)),
        whole=explain_whole(task, found, best) if cuts else (),
        results=find_results(found, cuts),
    )


def _fitting_choice(
    task: Task, degree: int | None, prove: Prove, price: Pricer
) -> tuple[Task, Choice, tuple[Cut, ...]]:
    """Choose and prove, and take the exact figures; what does not fit by those is chosen again with less room.

    How far activations shrink is known only then. First they count whole, then, if nothing fits, as if cut.
    """
    whole_bytes = task.whole_bytes
    for shrinking in (0.0, 0.5, 1.0):
        task = replace(task, whole_bytes=whole_bytes, shrinking=shrinking)
        for _ in range(_TRIES):
            chosen = _proved_choice(task, degree, prove)
            if chosen is None:
                break
            task, best, cuts = chosen
            figures = price(_draft(task, best, cuts))
            if figures.fits:
                by_name = {device.name: device for device in figures.devices}
                peaks = tuple(by_name[d.name].peak_bytes - by_name[d.name].overhead_bytes for d in best.devices)
                seconds, collectives = figures.latency_seconds, figures.collective_seconds
                exact = replace(best, seconds=seconds, collective_seconds=collectives, peak_bytes=peaks)
                return replace(task, whole_bytes=whole_bytes), exact, cuts
            task = replace(task, whole_bytes=task.whole_bytes + max(-device.free_bytes for device in figures.devices))
    raise PlanError(_refusal(replace(task, whole_bytes=whole_bytes, shrinking=0.0), degree))


def _draft(task: Task, best: Choice, cuts: tuple[Cut, ...]) -> Plan:
    return Plan(
        strategy="column-parallel",
        objective=task.wanted,
        workload=task.profile.workload,
        devices=tuple(map(plan_device, best.devices)),
        placements={"": best.devices[0].name},
        fingerprint=task.profile.graph.fingerprint,
        cuts=cuts,
    )


def _check_one_process(profile: Profile) -> None:
    packed = next((op for op in profile.graph.ops if name_of(op) in _READ_BY_TORCH), None)
    if packed is not None:
        raise PlanError(
            f"{where(profile.graph, packed)} packs sequences, whose lengths torch reads from memory itself: it can't "
            "where one process holds all ranks. Start one process per device with torchrun, or place modules "
            '(strategy="balanced").'
        )


def _check_degree(task: Task, degree: int) -> None:
    count = len(task.cluster.devices)
    if not 1 <= degree <= count:
        raise PlanError(f"a model can't be cut over {degree} devices where there are {count}. Ask for 1 to {count}.")
    if degree > 1 and not any(allows(group, degree, task.even) for group in task.groups):
        raise PlanError(no_such_degree(degree, valid_degrees(task), task.even))


def _proved_choice(task: Task, degree: int | None, prove: Prove) -> tuple[Task, Choice, tuple[Cut, ...]] | None:
    """Choose, prove, and choose again without what was refused, until all is proved; None if nothing fits.

    A degree that is asked for is taken also where nothing pays: then as much as possible is cut. Raises `PlanError` if
    nothing can be.
    """
    by_index = {group.index: group for group in task.groups}
    known: dict[tuple[tuple[int, Shares], ...], Sequence[Cut | Refusal]] = {}
    while True:
        best = best_choice(task, degree)
        if best is None:
            return None
        if degree is not None and degree > 1 and not best.picked:
            if task.objective == "memory":
                raise PlanError(no_such_degree(degree, valid_degrees(task), task.even, task.banned.values()))
            task = replace(task, objective="memory")
            continue
        together: dict[tuple[str, ...], list[Option]] = {}
        for option in best.picked:
            together.setdefault(by_index[option.index].blocks, []).append(option)
        outcomes: dict[tuple[int, Shares], Cut | Refusal] = {}
        for number, options in enumerate(together.values()):
            tell("blocks", number, len(together))
            key = tuple((option.index, option.shares) for option in options)
            if key not in known:
                known[key] = prove([by_index[index] for index, _ in key], [shares for _, shares in key])
            outcomes.update(zip(key, known[key], strict=True))
        refused = {key: found.reason for key, found in outcomes.items() if isinstance(found, Refusal)}
        if not refused:
            return task, best, tuple(found for found in outcomes.values() if isinstance(found, Cut))
        task = replace(task, banned={**task.banned, **refused})


def best_choice(task: Task, degree: int | None = None) -> Choice | None:
    """The best set of devices with the best groups for it; between equals the fewest devices. None if none fits."""
    best: Choice | None = None
    for devices in device_sets(task, degree):
        found = choice_on(task, devices) if _may_fit(task, devices) else None
        if found is not None and (best is None or _is_less(found.value(task.objective), best.value(task.objective))):
            best = found
    return best


def _may_fit(task: Task, devices: Sequence[Device]) -> bool:
    """Whether devices have room together for what all of them hold, if all is cut over them that any group cuts.

    Each holds all but that, and of that all together have one copy, however it is divided.
    """
    count = len(devices)
    held = count * held_bytes(task, count) - (count - 1) * task.cuttable_bytes
    return held <= sum(device.budget_bytes for device in devices)


def _is_less(one: tuple[float, float], other: tuple[float, float]) -> bool:
    if one[0] < other[0] * (1 - 1e-9):
        return True
    return one[0] <= other[0] * (1 + 1e-9) and one[1] < other[1] * (1 - 1e-9)


def device_sets(task: Task, degree: int | None = None) -> Iterator[tuple[Device, ...]]:
    """Sets of devices worth a look, the smallest first, in the cluster's order: the fastest, the fastest of one host,
    those with the most memory."""
    devices = task.cluster.devices
    orders = [sorted(devices, key=lambda device: task.whole_seconds[device.name])]
    for host in dict.fromkeys(device.host for device in devices):
        orders.append([device for device in orders[0] if device.host == host])
    orders.append(sorted(devices, key=lambda device: -device.budget_bytes))
    for count in range(1, min(len(devices), MOST_DEGREE) + 1) if degree is None else [degree]:
        seen = set()
        for order in orders:
            chosen = {device.name for device in order[:count]}
            if len(chosen) == count and frozenset(chosen) not in seen:
                seen.add(frozenset(chosen))
                yield tuple(device for device in devices if device.name in chosen)


def choice_on(task: Task, devices: tuple[Device, ...]) -> Choice | None:
    """The best groups for these devices; None if the model does not fit on them whatever is cut.

    Shares follow the devices' speed. Where that does not fit they follow speed within what each device has room for.
    """
    found = [_chosen(task, devices, options_on(task, devices))]
    if found[0] is None or task.objective == "memory":
        options = options_on(task, devices, by_memory=True)
        found.append(_chosen(task, devices, options))
        most = _chosen(replace(task, objective="memory"), devices, options, limited=False)
        assert most is not None
        parts = _room(task, devices, most)
        if parts is not None:
            found.append(_chosen(task, devices, options_on(task, devices, most=parts)))
    fitting = [choice for choice in found if choice is not None]
    return min(fitting, key=lambda choice: choice.value(task.objective), default=None)


def _chosen(task: Task, devices: tuple[Device, ...], options: list[Option], limited: bool = True) -> Choice | None:
    seconds = [task.whole_seconds[device.name] for device in devices]
    whole = held_bytes(task, len(devices))
    budget = [device.budget_bytes if limited else whole for device in devices]
    if task.objective == "memory":  # a few bytes more are not worth a gather
        usual = [option for option in options if option.index not in task.fallback]
    else:
        usual = options
    picked = choose(usual, seconds, whole, budget, task.objective)
    if picked is None:
        picked = choose(options, seconds, whole, budget, task.objective)
    elif len(usual) < len(options):
        taken = {option.index for option in picked}
        left = [o for o in options if o.index in task.fallback and taken.isdisjoint(o.conflicts)]
        picked = choose([*picked, *left], seconds, whole, budget, task.objective)
    if picked is None:
        return None
    rest = max(own - sum(option.whole_seconds[rank] for option in picked) for rank, own in enumerate(seconds))
    collectives = sum(option.collective_seconds for option in picked)
    return Choice(
        devices=devices,
        picked=picked,
        seconds=max(rest, 0.0) + sum(option.share_seconds for option in picked) + collectives,
        collective_seconds=collectives,
        peak_bytes=tuple(whole - sum(option.saved_bytes[rank] for option in picked) for rank in range(len(devices))),
    )


def _room(task: Task, devices: tuple[Device, ...], most: Choice) -> list[float] | None:
    """The part of what is cut that each device has room for, if as much is cut as can be."""
    by_index = {group.index: group for group in task.groups}
    cut = sum(cut_bytes(task, by_index[option.index]) for option in most.picked)
    if not cut:
        return None
    whole = held_bytes(task, len(devices))
    return [(device.budget_bytes - whole + cut) / cut for device in devices]


def valid_degrees(task: Task) -> tuple[int, ...]:
    """Degrees up to `MOST_DEGREE` at which as many bytes can be cut as at any, with as few collectives.

    By sizes: nothing is proved here, and what only single modules can be cut into does not count.
    """
    known: dict[tuple[int, ...], tuple[int, int]] = {}
    found: dict[int, tuple[int, int]] = {}
    for degree in range(2, MOST_DEGREE + 1):
        usual = [group for group in task.groups if group.index not in task.fallback]
        allowed = tuple(group.index for group in usual if allows(group, degree, task.even))
        if allowed not in known:
            cut = _largest(task, allowed)
            known[allowed] = -sum(cut_bytes(task, group) for group in cut), sum(map(_collectives, cut))
        found[degree] = known[allowed]
    best = min(found.values())
    return tuple(degree for degree, value in found.items() if value == best and value[0])


def _collectives(group: AxisGroup) -> int:
    return len(group.blocks) * (group.reductions + group.gathers)


def _best_cut(task: Task) -> Choice | None:
    """The best choice with cuts, though it be slower than one device or not fit: what one device is compared with."""
    best: Choice | None = None
    most = replace(task, objective="memory")
    for count in range(2, min(len(task.cluster.devices), MOST_DEGREE) + 1):
        for devices in device_sets(task, count):
            options = options_on(task, devices)
            for posed in (task, most):
                found = _chosen(posed, devices, options, limited=False)
                if found is not None and found.picked and (best is None or found.seconds < best.seconds):
                    best = found
    return best


def _largest(task: Task, allowed: Sequence[int]) -> list[AxisGroup]:
    """The compatible groups, among those allowed, with the most bytes, and of those the fewest collectives."""
    options = [
        Option(
            index=group.index, shares=(), whole_seconds=(0.0,), share_seconds=0.0, places=0, conflicts=conflicts,
            collective_seconds=_collectives(group), saved_bytes=(cut_bytes(task, group),),
        )
        for group, conflicts in zip(task.groups, task.conflicts, strict=True) if group.index in allowed
    ]  # fmt: skip
    picked = choose(options, [1.0], task.whole_bytes, [task.whole_bytes], "memory") or ()
    chosen = {option.index for option in picked}
    return [group for group in task.groups if group.index in chosen]


def _refusal(task: Task, degree: int | None) -> str:
    """Why nothing fits, with one change that was tried and works."""
    count = len(task.cluster.devices) if degree is None else degree
    closest: Choice | None = None
    for devices in device_sets(task, count):
        found = _chosen(replace(task, objective="memory"), devices, options_on(task, devices, by_memory=True), False)
        if found is not None and (closest is None or found.value("memory") < closest.value("memory")):
            closest = found
    assert closest is not None

    def works(cluster: Cluster, degree: int | None) -> bool:
        posed = make_task(task.profile, cluster, AxisGroups(groups=task.groups, blocked=(), regions=()), task.objective)
        posed = replace(posed, even=task.even, fallback=task.fallback, banned=task.banned)
        return best_choice(posed, degree) is not None

    return lacking_memory(task, closest, degree, works)
