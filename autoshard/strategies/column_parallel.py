"""column_parallel: cut parameters over devices that all work on the same input, where that pays.

    one pass  =  the slowest rank: what is not cut, and its shares of what is  +  all-reduces and gathers of every cut

Groups and degree are chosen together: for every set of devices worth a look the best compatible groups are found
exactly (`cut_choice`), the best set of devices wins, and its cuts are proved. What can't be proved is out, and the
choice is made again. One device without cuts takes part like the others, so a plan is never slower than one device by
its own estimate unless one device can't hold the model, or cuts were asked for.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.axes.walk import where
from autoshard.capture.graph import name_of
from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.engine.pricer import Pricer
from autoshard.errors import PlanError
from autoshard.estimate import Estimate
from autoshard.plan import Plan
from autoshard.plan_cuts import Refusal
from autoshard.profile.profile import Profile
from autoshard.sharding import Cut
from autoshard.strategies.cut_choice import Option, choose
from autoshard.strategies.cut_reasons import explain_cuts, explain_whole, lacking_memory, no_such_degree
from autoshard.strategies.cut_results import find_results
from autoshard.strategies.cut_search import MOST_DEGREE, best_choice, choice_among, device_sets
from autoshard.strategies.cut_task import (
    Choice,
    Shares,
    Task,
    allows,
    assumed_cuts,
    cut_bytes,
    held_bytes,
    make_task,
    names_of,
    options_on,
    seconds_alone,
)

_READ_BY_TORCH = frozenset({"_pack_padded_sequence"})
"""Ops after which torch's own code reads tensors that in one process are several, one per rank."""
_TRIES = 48
"""Most rounds of choosing again because by the exact figures the choice does not fit."""
_FEW_TRIES = 8
"""Most sets of groups that are noted as too few on the same devices."""
Prove = Callable[[Sequence[AxisGroup], Sequence[tuple[int, ...]]], Sequence[Cut | Refusal]]
"""All groups that are to be cut at once, and the shares of each -> for each a checked cut, or why not."""


def column_parallel(
    profile: Profile,
    cluster: Cluster,
    found: AxisGroups,
    prove: Prove,
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
    task = make_task(profile, cluster, found, objective, even, price.tracer)
    if degree is not None:
        _check_degree(task, degree)
    task, best, cuts = _fitting_at_last(task, degree, prove, price)
    compared = _compared(task, cuts)
    slower = cuts and compared is not None and compared.seconds <= best.seconds  # by the exact figures
    if degree is None and objective != "memory" and (slower or not cuts):
        if asked:
            task, best, cuts = _fitting_at_last(replace(task, objective="memory"), None, prove, price)
            compared = _compared(task, cuts)
        elif slower:
            assert compared is not None
            best, cuts, compared = compared, (), best
    return replace(
        _draft(task, best, cuts),
        devices=tuple(map(plan_device, best.devices if cuts else cluster.devices)),
        reasons=explain_cuts(task, best, compared, cuts, valid_degrees(task)),
        whole=explain_whole(task, found, best) if cuts else (),
        results=find_results(found, cuts),
    )


def _compared(task: Task, cuts: tuple[Cut, ...]) -> Choice | None:
    """What a choice is compared with: one device, or if that was chosen, the best cut."""
    return best_choice(task, 1) if cuts else _best_cut(task)


class _NothingFitsError(Exception):
    """Nothing fits of what is allowed by `task`; why takes long to say, and is not always asked for."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task


def _fitting_at_last(
    task: Task, degree: int | None, prove: Prove, price: Pricer
) -> tuple[Task, Choice, tuple[Cut, ...]]:
    """As `_fitting_choice`; if all its tries fail, as much is cut as can be. Raises `PlanError` if that fails, too."""
    if task.objective != "memory":
        with suppress(PlanError, _NothingFitsError):
            return _fitting_choice(task, degree, prove, price)
    try:
        return _fitting_choice(replace(task, objective="memory"), degree, prove, price)
    except _NothingFitsError as nothing:
        raise PlanError(_refusal(nothing.task, degree)) from None


def _fitting_choice(
    task: Task, degree: int | None, prove: Prove, price: Pricer
) -> tuple[Task, Choice, tuple[Cut, ...]]:
    """Choose, take the exact figures, and prove; what does not fit by those, or is not proved, is chosen again.

    How far activations shrink is known only then. First they count as if all of them were cut. Raises
    `_NothingFitsError` if all tries fail, and `PlanError` if nothing can be cut over so many.
    """
    tries = 0
    while tries < _TRIES:
        task, best = _choice(task, degree)
        shared = task.whole_bytes - held_bytes(task, best.devices)  # which it may turn out not to be
        surely = all(
            peak + shared <= device.budget_bytes for peak, device in zip(best.peak_bytes, best.devices, strict=True)
        )
        if not surely and not _assumed(task, best, price).fits:
            task, tries = _outgrown(task, best, price), tries + 1
            continue
        outcomes = _proved(task, best, prove)
        refused = {key: found.reason for key, found in outcomes.items() if isinstance(found, Refusal)}
        if refused:
            task = replace(task, banned={**task.banned, **refused})
            continue
        cuts = tuple(found for found in outcomes.values() if isinstance(found, Cut))
        figures = price(_draft(task, best, cuts))
        if not figures.fits:
            task, tries = _outgrown(task, best, price), tries + 1
            continue
        seconds, collectives = figures.latency_seconds, figures.collective_seconds
        peaks = _peaks(best, figures)
        return task, replace(best, seconds=seconds, collective_seconds=collectives, peak_bytes=peaks), cuts
    raise _NothingFitsError(task)


def _choice(task: Task, degree: int | None) -> tuple[Task, Choice]:
    """The best choice. A degree that is asked for is taken also where nothing pays: then as much as possible is cut.

    Raises `_NothingFitsError` if nothing fits, and `PlanError` if nothing can be cut over so many.
    """
    best = best_choice(task, degree)
    if best is None:
        raise _NothingFitsError(task)
    if degree is None or degree == 1 or best.picked:
        return task, best
    if task.objective == "memory":
        raise PlanError(no_such_degree(degree, valid_degrees(task), task.even, task.banned.values()))
    return _choice(replace(task, objective="memory"), degree)


def _peaks(best: Choice, figures: Estimate) -> tuple[int, ...]:
    """Per rank, bytes of tensors at the peak."""
    by_name = {device.name: device for device in figures.devices}
    return tuple(by_name[d.name].peak_bytes - by_name[d.name].overhead_bytes for d in best.devices)


def _assumed(task: Task, best: Choice, price: Pricer) -> Estimate:
    """The exact figures of a choice if all of it is proved."""
    return price(_draft(task, best, assumed_cuts(task, best.picked)))


def _outgrown(task: Task, best: Choice, price: Pricer) -> Task:
    """Take into account that a choice does not fit by its exact figures.

    What devices hold beside parameters is least if as much is cut as can be: that is looked at first, and counts from
    then on. Then it is noted that what was picked is not enough, and after some tries that all is larger there.
    """
    names = names_of(best.devices)
    known = task.too_few.get(names, ())
    if best.picked and names not in task.held:
        most = choice_among(
            replace(task, objective="memory"), best.devices, options_on(task, best.devices), limited=False
        )
        assert most is not None
        return replace(task, held={**task.held, names: _held(task, most, price)})
    if best.picked and len(known) < _FEW_TRIES:
        picked = frozenset((option.index, option.shares) for option in best.picked)
        return replace(task, too_few={**task.too_few, names: (*known, picked)})
    more = max(_held(task, best, price), held_bytes(task, best.devices) + 1)
    return replace(task, held={**task.held, names: more})


def _held(task: Task, choice: Choice, price: Pricer) -> int:
    """What each of the devices would hold if no parameter were cut, as it seems if these are."""
    peaks = _peaks(choice, _assumed(task, choice, price))
    more = max(peak - counted for peak, counted in zip(peaks, choice.peak_bytes, strict=True))
    return held_bytes(task, choice.devices) + more


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


def _proved(task: Task, best: Choice, prove: Prove) -> dict[tuple[int, Shares], Cut | Refusal]:
    """What holds of a choice; block by block, as plans list it."""
    by_index = task.by_index
    together: dict[tuple[str, ...], list[Option]] = {}
    for option in best.picked:
        together.setdefault(by_index[option.index].blocks, []).append(option)
    keys = [(option.index, option.shares) for options in together.values() for option in options]
    return dict(zip(keys, prove([by_index[i] for i, _ in keys], [shares for _, shares in keys]), strict=True))


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
                found = choice_among(posed, devices, options, limited=False)
                if found is not None and found.picked and (best is None or found.seconds < best.seconds):
                    best = found
    return best


def _largest(task: Task, allowed: Sequence[int]) -> list[AxisGroup]:
    """The compatible groups, among those allowed, with the most bytes, and of those the fewest collectives."""
    options = [
        Option(
            index=group.index, shares=(), saved_seconds=(0.0,), saved_bytes=(cut_bytes(task, group),), places=0,
            conflicts=conflicts, collective_seconds=_collectives(group),
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
    most = replace(task, objective="memory")
    for devices in device_sets(task, count):
        found = choice_among(most, devices, options_on(task, devices, by_memory=True), limited=False)
        if found is not None and (closest is None or found.value("memory") < closest.value("memory")):
            closest = found
    assert closest is not None

    def works(cluster: Cluster, degree: int | None) -> bool:
        posed = replace(task, cluster=cluster, whole_seconds=seconds_alone(task.profile, cluster))
        return best_choice(posed, degree) is not None

    return lacking_memory(task, closest, degree, works)
