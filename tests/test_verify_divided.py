"""verify on plans that divide the batch: equal to rounding, and a batch that is none is found and named."""

from dataclasses import replace

import numpy
import pytest
import torch
from torch import nn

import autoshard
from autoshard.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.check.batch import find_batch_axis
from autoshard.plan import Mesh, Plan, PlanDevice
from autoshard.verify.cuts import CoarsestType
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


def test_one_part_is_compared_bit_for_bit():
    model, inputs = words(), sentences()
    found = verify(model, elsewhere(pipeline(model, inputs, count=1)), inputs)
    assert found.ok and found.max_error == 0 and not any("parts of the batch" in note for note in found.notes)


class Dropping(nn.Module):
    """Drops values, adds noise, and masks a random position of each row, as speech models do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        kept = torch.ones_like(x)
        for row in kept:
            row[numpy.random.choice(8, 2, replace=False)] = 0
        x = x * kept + torch.randn_like(x)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.3)
        return x


def test_random_numbers_are_no_difference():
    model, inputs = Dropping(), {"x": torch.randn(8, 8)}
    before = torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    functions = numpy.random.choice
    found = verify(model, elsewhere(pipeline(model, inputs, ROWS)), inputs)
    assert found.ok, found.first_difference
    assert any("random numbers were taken to be the same for all rows" in note for note in found.notes)
    assert torch.equal(torch.get_rng_state(), before[0]) and numpy.random.get_state()[1].tolist() == before[1]
    assert numpy.random.choice is functions


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
def test_rows_that_are_mixed_are_the_reason(mode):
    model, inputs = Centred(), {"x": torch.randn(8, 8)}
    workload = autoshard.Workload(mode=mode)
    found = verify(model.train(mode == "training"), elsewhere(pipeline(model, inputs, ROWS, workload=workload)), inputs)
    assert not found.ok
    assert "with the batch in one piece this plan gives what the original gives" in found.first_difference.message


@pytest.mark.parametrize(("dtype", "told"), [(torch.float32, "either it is"), (torch.float64, "it is divided along")])
def test_rows_that_are_mixed_a_little(dtype, told):
    """In single precision it may be rounding, too."""
    torch.manual_seed(0)
    model, inputs = Centred(1e-4).to(dtype).eval(), {"x": torch.randn(8, 8).to(dtype)}
    found = verify(model, elsewhere(pipeline(model, inputs, ROWS)), inputs)
    assert not found.ok and f"gives what the original gives: {told}" in found.first_difference.message


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


def test_weights_that_are_only_kept_in_half_precision_are_held_to_what_computes():
    model, inputs = Centred(), {"x": torch.randn(8, 8)}
    for block in model.blocks:
        block.to(torch.bfloat16)
    model.forward = lambda x: nn.functional.linear(x, model.blocks[0].weight.float(), model.blocks[0].bias.float())
    found = CoarsestType()
    with found, torch.no_grad():
        model(inputs["x"])
        copies = [block.weight.t().clone() for block in model.blocks]
    assert found.dtype is None
    with found:
        copies[0] * 2
    assert found.dtype is torch.bfloat16


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
        assert peak.predicted_bytes == pytest.approx(peak.measured_bytes, rel=0.05), peak.name


class Cache:
    """What attention keeps from call to call: no container."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


class Attending(nn.Module):
    """A block that looks at what it has written into a cache, however much that is."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x, cache, number):
        if number == len(cache.keys):
            cache.keys.append(self.key(x))
        else:
            cache.keys[number] = torch.cat([cache.keys[number], self.key(x)], 1)
        return x + self.value(cache.keys[number].tanh())


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(6))

    def forward(self, x):
        cache = Cache()
        for number, block in enumerate(self.blocks):
            x = block(x, cache, number)
        return x, cache


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_caches_among_the_outputs(mode, recompute):
    """What runs again in backward finds the cache as it was; every part has its own, which goes with it."""
    inputs = {"x": torch.randn(8, 24, 16)}
    workload = autoshard.Workload(mode=mode, batch_size=8, optimizer="none")
    model = Caching().train(mode == "training")
    batch = find_batch_axis(model, inputs, workload)
    assert len(batch.outputs) == 1
    options = {"schedule": "gpipe", "recompute": recompute, "workload": workload}
    found = verify(model, elsewhere(pipeline(model, inputs, batch, **options)), inputs)
    assert found.ok, found.first_difference
    for peak in found.peaks:  # a little of the caches goes earlier in training
        assert 0.95 * peak.measured_bytes <= peak.predicted_bytes <= 1.25 * peak.measured_bytes, peak.name


class Coding(nn.Module):
    """Returns what its first stage made, too, which is read far behind; one weight is used on all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6))

    def forward(self, ids):
        near = self.embed(ids)
        for block in self.blocks[:3]:
            near = near + block(near)
        far = near + self.embed(ids.flip(1))
        for block in self.blocks[3:]:
            far = far + block(far) * near
        return {"logits": self.head(far), "codes": near}


def test_outputs_of_several_stages():
    """A step brings them to its last stage, and puts them together when all parts have gone back."""
    inputs = {"ids": torch.randint(0, 40, (8, 24))}
    workload = autoshard.Workload(mode="training", batch_size=8, optimizer="none")
    model = Coding()
    batch = find_batch_axis(model, inputs, workload)
    plan = elsewhere(pipeline(model, inputs, batch, workload=workload))
    paths = [("embed", "head", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3"), ("blocks.4", "blocks.5")]
    stages = tuple(replace(stage, paths=own) for stage, own in zip(plan.stages, paths, strict=True))
    placements = {path: plan.devices[i].name for i, own in enumerate(paths) for path in own}
    found = verify(model, replace(plan, stages=stages, placements=placements), inputs)
    assert found.ok, found.first_difference
    for peak in found.peaks:
        assert peak.predicted_bytes == pytest.approx(peak.measured_bytes, rel=0.1), peak.name
