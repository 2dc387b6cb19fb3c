"""Cuts over devices that are too small: what is streamed, what it costs, and where it is refused."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.capture import capture
from autoshard.cluster.parse import parse_devices
from autoshard.engine.pricer import price
from autoshard.errors import PlanError
from autoshard.profile.measure import profile_graph

LAYERS, LAYER_BYTES = 8, 2 * 128 * 512 * 4  # two matrices
KIB = 1 << 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(128, 512, bias=False)
        self.down = nn.Linear(512, 128, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def net():
    return Net()


def planned(net, devices, **options):
    return autoshard.plan(net, devices, inputs=(torch.zeros(4, 128),), strategy="column-parallel", **options)


def figures_of(net, plan, devices):
    profile = profile_graph(capture(net, (torch.zeros(4, 128),)), plan.workload)
    figures = price(plan, profile, parse_devices(devices))
    return figures, {device.name: device for device in figures.devices}


@pytest.mark.parametrize("store", ["cpu", "disk"])
def test_as_few_modules_are_streamed_as_must_be(net, store):
    streamed = []
    for layers in (2.2, 4.3, 6.3, 9):  # room for so many halves of layers
        room = int(layers * LAYER_BYTES / 2)
        devices = {"cpu:0": f"{room // KIB}KiB", "cpu:1": f"{room // KIB}KiB", store: "1GiB"}
        plan = planned(net, devices)
        figures, by_name = figures_of(net, plan, devices)
        assert plan.cuts and figures.fits and [device.name for device in plan.devices] == ["cpu:0", "cpu:1"]
        assert set(plan.streamed.values()) <= {store}
        streamed.append(len(plan.streamed))
        assert by_name[store].stored_bytes == streamed[-1] * LAYER_BYTES  # each rank keeps its half there
        if streamed[-1]:
            brought = {link.destination: link.nbytes for link in figures.streaming.links}
            assert brought == dict.fromkeys(["cpu:0", "cpu:1"], streamed[-1] * LAYER_BYTES // 2)
            assert "one process per device" in plan.reasons[-1]
            assert figures.latency_seconds >= figures.streaming.bound_seconds + figures.collective_seconds
    assert streamed == sorted(streamed, reverse=True) and streamed[0] == LAYERS and streamed[-1] == 0


def test_ranks_share_the_disk(net):
    devices = {"cpu:0": "700KiB", "cpu:1": "700KiB", "disk": "1GiB"}
    plan = planned(net, devices)
    link = parse_devices(devices).link("disk", "cpu:0")
    brought = figures_of(net, plan, devices)[0].streaming.links[0]
    copies = 2 * len(plan.streamed)  # two matrices each
    expected = copies * link.latency_seconds + 2 * brought.nbytes / link.bytes_per_second
    assert brought.seconds == pytest.approx(expected)


def test_without_stores_or_room_or_for_training_it_is_refused(net):
    for devices, options in (
        ({"cpu:0": "700KiB", "cpu:1": "700KiB"}, {}),
        ({"cpu:0": "200KiB", "cpu:1": "200KiB", "disk": "1GiB"}, {}),
        ({"cpu:0": "700KiB", "cpu:1": "700KiB", "disk": "1MiB"}, {}),
        ({"cpu:0": "700KiB", "cpu:1": "700KiB", "disk": "1GiB"}, {"workload": autoshard.Workload(mode="training")}),
    ):
        with pytest.raises(PlanError, match="does not fit"):
            planned(net, devices, **options)
