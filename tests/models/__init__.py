"""Small models shared by the tests: hostile ones written here, and tiny random transformers of many kinds."""

from tests.models.case import Case, energise, same
from tests.models.hf import HF_CASES
from tests.models.hostile import HOSTILE_CASES

ALL_CASES = HOSTILE_CASES + HF_CASES
REFUSED_CASES = [case for case in ALL_CASES if case.refused]
"""What can't be captured and is refused at plan time; every other case must work."""
WORKING_CASES = [case for case in ALL_CASES if not case.refused]

__all__ = [
    "ALL_CASES",
    "HF_CASES",
    "HOSTILE_CASES",
    "REFUSED_CASES",
    "WORKING_CASES",
    "Case",
    "by_name",
    "energise",
    "same",
]


def by_name(name: str) -> Case:
    """The case with this name."""
    return next(case for case in ALL_CASES if case.name == name)
