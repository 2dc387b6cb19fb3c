"""Pipelines of one process, made at random (models, placements, divisions), step as the whole batch does."""

import copy

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.plan import Mesh, Plan, PlanDevice, Stage

WIDTH = 4
ROWS = BatchAxis(
    size=4,
    inputs=(BatchInput(path="x", dim=0, axis="*4"),),
    outputs=(BatchOutput(path="y", how="cat", axis="*4"), BatchOutput(path="size", how="mean")),
)
KINDS = {
    "plain": lambda block, hidden, first: block(hidden),
    "residual": lambda block, hidden, first: hidden + block(hidden),
    "skip": lambda block, hidden, first: block(hidden) * first,
    "twice": lambda block, hidden, first: block(block(hidden)),
    "branch": lambda block, hidden, first: block(hidden.relu()) + block(first),
}


class Layers(nn.Module):
    """Blocks that are called in several ways; the last one may be the first one again."""

    def __init__(self, kinds: list[str], tied: bool) -> None:
        super().__init__()
        self.kinds = kinds
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in kinds)
        if tied:
            self.blocks[-1] = self.blocks[0]

    def forward(self, x):
        hidden = x
        for kind, block in zip(self.kinds, self.blocks, strict=True):
            hidden = KINDS[kind](block, hidden, x)
        return {"y": hidden, "size": hidden.square().mean()}


@st.composite
def pipelines(draw):
    """(model, plan): any block on any device, in any order."""
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=5))
    tied = draw(st.booleans())
    model = Layers(kinds, tied).double()
    names = draw(st.lists(st.sampled_from(["cpu:0", "cpu:1", "cpu:2"]), min_size=len(kinds), max_size=len(kinds)))
    if tied:
        names[-1] = names[0]
    stages: dict[str, list[str]] = {}
    for index, name in enumerate(names):
        stages.setdefault(name, []).append(f"blocks.{index}")
    recompute = draw(st.booleans())
    plan = Plan(
        strategy="pipeline", objective="latency", workload=autoshard.Workload(mode="training", batch_size=4),
        devices=tuple(PlanDevice(name=name, memory_bytes=1 << 24) for name in stages),
        placements={path: name for name, paths in stages.items() for path in paths},
        stages=tuple(Stage(paths=tuple(paths), recompute=recompute) for paths in stages.values()),
        mesh=Mesh(pp=len(stages)), batch=ROWS, num_microbatches=draw(st.integers(1, 4)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])), aligned=("",),
    )  # fmt: skip
    return model, plan


@settings(max_examples=40)
@given(pipelines(), st.integers(4, 9), st.sampled_from(["mean", "sum"]), st.booleans())
def test_steps_of_random_models(pipeline, rows, reduction, by_schedule):
    model, plan = pipeline
    generator = torch.Generator().manual_seed(rows)
    x, target = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))

    def loss(output, target):
        return F.mse_loss(output["y"], target, reduction=reduction)

    whole = copy.deepcopy(model)
    wanted = whole(x)
    loss(wanted, target).backward()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, plan)
        if by_schedule:
            found = autoshard.schedule(model, loss, reduction=reduction).step(x=x, target=target)
        else:
            found = model(x=x)
            loss(found, target).backward()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name].cpu(), value, rtol=1e-12, atol=1e-12)
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-12, atol=1e-12)
        del found
