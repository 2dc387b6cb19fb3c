"""Search the devices to cut over: for every set of them worth a look the best groups, and of the sets the best."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from autoshard.cluster.cluster import Device
from autoshard.strategies.cut_choice import Option, choose
from autoshard.strategies.cut_task import Choice, Task, cut_bytes, held_bytes, names_of, options_on

MOST_DEGREE = 64
"""Degrees above are not listed as valid; more devices than this are not used."""


def best_choice(task: Task, degree: int | None = None) -> Choice | None:
    """The best set of devices with the best groups for it; between equals the fewest devices. None if none fits."""
    best: Choice | None = None
    for devices in device_sets(task, degree):
        found = choice_on(task, devices) if _may_fit(task, devices) else None
        if found is not None and (best is None or _is_less(found.value(task.objective), best.value(task.objective))):
            best = found
    return best


def _may_fit(task: Task, devices: tuple[Device, ...]) -> bool:
    """Whether devices have room together for what all of them hold, if all is cut over them that any group cuts.

    Each holds all but that, and of that all together have one copy, however it is divided.
    """
    count = len(devices)
    held = count * held_bytes(task, devices) - (count - 1) * task.cuttable_bytes
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
    found = [choice_among(task, devices, options_on(task, devices))]
    if found[0] is None or task.objective == "memory" or names_of(devices) in task.held:
        options = options_on(task, devices, by_memory=True)
        found.append(choice_among(task, devices, options))
        most = choice_among(replace(task, objective="memory"), devices, options, limited=False)
        assert most is not None
        parts = _room(task, devices, most)
        if parts is not None:
            found.append(choice_among(task, devices, options_on(task, devices, most=parts)))
    fitting = [choice for choice in found if choice is not None]
    return min(fitting, key=lambda choice: choice.value(task.objective), default=None)


def choice_among(task: Task, devices: tuple[Device, ...], options: list[Option], limited: bool = True) -> Choice | None:
    """The best of these options; None if the model does not fit. `limited`: by the devices' memory."""
    seconds = [task.whole_seconds[device.name] for device in devices]
    whole = held_bytes(task, devices)
    budget = [device.budget_bytes if limited else whole for device in devices]
    if task.objective == "memory":  # a few bytes more are not worth a gather
        usual = [option for option in options if option.index not in task.fallback]
    else:
        usual = options
    too_few = task.too_few.get(names_of(devices), ()) if limited else ()
    pick = partial(
        choose, whole_seconds=seconds, whole_bytes=whole, budget_bytes=budget, objective=task.objective, too_few=too_few
    )
    picked = pick(usual)
    if picked is None:
        picked = pick(options)
    elif len(usual) < len(options):
        taken = {option.index for option in picked}
        left = [o for o in options if o.index in task.fallback and taken.isdisjoint(o.conflicts)]
        picked = pick([*picked, *left])
    if picked is None:
        return None
    slowest = max(own - sum(option.saved_seconds[rank] for option in picked) for rank, own in enumerate(seconds))
    collectives = sum(option.collective_seconds for option in picked)
    return Choice(
        devices=devices,
        picked=picked,
        seconds=slowest + collectives,
        collective_seconds=collectives,
        peak_bytes=tuple(whole - sum(option.saved_bytes[rank] for option in picked) for rank in range(len(devices))),
    )


def _room(task: Task, devices: tuple[Device, ...], most: Choice) -> list[float] | None:
    """The part of what is cut that each device has room for, if as much is cut as can be."""
    groups = task.by_index
    cut = sum(cut_bytes(task, groups[option.index]) for option in most.picked)
    if not cut:
        return None
    whole = held_bytes(task, devices)
    return [(device.budget_bytes - whole + cut) / cut for device in devices]
