"""Set the integers that are smaller on a rank, and put the old ones back.

Objects on the way of a dotted attribute are copied for the module: a config that is shared stays as it is for others.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from autoshard.common.module_paths import join
from autoshard.errors import PlanError
from autoshard.plan.sharding import Cut, Scale

Old = tuple[str, str, Any, bool]
"""(module path, attribute, value it had, whether it was the module's own, not its class's)."""


def find_scales(model: nn.Module, cuts: Sequence[Cut]) -> list[tuple[str, Scale]]:
    """(full module path, scale) of all blocks. Raises `PlanError` where the model has something else than the plan."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[tuple[str, str], tuple[str, Scale]] = {}
    for cut in cuts:
        for block in cut.blocks:
            for scale in cut.scales:
                path = join(block, scale.module)
                if path not in modules:
                    raise PlanError(f"the plan sets {scale.attribute} of {path!r}, which this model does not have.")
                value = _read(modules[path], scale.attribute)
                if isinstance(value, bool) or not isinstance(value, int) or value != scale.value:
                    raise PlanError(
                        f"the plan expects {scale.attribute} = {scale.value} in {path!r} and finds {value!r}. The plan "
                        "was made for another model; make a new one."
                    )
                known = found.setdefault((path, scale.attribute), (path, scale))[1]
                if known.local != scale.local:
                    raise PlanError(f"the plan sets {scale.attribute} of {path!r} in two ways. Make it again.")
    return list(found.values())


def set_scales(model: nn.Module, scales: Sequence[tuple[str, Scale]], rank: int, log: list[Old]) -> None:
    """Give every attribute the value of a rank; `log` takes what `restore` needs."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, scale in scales:
        module = modules[path]
        first, *rest = scale.attribute.split(".")
        old: Old = path, first, getattr(module, first), first in vars(module)
        setattr(module, first, _replaced(old[2], rest, scale.local[rank]))
        log.append(old)
        if _read(module, scale.attribute) != scale.local[rank]:
            raise PlanError(f"{scale.attribute} of {path!r} can't be set. Plan with this module whole.")


def restore(model: nn.Module, log: list[Old]) -> None:
    """Put back what `set_scales` replaced."""
    modules = dict(model.named_modules(remove_duplicate=False))
    while log:
        path, name, value, own = log.pop()
        if not own:  # it was an attribute of the class
            modules[path].__dict__.pop(name, None)
        if own or getattr(modules[path], name) is not value:
            setattr(modules[path], name, value)


@contextmanager
def unscaled(model: nn.Module, log: Sequence[Old]) -> Iterator[None]:
    """Inside, every attribute that was set has the value it had before: what is saved is the whole model's."""
    modules = dict(model.named_modules(remove_duplicate=False))
    before = {(path, name): value for path, name, value, _ in reversed(log)}  # of an attribute set twice, the first
    now = {(path, name): getattr(modules[path], name) for path, name in before}
    for (path, name), value in before.items():
        setattr(modules[path], name, value)
    try:
        yield
    finally:
        for (path, name), value in now.items():
            setattr(modules[path], name, value)


def _read(owner: Any, attribute: str) -> Any:
    for part in attribute.split("."):
        if isinstance(owner, (tuple, list)) and part.isdecimal() and int(part) < len(owner):
            owner = owner[int(part)]
        elif isinstance(owner, dict) and part in owner:
            owner = owner[part]
        else:
            owner = getattr(owner, part, None)
    return owner


def _replaced(owner: Any, parts: list[str], value: int) -> Any:
    """A copy of an object in which an attribute, or an item, some way down has another value."""
    if not parts:
        return value
    first, *rest = parts
    if isinstance(owner, (tuple, list)):
        items = [_replaced(item, rest, value) if str(at) == first else item for at, item in enumerate(owner)]
        return type(owner)(*items) if hasattr(owner, "_fields") else type(owner)(items)
    made = copy.copy(owner)
    if isinstance(owner, dict):
        made[first] = _replaced(owner[first], rest, value)
    else:
        setattr(made, first, _replaced(getattr(owner, first), rest, value))
    return made
