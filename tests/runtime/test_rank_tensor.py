"""Tensors of which every rank of one process has its own: what is read, made and written is as with ordinary ones.

And parts of a dimension of which the batch or the length is a factor, in a run with another batch or length.
"""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

import autoshard
from autoshard.check.rank import LoneRank
from autoshard.errors import ApplyError
from autoshard.plan.sharding import Action, resized
from autoshard.runtime.collectives import Axis
from autoshard.runtime.local_ranks import LocalRanks
from autoshard.runtime.rank_tensor import RanksMode, RankTensor, running, spread
from autoshard.runtime.steps import Memo, Step, Tokens
from tests.threads import run_ranks


def ranked(*values):
    cpu = torch.device("cpu")
    return RankTensor([torch.as_tensor(value) for value in values], [cpu, cpu])


def test_values_that_differ_between_ranks_are_not_read():
    different, alike = ranked([1.0, 2.0], [1.0, 3.0]), ranked([1.0, 2.0], [1.0, 2.0])
    assert alike.tolist() == [1, 2] and alike[1].item() == 2 and bool((alike > 0).all())
    for read in (
        lambda: different[1].item(),
        lambda: different.tolist(),
        lambda: bool((different > 2.5).any()),
        lambda: different[different > 2.5],
        lambda: torch.bernoulli(different / 4),
    ):
        with pytest.raises(ApplyError):
            read()


def test_reading_values_calls_no_functions_that_are_counted():
    """A gather at the seventh reshape must not come at the third, because values were compared before it."""

    class Names(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    names = []
    sizes = ranked([2, 3], [2, 3])
    with Names():
        assert sizes.tolist() == [2, 3]
        assert sizes.numpy().tolist() == [2, 3]
    assert not {"detach", "reshape", "equal", "__getitem__"} & set(names), names


@pytest.mark.parametrize("value", [3, 2.5, True, 1j])
def test_tensors_are_made_of_lists_of_numbers_that_all_ranks_have(value):
    """torch.tensor reads such numbers from memory, with dispatch off, and the wrapper has none."""
    item = ranked(value, value)
    for tensor_of in (torch.tensor, torch.as_tensor, torch.asarray, torch.ones((), dtype=item.dtype).new_tensor):
        if value == 1j and tensor_of.__name__ == "new_tensor":
            continue  # ordinary tensors can't do that either
        assert tensor_of([[item], [item]]).tolist() == [[value], [value]]
        with RanksMode([torch.device("cpu")] * 2, torch.device("cpu")):
            made = tensor_of([item, item])
        assert [part.tolist() for part in made.parts] == [[value, value]] * 2
    with pytest.raises(ApplyError, match="different values"):
        torch.tensor([ranked(1, 2)])


def test_a_tensor_is_the_number_that_an_ordinary_one_is():
    assert running() is None
    assert [0, 1, 2, 3][ranked(2, 2)] == 2 and int(ranked(2.5, 2.5)) == 2 and float(ranked([2], [2])) == 2
    assert math.isnan(ranked(math.nan, math.nan))
    for read, error in (
        (lambda: [1][ranked(0.0, 0.0)], TypeError),
        (lambda: bool(ranked([1, 2], [1, 2])), RuntimeError),
    ):
        with pytest.raises(error):
            read()


def test_writing_into_an_ordinary_tensor_is_refused():
    plain = torch.zeros(2, 2)
    for write in (
        lambda: plain.copy_(ranked([[1.0, 2]], [[3.0, 4]])),
        lambda: plain[0].add_(ranked([1.0, 2], [3.0, 4])),
        lambda: plain.__setitem__(0, ranked([1.0, 2], [3.0, 4])),
        lambda: torch.add(ranked([1.0, 2], [3.0, 4]), 1, out=plain[0]),
        lambda: plain.index_copy_(0, torch.tensor([1]), ranked([[1.0, 2]], [[3.0, 4]])),
    ):
        with pytest.raises(ApplyError, match="made outside"):
            write()
    assert not plain.any()


def test_ordinary_tensors_are_copied_for_each_rank():
    """A view of what was an ordinary tensor must not be one tensor for both ranks."""
    with torch.inference_mode():
        plain = torch.zeros(1, 2)
        both = plain.expand_as(ranked([[1.0, 2]], [[3.0, 4]]))
        both += ranked([[1.0, 2]], [[3.0, 4]])
        assert [part.tolist() for part in both.parts] == [[[1, 2]], [[3, 4]]]
    mixed = torch.stack([torch.ones(2), ranked([1.0, 2], [3.0, 4])])
    assert mixed.parts[1].tolist() == [[1, 1], [3, 4]]


def test_random_numbers_are_drawn_once():
    with RanksMode([torch.device("cpu")] * 2, torch.device("cpu")):
        torch.manual_seed(0)
        made = torch.randn(3), torch.empty(3).uniform_(), torch.nn.functional.dropout(torch.ones(64))
        after = torch.rand(1)
    torch.manual_seed(0)
    expected = torch.randn(3), torch.empty(3).uniform_(), torch.nn.functional.dropout(torch.ones(64))
    for found, wanted in zip((*made, after), (*expected, torch.rand(1)), strict=True):
        assert all(torch.equal(part, wanted) for part in found.parts)
    with torch.inference_mode():  # dropout that drops nothing is no op of its own elsewhere
        assert torch.dropout(ranked([1.0, 2], [3.0, 4]), 0.0, True).parts[1].tolist() == [3, 4]


def test_simulated_tensors_meet_rank_tensors():
    with autoshard.simulate("2x1MiB") as devices:
        devices = [torch.device(name) for name in devices]
        cut = RankTensor([torch.ones(2, device=device) for device in devices], devices)
        ordinary = torch.ones(2, device=devices[0])
        for made in (ordinary + cut, cut + ordinary, ordinary.sum() + cut.sum()):
            assert isinstance(made, RankTensor) and [part.device for part in made.parts] == devices
        moved = cut.cpu() * torch.ones(2)
        assert [part.device for part in moved.parts] == [torch.device("cpu")] * 2
        assert isinstance(moved.to(devices[0]) + ordinary, RankTensor)


def test_parts_that_are_not_in_order_are_put_together_where_they_are():
    """Ordinary indices would be on the CPU, and no part is."""
    with autoshard.simulate("2x1MiB") as names:
        devices = tuple(torch.device(name) for name in names)
        ranks = LocalRanks.of(devices)
        axis = Axis.of(ranks, "2x*4", (2, 2))
        whole = torch.arange(8.0, device=devices[0])
        part = axis.own_part(spread(whole, devices), 0)
        assert [one.tolist() for one in part.parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]
        assert axis.gather(part, 0).agreed().tolist() == whole.tolist()


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
        part = axis.sized(12).own_part(whole, 0)
        assert part.shape[0] == 3 * shares[ranks.rank]
        return axis.sized_by_part(part.shape[0]).gather(part, 0)

    assert all(torch.equal(found, whole) for found in run_ranks(work, len(shares)))


def test_a_part_of_no_known_size_is_refused():
    """It was padded, and zeros were gathered."""
    action = Action(kind="gather", module="", argument="", axis="2x*4x3")
    step = Step(action, (2, 2), LoneRank(rank=0, size=2), Memo(Tokens()), "here")
    assert step.after(torch.ones(12)).shape == (24,)
    with pytest.raises(ApplyError, match="the plan is for 12 on this rank"):
        step.after(torch.ones(6))
