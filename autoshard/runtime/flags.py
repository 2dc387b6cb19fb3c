"""The flags of a model: attributes of its modules, or of their classes, that are True or False.

    Block.causal=True         in all modules of this class
    Block.gated=1011…         one digit for each of them, in order; many are a hash of the digits

What ops do together was looked at with the flags as they were: one that is set later may bring a mean of the batch.
"""

import hashlib
from collections.abc import Iterable
from functools import cache

from torch import nn

_LONGEST = 32
"""So many digits are written out."""


def flags_of(model: nn.Module) -> tuple[str, ...]:
    """All flags with their values, but for names that begin with "_", and for modes: those are looked at elsewhere."""
    found: dict[tuple[str, str], list[bool]] = {}
    for module in model.modules():
        own = vars(module)
        names = _of_classes(type(module).__mro__) | {name for name, value in own.items() if _is_flag(name, value)}
        for name in names:
            found.setdefault((type(module).__name__, name), []).append(getattr(module, name) is True)
    return tuple(sorted(f"{kind}.{name}={_written(values)}" for (kind, name), values in found.items()))


def changed_flag(planned: Iterable[str], model: nn.Module) -> str:
    """Say which of the planned flags is another now, "" if none is. Others, which nobody read then, don't count."""
    wanted: dict[str, dict[str, str]] = {}
    for flag in planned:
        place, _, value = flag.rpartition("=")
        kind, _, name = place.rpartition(".")
        wanted.setdefault(kind, {})[name] = value
    found: dict[tuple[str, str], list[bool]] = {}
    for module in model.modules() if wanted else ():
        kind = type(module).__name__
        for name in wanted.get(kind, ()):
            found.setdefault((kind, name), []).append(getattr(module, name, None) is True)
    for (kind, name), values in found.items():
        now, then = _written(values), wanted[kind][name]
        if now != then:
            return f"{name} of {kind} is {now}, and was {then} when the plan was made"
    return ""


@cache
def _of_classes(bases: tuple[type, ...]) -> frozenset[str]:
    bases = tuple(base for base in bases if base not in (nn.Module, object))
    return frozenset(name for base in bases for name, value in vars(base).items() if _is_flag(name, value))


def _is_flag(name: str, value: object) -> bool:
    return type(value) is bool and name != "training" and not name.startswith("_")


def _written(values: list[bool]) -> str:
    if len(set(values)) == 1:
        return str(values[0])
    digits = "".join("01"[value] for value in values)
    return digits if len(digits) <= _LONGEST else hashlib.sha256(digits.encode()).hexdigest()[:16]
