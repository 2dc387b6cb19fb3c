"""Collectives: the formulas by hand, what can never be beaten, and machines."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device, Link
from autoshard.cluster.links import make_links
from autoshard.engine.links import all_gather_seconds, all_reduce_seconds

COUNTS, SIZES = st.integers(2, 9), st.integers(0, 10**9)


def cluster(hosts, *, latency=1e-5, rate=1e10, network=(1e-4, 1e9)):
    devices = tuple(Device(name=f"d:{i}", memory_bytes=1, host=host) for i, host in enumerate(hosts))
    links = {
        (a.name, b.name): Link(
            source=a.name, destination=b.name, latency_seconds=latency if a.host == b.host else network[0],
            bytes_per_second=rate if a.host == b.host else network[1],
        )
        for a, b in itertools.permutations(devices, 2)
    }  # fmt: skip
    return Cluster(devices=devices, links=make_links(devices, (), links))


@pytest.mark.parametrize(
    "count, nbytes, seconds",
    [
        (1, 1e9, 0.0),
        (2, 1e9, 2e-5 + 0.1),  # two exchange halves
        (4, 1e9, 2 * 3 * (1e-5 + 0.25e9 / 1e10)),  # much: ring
        (9, 2e6, 2 * 4 * 1e-5 + 2 * 2e6 / 1e10),  # between, on many: tree
    ],
)
def test_all_reduce_by_hand(count, nbytes, seconds):
    one = cluster(["h"] * count)
    assert all_reduce_seconds(one, one.names, nbytes) == pytest.approx(seconds)


def test_all_gather_by_hand():
    one = cluster(["h"] * 4)
    assert all_gather_seconds(one, one.names, 4e9) == pytest.approx(3 * (1e-5 + 0.1))
    assert all_gather_seconds(one, one.names[:1], 4e9) == 0.0


@given(COUNTS, SIZES)
def test_nobody_receives_faster_than_the_links(count, nbytes):
    one = cluster(["h"] * count)
    part = (count - 1) / count * nbytes / 1e10
    assert all_reduce_seconds(one, one.names, nbytes) >= (2 * part) * (1 - 1e-9)
    assert all_gather_seconds(one, one.names, nbytes) >= (part + 1e-5) * (1 - 1e-9)


@given(COUNTS, SIZES, SIZES, st.floats(1, 100))
def test_more_bytes_and_slower_links_take_longer(count, less, more, factor):
    less, more = sorted((less, more))
    hosts = [f"h{i % 2}" for i in range(count)]
    fast, slow = cluster(hosts, rate=1e10 * factor), cluster(hosts)
    for seconds in (all_reduce_seconds, all_gather_seconds):
        assert seconds(slow, slow.names, less) <= seconds(slow, slow.names, more)
        assert seconds(fast, fast.names, more) <= seconds(slow, slow.names, more)
