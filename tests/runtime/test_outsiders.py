"""Modules outside of a cut model that have its parameters are found, also where `gc.freeze` hides them."""

import gc

import pytest
from torch import nn

from autoshard.errors import ApplyError
from autoshard.runtime.outsiders import check_not_shared


@pytest.fixture
def frozen():
    hidden = gc.get_freeze_count()
    yield gc.freeze
    if not hidden:
        gc.unfreeze()


def tied():
    inside, outside = nn.Linear(4, 4), nn.Linear(4, 4)
    outside.weight = inside.weight
    return inside, outside


def test_a_module_outside_is_found_where_objects_are_frozen(frozen):
    inside, outside = tied()
    for hide in (lambda: None, frozen):
        hide()
        with pytest.raises(ApplyError, match="weight is also a parameter of a Linear"):
            check_not_shared(inside, {"weight": inside.weight})
    assert gc.get_freeze_count() > 0
    del outside


def test_a_module_that_is_gone_but_for_a_cycle_does_not_count(frozen):
    inside, outside = tied()
    outside.me = [outside]
    frozen()
    del outside
    check_not_shared(inside, {"weight": inside.weight})
