"""verify says equal where it is, names the place where it is not, and leaves everything as it was."""

import copy
import math

import pytest
import torch
from torch import nn

from autoshard import Workload
from autoshard import plan as make_plan
from autoshard.errors import PlanError, VerifyError
from autoshard.plan import Plan, PlanDevice
from autoshard.runtime import copies
from autoshard.runtime.dispatch import apply_device_map, is_applied
from autoshard.simulate import simulate
from autoshard.verify.verify import verify
from tests.hooks import is_hooked
from tests.models import by_name


class Stack(nn.Module):
    """Four blocks with a mask that all share, a buffer that each forward writes, and dropout."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(dropout)) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x) * mask
        return {"out": self.norm(x), "rest": [x.mean()]}


SPLIT = {"blocks.0": "cuda:0", "blocks.1": "cuda:0", "blocks.2": "cuda:1", "blocks.3": "cuda:1", "norm": "cuda:1"}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


@pytest.fixture
def inputs() -> dict:
    return {"x": torch.randn(5, 8), "mask": torch.rand(5, 1)}


def a_plan(placements, training=False, memory_bytes=1 << 30, **more) -> Plan:
    devices = tuple(PlanDevice(name=name, memory_bytes=memory_bytes) for name in sorted(set(placements.values())))
    workload = Workload(mode="training" if training else "inference")
    return Plan(
        strategy="given", objective="latency", workload=workload, devices=devices, placements=placements, **more
    )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("as_map", [False, True])
def test_an_applied_plan_is_equal(model, inputs, training, as_map):
    given = SPLIT if as_map else a_plan(SPLIT, training, mixed_device=("",))
    report = verify(model, given, inputs, training=training)
    assert report.ok and report and report.max_error == report.max_relative_error == 0
    assert report.first_difference is None and report.simulated
    assert report.compared == (("forward", "backward", "optimizer step") if training else ("forward",))
    assert [(peak.name, peak.simulated_as) for peak in report.peaks] == [("cuda:0", "cpu:0"), ("cuda:1", "cpu:1")]
    weights = sum(p.nbytes for p in model.parameters())
    assert sum(peak.measured_bytes for peak in report.peaks) > weights * (3 if training else 1)


def test_the_peak_is_the_predicted_one(inputs):
    torch.manual_seed(0)
    wide = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    found = make_plan(wide, "1x70KiB,1x70KiB", inputs=torch.randn(16, 64), strategy="balanced", objective="memory")
    report = verify(wide, found, torch.randn(16, 64))
    assert report.ok and len(report.peaks) == 2 and not report.notes
    assert [peak.predicted_bytes for peak in report.peaks] == [peak.measured_bytes for peak in report.peaks]


@pytest.mark.parametrize("training", [False, True])
def test_everything_is_left_as_it_was(model, inputs, training, monkeypatch):
    """Equal or not."""
    model.train(training)
    model(**inputs)["out"].sum().backward()
    before, given = copy.deepcopy(model), {name: value.clone() for name, value in inputs.items()}
    before_gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    objects = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    random = torch.get_rng_state()
    for faulty in (False, True):
        placements = SPLIT | {"norm": "cuda:0"}
        if faulty:
            monkeypatch.setattr("autoshard.runtime.copies.copy_tensor", lambda tensor, device: tensor.to(device) + 1)
        assert verify(model, placements, inputs, training=training).ok is not faulty
        assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == objects
        for name, tensor in before.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name
        for name, parameter in model.named_parameters():
            assert parameter.grad is gradients[name] and type(parameter) is nn.Parameter
            assert torch.equal(parameter.grad, before_gradients[name])
        for ours, theirs in zip(model.modules(), before.modules(), strict=True):
            assert vars(ours).keys() == vars(theirs).keys()
            assert not is_hooked(ours)
        assert torch.equal(torch.get_rng_state(), random)
        assert all(torch.equal(inputs[name], given[name]) for name in given)
        assert not is_applied(model)


def test_a_model_that_cannot_be_copied_is_refused(model, inputs):
    model.handle = (step for step in range(3))  # generators can't be copied
    with pytest.raises(VerifyError, match="can't be copied"):
        verify(model, SPLIT, inputs)
    assert next(model.handle) == 0


def _corrupt(monkeypatch, when, change):
    """Change what some transfers deliver."""
    original, calls = copies.copy_tensor, []

    def copy_tensor(tensor, device):
        made = original(tensor, device)
        calls.append(tuple(tensor.shape))
        return change(made) if when(calls) else made

    monkeypatch.setattr(copies, "copy_tensor", copy_tensor)
    return calls


def _with_wrong_gradient(tensor):
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: gradient * 1.001)
    return tensor


def _flip_one(tensor):
    changed = tensor.clone()
    changed.view(-1)[3] += 1e-6
    return changed


def test_one_corrupted_element_in_one_transfer_is_found(model, inputs, monkeypatch):
    model.eval()
    _corrupt(monkeypatch, lambda calls: calls[-1] == (5, 8), _flip_one)
    report = verify(model, SPLIT, inputs)
    assert not report.ok and 0 < report.max_error < 1e-3
    assert report.first_difference.module == "blocks.2.0" and report.first_difference.during == "forward"
    assert "blocks.2.0" in str(report.first_difference)
    assert verify(model, SPLIT, inputs, tolerance=1e-3).ok


def test_a_corrupted_gradient_is_found(model, inputs, monkeypatch):
    model.eval()
    _corrupt(monkeypatch, lambda calls: calls[-1] == (5, 8), _with_wrong_gradient)
    report = verify(model, SPLIT, inputs, training=True)
    assert not report.ok and report.first_difference.during == "backward"
    assert "gradient of" in report.first_difference.output
    assert verify(model, SPLIT, inputs, training=False).ok


CHAIN = {"0": "cuda:0", "1": "cuda:0", "2": "cuda:1", "3": "cuda:1"}


def test_a_skipped_transfer_is_found(inputs, monkeypatch):
    chain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    copy_tensor = copies.copy_tensor
    monkeypatch.setattr(copies, "copy_tensor", lambda t, device: t if t.shape == (5, 8) else copy_tensor(t, device))
    report = verify(chain, a_plan(CHAIN), inputs["x"])
    difference = report.first_difference
    assert not report.ok and report.max_error == math.inf
    assert difference.module == "2" and "same device" in difference.message


def test_an_applied_model_is_compared_with_its_removed_state(model, inputs):
    with simulate("2x1GiB"):
        apply_device_map(model, {"": "cpu:1"})
        report = verify(model, inputs=inputs)
        assert report.ok and is_applied(model)
        assert verify(model, {"": "cpu:0"}, inputs).ok
        assert model.norm.weight.device == torch.device("cpu:1")
        with torch.no_grad():
            model.norm.register_forward_hook(lambda module, args, output: output + 1 if output.device.index else None)
        report = verify(model, inputs=inputs)
        assert not report.ok and report.first_difference.module == "norm"


def test_too_little_memory_is_a_finding(model, inputs):
    report = verify(model, a_plan(SPLIT, memory_bytes=1200), inputs)
    assert not report.ok and "out of memory" in report.first_difference.message


def test_decode_is_compared(monkeypatch):
    case = by_name("llama")
    llama, example = case.model(), case.example()
    half = {"model.embed_tokens": "cuda:0", "model.layers.0": "cuda:0", "model.norm": "cuda:1", "lm_head": "cuda:1"}
    half |= {f"model.layers.{index}": "cuda:1" for index in range(1, len(llama.model.layers))}
    half["model.rotary_emb"] = "cuda:0"
    report = verify(llama, half, example, new_tokens=6)
    assert report.ok and report.compared == ("forward", "decode")
    with pytest.raises(VerifyError, match="generate"):
        verify(nn.Linear(2, 2), {"": "cuda:0"}, torch.ones(1, 2), new_tokens=3)


def test_errors(model, inputs):
    with pytest.raises(VerifyError, match="needs a plan"):
        verify(model, inputs=inputs)
    with pytest.raises(VerifyError, match="itself fails"):
        verify(model, SPLIT, torch.ones(3, 3))
    with pytest.raises(PlanError):
        verify(model, {"nothing": "cuda:0"}, inputs)
