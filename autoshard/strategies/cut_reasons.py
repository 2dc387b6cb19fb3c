"""Why a model is cut as it is, or not: sentences for people, and what stays whole."""

from collections.abc import Iterable, Sequence

from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.common.module_paths import above, join, relative
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.timing import op_seconds
from autoshard.plan.sharding import Cut, Whole, count_collectives
from autoshard.strategies.cut_task import Choice, CutTask, allows, full_names

_NOT_FOLLOWED = {True: "no dimension of it can be followed", False: "nothing in the recorded run uses it"}


def explain_cuts(task: CutTask, best: Choice, compared: Choice | None, cuts: Sequence[Cut]) -> tuple[str, ...]:
    """Say what the plan costs against one device, or what the best cut would, and how much is cut.

    `compared`: one device, where there are cuts, None if it can't hold the model; else the best cut, None if there is
    none.
    """
    if not cuts:
        return (_one_device(task, best, compared),)
    count = len(best.devices)
    reduces, gathers = collectives(cuts)
    shared = " and ".join(
        f"{number} {name}{'s' if number > 1 else ''}"
        for number, name in ((reduces, "all-reduce"), (gathers, "all-gather"))
        if number
    )
    cost = f"{format_seconds(best.seconds)} per {_timed(best)} over {count} devices"
    if shared:
        cost += f", of which {format_seconds(best.estimate.collective_seconds)} in {shared} of a forward"
    reasons = [f"{cost}; {_against_one(task, best, compared)}"]
    uneven = sum(len(set(cut.shares)) > 1 for cut in cuts)
    if uneven:
        what = "one cut is" if uneven == 1 else f"{uneven} cuts are"
        reasons.append(f"{what} uneven: the slices don't divide")
    return tuple(reasons)


def _timed(choice: Choice) -> str:
    return "answer" if choice.estimate.prompt_seconds else "pass"


def collectives(cuts: Iterable[Cut]) -> tuple[int, int]:
    """All-reduces and all-gathers of one forward in which every place of every cut is passed once."""
    return count_collectives(action for cut in cuts for action in cut.actions for _ in cut.blocks)


def _against_one(task: CutTask, best: Choice, alone: Choice | None) -> str:
    if alone is None:
        seconds = min(float(op_seconds(task.profile, device).sum()) for device in task.cluster.devices)
        need = format_bytes(task.profile.peak_bytes)
        if best.seconds > seconds:
            return f"one device would be faster, and none has room for the {need} of the model"
        return f"no device alone has room for the {need} of the model"
    one = f"{format_seconds(alone.seconds)} on {alone.devices[0].name} alone"
    if best.seconds > alone.seconds:
        why = "less memory" if task.objective == "memory" else "to cut it"
        return f"that is slower than {one}, but {why} was asked for"
    return f"{alone.seconds / best.seconds:.2f} times as fast as {one}"


def _one_device(task: CutTask, best: Choice, cut: Choice | None) -> str:
    name = best.devices[0].name
    if len(task.cluster.devices) == 1:
        return f"everything is on {name}, the only device of the process"
    if cut is None:
        why = f"; {next(iter(task.banned.values()))}" if task.banned else ""
        return f"everything is on {name}: nothing in the model can be cut over the other devices{why}"
    collective = (
        f", {format_seconds(cut.estimate.collective_seconds)} of them in collectives"
        if cut.estimate.collective_seconds
        else ""
    )
    return (
        f"one device is best: {name} takes {format_seconds(best.seconds)} per {_timed(best)}, and cut over "
        f"{len(cut.devices)} devices it would take {format_seconds(cut.seconds)}{collective}"
    )


def runs(numbers: Sequence[int]) -> str:
    """2, 3, 4, 8 -> "2 to 4, 8"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in found)


def no_such_degree(degree: int, degrees: Sequence[int], even: bool, why: Iterable[str] = ()) -> str:
    """Say that nothing can be cut over so many devices, and over how many it can."""
    reason = next(iter(why), "")
    equal = " into equal parts" if even else ""
    said = f"nothing in this model can be cut{equal} over {degree} devices{': ' + reason if reason else ''}. "
    others = [other for other in degrees if other != degree]
    if others:
        return said + f"Degrees that its sizes allow: {runs(others)}."
    return said + 'Use strategy="balanced", which places whole modules.'


def lacking_memory(closest: Choice, remedy: str) -> str:
    """Say which device lacks how much though all is cut that can be, and what may help."""
    pairs = list(zip(closest.peaks, closest.devices, strict=True))
    need, device = max(pairs, key=lambda pair: pair[0] - pair[1].budget_bytes)
    row = next(row for row in closest.estimate.devices if row.name == device.name)
    parts = [(size, name) for name, size in row.parts.items() if size and name != "overhead"]
    named = ", ".join(f"{name} {format_bytes(size)}" for size, name in sorted(parts, reverse=True))
    lack = f", {format_bytes(closest.lacking_bytes)} too little" if closest.lacking_bytes > 0 else ""
    return (
        f"the model does not fit: cut as far as it can be, {device.name} needs {format_bytes(need)} and has "
        f"{format_bytes(device.budget_bytes)} for tensors{lack} (there: {named}). {remedy}"
    )


def explain_whole(task: CutTask, found: AxisGroups, best: Choice) -> tuple[Whole, ...]:
    """List the matrices that are on every rank whole, with the reason, once for all blocks that are alike."""
    degree = len(best.devices)
    against = frozenset(index for group in best.groups for index in task.conflicts[group.index])
    cut = {name for group in best.groups for name in full_names(group)}
    storages = {tensor.storage for tensor in task.profile.graph.tensors if tensor.name in cut}
    owner = {path: region.paths for region in found.regions for path in region.paths}
    unshardable: dict[str, str] = {}
    for row in found.unshardable:
        unshardable.setdefault(row.name, row.reason)
    offers: dict[str, list[AxisGroup]] = {}
    for group in task.groups:
        for name in full_names(group):
            offers.setdefault(name, []).append(group)
    read = {value for op in task.profile.graph.ops for value in op.inputs}
    rows: dict[tuple[tuple[str, ...], str], dict[str, None]] = {}
    for tensor in task.profile.graph.tensors:
        if tensor.kind != "parameter" or len(tensor.shape) < 2 or tensor.storage in storages:
            continue
        path = next((one for one in above(tensor.name) if one in owner), "")
        blocks = owner.get(path, ("",))
        inside = relative(tensor.name, path)
        first = join(blocks[0], inside)
        reason = _why_whole(task, offers.get(tensor.name, []), against, degree)
        reason = reason or unshardable.get(first) or unshardable.get(tensor.name) or _NOT_FOLLOWED[tensor.value in read]
        rows.setdefault((blocks, reason), {})[inside] = None
    return tuple(Whole(blocks=blocks, names=tuple(names), reason=reason) for (blocks, reason), names in rows.items())


def _why_whole(task: CutTask, offers: Sequence[AxisGroup], against: frozenset[int], degree: int) -> str:
    """Why groups that would cut a parameter were not taken; `against`: those that what was taken excludes."""
    if not offers:
        return ""
    indices = {group.index for group in offers}
    for (index, ranks), reason in task.banned.items():
        if index in indices and ranks == degree:
            return reason
    possible = [group for group in offers if allows(group, degree, task.even)]
    if not possible:
        size = max(group.size for group in offers)
        return f"{size} slices can't be shared by {degree} devices"
    if any(group.index in against for group in possible):
        return "what is cut instead, in the same tensors, saves more"
    return "its all-reduces and gathers would take longer than they save"
