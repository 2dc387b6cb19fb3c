"""The most that lives on a rank of any mesh is what the engine says; on a CPU that is tensors alone."""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

import autoshard
from autoshard.plan.workload import Workload
from tests.live_bytes import LiveBytes
from tests.ranks import run_jobs, run_ranks
from tests.runtime.test_launched import completed
from tests.search.models import Decoder
from tests.torch_releases import sharded_replicas

ROWS = 16
DEVICES = {"cpu:0": "1GiB", "cpu:1": "1GiB"}  # a context and the buffers of collectives would be more
MESHES = ("dp=2", "fsdp=2", "pp=2", "tp=2")


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
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def made(name, training):
    """(model, inputs); most of what the decoder has are its logits."""
    torch.manual_seed(0)
    if name == "layers":
        x, labels = torch.randn(ROWS, 20, 48), torch.randint(0, 30, (ROWS, 20))
        return Layers(), {"x": x} | ({"labels": labels} if training else {})
    ids = torch.randint(0, 512, (ROWS, 32))
    return Decoder(32, 4, 4, 512), {"ids": ids} | ({"labels": ids} if training else {})


def peak_of(name, plan, training):
    """The most bytes that live on this rank in the third step; replicas have their part of the rows."""
    model, inputs = made(name, training)
    autoshard.apply(model, plan, inputs=inputs)
    gc.collect()
    staged = plan.mesh.pp > 1
    if plan.mesh.data > 1:
        inputs = {name: one.chunk(2)[torch.distributed.get_rank()].clone() for name, one in inputs.items()}
    parts = [
        slice(begin, begin + plan.micro_batch) for begin in range(0, len(next(iter(inputs.values()))), plan.micro_batch)
    ]
    with LiveBytes(list(model.parameters()), inputs) as live, torch.set_grad_enabled(training):
        optimizer = torch.optim.AdamW([one for one in model.parameters() if not one.is_meta], foreach=False)
        schedule = autoshard.schedule(model) if staged else None
        for _ in range(3):
            live.reset()
            if schedule is not None:
                schedule.step(**inputs) if training else schedule.eval(**inputs)
            elif training:
                for part in parts:
                    model(**{name: one[part] for name, one in inputs.items()}).backward()
            else:
                model(**inputs)
            if training:
                optimizer.step()
                optimizer.zero_grad()
        return live.peak


@sharded_replicas
@pytest.mark.parametrize(
    ("training", "cases"),
    [
        (True, {"layers": ("fsdp=2", "pp=2", "tp=2")}),
        pytest.param(True, {"layers": ("dp=2",), "decoder": MESHES}, marks=pytest.mark.slow),
        pytest.param(False, dict.fromkeys(("layers", "decoder"), ("dp=2", "pp=2", "tp=2")), marks=pytest.mark.slow),
    ],
    ids=["training", "training of a decoder", "answers"],
)
def test_peaks(training, cases):
    """All plans in one launch."""
    figures, jobs = {}, {}
    for name, meshes in cases.items():
        model, inputs = made(name, training)
        workload = Workload(mode="training" if training else "inference", batch_size=ROWS, optimizer="adamw")
        profile = autoshard.profile(model, inputs, workload=workload)
        for mesh in meshes:
            plan = autoshard.plan(
                model, DEVICES, inputs=inputs, launch="processes", mesh=mesh, workload=workload,
                recompute="none" if training else None,
            )  # fmt: skip
            figures[name, mesh] = autoshard.estimate(plan, profile, DEVICES).devices
            jobs[name, mesh] = peak_of, name, completed(plan.to_json(), model, inputs), training
    # Before 2.15 torch holds what stages send of all micro-batches.
    least = 0.8 if hasattr(PipelineStage, "release_fwd_send_outputs") else 0.65
    for rank, peaks in enumerate(run_ranks(run_jobs, 2, jobs)):
        for case, peak in peaks.items():
            assert least * peak <= figures[case][rank].peak_bytes <= 1.35 * peak, (case, rank, peak)
