"""Sums and gathers among processes of gloo that send to each other; few starts, each with several checks."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from autoshard.errors import RankError
from autoshard.runtime import exchange
from autoshard.runtime.collectives import ProcessRanks, layout
from tests.ranks import run_ranks


def given(shape, dtype, rank):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def check_sums(ranks, sizes):
    """Equal on all ranks to the bit, and the sum in the order of ranks."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for size in sizes:
            wanted = given(size, dtype, 0)
            for rank in range(1, ranks.size):
                wanted = wanted + given(size, dtype, rank)
            own = given(size, dtype, ranks.rank)
            found = ranks.all_reduce(own)
            assert torch.equal(found, wanted) and found.data_ptr() == own.data_ptr(), (size, dtype)
    own = given((3, 5), torch.float32, ranks.rank).t()
    assert torch.equal(ranks.all_reduce(own), sum(given((3, 5), torch.float32, rank) for rank in range(ranks.size)).t())
    assert ranks.all_reduce(torch.tensor([2])).tolist() == [2 * ranks.size]


def check_gathers(ranks):
    shares = tuple(range(1, ranks.size + 1))
    where = layout(f"*{sum(shares)}", shares)
    whole = given((4, sum(shares)), torch.float32, 9)
    part = whole[:, where.kept[ranks.rank]]
    assert torch.equal(ranks.gather(part, 1, where, torch.from_numpy(where.order)), whole)


@contextmanager
def asked():
    """Count what torch.distributed is asked for."""
    counts = {"all_reduce": 0, "isend": 0}
    originals = {name: getattr(dist, name) for name in counts}

    def counting(name):
        def call(*args, **kwargs):
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in counts:
        setattr(dist, name, counting(name))
    yield counts
    for name, original in originals.items():
        setattr(dist, name, original)


def two(sizes):
    ranks = ProcessRanks.of()
    exchange.MOST_BYTES = 64
    assert ranks.exchanges
    with asked() as counts:
        check_sums(ranks, (1, 8, 64))
    # a float64 of 8 numbers is 64 bytes; of larger ones a number is sent, and gloo adds; integers are gloo's
    assert counts == {"isend": 3 * 3 + 1, "all_reduce": 3 + 1}
    check_gathers(ranks)
    # different inputs: gloo ends the process that gets too much, and the other one has to say so
    try:
        ranks.all_reduce(torch.ones(sizes[ranks.rank]))
    except RankError as error:
        return str(error)


@pytest.mark.parametrize("sizes", [(8, 16), (8, 70)])
def test_two_ranks_and_inputs_that_differ(sizes):
    """The other process is ended by gloo, which has nowhere to put what comes."""
    said = run_ranks(two, 2, sizes, may_die=True)
    assert sum(one is None for one in said) == 1
    (said,) = (one for one in said if one)
    assert "they run with inputs of different shapes" in said


def three():
    ranks = ProcessRanks.of()
    check_sums(ranks, (1, 64))
    check_gathers(ranks)
    exchange.MOST_BYTES = 64
    with asked() as counts:
        assert ranks.all_reduce(torch.ones(8) * ranks.rank).tolist() == [3.0] * 8
        assert counts == {"isend": 2, "all_reduce": 0}
        assert ranks.all_reduce(torch.ones(9) * ranks.rank).tolist() == [3.0] * 9
        assert counts == {"isend": 4, "all_reduce": 1}


def test_three_ranks():
    run_ranks(three, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_unset_is_no_number_that_is_computed(dtype):
    """A NaN of arithmetic may end a tensor: that is not taken for nothing."""
    integers, unset = exchange._UNSET[dtype.itemsize]
    zeros = torch.zeros(1, dtype=dtype)
    for nan in (torch.full((1,), float("nan"), dtype=dtype), zeros / 0, -zeros / 0, (zeros.double() / 0).to(dtype)):
        assert nan.isnan().all() and nan.view(integers).item() != unset
    assert torch.tensor([unset], dtype=integers).view(dtype).isnan().all()
