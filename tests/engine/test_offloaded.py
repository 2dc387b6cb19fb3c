"""What plans with offloaded modules are said to take, against runs on simulated devices and counts by hand."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload

WIDTH = 32


class Net(nn.Module):
    """Layers of unequal sizes, one of which is called twice, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (64, 256, 32, 128, 256, 64)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, size) for size in sizes)
        self.downs = nn.ModuleList(nn.Linear(size, WIDTH) for size in sizes)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(x)))
        return self.norm(self.mix(torch.relu(self.mix(x))))


def made(kib: int, devices: int = 1) -> tuple[Net, Plan, torch.Tensor, dict[str, str]]:
    model, x = Net().eval(), torch.randn(8, WIDTH)
    spec = {**{f"cpu:{i}": f"{kib}KiB" for i in range(devices)}, "cpu": "1MiB"}
    return model, autoshard.plan(model, spec, inputs=x), x, spec


@pytest.mark.parametrize(("kib", "devices"), [(110, 1), (150, 1), (180, 1), (100, 2), (120, 2)])
def test_peaks_are_those_of_a_run(kib: int, devices: int) -> None:
    model, plan, x, spec = made(kib, devices)
    assert plan.offloaded
    figures = autoshard.estimate(plan, autoshard.profile(model, x), spec)
    with torch.no_grad():
        want = model(x)
    with autoshard.simulate({name: size for name, size in spec.items() if name != "cpu"}) as simulated:
        autoshard.apply(model, plan)
        here = x.to(next(iter(plan.placements.values())))
        for _ in range(2):
            got = None  # else it is on the device beside the next one
            simulated.reset_peak()
            with torch.no_grad():
                got = model(here)
        measured = [simulated.memory(name)[1] for name in simulated]
        assert got is not None and torch.equal(got.cpu(), want)
        autoshard.remove(model)
    predicted = [device.peak_bytes for device in figures.devices if device.name != "cpu"]
    for found, told in zip(measured, predicted, strict=True):
        assert found <= told <= 1.12 * found  # two slots of the largest modules count all the time


def hand_made(offloaded: dict[str, str], device: str = "cuda:0") -> Plan:
    placements = {"downs": device, "mix": device, "norm": device, **{f"ups.{i}": device for i in range(6)}}
    return Plan(
        strategy="balanced", objective="latency", workload=Workload(), devices=(), placements=placements,
        offloaded=offloaded,
    )  # fmt: skip


def test_a_plan_for_other_devices_or_another_model_is_refused() -> None:
    profile = autoshard.profile(Net().eval(), torch.randn(8, WIDTH))
    with pytest.raises(PlanError, match="needs disk"):
        autoshard.estimate(hand_made({"ups.0": "disk"}), profile, {"cuda:0": "1GiB", "cpu": "1GiB"})
    with pytest.raises(PlanError, match=r"no such module"):
        autoshard.estimate(hand_made({"elsewhere": "cpu"}), profile, {"cuda:0": "1GiB", "cpu": "1GiB"})
