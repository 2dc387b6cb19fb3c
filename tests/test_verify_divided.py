"""verify on plans that divide the batch: equal to rounding, and a batch that is none is found and named."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.plan import Mesh, Plan, PlanDevice
from autoshard.plan.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.verify.verify import verify
from tests.runtime.pipelines import pipeline, sentences, words


def elsewhere(plan):
    """The plan for devices that are not here."""
    names = {device.name: f"cuda:{index}" for index, device in enumerate(plan.devices)}
    devices = tuple(replace(device, name=names[device.name]) for device in plan.devices)
    return replace(plan, devices=devices, placements={path: names[name] for path, name in plan.placements.items()})


@pytest.mark.parametrize("labelled", [True, False])
def test_a_pipeline_is_equal_to_rounding(labelled):
    model, inputs = words().float(), sentences()
    if not labelled:
        del inputs["labels"]
    found = verify(model, elsewhere(pipeline(model, inputs)), inputs)
    assert found.ok, found.first_difference
    assert found.compared == ("forward", "backward", "optimizer step")
    assert 0 < found.max_error < 1e-5
    assert any("parts of the batch" in note for note in found.notes)
    assert [peak.name for peak in found.peaks] == ["cuda:0", "cuda:1", "cuda:2"]


class Dropping(nn.Module):
    """Drops values and adds noise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = x + torch.randn_like(x)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.3)
        return x


def test_random_numbers_are_no_difference():
    model, inputs = Dropping(), {"x": torch.randn(8, 8)}
    before = torch.get_rng_state()
    found = verify(model, elsewhere(pipeline(model, inputs, ROWS)), inputs)
    assert found.ok, found.first_difference
    assert any("random numbers were taken to be the same for all rows" in note for note in found.notes)
    assert torch.equal(torch.get_rng_state(), before)


class Centred(nn.Module):
    """Takes the mean of the batch away, or a share of it, in an inner module."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self.blocks, self.share = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), share

    def forward(self, x):
        for block in self.blocks:
            x = block(x - self.share * x.mean(0, keepdim=True))
        return x


ROWS = BatchAxis(
    size=8, inputs=(BatchInput(path="x", dim=0, axis="*8"),), outputs=(BatchOutput(path="", how="cat", axis="*8"),)
)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_rows_that_are_mixed_are_found(mode):
    model, inputs = Centred(), {"x": torch.randn(8, 8)}
    workload = autoshard.Workload(mode=mode)
    found = verify(model.train(mode == "training"), elsewhere(pipeline(model, inputs, ROWS, workload=workload)), inputs)
    assert not found.ok and found.first_difference.max_error > 0.1


class Lowered(nn.Module):
    """Computes in half precision and returns single precision; takes some of the mean of the batch away."""

    def __init__(self, taken: float) -> None:
        super().__init__()
        self.blocks, self.taken = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), taken

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                x = block(x - self.taken * x.mean(0, keepdim=True)).relu()
        return x.float()


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_half_precision_inside_of_a_model(mode):
    inputs, workload = {"x": torch.randn(8, 64)}, autoshard.Workload(mode=mode)
    for taken in (0.0, 1.0):
        model = Lowered(taken).train(mode == "training")
        found = verify(model, elsewhere(pipeline(model, inputs, ROWS, workload=workload)), inputs)
        assert found.ok is (taken == 0), found.first_difference
        assert any("computes in bfloat16, so 0.05 of the largest" in note for note in found.notes)


def test_an_applied_model_is_compared_with_its_removed_state():
    model, inputs = words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs))
        found = verify(model, None, inputs, training=False)
    assert found.ok and any("parts of the batch" in note for note in found.notes)


def test_replicas_are_equal_to_rounding():
    model, inputs = words().float(), sentences()
    names = ("cuda:0", "cuda:1")
    plan = Plan(
        strategy="data-parallel", objective="latency", workload=autoshard.Workload(mode="training", batch_size=8),
        devices=tuple(PlanDevice(name=name, memory_bytes=1 << 24) for name in names), placements={"": "cuda:0"},
        mesh=Mesh(dp=2, shares=(5, 3)), batch=pipeline(model, inputs).batch,
    )  # fmt: skip
    found = verify(model, plan, inputs)
    assert found.ok and 0 < found.max_error < 1e-5
    assert [peak.name for peak in found.peaks] == ["cuda:0", "cuda:1"]
    assert all(peak.measured_bytes > 0 for peak in found.peaks)


def test_peaks_of_replicas_are_predicted():
    """Outputs leave for the first device, and gradients of replicas are added once all have gone back."""
    model, inputs = words().float(), sentences(9, 12)
    batch = replace(
        pipeline(model, sentences()).batch, size=9,
        inputs=tuple(BatchInput(path=name, dim=0, axis="*9") for name in inputs),
        outputs=(BatchOutput(path="logits", how="cat", axis="*9"),
                 BatchOutput(path="loss", how="weighted", weights="labels", skipped=1)),
    )  # fmt: skip
    plan = Plan(
        strategy="data-parallel", objective="latency",
        workload=autoshard.Workload(mode="training", batch_size=9, optimizer="none"),
        devices=tuple(PlanDevice(name=f"cuda:{i}", memory_bytes=1 << 24) for i in range(3)),
        placements={"": "cuda:0"}, mesh=Mesh(dp=3), batch=batch,
    )  # fmt: skip
    found = verify(model, plan, inputs)
    assert found.ok, found.first_difference
    for peak in found.peaks:
        assert peak.predicted_bytes == pytest.approx(peak.measured_bytes, rel=0.1), peak.name
