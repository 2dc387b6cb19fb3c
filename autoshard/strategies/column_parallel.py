"""column_parallel: cut parameters over devices that all work on the same input, where that pays.

    one pass  =  the slowest rank: what is not cut, and its shares of what is  +  all-reduces and gathers of every cut

For every set of devices worth a look as much is cut as can be, in parts that are as even as slices allow. What makes a
pass longer is then left whole, one group after the other, as long as the rest fits. The engine prices each of these;
the best is checked on the model. What is refused there is out, and it is chosen again. One device without cuts takes
part like the others, so a plan is never slower than one device by its own estimate unless one device can't hold the
model, or cuts were asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.axes.walk import where
from autoshard.capture.graph import name_of
from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.cluster.device import Device
from autoshard.common.module_paths import join
from autoshard.common.sizes import format_bytes
from autoshard.engine.pricer import Pricer
from autoshard.engine.timing import op_seconds
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.sharding import Cut, Refusal, even_shares
from autoshard.profile.profile import Profile
from autoshard.strategies.cut_reasons import explain_cuts, explain_whole, lacking_memory, no_such_degree
from autoshard.strategies.cut_results import find_results
from autoshard.strategies.cut_task import Choice, CutTask, allows, full_names
from autoshard.strategies.refusal import round_up, with_copies

_READ_BY_TORCH = frozenset({"_pack_padded_sequence"})
"""Ops after which torch's own code reads tensors that in one process are several, one per rank."""
MOST_DEGREE = 64
"""Degrees above are not listed as valid; more devices than this are not used."""
_FEW = 8
"""Devices up to which every number of them is tried; of more, powers of two and all."""
_PAYS = 0.99
"""Part of one device's seconds that cuts must come down to: less is lost in what the estimate can't follow."""
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
    blocks = {region.paths for region in found.regions}
    task = CutTask(
        profile=profile, cluster=cluster, groups=found.groups, conflicts=_conflicts(found.groups), objective=objective,
        even=even, price=price or Pricer(profile, cluster),
        fallback=frozenset(group.index for group in found.groups if blocks and group.blocks not in blocks),
    )  # fmt: skip
    if degree is not None:
        _check_degree(task, degree)
    single = _alone(task)
    alone = single if degree in (None, 1) else None
    best, cuts = _checked(task, check, degree, single, wanted=asked or alone is None)
    if best is None and alone is None:
        raise PlanError(_refusal(task, degree))
    beside = single
    if alone is not None and (best is None or (not asked and alone.value(objective) <= best.value(objective))):
        best, beside, cuts = alone, best or _best(task, None, "memory", limited=False), ()
    assert best is not None
    return replace(
        task.draft(best.devices, cuts),
        devices=tuple(map(plan_device, best.devices if cuts else cluster.devices)),
        reasons=explain_cuts(task, best, beside, cuts),
        whole=explain_whole(task, found, best) if cuts else (),
        results=find_results(found, cuts),
    )


def _checked(
    task: CutTask, check: CheckCuts, degree: int | None, alone: Choice | None, *, wanted: bool
) -> tuple[Choice | None, tuple[Cut, ...]]:  # fmt: skip
    """The best choice with cuts, checked; None if none fits. What is refused is banned, and it is chosen again.

    `alone`: one device, where it has room. `wanted`: where cuts don't pay, as much is cut as can be.
    """
    objective = task.objective
    while degree != 1:
        best = _best(task, degree, objective)
        if objective != "memory" and (best is None or (alone is not None and best.seconds > _PAYS * alone.seconds)):
            if not wanted:
                return None, ()
            objective = "memory"  # nothing pays: as much is cut as can be
            continue
        if best is None:
            if degree is not None and _best(task, degree, "memory", limited=False) is None:
                raise PlanError(no_such_degree(degree, valid_degrees(task), task.even, task.banned.values()))
            break
        count = len(best.devices)
        together: dict[tuple[str, ...], list[AxisGroup]] = {}  # block by block, as plans list it
        for group in sorted(best.groups, key=lambda group: group.index):
            together.setdefault(group.blocks, []).append(group)
        groups = [group for some in together.values() for group in some]
        outcomes = check(groups, [even_shares(group.size, count) for group in groups])
        refused = {(group.index, count): made.reason for group, made in zip(groups, outcomes, strict=True)
                   if isinstance(made, Refusal)}  # fmt: skip
        if not refused:
            cuts = tuple(made for made in outcomes if isinstance(made, Cut))
            return task.with_cuts(best, cuts), cuts
        task.banned.update(refused)
    return None, ()


def _best(task: CutTask, degree: int | None, objective: str, *, limited: bool = True) -> Choice | None:
    """The best set of devices with what is cut over it; None if nothing can be, or pays. `limited`: by memory."""
    best: Choice | None = None
    for devices in _device_sets(task, degree):
        groups = task.most(len(devices))
        found = task.priced(devices, groups) if groups else None
        if found is None or (limited and found.lacking_bytes > 0):
            continue
        if objective != "memory":
            found = _that_pays(task, found)
        if found.groups and (best is None or found.value(objective) < best.value(objective)):
            best = found
    return best


def _that_pays(task: CutTask, found: Choice) -> Choice:
    """Leave whole what makes a pass longer, what costs most first, as long as the rest fits."""

    def without(group: AxisGroup) -> Choice:
        return task.priced(found.devices, [one for one in found.groups if one is not group])

    for group in sorted(found.groups, key=lambda group: without(group).seconds):
        fewer = without(group)
        if fewer.seconds < found.seconds and fewer.lacking_bytes <= 0:
            found = fewer
    return found


def _device_sets(task: CutTask, degree: int | None) -> Iterator[tuple[Device, ...]]:
    """Sets of devices worth a look, in the cluster's order: the fastest, the fastest of one host, the largest."""
    devices = task.cluster.devices
    orders = [sorted(devices, key=lambda device: op_seconds(task.profile, device).sum())]
    orders += [[one for one in orders[0] if one.host == host] for host in dict.fromkeys(one.host for one in devices)]
    orders.append(sorted(devices, key=lambda device: -device.budget_bytes))
    most = min(len(devices), MOST_DEGREE)
    numbers = [n for n in range(2, most + 1) if most <= _FEW or n & (n - 1) == 0 or n == most]
    for count in numbers if degree is None else [degree]:
        sets = dict.fromkeys(frozenset(one.name for one in order[:count]) for order in orders if len(order) >= count)
        for names in sets:
            yield tuple(device for device in devices if device.name in names)


def _alone(task: CutTask) -> Choice | None:
    """The fastest device that holds the whole model; None if none does."""
    devices = {(one.speed, one.budget_bytes): one for one in reversed(task.cluster.devices)}.values()
    found = [one for one in (task.priced((device,), ()) for device in devices) if one.estimate.fits]
    return min(reversed(found), key=lambda one: one.value(task.objective), default=None)


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


def _conflicts(groups: Sequence[AxisGroup]) -> dict[int, frozenset[int]]:
    """The groups' own conflicts, and those with groups of other analyses that cut what they cut, or use whole."""
    cutters: dict[str, set[int]] = {}
    for group in groups:
        for name in full_names(group):
            cutters.setdefault(name, set()).add(group.index)
    found = {group.index: set(group.conflicts) for group in groups}
    for group in groups:
        whole = [join(block, name) for block in group.blocks for name in group.summed]
        for other in set().union(*(cutters.get(name, ()) for name in (*full_names(group), *whole))) - {group.index}:
            found[group.index].add(other)
            found[other].add(group.index)
    return {index: frozenset(others) for index, others in found.items()}


def _refusal(task: CutTask, degree: int | None) -> str:
    """Why nothing fits, with one change that was tried and works."""
    count = len(task.cluster.devices)

    def fits(larger: Cluster, degree: int | None) -> bool:
        other = replace(task, cluster=larger, price=Pricer(task.profile, larger))
        return _best(other, degree, "memory") is not None

    closest = _best(task, degree or count, "memory", limited=False) or task.priced(task.cluster.devices[:1], ())
    first = task.cluster.names.index(closest.devices[0].name)
    for more in (1, 2, 4, 8, 16) if degree is None else ():
        if fits(with_copies(task.cluster, first, more), count + more):
            many = "one more device" if more == 1 else f"{more} more devices"
            return lacking_memory(closest, f"It was checked that it fits with {many} like {closest.devices[0].name}.")
    for factor in (1.01, 1.5):
        extra = round_up(max(closest.lacking_bytes, 1) * factor)
        more_memory = {one.name: one.memory_bytes + extra for one in task.cluster.devices}
        if fits(task.cluster.with_memory(more_memory), degree):
            said = f"It was checked that it fits if every device has {format_bytes(extra)} more."
            return lacking_memory(closest, said)
    return lacking_memory(
        closest, 'Take larger devices, or use strategy="balanced", which keeps each module on one device only.'
    )
