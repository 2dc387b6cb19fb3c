"""A cut dimension of which the batch or the length is a part, in a run with another batch or length."""

import pytest
import torch

from autoshard.check.rank import LoneRank
from autoshard.errors import ApplyError
from autoshard.plan.sharding import Action, resized
from autoshard.runtime.actions import Memo, Step
from autoshard.runtime.collectives import Axis
from tests.threads import run_ranks


def test_what_is_not_cut_grows():
    assert resized("2x*4", 12) == "3x*4"
    assert resized("2x3x*4", 4) == "1x*4"
    assert resized("*4x6", 20) == "*4x5"
    assert resized("2x*4x6", 48) == "2x*4x6"


@pytest.mark.parametrize("axis, size", [("2x*4x6", 24), ("*4", 8), ("2x*4", 10), ("(*4|2)", 7), ("(*4|2)x3", 9)])
def test_what_has_grown_is_not_known(axis, size):
    with pytest.raises(ValueError, match="can't have a size"):
        resized(axis, size)


@pytest.mark.parametrize("shares", [(2, 2), (3, 1), (2, 1, 1)])
def test_parts_of_another_batch(shares):
    whole = torch.arange(12 * 5).view(12, 5)

    def work(ranks):
        axis = Axis.of(ranks, "2x*4", shares)
        part = axis.sized(12).take(whole, 0)
        assert part.shape[0] == 3 * shares[ranks.rank]
        return axis.sized_by_part(part.shape[0]).gather(part, 0)

    assert all(torch.equal(found, whole) for found in run_ranks(work, len(shares)))


def test_a_part_of_no_known_size_is_refused():
    """It was padded, and zeros were gathered."""
    action = Action(kind="gather", module="", argument="", axis="2x*4x3")
    step = Step(action, (2, 2), LoneRank(rank=0, size=2), Memo(), "here")
    assert step.after(torch.ones(12)).shape == (24,)
    with pytest.raises(ApplyError, match="the plan is for 12 on this rank"):
        step.after(torch.ones(6))
