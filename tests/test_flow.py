"""What a run does under a placement: which copies it makes, and what simulated devices count."""

import functools
import gc
import random
import weakref

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.backward import training_loss
from autoshard.capture.capture import capture
from autoshard.errors import PlanError
from autoshard.flow import flow
from autoshard.nested import map_tensors
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.profile.measure import live_bytes, profile_graph
from autoshard.profile.units import find_units
from autoshard.runtime.dispatch import apply_plan
from tests.models import by_name

INFERENCE, TRAINING = Workload(), Workload(mode="training")


def copies(found):
    return [(one.source, one.destination, one.nbytes, one.reason) for one in found.copies]


def test_arguments_and_outputs_are_copied_and_gradients_come_back():
    model, x = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5)), torch.ones(3, 10)
    graph = capture(model, x, workload=TRAINING)
    found = flow(graph, {"0": "d0", "1": "d1"})
    forward = [("d0", "d1", 240, "hook"), ("d1", "d0", 60, "output")]
    assert copies(found) == [*forward, ("d0", "d1", 4, "backward"), ("d1", "d0", 240, "backward")]
    assert found.mixed_device == found.written_back == ()
    assert copies(flow(graph, {"": "d0"})) == []
    with pytest.raises(PlanError, match=r"1\.weight"):
        flow(graph, {"0": "d0"})


def test_writing_into_an_argument_that_came_as_a_copy_is_reported():
    case = by_name("adds-to-argument")
    graph = capture(case.model(), case.example())
    assert flow(graph, {"a": "d0", "first": "d1", "second": "d0", "out": "d0"}).written_back == ("first",)
    assert flow(graph, {"": "d0"}).written_back == ()


def test_a_tied_weight_is_read_through_one_kept_copy_per_device():
    case = by_name("three-way-tie")
    here = dict.fromkeys(("source", "encoder", "decoder", "again", "never"), "d0")
    found = flow(capture(case.model(), case.example()), {**here, "target": "d1", "head": "d1"})
    kept = [(one.source, one.destination, one.nbytes) for one in found.copies if one.kept]
    assert kept == [("d0", "d1", 32 * 16 * 4)]


def test_a_weight_read_from_elsewhere_is_copied_once_also_by_an_encoder_that_is_called_by_itself():
    case = by_name("t5")
    graph = capture(case.build().eval(), workload=Workload(batch_size=2, sequence_length=6, new_tokens=4))
    found = flow(graph, {"shared": "d0", "encoder": "d1", "decoder": "d0", "lm_head": "d0"})
    assert [(one.source, one.destination, one.nbytes) for one in found.copies if one.kept] == [
        ("d0", "d1", 96 * 32 * 4)
    ]
    home = [one for one in found.copies if one.reason == "output" and one.nbytes == 2 * 6 * 32 * 4]
    assert {(one.source, one.destination) for one in home} <= {("d1", "d0")}  # what the encoder made


def measured_peaks(model, inputs, placements, found, graph, training):
    """Peak of each simulated device in the second of two passes."""
    plan = Plan(
        strategy="by hand", objective="latency", workload=TRAINING if training else INFERENCE, devices=(),
        placements=placements, mixed_device=found.mixed_device, written_back=found.written_back,
        fingerprint=graph.fingerprint,
    )  # fmt: skip
    with autoshard.simulate("3x1GiB") as devices:
        apply_plan(model, plan)
        inputs = map_tensors(inputs, lambda tensor: tensor.to(found.execution_devices.devices[""]))
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                devices.reset_peak()
                if training:
                    model.zero_grad()
                    output = model(**inputs)
                    training_loss(output, "").backward()
                else:
                    with torch.no_grad():
                        output = model(**inputs)
                del output
        finally:
            gc.enable()
        return {name: devices.memory(name)[1] for name in devices}


@functools.cache
def captured(name, training):
    """The graph of a case, for all placements of it."""
    case = by_name(name)
    return capture(case.model(), case.example(), workload=TRAINING if training else INFERENCE)


def placements_of(profile, seed):
    """Every unit on a random device, or (seed 0) three intervals."""
    paths = find_units(profile).paths
    if seed == 0:
        return {path: f"cpu:{3 * i // len(paths)}" for i, group in enumerate(paths) for path in group}
    draw = random.Random(seed)
    return {path: device for group in paths for device in [f"cpu:{draw.randrange(3)}"] for path in group}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("seed", [0, 1], ids=["intervals", "random"])
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "adds-to-argument", "three-way-tie", "reads-devices"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "t5", "mamba")),
    ],
)
def test_peaks_are_those_of_simulated_devices(name, seed, training):
    case, graph = by_name(name), captured(name, training)
    placements = placements_of(profile_graph(graph, TRAINING if training else INFERENCE), seed)
    found = flow(graph, placements)
    measured = measured_peaks(case.model(), case.example(), placements, found, graph, training)
    for device, peak in measured.items():
        predicted = found.peak(device)[0] if device in found.devices else 0
        assert abs(predicted - peak) <= max(4096 if training else 64, (0.1 if training else 0.01) * peak), device


class Keeping(nn.Module):
    """Layers that keep what they made until they make it again: a weight, a map, a list that is emptied first."""

    def __init__(self):
        super().__init__()
        self.given = nn.utils.weight_norm(nn.Linear(32, 96))
        self.back = nn.utils.weight_norm(nn.Linear(96, 32))
        self.last, self.seen = None, []

    def forward(self, x):
        self.seen = []
        hidden = torch.relu(self.given(x))
        chances = hidden.softmax(-1)
        hidden = hidden * chances + 1
        self.last = chances
        self.seen.append(hidden)
        return self.back(hidden)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_what_modules_keep_is_there_when_the_next_forward_begins(training):
    model, inputs = nn.Sequential(Keeping(), Keeping()), {"input": torch.randn(8, 32)}
    workload = TRAINING if training else INFERENCE
    graph = capture(model, inputs, workload=workload)
    placements = {"0": "cpu:0", "1": "cpu:1"}
    found = flow(graph, placements)
    measured = measured_peaks(model, inputs, placements, found, graph, training)
    peaks = {device: found.peak(device)[0] for device in found.devices}
    assert peaks == pytest.approx({d: measured[d] for d in found.devices}, rel=0.1)
    tensors = sum(row.nbytes for row in graph.storages if row.kind in ("parameter", "buffer"))
    assert live_bytes(graph).max() + tensors == flow(graph, {"": "cpu:0"}).peak("cpu:0")[0]


def test_the_latest_walk_of_a_graph_is_remembered_and_keeps_nothing_alive():
    graph = autoshard.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4))
    apart, together = {"0": "cpu:0", "1": "cpu:1"}, {"": "cpu:0"}
    first = flow(graph, apart)
    assert flow(graph, dict(apart)) is first and flow(graph, together) is not first
    assert flow(graph, apart).copies == first.copies
    assert flow(graph, dict(reversed(apart.items()))).devices == ("cpu:1", "cpu:0")  # the order counts
    gone = weakref.ref(graph)
    del graph
    assert gone() is None
