"""Plans of pipelines made by hand, as a strategy would make them: contiguous modules, one after the other."""

import torch

from autoshard.common.fingerprint import fingerprint
from autoshard.nested import tensors_in
from autoshard.plan import Mesh, Plan, PlanDevice, Stage
from autoshard.plan.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.plan.workload import Workload
from autoshard.runtime.chunks import bind, plain_arguments


def batch_of(model, inputs):
    """The batch of keyword inputs, taken to be dimension 0 of all; numbers in the output are means over its rows."""
    rows = next(tensor.shape[0] for _, tensor in tensors_in(inputs))
    with torch.no_grad():
        output = model(**inputs)
    return BatchAxis(
        size=rows,
        inputs=tuple(BatchInput(path=path, dim=0, axis=f"*{rows}") for path, _ in tensors_in(inputs)),
        outputs=tuple(
            BatchOutput(path=path, how="mean")
            if tensor.dim() == 0
            else BatchOutput(path=path, how="cat", dim=0, axis=f"{rows_in(tensor, rows)}")
            for path, tensor in tensors_in(output)
        ),
        plain=plain_arguments(model, bind(model, (), inputs)),
    )


def rows_in(tensor, rows):
    """The axis of a first dimension."""
    several = tensor.shape[0] // rows
    return f"*{rows}x{several}" if several > 1 else f"*{rows}"


def plan_of(model, stages, positions, inputs, *, parts=2, schedule="gpipe", recompute=False, mesh=None, cuts=()):
    """A plan with `stages` (lists of paths) over `positions` devices for keyword inputs."""
    batch = batch_of(model, inputs)
    mesh = mesh or Mesh(pp=positions)
    devices = tuple(PlanDevice(name=f"cpu:{index}", memory_bytes=1 << 34) for index in range(mesh.size))
    placements = {path: f"cpu:{number % positions}" for number, paths in enumerate(stages) for path in paths}
    return Plan(
        strategy="pipeline",
        objective="throughput",
        workload=Workload(mode="training", batch_size=batch.size),
        devices=devices,
        placements=placements,
        stages=tuple(Stage(paths=tuple(paths), recompute=recompute) for paths in stages),
        mesh=mesh,
        cuts=cuts,
        batch=batch,
        num_microbatches=parts,
        schedule=schedule,
        fingerprint=fingerprint(model),
    )
