"""A small decoder for tests of pipelines, and how its batch is divided."""

from dataclasses import replace

import torch
from torch import nn

from autoshard.cluster.parse import parse_devices
from autoshard.plan import Mesh, Plan, PlanDevice, Stage
from autoshard.plan.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.plan.workload import Workload
from autoshard.profile.measure import profile_graph
from tests.search.models import Decoder


def decoder(width: int = 64, *, tied: bool = False) -> nn.Module:
    """Eight layers; returns logits, or with labels the mean loss."""
    model = Decoder(width, 8, 4, 100)
    if tied:
        model.head.weight = model.embed.weight
    return model


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
