"""A pipeline whose processes all run the user's own forward: results are those of the whole model, bit for bit."""

import pytest

from tests.models import HF_CASES
from tests.ranks import run_ranks
from tests.runtime.follow_checks import WAYS, check_models

QUICK = ["llama"]


def test_equal_to_the_whole_model():
    run_ranks(check_models, 2, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", [case.name for case in HF_CASES])
def test_every_kind_is_equal_to_the_whole_model(name, count):
    run_ranks(check_models, count, [name], WAYS, timeout_seconds=200)
