"""Hosts of a cluster: how many cards each has, its network, and the levels that collectives are priced by."""

import json
from dataclasses import replace

import pytest

from autoshard.cluster.cluster import plan_device
from autoshard.cluster.files import cluster_from_dict, cluster_to_dict
from autoshard.cluster.hardware import LINK_EFFICIENCY, hardware_table
from autoshard.cluster.links import ASSUMED_NIC_BYTES_PER_SECOND
from autoshard.cluster.parse import cluster_of, parse_devices
from autoshard.cluster.topology import topology_of, unequal_reason, uneven_reason
from autoshard.errors import SpecError

GBIT = 1e9 / 8


def sizes(cluster):
    hosts = [device.host for device in cluster.devices]
    assert hosts == sorted(hosts, key=lambda host: int(host.removeprefix("host")))
    return [hosts.count(f"host{number}") for number in range(len(set(hosts)))]


DIVIDED = {
    "16xH100-80GB": [8, 8], "512xH100-80GB": [8] * 64, "12xH100-80GB": [6, 6], "20xH100-80GB": [7, 7, 6],
    "16xRTX4090": [8, 8], "144xGB200": [72, 72], "16xH100,4 hosts of 2xT4": [8, 8, 2, 2, 2, 2],
}  # fmt: skip
AS_SAID = {
    "16x24GiB": [16], "8xH100-80GB": [8], "8xL4": [8], "1 host of 16xH100": [16], "2 hosts of 8xA100": [8, 8],
    "8xH100,1x12GiB": [9],
}  # fmt: skip


@pytest.mark.parametrize("spec", [*DIVIDED, *AS_SAID])
def test_cards_are_divided_over_machines(spec):
    cluster, hosts = parse_devices(spec), {**DIVIDED, **AS_SAID}[spec]
    assert sizes(cluster) == hosts
    assert cluster.names == tuple(f"cuda:{number}" for number in range(sum(hosts)))
    assert any("is taken as" in note and "hosts of" in note for note in cluster.notes) == (spec in DIVIDED)


def test_every_row_with_a_network_card_says_where_it_was_read():
    for row in hardware_table().values():
        assert bool(row.nic_bytes_per_second) <= bool(row.host_source), row.name
        assert row.nics_per_host in (0, 1) or row.nic_bytes_per_second, row.name
        assert row.peers_bytes_per_second >= row.peer_bytes_per_second, row.name


NETWORKS = {
    "16xH100-80GB": (8, 400), "2 hosts of 4xH200": (4, 400), "16xA100-80GB": (8, 200), "16xV100": (1, 100),
    "16xL40S": (1, ASSUMED_NIC_BYTES_PER_SECOND / GBIT), "2 hosts of 8xA100-40GB, 1600Gb/s": (8, 200),
    "2 hosts of 8xA100-40GB, 400 Gbps per host": (8, 50), "2 hosts of 8xA100-40GB,4x100Gb/s": (4, 100),
    "2 hosts of 8xL4, 25 GB/s per GPU": (8, 200), "2 hosts of 8xL4, 0.2Tbit/s": (1, 200),
}  # fmt: skip


@pytest.mark.parametrize("spec", NETWORKS)
def test_networks(spec):
    nics, rate = NETWORKS[spec][0], NETWORKS[spec][1] * GBIT
    cluster = parse_devices(spec if "per GPU" not in spec else spec.split(", "))
    for host in cluster.links.hosts.values():
        assert (host.nics, host.nic_bytes_per_second) == (nics, pytest.approx(rate))
    link = cluster.link(cluster.names[0], cluster.names[-1])
    assert link.bytes_per_second == pytest.approx(rate * LINK_EFFICIENCY) and link.latency_seconds < 50e-6
    topology = topology_of(cluster)
    per_host = len(cluster.devices) // 2
    assert (topology.hosts, topology.devices_per_host) == (2, per_host)
    assert topology.network_bytes_per_second == pytest.approx(rate * min(1, nics / per_host))
    plan_devices = [plan_device(device) for device in cluster.devices]
    assert topology_of(cluster_of(plan_devices)) == topology
    said = [note for note in cluster.notes if "network" in note and "assumed" in note]
    assert len(said) == ("," not in spec)


LOCAL = {
    "8xH100-80GB": 450, "8xH100-80GB, no nvlink": 32, "4xRTX4090": 16, "4xRTX4090, no nvlink": 16, "2xA6000": 56.25,
    "4xA6000": 16, "8xMI300X": 448, "2xMI300X": 64, "8xV100": 150,
}  # fmt: skip
"""GB/s. Without links of their own cards have half of PCIe: both directions go through the host. Bridges join pairs."""


@pytest.mark.parametrize(("spec", "gigabytes"), LOCAL.items())
def test_bandwidth_inside_of_a_host(spec, gigabytes):
    assert topology_of(parse_devices(spec)).local_bytes_per_second == pytest.approx(gigabytes * 1e9)


def test_links_that_are_known_scale_the_topology():
    cluster = parse_devices("2 hosts of 2xH100-80GB")
    slow = {
        (one.source, one.destination): replace(one, bytes_per_second=one.bytes_per_second / 4)
        for one in map(cluster.link, *zip(*cluster.links.pairs, strict=True))
    }
    usual, found = topology_of(cluster), topology_of(cluster.with_known(slow))
    assert found.local_bytes_per_second == pytest.approx(usual.local_bytes_per_second / 4)
    assert found.network_bytes_per_second == pytest.approx(usual.network_bytes_per_second / 4)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("1xH100-80GB,1xA100-80GB", "unequal"),
        ("2x24GiB,1x12GiB", "cuda:2 has less memory than cuda:0"),
    ],
)
def test_unequal_devices_have_the_slowest_links(spec, says):
    cluster = parse_devices(spec)
    assert says in unequal_reason(cluster)
    each = [topology_of(parse_devices(f"2x{device.kind}")) for device in cluster.devices if device.kind != "generic"]
    slowest = min((one.local_bytes_per_second for one in each), default=0.0)
    assert topology_of(cluster).local_bytes_per_second in (slowest, *[0.5 * 32e9] * (not each))


def test_hosts_of_unequally_many_devices_have_no_topology():
    cluster = parse_devices("20xH100-80GB")
    assert topology_of(cluster) is None and "host2 has 6 devices and host0 has 7" in uneven_reason(cluster)


def test_memory_and_disk_are_no_ranks():
    assert parse_devices("16xH100-80GB,cpu=60GiB").device("cpu").host == "host0"
    assert topology_of(parse_devices("8xH100-80GB,cpu=100GiB,disk=1TiB")) == topology_of(parse_devices("8xH100-80GB"))
    assert topology_of(parse_devices("16xH100-80GB", simulated=True)) == topology_of(parse_devices("16xH100-80GB"))


WRONG = {
    "2 hosts of 8xH100, fastGb/s": "'fastGb/s' is not the speed of a network.*1600Gb/s",
    "2 hosts of 8xH100, 0Gb/s": "not the speed", "2 hosts of 8xH100, 9e99Gb/s": "not the speed",
    "2 hosts of 8xH100, 1600Gb": "bits", "8xH100,400Gb/s,200Gb/s": "given twice", "400Gb/s": "names no device",
    "cuda:0=20": "no unit.*20GiB", "2x24": "no unit", "cuda:0=20000000000": "no unit",
}  # fmt: skip


@pytest.mark.parametrize(("spec", "says"), WRONG.items())
def test_wrong_words(spec, says):
    with pytest.raises(SpecError, match=says):
        parse_devices(spec)


def test_hundreds_of_devices_have_no_table_of_links():
    cluster = parse_devices("256xH100-80GB, 8x400Gb/s")
    data = cluster_to_dict(cluster)
    assert data["links"] == [] and len(data["hosts"]) == 32
    assert cluster_from_dict(json.loads(json.dumps(data))) == cluster
    assert sum(map(len, cluster.links.groups().values())) == 256 * 255


def test_a_file_says_what_hosts_have():
    entries = [{"name": f"cuda:{number}", "kind": "A100", "host": f"host{number // 2}"} for number in range(4)]
    hosts = [{"name": "host0", "nics": 1, "nic_bytes_per_second": 1e9, "peer_links": False}]
    cluster = cluster_from_dict({"devices": entries, "hosts": hosts})
    assert cluster.link("cuda:0", "cuda:1").bytes_per_second == pytest.approx(0.8 * 32e9)
    assert cluster.link("cuda:2", "cuda:3").bytes_per_second == pytest.approx(0.8 * 300e9)
    assert topology_of(cluster).network_bytes_per_second == 0.5e9
    for wrong, says in (
        ([{"name": "x"}], "hosts of devices"),
        ([{"name": "host0", "nic": 1}], "found .'nic'"),
        ([1], "an object"),
    ):
        with pytest.raises(SpecError, match=says):
            cluster_from_dict({"devices": entries, "hosts": wrong})
