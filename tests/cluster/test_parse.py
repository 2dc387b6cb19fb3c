"""Every form of a device spec, what is said about wrong ones, and that only a Cluster or a SpecError comes out."""

import json
import string

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.files import cluster_from_dict, cluster_to_dict
from autoshard.cluster.parse import MAX_DEVICES, active_cluster, canonical_name, cluster_of, parse_devices
from autoshard.errors import SpecError
from autoshard.plan import PlanDevice

GIB = 2**30


def rows(cluster):
    return [(d.name, d.kind, d.host) for d in cluster.devices]


def test_sizes():
    cluster = parse_devices("2x24GiB,1x12GiB")
    assert [(d.name, d.memory_bytes) for d in cluster.devices] == [
        ("cuda:0", 24 * GIB),
        ("cuda:1", 24 * GIB),
        ("cuda:2", 12 * GIB),
    ]
    assert all(d.kind == "generic" and d.host == "host0" for d in cluster.devices)
    assert cluster.spec == "2x24GiB,1x12GiB"
    assert any("assumed" in note for note in cluster.notes)


@pytest.mark.parametrize("spec", ["24GiB,24GiB,12GiB", "2 x 24 GiB, 12GiB", "2×24GiB,12GiB", ["2x24GiB", "12GiB"]])
def test_other_spellings_of_sizes(spec):
    assert parse_devices(spec).devices == parse_devices("2x24GiB,1x12GiB").devices


@pytest.mark.parametrize("spec", ["8xH100-80GB", "8 H100", "8*h100 80gb", "8 x NVIDIA H100-SXM", "8xH100-SXM"])
def test_hardware(spec):
    cluster = parse_devices(spec)
    assert rows(cluster) == [(f"cuda:{i}", "H100-SXM", "host0") for i in range(8)]
    device = cluster.devices[0]
    assert 79 * GIB < device.memory_bytes < 80 * GIB
    assert device.flops("bfloat16") == pytest.approx(0.75 * 989.4e12)
    assert device.flops("float8_e4m3fn") == device.flops("float32") == pytest.approx(0.75 * 66.9e12)
    assert device.overhead_bytes == 800 * 2**20
    # 900 GB/s is both directions together; 0.8 of it is achieved.
    assert cluster.link("cuda:0", "cuda:7").bytes_per_second == pytest.approx(0.8 * 450e9)


def test_what_a_card_lacks_is_said():
    for spec, lacks in (("1xT4", True), ("2xV100-32GB", True), ("1xA800-80GB", False), ("1xM1-Max", False)):
        assert any("no bfloat16 units" in note for note in parse_devices(spec).notes) == lacks
    assert any("so is float16" in note for note in parse_devices("2xP40").notes)
    assert any("Rates of cpu devices" in note for note in parse_devices("1x24GiB,cpu=60GiB").notes)


def test_a_number_can_be_a_card():
    assert rows(parse_devices("4090")) == [("cuda:0", "RTX-4090", "host0")]
    assert len(parse_devices("2x4090").devices) == 2
    mixed = parse_devices("3060,RTX3080-12GB,1 x 4070 Ti Super")
    assert [device.kind for device in mixed.devices] == ["RTX-3060", "RTX-3080-12", "RTX-4070-Ti-Super"]


def test_max_memory_form():
    cluster = parse_devices({"cuda:0": "20GiB", 1: 10 * GIB, "cpu": "60GiB", "disk": "200GiB"})
    assert cluster.names == ("cuda:0", "cuda:1", "cpu", "disk")
    assert [d.memory_bytes // GIB for d in cluster.devices] == [20, 10, 60, 200]
    assert cluster.device("cpu").overhead_bytes == 0
    assert cluster.link("disk", "cuda:0").bytes_per_second < cluster.link("cpu", "cuda:0").bytes_per_second
    assert parse_devices("cuda:0=20GiB,cuda:1=10GiB,cpu=60GiB,disk=200GiB").devices == cluster.devices
    assert parse_devices(cluster.spec).devices == cluster.devices


def test_apple_machines_have_one_gpu():
    assert rows(parse_devices("M2-Ultra")) == [("mps", "M2-Ultra", "host0")]
    with pytest.raises(SpecError, match="an Apple machine has one GPU"):
        parse_devices("2xM3-Ultra")


def test_simulated_devices_are_exact():
    cluster = parse_devices("8xH100-80GB,1x12GiB", simulated=True)
    assert cluster.names == tuple(f"cpu:{i}" for i in range(9))
    assert all(d.overhead_bytes == 0 and d.block_bytes == 1 for d in cluster.devices)
    assert cluster.devices[0].kind == "H100-SXM"
    real = parse_devices("8xH100-80GB,1x12GiB")
    assert cluster.link("cpu:0", "cpu:8").seconds(1e9) == real.link("cuda:0", "cuda:8").seconds(1e9)


def test_names_mean_the_active_devices_while_simulating():
    simulated = parse_devices("2x1GiB,1x512MiB", simulated=True)
    token = active_cluster.set(simulated)
    try:
        assert parse_devices("auto").devices == simulated.devices
        assert parse_devices(2).devices == simulated.devices[:2]
        subset = parse_devices(["cpu:2", "cpu:0"])
        assert subset.devices == (simulated.devices[2], simulated.devices[0])
        assert subset.link("cpu:2", "cpu:0") == simulated.link("cpu:2", "cpu:0")
        assert parse_devices({"cpu:1": "100MiB"}).devices[0].memory_bytes == 100 * 2**20
        with pytest.raises(SpecError, match="4 devices"):
            parse_devices(4)
    finally:
        active_cluster.reset(token)


def test_devices_of_this_machine():
    assert parse_devices(["cpu"]).devices[0].memory_bytes > 2**20
    halves = parse_devices(["cpu:0", "cpu:1"])
    assert halves.names == ("cpu:0", "cpu:1")
    assert halves.devices[0].memory_bytes <= parse_devices(["cpu"]).devices[0].memory_bytes // 2 * 1.5
    auto = parse_devices("auto")
    assert auto.names == ("cpu",) if not torch.accelerator.is_available() else "cpu" not in auto.names


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("spec", ["cuda:0", ["cuda:0", "cuda:1"], [0], 2, "3", torch.device("cuda", 1)])
def test_a_device_that_does_not_exist(spec):
    with pytest.raises(SpecError, match=r"torch sees no accelerator here.*24GiB"):
        parse_devices(spec)


@pytest.mark.gpu
def test_a_real_accelerator_is_detected_with_its_free_memory():
    name = parse_devices(1).names[0]
    before = parse_devices([name]).devices[0].memory_bytes
    taken = torch.ones(2**28, device=name)
    after = parse_devices([name]).devices[0].memory_bytes
    assert before - after >= taken.nbytes * 0.9


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "empty"),
        ("H100-40GB", "Closest: H100-PCIe, H100-SXM"),
        ("2xRTX-9090", "RTX-3090, RTX-4090, RTX-5090"),
        ("0xH100", "at least 1"),
        ("99999999999999xH100", str(MAX_DEVICES)),
        ("500 hosts of 4xT4", str(MAX_DEVICES)),
        ("2x0GiB", "positive"),
        ("2x24Gallons", "not a size"),
        ("cuda:0=20GiB,cuda:0=20GiB", "listed twice"),
        (["cuda:0=1GiB", "cuda=2GiB"], "'cuda:0' is listed twice"),
        ({"cuda:0": 0}, "memory of 'cuda:0'.*positive"),
        ({"cuda:0": "20 parsecs"}, "not a size"),
        ({"cuda:0": "20"}, "no unit"),
        ({"cuda:0": "9" * 400 + "GiB"}, "beyond every device"),
        ({"gpu0": "20GiB"}, "not a device name"),
        ({-1: "20GiB"}, "not a device index"),
        ({}, "no devices"),
        (0, "at least 1"),
        (True, "not a device spec"),
        (None, "not a device spec"),
        ([None], "not a device name"),
        ("nowhere/cluster.json", "can't be read"),
    ],
)
def test_wrong_specs(spec, says):
    with pytest.raises(SpecError, match=says) as caught:
        parse_devices(spec)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600


def test_canonical_names():
    assert canonical_name("cuda") == canonical_name(0) == canonical_name(torch.device("cuda", 0)) == "cuda:0"
    assert canonical_name("cpu") == "cpu" and canonical_name("cpu:3") == "cpu:3"
    assert canonical_name("mps") == canonical_name("mps:0") == "mps"
    assert canonical_name("disk") == "disk"


def test_a_plan_s_devices_become_a_cluster_again():
    asked = parse_devices("2 hosts of 2xA100-40GB")
    plan_devices = [
        PlanDevice(name=d.name, memory_bytes=d.memory_bytes, kind=d.kind, host=d.host) for d in asked.devices
    ]
    again = cluster_of(plan_devices)
    assert again.devices == asked.devices and again.links == asked.links
    simulated = cluster_of([PlanDevice(name="cpu:1", memory_bytes=2**30, kind="generic")])
    assert simulated.devices[0].overhead_bytes == 0


PIECES = st.sampled_from(
    [
        *(
            "auto",
            "8",
            "2",
            "0",
            "-1",
            "1e9",
            "x",
            "×",
            "*",
            " ",
            ",",
            "+",
            "=",
            ":",
            "/",
            ".json",
            " hosts of ",
            " of ",
        ),
        *("H100", "-80GB", "A100", "4090", "24GiB", "GiB", "12.5MiB", ",1600Gb/s", ",no nvlink", "\x00", "é", "٣"),
        *("cpu", "cpu:1", "disk", "mps", "cuda:0", "cuda:"),
    ]
)
TEXTS = st.one_of(st.lists(PIECES, max_size=8).map("".join), st.text(max_size=20), st.text(string.digits, max_size=30))
VALUES = st.one_of(TEXTS, st.integers(), st.floats(), st.none(), st.booleans(), st.binary(max_size=4))
SPECS = st.one_of(
    VALUES, st.lists(VALUES, max_size=4), st.dictionaries(st.one_of(TEXTS, st.integers()), VALUES, max_size=4)
)


@settings(max_examples=200)
@given(SPECS, st.booleans())
@example("9" * 5000 + "xT4", False)
@example({"cuda:0": 10**5000}, False)
@example(10**5000, True)
@example("\x00.json", False)
@example("/", False)
@example(float("nan"), False)
def test_only_a_cluster_or_a_spec_error_comes_out(spec, simulated):
    try:
        cluster = parse_devices(spec, simulated=simulated)
    except SpecError as error:
        assert str(error)
        return
    assert isinstance(cluster, Cluster) and 1 <= len(cluster.devices) <= MAX_DEVICES
    assert len(set(cluster.names)) == len(cluster.names)
    assert all(d.memory_bytes > 0 and d.budget_bytes > 0 for d in cluster.devices)
    if len(cluster.devices) <= 16:
        assert len([*cluster.links.pairs]) == len(cluster.devices) * (len(cluster.devices) - 1)
        assert cluster_from_dict(json.loads(json.dumps(cluster_to_dict(cluster)))) == cluster
