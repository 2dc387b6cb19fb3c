"""Every adversary is refused, or equal to the original on all that it is run with; which one is pinned by name.

A pin is "equal", "whole" (nothing is cut or divided), "refused: part of the message" or "late: part of the message"; a
dict has one per strategy. What is silently wrong today is an `xfail` that must be taken away with the fault.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import autoshard
from tests.adversaries.batches import BATCHES
from tests.adversaries.capture import CARRIED, TRACES, Trace
from tests.adversaries.capture import rows as trace_inputs
from tests.adversaries.columns import COLUMNS
from tests.adversaries.harness import Adversary, Difference, divides, outcome, planned, unhelpful
from tests.adversaries.sound import CUT, DIVIDED

Pins = dict[str, str | dict[str, str]]
COLUMN, DATA, PIPELINE = "column-parallel", "data-parallel", "pipeline"

PINNED: dict[str, Pins] = {
    "columns": {
        "QuantisedWeights": "whole",
        "FixedMask": "whole",
        "RegularisedInside": "whole",
    },
    "batches": {
        "ZeroInitialisedCentring": "refused: mean in layers.0",
        "OneOfEight": "refused: mean in layers.5",
        "Capacity": "refused: nonzero in router",
        "MaskOfFirstRow": "refused: forward mixes its rows",
        "LongestSentence": "refused: forward mixes its rows",
        "LossPerSentence": "refused: loss is neither a sum nor a mean",
        "BalancedExperts": "refused: mean in the model itself",
        "MovingAverage": "refused: the buffer average is written",
        "QuantisedBatch": "refused: amax in the model itself",
    },
    "carried": {
        "ChangesItsInput": {COLUMN: "refused: changes input x in place"},
        "ChangesItsInputLast": {COLUMN: "refused: changes input x in place"},
        "ReturnsLists": {DATA: "refused: other outputs", PIPELINE: "refused: other outputs"},
        "HooksOnParameters": {COLUMN: "whole"},
    },
}  # fmt: skip

# What differs without a word today, or stops with an error that is not for users: name, and strategy where it is one.
WRONG: dict[str, str] = {
    "ClippedBatch": "the norm of the batch is above its bound for other inputs",
    "MeanTimesBuffer": "the buffer that hides a mean is zero when planned",
    "BranchOnBatch": "a branch on the batch is not taken when planned",
    "ItemOfBatch": "a number of the batch is below its bound when planned",
    "BatchTemperature": "a deviation of the batch is below its bound when planned",
    "LargestOfBatch": "rows underflow against the largest of the batch",
    "SortedBatch": "the buffer that hides a sort is zero when planned",
    "NumberedRows": "the buffer that hides numbers of rows is zero when planned",
    "CachedByRows": "the buffer that hides a table of rows is zero when planned",
    "NextRow": "the buffer that hides other rows is zero when planned",
    "NumberOfRows": "a clamp by the number of rows is not reached when planned",
    "ManyTokens": "a branch on the number of rows is not taken when planned",
    "UntilAllAreSmall": "a loop over the whole batch does not run when planned",
    "ExpertsChoose": "the buffer that hides a choice among the batch is zero when planned",
    "LeastPadding": "rows are trimmed by the least padding of the batch",
    "Accuracy": "an accuracy is nought when planned and taken to be the same in every part",
    "WarmedUpContrast": "the buffer that hides a contrast is zero when planned",
    "EnoughVariance": "a deviation of the batch is above its bound when planned",
    "ClippedGradient": "a backward of the model's own clips the gradient of the batch",
    "HookedGradient": "a hook on an activation clips the gradient of the batch",
    "DistinctWords": "a branch on the batch is not taken when planned",
    f"ChangesItsInput, {DATA}": "the caller's tensor keeps its old values",
    f"ChangesItsInputLast, {DATA}": "the caller's tensor keeps its old values",
    f"ReturnsNumbers, {DATA}": "refused at the first call, not by the plan",
    f"ReturnsNumbers, {PIPELINE}": "a number of rows is that of a part",
    f"ReturnsObject, {COLUMN}": "the tensor within is one of a rank",
    f"ReturnsObject, {DATA}": "refused when the object is read",
    f"ReturnsObject, {PIPELINE}": "refused when the object is read",
    f"ReturnsSet, {COLUMN}": "the tensor in the deque is one of a rank",
    f"ReturnsSet, {DATA}": "refused when set and deque are read",
    f"ReturnsSet, {PIPELINE}": "refused when set and deque are read",
    f"CountsGradients, {COLUMN}": "refused by apply, not by the plan",
}

# Refusals that don't say what would work.
UNHELPFUL = {
    "ZeroInitialisedCentring", "OneOfEight", "Capacity", "MaskOfFirstRow", "LongestSentence", "LossPerSentence",
    "BalancedExperts", "MovingAverage", "QuantisedBatch", "ReturnsLists",
}  # fmt: skip

# Equal ones of the default tests; the others, which are planned and run up to twelve times as well, are `slow`.
QUICK = {
    *(f"{name}, {COLUMN}" for name in ("TemperatureOfHeads", "SaturatedMean", "EqualisedElsewhere", "CachedTable")),
    *(f"{name}, {COLUMN}" for name in ("MixedHeads", "NormOfWeight", "ReadByNeighbour", "PlainAttention")),
    f"MaskedAttention, {DATA}", f"TwoExpertsPerToken, {PIPELINE}", f"Convolutions, {DATA}", f"MeanSquare, {DATA}",
    f"CountedWords, {DATA}", f"ClippedBatch, {PIPELINE}", f"HookedGradient, {PIPELINE}",
    f"HooksOnParameters, {DATA}", f"ChangesItsInput, {PIPELINE}",
}  # fmt: skip

KINDS = {
    "columns": (COLUMNS, [COLUMN]), "batches": (BATCHES, [DATA, PIPELINE]),
    "carried": (CARRIED, [COLUMN, DATA, PIPELINE]), "cut": (CUT, [COLUMN]), "divided": (DIVIDED, [DATA, PIPELINE]),
}  # fmt: skip


def _pins() -> Iterator[tuple[Adversary, str, str]]:
    """Every model under every strategy that it is meant for, with its pin."""
    for kind, (cases, strategies) in KINDS.items():
        pins = PINNED.get(kind, {})
        assert pins.keys() <= cases.keys()
        for name, case in cases.items():
            for strategy in strategies:
                pin = pins.get(name, "equal")
                yield case, strategy, pin if isinstance(pin, str) else pin.get(strategy, "equal")


def _all() -> Iterator[Any]:
    for case, strategy, pin in _pins():
        name = f"{case.name}, {strategy}"
        reason = WRONG.get(case.name) or WRONG.get(name)
        marks = [pytest.mark.xfail(strict=True, raises=Difference, reason=reason)] if reason else []
        yield pytest.param(case, strategy, pin, id=name, marks=marks + _slow(case, strategy, pin, reason))


def _slow(case: Adversary, strategy: str, pin: str, reason: str | None = None) -> list[pytest.MarkDecorator]:
    """Leave out equal ones, and pipelines whose division the same check has refused for replicas."""
    quick = f"{case.name}, {strategy}" in QUICK
    again = strategy == PIPELINE and case.name in BATCHES
    return [pytest.mark.slow] if not quick and (again or (pin == "equal" and not reason)) else []


def _refused() -> Iterator[Any]:
    for case, strategy, pin in _pins():
        if pin.startswith(("refused", "late")):
            lacks = case.name in UNHELPFUL
            marks = [pytest.mark.xfail(strict=True, reason="says nothing that works")] if lacks else []
            yield pytest.param(case, strategy, id=f"{case.name}, {strategy}", marks=marks + _slow(case, strategy, pin))


def _sound() -> Iterator[Any]:
    for case in CUT.values():
        yield pytest.param(case, COLUMN, id=case.name)
    for case in DIVIDED.values():
        yield pytest.param(case, DATA, id=case.name)


@pytest.mark.parametrize(("case", "strategy", "pin"), _all())
def test_equal_or_refused(case: Adversary, strategy: str, pin: str) -> None:
    found = outcome(case, strategy)
    kind, _, part = pin.partition(": ")
    assert (found.kind, part in found.message) == (kind, True), f"{found.kind}: {found.message}"


@pytest.mark.parametrize(("case", "strategy"), _refused())
def test_refusal_says_where_and_what_works(case: Adversary, strategy: str) -> None:
    message = outcome(case, strategy).message
    assert not unhelpful(case.build, case.inputs(), message), message


@pytest.mark.parametrize(("case", "strategy"), _sound())
def test_sound_is_not_refused(case: Adversary, strategy: str) -> None:
    with autoshard.simulate("2x64MiB") as devices:
        plan = planned(case, strategy, devices)
    assert divides(plan)
    if strategy == COLUMN:  # all matrices, not some of them; `remove` and run time are compared by the test above
        cut = {name for part in plan.cuts for block in part.blocks for name in _names(block, part.shards)}
        assert cut >= {name for name, parameter in case.build().named_parameters() if parameter.dim() == 2}


def _names(block: str, shards: Any) -> list[str]:
    return [f"{block}.{shard.name}".lstrip(".") for shard in shards]


# What a call of the model leaves outside of it, and a plan must not: "unchanged", or "refused: part of the message".
LEFT: Pins = {}

TRACES_WRONG: dict[str, str] = {
    "ModuleDict": "entries are another tensor afterwards",
    "EmptiedDict": "entries are gone afterwards",
    "FeatureHooks": "a list has tensors without values",
    "ClassAttributes": "the class has another value",
    "DefaultArgument": "the default argument has one more",
    "ObjectWithSlots": "the object has another value",
    "RecentInputs": "what was there has fallen out",
    "TensorOfFile": "the tensor has other values",
    **{f"HookOnce, {strategy}": "the hook is gone" for strategy in (COLUMN, DATA, PIPELINE)},
    "ChangesModes": "the default dtype is another one",
    "Pooled, profile": "work of a pool of threads is missed",
    "OtherThread": "parameters of another thread are replaced",
}
TRACED = ["profile", "balanced", COLUMN, DATA, PIPELINE]


def _traces() -> Iterator[Any]:
    for name, trace in TRACES.items():
        for strategy in TRACED:
            reason = TRACES_WRONG.get(name) or TRACES_WRONG.get(f"{name}, {strategy}")
            marks = [pytest.mark.xfail(strict=True, raises=Difference, reason=reason)] if reason else []
            if strategy not in ("profile", DATA):
                marks.append(pytest.mark.slow)
            pin = LEFT.get(name, "unchanged")
            pin = pin if isinstance(pin, str) else pin.get(strategy, "unchanged")
            yield pytest.param(trace, strategy, pin, id=f"{name}, {strategy}", marks=marks)


@pytest.fixture
def _same_default():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_same_default")
@pytest.mark.parametrize(("trace", "strategy", "pin"), _traces())
def test_nothing_is_left_behind(trace: Trace, strategy: str, pin: str) -> None:
    model = trace.build()
    before = trace.look(model)
    found, message = "unchanged", ""
    try:
        if strategy == "profile":
            if autoshard.profile(model, trace_inputs()).flops < trace.flops:
                raise Difference("the profile has fewer FLOPs than the call")
        else:
            with autoshard.simulate("2x64MiB") as devices:
                autoshard.plan(model, devices, inputs=trace_inputs(), strategy=strategy)
    except autoshard.AutoshardError as error:
        found, message = "refused", str(error)
    after = trace.look(model)
    if after != before:
        raise Difference(f"{str(after)[:200]} instead of {str(before)[:200]}")
    kind, _, part = pin.partition(": ")
    assert (found, part in message) == (kind, True), f"{found}: {message}"
    if message:
        assert not unhelpful(trace.build, trace_inputs(), message), message
