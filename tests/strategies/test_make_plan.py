"""make_plan on recorded models: complete, fitting, reproducible plans, and refusals that help."""

import re

import pytest
import torch
from torch import nn

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.common.sizes import parse_bytes
from autoshard.engine.pricer import price
from autoshard.errors import PlanError, SpecError
from autoshard.plan import check_placements
from autoshard.plan.placement import covering_entry
from autoshard.plan.workload import Workload
from autoshard.profile.profile import Profile
from autoshard.strategies import make_plan

STRATEGIES = ("auto", "sequential", "balanced", "balanced_low_0")
KIB = 1024


class Block(nn.Module):
    """A block with a raw parameter, a scalar buffer and a buffer that is not saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("gain", torch.ones(()))
        self.register_buffer("shift", torch.zeros(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x * self.scale + self.shift))) * self.gain


class Model(nn.Module):
    """Tied embedding and head, raw tensors on the root, a module that never runs."""

    def __init__(self, depth: int = 6, width: int = 32, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(64, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.unused = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.ones(8), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def profile_of(mode: str = "inference") -> Profile:
    with torch.device("meta"):
        model = Model()
    ids = torch.zeros(2, 16, dtype=torch.long)
    return autoshard.profile(model, {"ids": ids}, workload=Workload(mode=mode))


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    return {mode: profile_of(mode) for mode in ("inference", "training")}


def devices(**sizes: str):
    return parse_devices({name.replace("_", ":"): size for name, size in sizes.items()})


@pytest.mark.parametrize(
    ("objective", "mode"), [("latency", "inference"), ("throughput", "training"), ("memory", "training")]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_tensor_has_one_device_and_everything_fits(profiles, strategy, objective, mode) -> None:
    profile = profiles[mode]
    size = {"inference": 80, "training": 330}[mode]
    for shares in ((1.0, 1.0, 1.0), (0.7, 1.5, 1.0), (20.0, 20.0, 20.0)):
        sizes = {f"cpu:{k}": int(size * KIB * share) for k, share in enumerate(shares)}
        cluster = parse_devices(sizes)
        plan = make_plan(profile, cluster, strategy=strategy, objective=objective)
        check_placements(plan.placements)
        entries = [covering_entry(plan.placements, tensor.name) for tensor in profile.graph.tensors]
        assert None not in entries and set(entries) == set(plan.placements)
        result = price(plan, profile, cluster)
        assert result.fits, [(d.name, d.peak_bytes, d.memory_bytes) for d in result.devices]
        assert (plan.mixed_device, plan.written_back) == (result.mixed_device, result.written_back)
        assert plan.reasons and plan.fingerprint == profile.graph.fingerprint


def test_entries_are_as_short_as_can_be(profiles) -> None:
    cluster = parse_devices({"cpu:0": 100 * KIB, "cpu:1": 100 * KIB, "cpu:2": 100 * KIB})
    plan = make_plan(profiles["inference"], cluster, strategy="balanced")
    assert set(plan.placements) <= {
        "embed", "position", "table", *(f"blocks.{k}" for k in range(6)), "unused", "head"
    }, "cuts between whole blocks cost the same and split nothing"  # fmt: skip


def test_pins_hold_for_all_below_and_the_longest_wins(profiles) -> None:
    cluster = devices(cpu_0="1MiB", cpu_1="1MiB", cpu_2="1MiB")
    pins = {"blocks": "cpu:1", "blocks.3": "cpu:2", "position": "cpu:0"}
    plan = make_plan(profiles["inference"], cluster, strategy="balanced", pins=pins)
    where = {
        t.name: plan.placements[covering_entry(plan.placements, t.name)] for t in profiles["inference"].graph.tensors
    }
    assert all(device == "cpu:2" for name, device in where.items() if name.startswith("blocks.3."))
    assert all(where[f"blocks.{k}.{t}"] == "cpu:1" for k in (0, 1, 2, 4, 5) for t in ("scale", "gain", "up.weight"))
    assert where["position"] == "cpu:0" and plan.pins == pins


def test_training_never_parts_tied_weights(profiles) -> None:
    cluster = parse_devices({f"cpu:{k}": 330 * KIB for k in range(3)})
    for strategy in STRATEGIES:
        plan = make_plan(profiles["training"], cluster, strategy=strategy, objective="throughput")
        of = {name: plan.placements[covering_entry(plan.placements, name)] for name in ("embed.weight", "head.weight")}
        assert of["embed.weight"] == of["head.weight"]
        assert any("share one tensor" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "fastest"}, "column-parallel, pipeline, data-parallel, hybrid, ddp, fsdp."),
        ({"strategy": "pipeline"}, "checks on the model what it divides"),
        ({"strategy": "column-parallel"}, "a profile alone is not enough"),
        ({"strategy": "data-parallel"}, "a profile alone is not enough"),
        ({"pins": {"haed": "cpu:0"}}, "no module or tensor of that name. Did you mean 'head'?"),
        ({"pins": {"head": "cpu:7"}}, "not among the devices cpu:0, cpu:1"),
    ],
)
def test_bad_settings_are_refused(profiles, settings, message) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        make_plan(profiles["inference"], devices(cpu_0="1MiB", cpu_1="1MiB"), **{"strategy": "balanced", **settings})


def test_a_disk_computes_nothing(profiles) -> None:
    with pytest.raises(SpecError, match='"disk" computes nothing'):
        make_plan(profiles["inference"], parse_devices({"disk": "9GiB"}))
    alone = make_plan(profiles["inference"], parse_devices({"cpu": "1GiB"}))
    beside = make_plan(profiles["inference"], parse_devices({"cpu": "1GiB", "disk": "9GiB"}))
    assert beside.placements == alone.placements and not beside.offloaded


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_refusal_names_device_deficit_contributors_and_a_change_that_works(profiles, strategy) -> None:
    sizes = {"cpu:0": 100 * KIB, "cpu:1": 60 * KIB}
    with pytest.raises(PlanError) as refused:
        make_plan(profiles["inference"], parse_devices(sizes), strategy=strategy)
    text = str(refused.value)
    assert re.search(r"cpu:\d needs [\d.]+ KiB and has [\d.]+ KiB for tensors, [\d.]+ KiB too little", text)
    assert "largest there: " in text
    more = re.search(r"fits if (cpu:\d) has ([\d.]+ \w+) more", text)
    if more:
        sizes[more[1]] += parse_bytes(more[2])
    else:
        count = {"one": 1}.get(m := re.search(r"fits with (\w+) more device", text)[1]) or int(m)
        like = re.search(r"like (cpu:\d)", text)[1]
        sizes |= {f"cpu:{2 + k}": sizes[like] for k in range(count)}
    assert make_plan(profiles["inference"], parse_devices(sizes), strategy=strategy)


def test_contradicting_pins_in_training_are_refused_as_such(profiles) -> None:
    pins = {"embed": "cpu:0", "head": "cpu:1"}
    with pytest.raises(PlanError, match="the pins contradict each other"):
        make_plan(profiles["training"], devices(cpu_0="8MiB", cpu_1="8MiB"), pins=pins)


def test_a_model_without_tensors_is_one_entry() -> None:
    profile = autoshard.profile(nn.Sequential(nn.ReLU(), nn.Tanh()), (torch.ones(2, 3),))
    assert dict(make_plan(profile, devices(cpu_0="1MiB", cpu_1="1MiB")).placements) == {"": "cpu:0"}


@pytest.mark.parametrize("objective", ["latency", "throughput", "memory"])
def test_what_fits_by_the_exact_figures_alone_is_found(profiles, objective: str) -> None:
    """The chain counts the optimizer's step alike for the CPU and for accelerators: no solution of it fits."""
    cluster = parse_devices({"cuda:0": 463849, "cpu": 210493})
    plan = make_plan(profiles["training"], cluster, objective=objective)
    assert price(plan, profiles["training"], cluster).fits


@pytest.mark.parametrize("objective", ["latency", "memory"])
def test_a_device_of_which_nothing_may_be_used_is_left_alone(profiles, objective: str) -> None:
    cluster = parse_devices({"cpu:0": "1GiB", "cpu:1": "1GiB"}).with_memory({"cpu:1": 0})
    plan = make_plan(profiles["inference"], cluster, objective=objective)
    assert set(plan.placements.values()) == {"cpu:0"}


def test_devices_with_almost_equal_memory_count_as_equal(profiles) -> None:
    sizes = {f"cpu:{k}": 100 * KIB - 7 * k for k in range(8)}
    plan = make_plan(profiles["inference"], parse_devices(sizes), strategy="balanced")
    used = list(dict.fromkeys(plan.placements.values()))
    assert len(used) > 1 and used == list(sizes)[: len(used)], "equal devices are taken in the order given"


def value(profile: Profile, sizes: list[int], objective: str) -> float:
    """The objective of the plan for devices of these sizes, by the exact estimate; inf if nothing fits."""
    cluster = parse_devices({f"cpu:{k}": n for k, n in enumerate(sizes)})
    try:
        figures = price(make_plan(profile, cluster, strategy="balanced", objective=objective), profile, cluster)
    except PlanError:
        return float("inf")
    return figures.bottleneck_seconds if objective == "throughput" else figures.latency_seconds


@pytest.mark.parametrize(
    ("mode", "objective", "sizes", "larger"),
    [
        ("inference", "throughput", [94559, 74674], [116061, 74674]),
        ("training", "throughput", [417196, 169871], [502228, 169871]),
        ("training", "latency", [195405, 406949], [257500, 406949]),
        ("inference", "latency", [90820, 83018], [60012, 90820, 83018]),
    ],
)
def test_more_memory_does_not_cost_a_better_plan(profiles, mode, objective, sizes, larger) -> None:
    """With less memory only a plan that the chain thinks too large fits; with more, one it allows must be as good."""
    before = value(profiles[mode], sizes, objective)
    assert value(profiles[mode], larger, objective) <= before * 1.05 < float("inf")
