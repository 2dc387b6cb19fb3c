"""The tables: what is folded, merged and cut, and that they fit 80 columns with and without colour and Unicode."""

import io
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.engine.estimate import DeviceEstimate, Estimate, Transfer
from autoshard.plan import Plan, PlanDevice
from autoshard.plan.workload import Workload
from autoshard.report.devices import print_devices, print_hardware
from autoshard.report.rows import peak_parts, placed_rows, transfer_rows
from autoshard.report.terminal import print_plan, print_profile
from tests.blocks import Block

GIB = 2**30


class Net(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList([*[Block(8, 16) for _ in range(depth)], Block(8, 16)])
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


@pytest.fixture(scope="module")
def profile():
    return autoshard.profile(Net(), torch.arange(6).reshape(1, 6), workload=Workload(batch_size=1, sequence_length=6))


def plan_of(placements, **fields):
    devices = tuple(PlanDevice(name=name, memory_bytes=GIB) for name in dict.fromkeys(placements.values()))
    settings = {
        "strategy": "balanced",
        "objective": "latency",
        "workload": Workload(),
        "reasons": ("it is the fastest",),
    }
    return Plan(placements=placements, devices=devices, **{**settings, **fields})


PLACEMENTS = {
    "embed": "cuda:0",
    "scale": "cuda:1",
    "blocks.0": "cuda:0",
    "blocks.1": "cuda:0",
    "blocks.2": "cuda:0",
    "blocks.3.up": "cuda:0",
    "blocks.3.down": "cuda:1",
    "blocks.4": "cuda:1",
    "blocks.5": "cuda:1",
    "blocks.6": "cuda:1",
    "head": "cuda:1",
}


def device(name, **parts):
    fields = ("parameter", "buffer", "gradient", "optimizer", "activation", "cache", "transfer", "overhead")
    figures = {f"{field}_bytes": parts.get(field, 0) for field in fields}
    return DeviceEstimate(
        name=name,
        memory_bytes=parts.get("memory", 10 * GIB),
        peak_bytes=sum(figures.values()),
        compute_seconds=parts.get("compute", 0.01),
        transfer_seconds=parts.get("transfer_time", 0.0),
        **figures,
    )


def estimate_of(*devices, transfers=(), **fields):
    settings = {"objective": "latency", "latency_seconds": 0.5, "bottleneck_seconds": 0.25, "lower_bound_seconds": 0.4}
    settings |= {"gap": 0.25}
    return Estimate(devices=devices, transfers=tuple(transfers), **{**settings, **fields})


def shown(call, *arguments, width=80, colour=False, encoding="utf-8", **settings):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, force_terminal=colour, highlight=False)
    call(console, *arguments, **settings)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


@given(st.integers(1, 6), st.data())
def test_folding_loses_nothing(depth, data):
    """Unfolding every range gives the placements back."""
    names = [f"blocks.{i}" for i in range(depth)]
    placements = {name: data.draw(st.sampled_from(["cuda:0", "cuda:1"])) for name in names}
    folded = placed_rows(plan_of(placements), FOLDED_PROFILE)
    unfolded = {}
    for row in folded:
        first, _, last = row.path.rpartition(".")[2].partition("-")
        numbers = range(int(first), int(last or first) + 1)
        assert len(numbers) == row.count
        unfolded |= {f"blocks.{i}": row.device for i in numbers}
    assert unfolded == placements


FOLDED_PROFILE = autoshard.profile(Net(5), torch.arange(6).reshape(1, 6))


def test_transfers_are_merged():
    def transfer(nbytes, backward=False, **names):
        return Transfer(source="a", destination="b", nbytes=nbytes, seconds=0.001, backward=backward, **names)

    transfers = [
        transfer(10, producer="x", consumer="y"),
        transfer(500, producer="big", consumer="user"),
        transfer(7, backward=True, producer="net.3.y", consumer="net.3.x.z"),
    ]
    forward, backward = transfer_rows(transfers)
    assert (forward.count, forward.nbytes, forward.largest) == (2, 510, "big -> user")
    assert backward.backward and backward.nbytes == 7 and backward.largest == "net.3: y -> x.z"


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_parts_of_memory_add_up_to_the_peak(mode):
    profile = autoshard.profile(Net(), torch.arange(6).reshape(1, 6), workload=Workload(mode=mode))
    parts = peak_parts(profile)
    assert sum(parts.values()) == profile.peak_bytes and min(parts.values()) >= 0
    cluster = parse_devices("2xT4")
    plan = plan_of({"": "cuda:0"})
    row = autoshard.estimate(plan, profile, cluster).devices[0]
    assert sum(row.parts.values()) == row.peak_bytes
    assert (parts["gradients"] > 0) == (row.parts["gradients"] > 0) == (mode == "training")


def test_a_plan_as_printed(profile):
    """What is folded, summed and named; the whole text of another plan is in README's picture."""
    estimate = estimate_of(
        device("cuda:0", parameter=4 * GIB, activation=2 * GIB, overhead=GIB, compute=0.2),
        device("cuda:1", parameter=2 * GIB, cache=3 * GIB, overhead=GIB, compute=0.1, transfer_time=0.002),
        device("cuda:2"),
        transfers=[
            Transfer(
                source="cuda:0",
                destination="cuda:1",
                nbytes=2**20,
                seconds=2e-3,
                producer="blocks.3.up",
                consumer="blocks.3",
            )
        ],
    )
    text = shown(
        print_plan, plan_of(PLACEMENTS, pins={"head": "cuda:1"}), estimate, profile, title="net.py", notes=["Noted."]
    )
    for row in (
        "cuda:0  █████████▒▒▒▒▒xx······  7.00 GiB  10.0 GiB  3.00 GiB   200 ms",
        "cuda:2  ······················    unused  10.0 GiB  10.0 GiB  10.0 ms",
        "  █ weights 6.00 GiB   ▒ activations 2.00 GiB   ▪ cache 3.00 GiB",
        "blocks.0-2     3 x  Block      3.28 KiB  cuda:0",
        "blocks.3.up         Linear        576 B  cuda:0",
        "head                Linear         tied  cuda:1 (pinned)",
        "  busiest device  250 ms  cuda:0; 24 tokens/s if passes overlap",
        "  lower bound     400 ms  no placement is faster; this one is 25.0% above",
        "cuda:0  cuda:1        1  1.00 MiB  2.00 ms  blocks.3.up -> blocks.3",
        "  - it is the fastest.",
    ):
        assert f"\n{row}\n" in text, row


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_tables_fit(profile, width, encoding):
    devices = [device(f"cuda:{i}", parameter=i * GIB, activation=GIB, optimizer=GIB, gradient=GIB) for i in range(4)]
    transfers = [
        Transfer(
            source="cuda:0",
            destination=f"cuda:{i % 3 + 1}",
            nbytes=10**i,
            seconds=1e-3,
            producer="some.very.long.path.of.modules.that.does.not.end.soon",
            consumer="another.very.long.path.of.modules.that.does.not.end.soon",
            backward=i % 2 == 1,
        )
        for i in range(8)
    ]
    estimate = estimate_of(*devices, transfers=transfers, mixed_device=("a.b", "", "c", "d"), written_back=("e",))
    kinds = {d.name: "MI300X" for d in devices}
    note = ["A rather long sentence about an assumption that was made along the way, to be wrapped."]
    text = shown(
        print_plan, plan_of(PLACEMENTS), estimate, profile, kinds=kinds, notes=note, width=width, encoding=encoding
    )
    assert max(map(len, text.splitlines())) <= max(width, 90)  # a bar and five figures are never cut
    if width >= 80:
        assert max(map(len, text.splitlines())) <= width
    assert not re.search(r" $", text, re.MULTILINE)
    assert "\x1b" not in text
    for call, argument in ((print_profile, profile), (print_devices, parse_devices("2 hosts of 8xMI300X,cpu=1GiB"))):
        text = shown(call, argument, width=80, encoding=encoding)
        assert max(map(len, text.splitlines())) <= 80 and not re.search(r" $", text, re.MULTILINE)
    text = shown(print_hardware, width=80, encoding=encoding)
    assert max(map(len, text.splitlines())) <= 80


def test_colour_only_where_wanted(profile, monkeypatch):
    estimate = estimate_of(device("cuda:0", parameter=GIB))
    assert "\x1b[" in shown(print_plan, plan_of({"": "cuda:0"}), estimate, profile, colour=True)
    monkeypatch.setenv("NO_COLOR", "1")
    coloured = shown(print_plan, plan_of({"": "cuda:0"}), estimate, profile, colour=True)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", coloured)
