"""A small decoder for tests of pipelines, and how its batch is divided."""

from dataclasses import replace

import torch
from torch import nn

from autoshard.cluster.parse import parse_devices
from autoshard.plan import Mesh, Plan, PlanDevice, Stage
from autoshard.plan.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.plan.workload import Workload
from autoshard.profile.measure import profile_graph


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Returns logits, or with labels the mean loss."""

    def __init__(self, layers: int = 8, width: int = 64, words: int = 100, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, labels=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.head(self.norm(x))
        return x if labels is None else nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())


def inputs_for(size: int = 8, length: int = 16, *, training: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 100, (size, length), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": ids.flip(0)} if training else {"ids": ids}


def batch_of(size: int = 8, *, training: bool = False) -> BatchAxis:
    names = ("ids", "labels") if training else ("ids",)
    axis = f"*{size}"
    output = BatchOutput(path="", how="mean") if training else BatchOutput(path="", how="cat", axis=axis)
    return BatchAxis(
        size=size, inputs=tuple(BatchInput(path=name, dim=0, axis=axis) for name in names), outputs=(output,)
    )


def profile_of(model: nn.Module, size: int = 8, length: int = 16, *, training: bool = False):
    from autoshard.capture.capture import capture

    workload = Workload(batch_size=size, sequence_length=length, mode="training" if training else "inference")
    return profile_graph(capture(model, inputs_for(size, length, training=training), workload=workload), workload)


def plan_by_hand(profile, spec: str, groups, *, microbatches: int = 4, schedule: str = "gpipe", **changes) -> Plan:
    """`groups`: per stage its paths."""
    cluster = parse_devices(spec)
    names = cluster.names
    plan = Plan(
        strategy="pipeline", objective="latency", workload=profile.workload,
        devices=tuple(PlanDevice(name=d.name, memory_bytes=d.memory_bytes, kind=d.kind) for d in cluster.devices),
        placements={path: names[i % len(names)] for i, paths in enumerate(groups) for path in paths},
        mesh=Mesh(pp=len(names)), batch=batch_of(training=profile.workload.training),
        stages=tuple(Stage(paths=tuple(paths)) for paths in groups), num_microbatches=microbatches, schedule=schedule,
        fingerprint=profile.graph.fingerprint,
    )  # fmt: skip
    return replace(plan, **changes)


def halves(layers: int = 8, stages: int = 2) -> list[list[str]]:
    """Equal shares of the layers; the embedding first and the head last."""
    share = layers // stages
    groups = [[f"layers.{i}" for i in range(s * share, (s + 1) * share)] for s in range(stages)]
    groups[0].insert(0, "embed")
    groups[-1] += ["norm", "head"]
    return groups
