"""The most that lives on a rank, of a pipeline or of sharded replicas, is what the plan says."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

import autoshard
from autoshard.check.batch import find_batch_axis
from autoshard.cluster.parse import parse_devices
from autoshard.engine.pricer import estimate_mesh
from autoshard.plan import Plan, Stage
from autoshard.plan.workload import Workload
from autoshard.strategies.data_parallel import data_parallel
from autoshard.strategies.pipeline import pipeline
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks


class Layers(nn.Module):
    """Every layer is residual, so what goes from rank to rank is saved by neither of them for itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(4))
        self.head = nn.Linear(48, 30)

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def made(training):
    torch.manual_seed(0)
    inputs = {"x": torch.randn(16, 20, 48)}
    return Layers(), inputs | ({"labels": torch.randint(0, 30, (16, 20))} if training else {})


def peak_of_steps(text, training):
    """The most bytes that live on this rank in the third step."""
    model, inputs = made(training)
    autoshard.apply(model, Plan.from_json(text))
    gc.collect()
    with LiveBytes(list(model.parameters()), inputs) as live:
        schedule = autoshard.schedule(model)
        own = [parameter for parameter in model.parameters() if not parameter.is_meta]
        optimizer = torch.optim.AdamW(own, foreach=False)
        for _ in range(3):
            live.reset()
            output = schedule.step(**inputs) if training else schedule.eval(**inputs)
            del output
            if training:
                optimizer.step()
                optimizer.zero_grad()
        return live.peak


SLOW = [pytest.param(schedule, marks=pytest.mark.slow) for schedule in ("1f1b", "interleaved")]


@pytest.mark.parametrize("schedule", ["gpipe", "inference", *SLOW])
def test_peaks_of_two_ranks(schedule):
    training = schedule != "inference"
    model, inputs = made(training)
    workload = Workload(mode="training" if training else "inference", batch_size=16, optimizer="adamw")
    profile = autoshard.profile(model, inputs, workload=workload)
    cluster = parse_devices({"cpu:0": "1GiB", "cpu:1": "1GiB"})
    plan = pipeline(
        profile, cluster, find_batch_axis(model, inputs, workload), processes=2, num_microbatches=4,
        schedule=schedule if training else "gpipe",
    )  # fmt: skip
    figures = estimate_mesh(plan, profile, cluster, processes=True)
    for device, peak in zip(figures.devices, run_ranks(peak_of_steps, 2, plan.to_json(), training), strict=True):
        # What several stages send is counted as held a little longer, and torch lets go of what was sent; before 2.15
        # it has buffers of all micro-batches.
        least, most = (0.93, 1.22) if hasattr(PipelineStage, "release_fwd_send_outputs") else (0.7, 1.12)
        assert least * peak <= device.peak_bytes <= most * peak, device.name


def peak_of_replicas(text, training):
    """The most bytes that live on this rank in three steps on its half of the batch."""
    model, inputs = made(training)
    autoshard.apply(model, Plan.from_json(text))
    gc.collect()
    rank = torch.distributed.get_rank()
    inputs = {name: tensor.chunk(2)[rank].clone() for name, tensor in inputs.items()}
    with LiveBytes(list(model.parameters()), inputs) as live, torch.set_grad_enabled(training):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(3):
            output = model(**inputs)
            if training:
                output["loss"].backward()
            del output
            optimizer.step()
            optimizer.zero_grad()
        return live.peak


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_peaks_of_sharded_replicas(training):
    model, inputs = made(training)
    workload = Workload(mode="training" if training else "inference", batch_size=16, optimizer="adamw")
    profile = autoshard.profile(model, inputs, workload=workload)
    cluster = parse_devices({"cpu:0": "1GiB", "cpu:1": "1GiB"})
    plan = data_parallel(profile, cluster, find_batch_axis(model, inputs, workload), processes=2)
    blocks = tuple(Stage(paths=(f"layers.{index}",)) for index in range(4))
    plan = replace(plan, mesh=replace(plan.mesh, dp=1, fsdp=plan.mesh.dp), stages=blocks)
    figures = estimate_mesh(plan, profile, cluster, processes=True)
    for device, peak in zip(figures.devices, run_ranks(peak_of_replicas, 2, plan.to_json(), training), strict=True):
        assert 0.99 * peak <= device.peak_bytes <= 1.15 * peak, (
            device.name
        )  # of a block counts the most that it may have
