"""verify on plans that divide the batch: equal to rounding, and a batch that is none is found and named."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.verify.verify import verify
from tests.runtime.pipelines import LABELLED, ROWS, pipeline, replicas, sentences, words


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
    assert 0 < found.max_error < 1e-3  # that of the loss, a sum
    assert any("parts of the batch" in note for note in found.notes)
    assert found.max_relative_error < 1e-3  # of the largest value of a tensor, whatever the others are
    assert [peak.name for peak in found.peaks] == ["cuda:0", "cuda:1", "cuda:2"]


class Blocks(nn.Module):
    """Linear layers, in bfloat16 if `lowered`; some of the mean of the batch is taken away, or values are drawn."""

    def __init__(self, taken: float = 0.0, lowered: bool = False, drawn: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.taken, self.lowered, self.drawn = taken, lowered, drawn

    def forward(self, x):
        if self.drawn:
            x = nn.functional.dropout(x + torch.randn_like(x), 0.3)
            x = x + torch.randint(0, 50, x.shape, device=x.device)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.lowered):
            for block in self.blocks:
                x = block(x - self.taken * x.mean(0, keepdim=True)).relu()
        return x.float()


def verified(model, mode="training"):
    model, inputs = model.train(mode == "training"), {"x": torch.randn(8, 64)}
    return verify(model, elsewhere(pipeline(model, inputs, ROWS, workload=autoshard.Workload(mode=mode))), inputs)


def test_random_numbers_are_no_difference():
    before = torch.get_rng_state()
    torch.manual_seed(0)
    found = verified(Blocks(drawn=True))
    assert found.ok, found.first_difference
    assert any("random numbers were taken to be the same for all rows" in note for note in found.notes)
    torch.set_rng_state(before)


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("lowered", [False, True])
def test_rows_that_are_mixed_are_found(mode, lowered):
    """Also where a model computes in half precision and returns single precision."""
    for taken in (0.0, 1.0):
        found = verified(Blocks(taken, lowered), mode)
        assert found.ok is (taken == 0), found.first_difference
        said = any("computes in bfloat16, so 0.05 of the largest" in note for note in found.notes)
        assert said is lowered


def test_an_applied_model_is_compared_with_its_removed_state():
    model, inputs = words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs))
        found = verify(model, None, inputs, training=False)
    assert found.ok and any("parts of the batch" in note for note in found.notes)


def test_replicas_are_equal_to_rounding():
    model, inputs = words().float(), sentences()
    found = verify(model, elsewhere(replicas(model, inputs, shares=(5, 3))), inputs)
    assert found.ok and 0 < found.max_error < 1e-5
    assert [peak.name for peak in found.peaks] == ["cuda:0", "cuda:1"]
    assert all(peak.measured_bytes > 0 for peak in found.peaks)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_peaks_of_replicas_are_predicted(mode):
    """Outputs leave for the first device, and gradients of replicas are added once all have gone back."""
    model, inputs = words().float().train(mode == "training"), sentences(9, 12)
    batch = replace(LABELLED, size=9, inputs=tuple(replace(one, axis="*9") for one in LABELLED.inputs),
                    outputs=(replace(LABELLED.outputs[0], axis="*9"), LABELLED.outputs[1]))  # fmt: skip
    workload = autoshard.Workload(mode=mode, batch_size=9, optimizer="none")
    found = verify(model, elsewhere(replace(replicas(model, inputs, batch), workload=workload)), inputs)
    assert found.ok, found.first_difference
    for peak in found.peaks:
        assert peak.predicted_bytes == pytest.approx(peak.measured_bytes, rel=0.1), peak.name
