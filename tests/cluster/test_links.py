"""Links that are assumed follow from what the devices are, and from whether each has a process of its own."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.cluster.links import LOOPBACK
from autoshard.cluster.parse import parse_devices
from tests.ranks import run_ranks

TWO = {"cpu:0": "1GiB", "cpu:1": "1GiB"}


def rate(cluster, source="cpu:0", destination="cpu:1"):
    link = cluster.link(source, destination)
    return link.bytes_per_second, link.latency_seconds


def test_cpus_with_a_process_each_send_through_the_loopback():
    cluster = parse_devices(TWO).between_processes()
    assert rate(cluster) == rate(cluster, "cpu:1", "cpu:0") == LOOPBACK
    assert rate(parse_devices(TWO))[1] < LOOPBACK[1] / 10  # in one process it is a copy


@pytest.mark.parametrize("devices", ["2xH100-80GB", {"cpu:0": "1GiB", "cpu": "1GiB"}])
def test_other_links_stay(devices):
    cluster = parse_devices(devices)
    assert cluster.between_processes() is cluster


def test_what_is_known_of_a_link_stays():
    cluster = parse_devices(TWO)
    known = replace(cluster, links=tuple(replace(link, latency_seconds=1e-5) for link in cluster.links))
    assert known.between_processes() is known


def collective_seconds():
    """What the estimate says of a model of two matrices that is cut between them."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.ones(2, 64)
    profile = autoshard.profile(model, x)
    plan = autoshard.plan(model, TWO, inputs=x, profile=profile, strategy="column-parallel", objective="memory")
    assert plan.cuts
    return autoshard.estimate(plan, profile).collective_seconds


def test_processes_are_priced_as_such():
    apart = run_ranks(collective_seconds, 2)
    assert min(apart) >= LOOPBACK[1] > 10 * collective_seconds()
