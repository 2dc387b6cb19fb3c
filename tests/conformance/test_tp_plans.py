"""Whatever the tensor parallel plans in transformers cut, autoshard finds, with no more collectives."""

import pytest

from tests.conformance.tp_plans import compare
from tests.models import HF_CASES, by_name

QUICK = ("llama", "gemma2", "mixtral")
WITH_PLANS = ("llama-tied", "phi3", "deepseek-v3", "jamba", "llava")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in WITH_PLANS)])
def test_what_a_written_plan_cuts(name):
    case = by_name(name)
    missing, more = compare(case.model(), case.example())
    assert not missing and not more


def test_those_are_all_that_have_a_plan():
    having = {case.name for case in HF_CASES if getattr(case.model(), "_tp_plan", None)}
    assert having == {*QUICK, *WITH_PLANS}
