"""Small models shared by the tests: hostile ones written here, and tiny random transformers of many kinds."""

from collections.abc import Collection

import pytest

from tests.models.case import Case, energise, same
from tests.models.hf import HF_CASES
from tests.models.hostile import HOSTILE_CASES

ALL_CASES = HOSTILE_CASES + HF_CASES
REFUSED_CASES = [case for case in ALL_CASES if case.refused]
"""What can't be captured and is refused at plan time; every other case must work."""
WORKING_CASES = [case for case in ALL_CASES if not case.refused]

DEFAULT = {
    *("llama", "t5", "convnext"),
    *("value-branch", "counted-loop", "routed-experts", "generator-child", "dataclass-output", "mutated-dict"),
    *("looped", "direct-forward", "bare-parameters", "running-buffers-train", "three-way-tie"),
    *("checkpointed-reentrant", "adds-to-argument", "cached-tables", "parametrized", "custom-function", "unet"),
    "reads-devices",
}
"""What the default tests look at where they look at architectures; the nightly ones (-m slow) look at all."""

__all__ = [
    "ALL_CASES",
    "HF_CASES",
    "HOSTILE_CASES",
    "REFUSED_CASES",
    "WORKING_CASES",
    "Case",
    "by_name",
    "energise",
    "over",
    "same",
]


def over(cases: list[Case], quick: Collection[str] = DEFAULT) -> pytest.MarkDecorator:
    """Parametrize a test by `case`: those in `quick` and refused ones by default, others with -m slow."""
    return pytest.mark.parametrize(
        "case",
        [pytest.param(c, id=c.name, marks=[] if c.name in quick or c.refused else [pytest.mark.slow]) for c in cases],
    )


def by_name(name: str) -> Case:
    """The case with this name."""
    return next(case for case in ALL_CASES if case.name == name)
