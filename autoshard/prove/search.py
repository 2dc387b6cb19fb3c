"""Find the integers that code has for the size of a cut axis: what must be smaller on a rank.

A rank runs the module's own Python, which may hold sizes in attributes (`self.heads`, `groups`, a field of a config).
The run on local shapes is followed; where a result first has another shape than it should, the attributes nearby that
hold a product of the factors there are tried, and what lets the run get further is kept. Code may as well read a size
from a whole tensor (`y.view(*x.shape)`): then it is a length among the arguments of the function that stumbles.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from autoshard.axes.axis import Axis, Leaf, describe
from autoshard.module_paths import is_below
from autoshard.prove.expected import Expected, Key, Number, numbers_in
from autoshard.prove.trial import Outcome
from autoshard.sharding import Action


class Length(NamedTuple):
    """An integer among the arguments of a function that a module calls: how long an axis is, as text.

    `dim`: how many sizes the function was given with it, where it is one of them and the occurrence -1.
    """

    module: str
    function: str
    occurrence: int
    argument: str
    axis: str
    dim: int

    @property
    def action(self) -> Action:
        """What makes it as long as the axis is on a rank."""
        return Action(kind="length", **self._asdict())


Scales = dict[tuple[str, str] | Length, Number]
"""(module path, attribute), or a length -> what it holds"""
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
        for more in _candidates(question, outcome, scales):
            trials += 1
            tried = run({**scales, **more})
            if _further(tried, outcome.reached):
                scales, outcome = {**scales, **more}, tried
                break
            if trials > MOST_TRIALS:
                raise NotFound(_where(outcome, "too many attributes might be meant"))
        else:
            fewer = _needed(scales, known, run, outcome.reached - 1)
            if len(fewer) == len(scales):
                raise NotFound(_where(outcome, "no attribute nearby holds that size"))
            scales, outcome = _with_lengths(question, fewer, run, outcome)
    return _needed(scales, known, run)


def _further(outcome: Outcome, reached: int | None) -> bool:
    """Whether a run went on after so many functions; None: whether it went to its end."""
    return outcome.failed is None or (reached is not None and outcome.reached > reached)


def _needed(scales: Scales, known: Scales, run: Callable[[Scales], Outcome], reached: int | None = None) -> Scales:
    """Leave out what the run does not need to get further than `reached` functions, or to its end."""
    for name in [name for name in scales if name not in known]:
        fewer = {key: number for key, number in scales.items() if key != name}
        if _further(run(fewer), reached):
            scales = fewer
    return scales


def _with_lengths(
    question: Question, scales: Scales, run: Callable[[Scales], Outcome], before: Outcome
) -> tuple[Scales, Outcome]:
    """Get further than before by lengths alone: attributes that were taken too soon are left out of `scales`.

    One that holds the same number for something else may have been all that was wrong.
    """
    outcome = run(scales)
    if _further(outcome, before.reached):
        return scales, outcome
    for more in _lengths(question, outcome):
        tried = run({**scales, **more})
        if _further(tried, before.reached):
            return {**scales, **more}, tried
    raise NotFound(_where(before, "no attribute nearby holds that size"))


def _where(outcome: Outcome, why: str) -> str:
    assert outcome.failed is not None
    path, _, function, _ = outcome.failed
    return f"{function or 'the call'} in {path or 'the block'}: {outcome.message}; {why}"


def _candidates(question: Question, outcome: Outcome, known: Scales) -> Iterator[Scales]:
    """Sets of integers to try. Attributes come first, unless the same module has a length already: it reads sizes."""
    assert outcome.failed is not None
    reads = any(isinstance(key, Length) and key.module == outcome.failed[0] for key in known)
    ways = [_attributes(question, outcome.failed, known), _lengths(question, outcome)]
    for way in reversed(ways) if reads else ways:
        yield from way


def _lengths(question: Question, outcome: Outcome) -> Iterator[Scales]:
    """Lengths of what it should make that the function which stumbled was given: all together, then each alone."""
    assert outcome.failed is not None
    path, _, function, occurrence = outcome.failed
    occurrence = -1 if outcome.sizes else occurrence
    found: Scales = {}
    for row in question.expected.get(outcome.failed, ()):
        for dim in row.cut_dims({question.leaf: 0}):
            number, axis = numbers_in(row.axes[dim], question.leaf), describe(row.axes[dim], question.leaf)
            for argument, length in outcome.lengths.items():
                if length == row.shape[dim]:
                    key = Length(path, function, occurrence, argument, axis, outcome.sizes)
                    found[key] = next(one for one in number if one.whole == length)
    if found:
        yield found
    if len(found) > 1:
        yield from ({one: number} for one, number in found.items())


def _attributes(question: Question, failed: Key, known: Scales) -> Iterator[Scales]:
    """Sets of attributes to try, nearest modules first: all of one module together, then each alone."""
    numbers: dict[int, list[Number]] = {}
    for axis in question.near.get(failed, ()):
        for number in numbers_in(axis, question.leaf):
            if number not in numbers.setdefault(number.whole, []):
                numbers[number.whole].append(number)
    everywhere: Scales = {}
    for path, module in _by_distance(question.block, failed[0]):
        matching: dict[tuple[str, str] | Length, list[Number]] = {
            (path, attribute): numbers[value]
            for attribute, value in integers_of(module)
            if value in numbers and (path, attribute) not in known
        }
        if not matching:
            continue
        together: Scales = {key: options[0] for key, options in matching.items()}
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
