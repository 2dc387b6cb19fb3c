"""Cut models on several devices of one process."""

import pytest

from autoshard.errors import PlanError
from autoshard.runtime.cuts import apply_cuts
from autoshard.runtime.local_ranks import LocalRanks
from tests.runtime.cut_checks import CASES, check_case, check_checkpoint, make


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", [name for name in CASES if name != "words"])
def test_equal_to_the_original(name, count, monkeypatch):
    made = []
    for method in ("all_reduce", "gather"):
        monkeypatch.setattr(LocalRanks, method, counted(getattr(LocalRanks, method), made))
    check_case(name, LocalRanks.of(["cpu"] * count), lambda: len(made))


def counted(method, made):
    def call(*args):
        made.append(1)
        return method(*args)

    return call


def test_uneven_shares_are_refused():
    model = make("words")
    with pytest.raises(PlanError, match="unevenly"):
        apply_cuts(model, CASES["words"].cuts(2), LocalRanks.of(["cpu", "cpu"]))
    assert model.embed.weight.shape == (25, 8)


def test_checkpoint():
    check_checkpoint(LocalRanks.of(["cpu", "cpu"]))
