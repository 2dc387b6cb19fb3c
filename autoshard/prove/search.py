"""Find the integers that code has for the size of a cut axis: what must be smaller on a rank.

A rank runs the module's own Python, which may hold sizes in attributes (`self.heads`, `groups`, a field of a config).
The run on local shapes is followed; where a result first has another shape than it should, the attributes nearby that
hold a product of the factors there are tried, and what lets the run get further is kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.axes.axis import Axis, Leaf
from autoshard.module_paths import is_below
from autoshard.prove.expected import Expected, Key, Number, numbers_in
from autoshard.prove.trial import Outcome

Scales = dict[tuple[str, str], Number]
"""(module path, attribute) -> what it holds"""
MOST_TRIALS = 60
"""Runs after which a search gives up."""


class NotFound(Exception):
    """No attribute explains what a run on local shapes stumbles over; the message says where that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a search is about: a block, what it should give, and a way to run it with some scales.

    `near` are, for every function, the axes with the leaf in its arguments and results.
    """

    block: nn.Module
    leaf: Leaf
    expected: dict[Key, list[Expected]]
    near: dict[Key, list[Axis]]


def find_scales(question: Question, run: Callable[[Scales], Outcome], known: Scales) -> Scales:
    """Search the attributes to scale, with some known already; `run` runs the first rank. Raises `NotFound`."""
    scales = dict(known)
    outcome = run(scales)
    trials = 1
    while outcome.failed is not None:
        for more in _candidates(question, outcome.failed, scales):
            trials += 1
            tried = run({**scales, **more})
            if tried.failed is None or tried.reached > outcome.reached:
                scales, outcome = {**scales, **more}, tried
                break
            if trials > MOST_TRIALS:
                raise NotFound(_where(outcome, "too many attributes might be meant"))
        else:
            raise NotFound(_where(outcome, "no attribute nearby holds that size"))
    return {**known, **_needed({key: n for key, n in scales.items() if key not in known}, known, run)}


def _needed(scales: Scales, known: Scales, run: Callable[[Scales], Outcome]) -> Scales:
    """Leave out what the run does not need."""
    for name in list(scales):
        fewer = {key: number for key, number in scales.items() if key != name}
        if run({**known, **fewer}).failed is None:
            scales = fewer
    return scales


def _where(outcome: Outcome, why: str) -> str:
    assert outcome.failed is not None
    path, _, function, _ = outcome.failed
    return f"{function or 'the call'} in {path or 'the block'}: {outcome.message}; {why}"


def _candidates(question: Question, failed: Key, known: Scales) -> Iterator[Scales]:
    """Sets of attributes to try, nearest modules first: all of one module together, then each alone."""
    numbers: dict[int, list[Number]] = {}
    for axis in question.near.get(failed, ()):
        for number in numbers_in(axis, question.leaf):
            if number not in numbers.setdefault(number.whole, []):
                numbers[number.whole].append(number)
    everywhere: Scales = {}
    for path, module in _by_distance(question.block, failed[0]):
        matching = {
            (path, attribute): numbers[value]
            for attribute, value in integers_of(module)
            if value in numbers and (path, attribute) not in known
        }
        if not matching:
            continue
        together = {key: options[0] for key, options in matching.items()}
        yield together
        everywhere = {**together, **everywhere}
        for key, options in matching.items():
            for number in options:
                if len(matching) > 1 or number is not options[0]:
                    yield {key: number}
    yield everywhere


def _by_distance(block: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Modules of a block: the one at `path`, those around it from the inside, those in it, then all others."""
    modules = dict(block.named_modules())

    def distance(other: str) -> tuple[int, int]:
        if is_below(path, other):
            return 0, len(path) - len(other)
        return (1 if is_below(other, path) else 2), len(other)

    return sorted(modules.items(), key=lambda item: distance(item[0]))


def integers_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    """(attribute, value) of the integers a module holds: itself, in tuples and lists, in objects such as a config."""
    for name, value in vars(module).items():
        if name.startswith("_") or isinstance(value, (torch.Tensor, nn.Module)):
            continue
        yield from _integers(name, value, 1)


def _integers(name: str, value: Any, depth: int) -> Iterator[tuple[str, int]]:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int):
        yield name, value
    elif isinstance(value, (tuple, list)) and depth:
        for index, item in enumerate(value[:16]):
            yield from _integers(f"{name}.{index}", item, 0)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        for inner, item in vars(value).items():
            if not inner.startswith("_"):
                yield from _integers(f"{name}.{inner}", item, 0)
