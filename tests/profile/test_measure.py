"""Bytes of models and of optimizer steps against independent measurements."""

import pytest
import torch
from torch import nn

from autoshard.capture.capture import capture
from autoshard.plan.workload import Workload
from autoshard.profile.measure import optimizer_step_bytes, profile_graph
from tests.live_bytes import LiveBytes
from tests.models import by_name

INFERENCE, TRAINING = Workload(), Workload(mode="training")


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_optimizer_step_takes_what_is_said(name):
    """Count what torch allocates in a step, storage by storage."""
    parameters = [nn.Parameter(torch.randn(size)) for size in (300, 1000, 50)]
    make = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1),
        "momentum": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adam": lambda: torch.optim.Adam(parameters),
        "adamw": lambda: torch.optim.AdamW(parameters),
    }
    optimizer = make[name]()
    with LiveBytes(parameters) as live:
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            live.reset()
            before = live.peak
            optimizer.step()
    assert live.peak - before == optimizer_step_bytes([1200, 4000, 200], name)


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek-v3", "mamba"])
def test_cache_bytes_are_those_of_the_tensors_the_model_makes(name):
    """Of grouped heads, a sliding window, a latent cache, and states."""
    from autoshard.capture.decode import opaque_tensors

    model = by_name(name).build().eval()
    inputs = {"input_ids": torch.randint(3, 90, (2, 9)), "use_cache": True}
    profile = profile_graph(capture(model, inputs, workload=INFERENCE), INFERENCE)
    with torch.no_grad():
        tensors = list(opaque_tensors(model(**inputs)))
    made = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    assert profile.cache_bytes == sum(made.values()) > 0
    # A layer's keys, values or states are counted in the layer; a counter that the cache object makes is not.
    layers = [m for m in profile.modules if m.path.count(".") == 2 and m.path.split(".")[1] == "layers"]
    states = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_floating_point()}
    assert sum(m.cache_bytes for m in layers) == sum(states.values())


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral", "convnext"])
def test_whole_model_agrees_with_torchs_memory_tracker(name):
    from torch.distributed._tools.mem_tracker import MemTracker

    case = by_name(name)
    model, inputs = case.model().eval(), case.example()
    predicted = profile_graph(capture(model, inputs, workload=INFERENCE), INFERENCE).peak_bytes
    tracker = MemTracker()
    tracker.track_external(model, *(t for t in inputs.values() if isinstance(t, torch.Tensor)))
    with tracker, torch.no_grad():
        output = model(**inputs)
    del output
    measured = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert predicted == pytest.approx(measured, rel=0.005)
