"""Links that are assumed follow from what the devices are, and from whether each has a process of its own."""

from dataclasses import replace

import pytest

from autoshard.cluster.links import LOOPBACK
from autoshard.cluster.parse import parse_devices

TWO = {"cpu:0": "1GiB", "cpu:1": "1GiB"}


def rate(cluster, source="cpu:0", destination="cpu:1"):
    link = cluster.link(source, destination)
    return link.latency_seconds, link.bytes_per_second


def test_cpus_with_a_process_each_send_through_the_loopback():
    cluster = parse_devices(TWO).between_processes()
    assert rate(cluster) == rate(cluster, "cpu:1", "cpu:0") == LOOPBACK
    assert rate(parse_devices(TWO))[0] < LOOPBACK[0] / 10  # in one process it is a copy


@pytest.mark.parametrize("devices", ["2xH100-80GB", {"cpu:0": "1GiB", "cpu": "1GiB"}])
def test_other_links_stay(devices):
    cluster = parse_devices(devices)
    assert cluster.between_processes() is cluster


def test_what_is_known_of_a_link_stays():
    cluster = parse_devices(TWO)
    fast = {
        (one.source, one.destination): replace(one, latency_seconds=1e-5)
        for one in map(cluster.link, *zip(*cluster.links.pairs, strict=True))
    }
    known = cluster.with_known(fast)
    assert known.between_processes() is known
