"""What a run does under a placement: by hand op by op, and on models against what simulated devices count."""

import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.backward import training_loss
from autoshard.capture.capture import capture
from autoshard.capture.graph import HOST
from autoshard.errors import PlanError
from autoshard.flow import HOST_NAME, flow
from autoshard.nested import map_tensors
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.profile.measure import live_bytes, profile_graph
from autoshard.profile.units import find_units
from autoshard.runtime import apply_plan
from tests.models import by_name
from tests.profile.handmade import Builder

INFERENCE, TRAINING = Workload(), Workload(mode="training")


def elements(result, device):
    """Live float32 elements at every op and after the last."""
    return (result.timeline(device) / 4).tolist()


def chain(residual: bool = False):
    """a (100 weights): x10 -> h20, b (50 weights): h20 -> y30; with `residual` the root reads h again at the end."""
    make = Builder()
    make.module("")
    first = make.module("a", weight=100)["weight"]
    second = make.module("b", weight=50)["weight"]
    x = make.input(10)
    make.begin("", x)
    make.begin("a", x)
    h = make.op(x, first, size=20)
    make.end(h)
    make.begin("b", h)
    view = make.op(h, size=20, view_of=h)
    y = make.op(view, second, size=30)
    make.dies(view)
    make.end(y)
    if not residual:
        make.dies(h)
    z = make.op(y, h, size=5) if residual else make.op(y, size=5)
    make.dies(y, h) if residual else make.dies(y)
    make.end(z)
    return make.graph(z)


def test_one_device_is_the_recorded_run():
    result = flow(chain(), {"": "d0"})
    assert result.copies == ()
    assert result.op_device == (0, 0, 0, 0)
    #                                   a    view  y    z   after: x and z are the caller's
    assert elements(result, "d0") == [180, 180, 210, 195, 165]


def test_an_argument_is_copied_at_the_boundary_and_its_views_are_there():
    result = flow(chain(), {"a": "d0", "b": "d1"})
    hook, output = result.copies
    assert (hook.source, hook.destination, hook.nbytes, hook.born, hook.reason) == ("d0", "d1", 80, 1, "hook")
    assert (hook.producer, hook.consumer) == ("a", "b")
    assert (output.reason, output.source, output.destination, output.nbytes) == ("output", "d1", "d0", 20)
    assert result.op_device == (0, 1, 1, 1)  # the root's own op runs where its input is
    assert elements(result, "d0") == [130, 130, 130, 110, 115]
    assert elements(result, "d1") == [50, 70, 100, 85, 55]
    assert result.aligned == ()


def generation():
    """An encoder that is called by itself, then twice the root with what it made, which it hands back.

    The root's own weight is read by the encoder too.
    """
    make = Builder()
    shared = make.module("", weight=100)["weight"]
    inner = make.module("encoder", weight=50)["weight"]
    make.module("head", weight=10)
    x = make.input(10)
    make.begin("encoder")  # without inputs: nothing says where its caller works
    h = make.op(inner, shared, size=20)
    make.end(h)
    for _ in range(2):
        ids = make.op(x, size=1)
        make.begin("", ids, h, contained=(h,))
        y = make.op(ids, shared, size=5)
        make.begin("encoder")
        z = make.op(inner, shared, size=3)
        make.end(z)
        make.dies(z)
        make.end(y, h)
        make.op(y, size=1)
        make.dies(ids, y)
    return make.graph()


def test_a_weight_read_from_elsewhere_is_copied_once_also_outside_the_root():
    result = flow(generation(), {"": "d0", "encoder": "d1"})
    (kept,) = [copy for copy in result.copies if copy.kept]
    assert (kept.source, kept.destination, kept.nbytes) == ("d0", "d1", 400)


def test_what_the_caller_gave_stays_where_it_is_when_the_root_hands_it_back():
    """The caller gets a copy at home, lives with it until the next step, and gives what it had again."""
    result = flow(generation(), {"": "d0", "encoder": "d1"})
    home = [copy for copy in result.copies if copy.reason == "output" and copy.nbytes == 80]
    assert [(copy.source, copy.destination) for copy in home] == [("d1", "d0")] * 2
    first, second = (int(result.buffers.died[copy.buffer]) for copy in home)
    steps = [call.begin for call in generation().calls if call.path == ""]
    assert (first, second) == (steps[1], result.steps)


def test_rows_looked_up_by_code_around_the_model_go_back_to_it():
    """The runtime hooks tables also inside of modules that are on one device."""
    make = Builder()
    make.module("")
    head = make.module("head", weight=10)["weight"]
    make.module("inner", weight=5)
    table = make.module("inner.embed", weight=100)["weight"]
    ids = make.input(10)
    make.begin("inner.embed", ids)
    rows = make.op(table, ids, size=20)
    make.ops[-1] = replace(make.ops[-1], target=torch.ops.aten.embedding.default)
    make.end(rows)
    make.begin("", rows)
    make.begin("head", rows)
    y = make.op(rows, head, size=5)
    make.end(y)
    make.end(y)
    result = flow(make.graph(y), {"head": "d0", "inner": "d1"})
    moves = [(copy.source, copy.destination, copy.reason) for copy in result.copies]
    assert moves == [("d0", "d1", "hook"), ("d1", "d0", "output")]
    assert result.op_device == (1, 0)


def test_devices_that_meet_are_aligned_to_the_first_tensor_in_a_mixed_module():
    result = flow(chain(residual=True), {"a": "d0", "b": "d1"})
    assert result.aligned == ("",)
    # the copy of h made for b is still there, since h is: nothing is copied twice
    assert [(c.reason, c.destination) for c in result.copies] == [("hook", "d1"), ("output", "d0")]
    assert result.op_device == (0, 1, 1, 1)


def test_a_mask_needed_by_two_modules_is_copied_once():
    make = Builder()
    make.module("")
    weights = [make.module(name, weight=1)["weight"] for name in "abc"]
    x, mask = make.input(8), make.input(100)
    make.begin("", x, mask)
    for name, weight in zip("abc", weights, strict=True):
        make.begin(name, x, mask)
        out = make.op(x, mask, weight, size=8)
        make.end(out)
        make.dies(x)
        x = out
    make.end(x)
    result = flow(make.graph(x), {"a": "d0", "b": "d1", "c": "d1"})
    assert [c.nbytes for c in result.copies if c.reason == "hook"] == [32, 400]


def test_a_written_source_is_copied_again():
    make = Builder()
    make.module("")
    weights = [make.module(name, weight=1)["weight"] for name in "abc"]
    x = make.input(8)
    make.begin("", x)
    h = make.op(x, size=8)
    for index, (name, weight) in enumerate(zip("abc", weights, strict=True)):
        make.begin(name, h)
        out = make.op(h, weight, size=8)
        make.end(out)
        make.dies(out)
        if index == 1:
            make.op(h, mutates=(h,))
    make.end(h)
    result = flow(make.graph(h), {"a": "d0", "b": "d1", "c": "d1"})
    assert [(c.born, c.consumer) for c in result.copies if c.reason == "hook"] == [(2, "b"), (4, "c")]


def test_writing_into_an_argument_that_came_as_a_copy_is_reported():
    make = Builder()
    make.module("")
    a, b = make.module("a", weight=1)["weight"], make.module("b", weight=1)["weight"]
    x = make.input(8)
    make.begin("", x)
    make.begin("a", x)
    h = make.op(x, a, size=8)
    make.end(h)
    make.begin("b", h)
    make.op(h, b, mutates=(h,))
    make.end()
    make.end(h)
    graph = make.graph(h)
    assert flow(graph, {"a": "d0", "b": "d1"}).written_back == ("b",)
    assert flow(graph, {"": "d0"}).written_back == ()


def test_a_tied_weight_is_read_through_one_kept_copy():
    make = Builder()
    make.module("")
    weight = make.module("embed", weight=100)["weight"]
    make.module("head")
    make.tie("head", "weight", weight)
    x = make.input(4)
    make.begin("", x)
    make.begin("embed", x)
    h = make.op(x, weight, size=10)
    make.end(h)
    make.begin("head", h)
    y = make.op(h, weight, size=30)
    make.end(y)
    make.end(y)
    result = flow(make.graph(y), {"embed": "d0", "head": "d1"})
    (kept,) = [c for c in result.copies if c.kept]
    assert (kept.nbytes, kept.reason, kept.consumer) == (400, "align", "head")
    assert result.aligned == ("head",)
    assert result.timeline("d1")[0] == 400  # from one pass to the next


def test_literals_stay_on_the_host_and_factories_go_where_they_are_told():
    make = Builder()
    make.module("")
    a, b = make.module("a", weight=1)["weight"], make.module("b", weight=1)["weight"]
    x = make.input(8)
    make.begin("", x)
    make.begin("a", x)
    h = make.op(x, a, size=8)
    make.end(h)
    make.begin("b", h)
    there = make.op(size=8, source=h)
    nowhere = make.op(size=8, source=HOST)
    make.op(there, b, h, size=8)
    y = make.op(nowhere, h, size=8)
    make.end(y)
    make.end(y)
    result = flow(make.graph(y), {"a": "d0", "b": "d1"})
    assert result.op_device == (0, 1, -1, 1, 1)
    assert result.aligned == ("b",)
    assert [c.source for c in result.copies if c.reason == "align"] == [HOST_NAME]


def test_a_tensor_without_a_device_is_refused():
    with pytest.raises(PlanError, match=r"b\.weight"):
        flow(chain(), {"a": "d0"})


def test_gradients_follow_the_copies_back():
    make = Builder()
    make.module("")
    first = make.module("a", weight=100)["weight"]
    second = make.module("b", weight=50)["weight"]
    x = make.input(10)
    make.begin("", x)
    make.begin("a", x)
    h = make.op(x, first, size=20)
    make.differentiable(h)
    make.end(h)
    make.begin("b", h)
    y = make.op(h, second, size=1)
    make.differentiable(y)
    saved = make.save(h)
    make.end(y)
    make.dies(h)
    make.end(y)
    make.backward()
    ones = make.op(size=1)
    to_second = make.op(ones, h, size=50, forward=1)
    to_h = make.op(ones, second, size=20, forward=1)
    make.release(saved)
    make.dies(ones)
    to_first = make.op(to_h, x, size=100, forward=0)
    make.dies(to_h)
    make.gradient("b.weight", to_second)
    make.gradient("a.weight", to_first)
    result = flow(make.graph(y), {"a": "d0", "b": "d1"})
    assert [result.devices[d] for d in result.op_device[3:]] == ["d1", "d1", "d0"]
    back = [c for c in result.copies if c.reason == "backward"]
    assert [(c.source, c.destination, c.nbytes) for c in back] == [("d0", "d1", 4), ("d1", "d0", 80)]
    # h leaves device 0 when its frame ends: what b's op saved is the copy on device 1
    rows = [(result.devices[d], bool(c), int(e)) for d, c, s, e in zip(
        result.buffers.device, result.buffers.copied, result.buffers.storage, result.buffers.died, strict=True
    ) if s == 3]  # fmt: skip
    assert rows == [("d0", False, 2), ("d1", True, 5)]


def measured_peaks(model, inputs, placements, found, graph, training):
    """Peak of each simulated device in the second of two passes."""
    plan = Plan(
        strategy="by hand", objective="latency", workload=TRAINING if training else INFERENCE, devices=(),
        placements=placements, aligned=found.aligned, written_back=found.written_back, fingerprint=graph.fingerprint,
    )  # fmt: skip
    with autoshard.simulate("3x1GiB") as devices:
        apply_plan(model, plan)
        inputs = map_tensors(inputs, lambda tensor: tensor.to(found.homes.homes[""]))
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


def placements_of(profile, seed):
    """Every unit on a random device, or (seed 0) three intervals."""
    paths = find_units(profile).paths
    if seed == 0:
        return {path: f"cpu:{3 * i // len(paths)}" for i, group in enumerate(paths) for path in group}
    draw = random.Random(seed)
    return {path: device for group in paths for device in [f"cpu:{draw.randrange(3)}"] for path in group}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("seed", [0, 1], ids=["intervals", "random"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert-eager", "t5", "mixtral", "convnext", "mamba"])
def test_peaks_are_those_of_simulated_devices(name, seed, training):
    case = by_name(name)
    model, inputs = case.model(), case.example()
    workload = TRAINING if training else INFERENCE
    graph = capture(model, inputs, workload=workload)
    placements = placements_of(profile_graph(graph, workload), seed)
    found = flow(graph, placements)
    measured = measured_peaks(model, inputs, placements, found, graph, training)
    for device, peak in measured.items():
        predicted = found.peak(device)[0] if device in found.devices else 0
        assert abs(predicted - peak) <= max(64, (0.1 if training else 0.01) * peak), device


class Residual(nn.Module):
    """x + f(x), with f's two layers apart."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_peaks_of_residuals(training):
    model = nn.Sequential(*(Residual() for _ in range(3)))
    model = nn.ModuleDict({"body": model, "head": nn.Linear(64, 10)})

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts["head"](self.parts["body"](x))

    whole, inputs = Whole(), {"x": torch.randn(8, 64)}
    workload = TRAINING if training else INFERENCE
    graph = capture(whole, inputs, workload=workload)
    placements = {"parts.body.0": "cpu:0", "parts.body.1.up": "cpu:1", "parts.body.1.down": "cpu:0",
                  "parts.body.2": "cpu:1", "parts.head": "cpu:2"}  # fmt: skip
    found = flow(graph, placements)
    assert found.aligned == ("parts.body.1",)  # x was moved to the home of `up`, f(x) comes from that of `down`
    measured = measured_peaks(whole, inputs, placements, found, graph, training)
    peaks = {device: found.peak(device)[0] for device in found.devices}
    assert peaks == pytest.approx(measured, rel=0.05) if training else peaks == measured


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
