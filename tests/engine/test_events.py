"""Events of every kind of plan: they are the estimate's own seconds, and nothing is in two places at once."""

import functools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.engine.events import LINKS, events
from autoshard.plan.workload import Workload


class Net(nn.Module):
    """Blocks of matrices with a residual stream, and a head that shares the embedding's weight."""

    def __init__(self, depth: int = 4, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(up(x).relu())
        return self.head(x)


INPUTS = torch.zeros(4, 8, dtype=torch.long)
TRAINING = Workload(mode="training")
WAITING = Workload(mode="training", batch_size=64, sequence_length=8)
CASES = {
    "one device": ("1xT4", "balanced", None),
    "placements": ("3xA100-40GB", "balanced", None),
    "training": ("2xA100-40GB,1xH100-80GB", "balanced", TRAINING),
    "unequal cuts": ("2xA100-40GB", "column-parallel", None),
    "cuts in training": ("2xA100-40GB", "column-parallel", TRAINING),
    "replicas that wait for the host": ("2xA100-40GB", "data-parallel", WAITING),
    "a pipeline that waits for the host": ("2xA100-40GB", "pipeline", WAITING),
    "replicas in inference": ("2xA100-40GB", "data-parallel", Workload(batch_size=64, sequence_length=8)),
    "replicas": ("2xA100-40GB", "data-parallel", Workload(mode="training", batch_size=512, sequence_length=256)),
    "pipeline": ("2xA100-40GB", "pipeline", Workload(mode="training", batch_size=512, sequence_length=256)),
    "offloaded": ({"cpu:0": "80KiB", "cpu": "10MiB"}, "auto", None),
    "offloaded to two": ({"cpu:0": "80KiB", "cpu:1": "80KiB", "cpu": "10MiB"}, "auto", None),
}


@functools.cache
def made(case: str):
    spec, strategy, workload = CASES[case]
    objective = "memory" if "cuts" in case else "throughput" if case in ("placements", "training") else "latency"
    sizes = (workload.batch_size, workload.sequence_length) if workload and workload.batch_size else INPUTS.shape
    inputs = torch.zeros(sizes, dtype=torch.long)
    model = Net(width=256 if case in ("replicas", "pipeline") else 32).train(workload is not None)
    if case in ("placements", "training"):  # without pins one device is best
        names = parse_devices(spec).names
        pins = {f"downs.{i}": names[(i + 1) % len(names)] for i in range(4)}
    else:
        pins = None
    plan = autoshard.plan(
        model, spec, inputs=inputs, strategy=strategy, workload=workload, objective=objective, pins=pins,
        launch="one-process",
    )  # fmt: skip
    if case == "unequal cuts":
        cuts = tuple(replace(cut, shares=(cut.size * 3 // 4, cut.size // 4)) for cut in plan.cuts)
        plan = replace(plan, cuts=cuts)
    profile = autoshard.profile(model, inputs, workload=workload)
    return plan, profile, parse_devices(spec)


SLOW = ("cuts in training", "replicas that wait for the host")
TIERS = [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]


@pytest.mark.parametrize("case", TIERS)
def test_events_sum_to_the_estimate(case):
    plan, profile, cluster = made(case)
    estimate = autoshard.estimate(plan, profile, cluster)
    found = events(plan, profile, cluster)
    assert found and all(event.end_seconds >= event.begin_seconds >= 0 for event in found)
    for device in estimate.devices:
        own = [
            e
            for e in found
            if e.device == device.name and e.kind in ("forward", "backward", "recompute", "weight", "optimizer")
        ]
        total = sum(event.end_seconds - event.begin_seconds for event in own)
        assert total == pytest.approx(device.compute_seconds, rel=1e-9)
    waits = [event for event in found if event.kind == "launch"]
    assert bool(waits) == ("wait" in case or case == "replicas in inference")
    assert max(event.end_seconds for event in found) == pytest.approx(estimate.latency_seconds, rel=1e-9)
    copied = [event for event in found if event.kind == "transfer"]
    assert sum(event.nbytes for event in copied) == sum(transfer.nbytes for transfer in estimate.transfers)
    assert bool(plan.cuts) == ("cuts" in case) and bool(plan.offloaded) == ("offloaded" in case)
    if plan.cuts:
        together = dict.fromkeys((device.name for device in estimate.devices), 0.0)
        for event in found:
            if event.kind.startswith("all-"):
                together[event.device] += event.end_seconds - event.begin_seconds
        assert together == pytest.approx(dict.fromkeys(together, estimate.collective_seconds), rel=1e-9)
    if plan.offloaded:
        fetched = sum(e.end_seconds - e.begin_seconds for e in found if e.kind == "fetch")
        assert fetched == pytest.approx(sum(link.seconds for link in estimate.streaming.links), rel=1e-9)


@pytest.mark.parametrize("case", TIERS)
def test_nothing_does_two_things_at_once(case):
    found = events(*made(case))
    lanes = {}
    for event in found:
        lanes.setdefault((event.device, event.kind in LINKS), []).append(event)
    for lane in lanes.values():
        for before, after in pairwise(lane):
            assert after.begin_seconds >= before.end_seconds - 1e-12
