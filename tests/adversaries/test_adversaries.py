"""Every adversary is refused, or equal to the original on all that it is run with; which one is pinned by name.

A pin is "equal", "whole" (nothing is cut or divided), "refused: part of the message", "late: part of the message", or
"wrong: reason" for what must be mended, "lost: reason" for what is refused and should not be: strict `xfail`s. A dict
has a pin per strategy, "equal" where it has none.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import autoshard
from autoshard.capture.capture import capture
from tests.adversaries import held
from tests.adversaries.batches import BATCHES
from tests.adversaries.capture import CARRIED, TRACES, Trace, described
from tests.adversaries.capture import rows as trace_inputs
from tests.adversaries.columns import COLUMNS
from tests.adversaries.harness import Adversary, Difference, divides, outcome, planned, unhelpful
from tests.adversaries.sound import CUT, DIVIDED

Pins = dict[str, str | dict[str, str]]
COLUMN, DATA, PIPELINE = "column-parallel", "data-parallel", "pipeline"
COLUMN_ONLY, DIVISIONS, ALL = (COLUMN,), (DATA, PIPELINE), (COLUMN, DATA, PIPELINE)

FEATURES = {DATA: "refused: up has a function in forward_hooks", PIPELINE: "refused: features.0 in the model itself"}
PINNED: dict[str, Pins] = {
    "columns": {"QuantisedWeights": "whole", "FixedMask": "whole", "RegularisedInside": "whole",
                "MoreDimensions": "late: its output is of shape [4, 8, 8], and the plan is for 2 dimensions"},
    "batches": {
        "ClippedBatch": "refused: linalg_vector_norm in the model itself",
        "MeanTimesBuffer": "refused: mean in the model itself",
        "OneOfEight": "refused: mean in layers.5",
        "BranchOnBatch": "refused: decides what to do by values of all rows (gt in",
        "ItemOfBatch": "refused: decides what to do by values of all rows (std in",
        "BatchTemperature": "refused: std in the model itself",
        "NumberOfRows": "refused: clamp in the model itself",
        "KernelsOfOthers": "refused: with other rows the model could not be run",
        "ManyTokens": "refused: mixes its rows: it runs other ops for 1024 rows than for 3, here tanh",
        "ShiftedRows": "refused: roll in the model itself",
        "HalvesOfRows": "refused: slice in the model itself",
        "OneRowAlone": "refused: does something else for one row alone",
        "TwoRows": "refused: does something else for 2 rows",
        "FourRows": {DATA: "refused: does something else for 4 rows"},
        "EightRows": "refused: does something else for 8 rows",
        "LossOfPlaces": "refused: div in the model itself",
        "LossOfThree": "refused: does something else for one row alone (div in the model itself",
        "ExpertsChoose": "refused: topk in the model itself",
        "MaskOfFirstRow": "refused: slice in the model itself",
        "LongestSentence": "refused: values of several rows as numbers, which may decide anything (max in",
        "Accuracy": "refused: div in the model itself",
        "CountedWords": "refused: any in the model itself",
        "LossPerSentence": "refused: sum in the model itself",
        "EnoughVariance": "refused: std in the model itself",
        "TeacherInForward": "refused: mul_ in the model itself writes into teacher.weight",
        "TeacherByData": "refused: replaces the data of a tensor",
        "ClippedGradient": "refused: calls _ClippedBackward, whose backward may mix its rows",
        "HookedGradient": "refused: its forward hangs a hook on gradients at",
        "DistinctWords": "refused: _unique2 in the model itself",
    },
    "carried": {
        "ChangesItsInput": "refused: changes input x in place",
        "ReturnsNumbers": dict.fromkeys(DIVISIONS, "refused: the output rows is 3 for 3 rows and 1024 for 1024"),
        "ReturnsLists": dict.fromkeys(DIVISIONS, "refused: the output shapes.0.0 is 5, which may be that"),
        "ReturnsObject": {
            COLUMN: "refused: the output 1 is a Holder, in which a tensor would be that of a rank",
            **dict.fromkeys(DIVISIONS, "refused: the output 1 is a Holder"),
        },
        "ReturnsSet": {
            COLUMN: "refused: the output deque is a deque, in which a tensor would be that of a rank",
            **dict.fromkeys(DIVISIONS, "refused: the batch of ReturnsSet can't be divided: the output set is"),
        },
        "HooksOnParameters": {COLUMN: "whole"},
        "CountsGradients": {COLUMN: "whole"},
        "SpectralNorms": dict.fromkeys(DIVISIONS, "refused: the forward writes into up.weight_u"),
        "BoundedTable": dict.fromkeys(DIVISIONS, "refused: embedding_renorm_ in table"),
        "FrequentWords": dict.fromkeys(DIVISIONS, "refused: embedding in table"),
        "GrowsWithCalls": dict.fromkeys(DIVISIONS, "refused: calls in the model itself is another number"),
        "LossOverParameters": {COLUMN: "whole"},
        "SumOverBatch": {COLUMN: "whole", **dict.fromkeys(DIVISIONS, "refused: add in the model itself")},
    },
    "held batches": {
        "FramesInPairs": "refused: arange in the model itself",
        "MemoryAsLongAsBatch": "refused: matmul in the model itself",
        "WeightedClasses": "refused: cross_entropy_loss in the model itself",
        "UntrackedNorm": "refused: batch_norm in norm",
        "QuantisedByLargest": "refused: amax in the model itself",
    },
    "held others": {
        "RowsOfFirstCall": dict.fromkeys(DIVISIONS, "refused: div in the model itself"),
        "CacheIsWritten": "refused: changes input cache in place",
        "ReportInWords": dict.fromkeys(DIVISIONS, "refused: decides what to do by values of all rows (max in"),
        "FeaturesOfHook": {COLUMN: "whole", **FEATURES},
        "FoldedOnFirstCall": dict.fromkeys(DIVISIONS, "refused: mul_ in the model itself writes into up.weight"),
    },
}  # fmt: skip

# Equal ones of the default tests; the others, which are planned and run up to twelve times as well, are `slow`.
QUICK = {
    *(f"columns {name}, {COLUMN}" for name in ("NormOfWeight", "ReadByNeighbour", "PartOfMatrices", "OneNormOfAll")),
    f"held columns WinnersTakeAll, {COLUMN}", f"divided RelativeBias, {PIPELINE}",
    f"carried HooksOnParameters, {DATA}", f"batches BiasOfRows, {DATA}",
}  # fmt: skip
# Sound ones that are `slow`: what they do, quicker ones do as well.
LONG = {"divided Recurrent", "divided ReadAlongLines", "divided TorchLosses"}

KINDS: dict[str, tuple[dict[str, Adversary], tuple[str, ...]]] = {
    "columns": (COLUMNS, COLUMN_ONLY),
    "batches": (BATCHES, DIVISIONS),
    "carried": (CARRIED, ALL),
    "cut": (CUT, COLUMN_ONLY),
    "divided": (DIVIDED, DIVISIONS),
    "held columns": (held.COLUMNS, COLUMN_ONLY),
    "held batches": (held.BATCHES, DIVISIONS),
    "held others": (held.OTHERS, ALL),
    "held honest columns": (held.HONEST_COLUMNS, COLUMN_ONLY),
    "held honest batches": (held.HONEST_BATCHES, DIVISIONS),
    "held honest others": (held.HONEST_OTHERS, ALL),
}


def _pins() -> Iterator[tuple[str, Adversary, str, str]]:
    """Kind and name, model, strategy and pin, of every model under every strategy that it is meant for."""
    for kind, (cases, strategies) in KINDS.items():
        pins = PINNED.get(kind, {})
        assert pins.keys() <= cases.keys()
        for name, case in cases.items():
            for strategy in strategies:
                pin = pins.get(name, "equal")
                yield f"{kind} {name}", case, strategy, pin if isinstance(pin, str) else pin.get(strategy, "equal")


def _all() -> list[Any]:
    return [
        pytest.param(case, strategy, pin, id=f"{name}, {strategy}", marks=[*_wrong(pin), *_slow(name, strategy, pin)])
        for name, case, strategy, pin in _pins()
    ]


def _wrong(pin: str) -> list[pytest.MarkDecorator]:
    kind, _, reason = pin.partition(": ")
    raises = {"wrong": Difference, "lost": (AssertionError, autoshard.AutoshardError)}.get(kind)
    return [pytest.mark.xfail(strict=True, raises=raises, reason=reason)] if raises else []


def _slow(name: str, strategy: str, pin: str) -> list[pytest.MarkDecorator]:
    """Leave out equal ones, and pipelines where replicas are refused by the same check."""
    again = strategy == PIPELINE and pin.startswith(("refused", "wrong", "lost"))
    return [pytest.mark.slow] if f"{name}, {strategy}" not in QUICK and (again or pin == "equal") else []


def _sound() -> list[Any]:
    return [
        pytest.param(
            case,
            strategy,
            id=f"{name}, {strategy}",
            marks=[*_wrong(pin), *([pytest.mark.slow] if name in LONG else [])],
        )
        for name, case, strategy, pin in _pins()
        if name.startswith(("cut", "divided", "held honest")) and strategy != PIPELINE and "honest others" not in name
    ]


@pytest.mark.parametrize(("case", "strategy", "pin"), _all())
def test_equal_or_refused(case: Adversary, strategy: str, pin: str) -> None:
    """A refusal says where, and what works."""
    found = outcome(case, strategy)
    kind, _, part = ("equal", "", "") if pin.startswith("lost") else pin.partition(": ")
    assert (found.kind, part in found.message) == (kind, True), f"{found.kind}: {found.message}"
    assert kind not in ("refused", "late") or not unhelpful(case.build, case.inputs(), found.message), found.message


@pytest.mark.parametrize(("case", "strategy"), _sound())
def test_sound_is_not_refused(case: Adversary, strategy: str) -> None:
    with autoshard.simulate("2x64MiB") as devices:
        plan = planned(case, strategy, devices)
    assert divides(plan)
    if strategy == COLUMN:  # every matrix
        cut = {
            f"{block}.{shard.name}".lstrip(".") for part in plan.cuts for block in part.blocks for shard in part.shards
        }
        assert cut >= {name for name, parameter in case.build().named_parameters() if parameter.dim() == 2}


# What a call of the model leaves outside of it, and a profile or a plan must not: "unchanged", or a pin as above.
REAL = "run for real"
TRACED = (REAL, "profile", "balanced", COLUMN, DATA, PIPELINE)
LEFT: Pins = {
    "TensorOfFile": dict.fromkeys(DIVISIONS, "refused: mean in the model itself"),
    "ModuleDict": dict.fromkeys(DIVISIONS, "refused: keeps what mixes its rows (slice in the model itself"),
    "OtherThread": "refused: runs tensor operations",
    "FeaturesOfHook": FEATURES,
}


def _traces() -> list[Any]:
    params = []
    features = Trace(build=held.OTHERS["FeaturesOfHook"].build, look=lambda model: described(model.features))
    for name, trace in [*TRACES.items(), ("FeaturesOfHook", features)]:
        for strategy in TRACED:
            pin = LEFT.get(name, "unchanged")
            pin = pin if isinstance(pin, str) else pin.get(strategy, "unchanged")
            slow = [] if strategy in (REAL, "profile", DATA) else [pytest.mark.slow]
            params.append(pytest.param(trace, strategy, pin, id=f"{name}, {strategy}", marks=[*_wrong(pin), *slow]))
    return params


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
        if strategy == REAL:
            capture(model, trace_inputs(), level="real")
        elif strategy == "profile":
            autoshard.profile(model, trace_inputs())
        else:
            with autoshard.simulate("2x64MiB") as devices:
                autoshard.plan(model, devices, inputs=trace_inputs(), strategy=strategy)
    except autoshard.AutoshardError as error:
        found, message = "refused", str(error)
    after = trace.look(model)
    if after != before:
        raise Difference(f"{str(after)[:200]} instead of {str(before)[:200]}")
    kind, _, part = pin.partition(": ")
    assert strategy == REAL or (found, part in message) == (kind, True), f"{found}: {message}"
    if message and strategy != REAL:
        assert not unhelpful(trace.build, trace_inputs(), message), message
