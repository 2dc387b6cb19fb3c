"""Plans of pipelines made by hand, as a strategy would make them: contiguous modules, one after the other."""

from autoshard.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.fingerprint import fingerprint
from autoshard.plan import Mesh, Plan, PlanDevice, Stage
from autoshard.workload import Workload


def plan_of(model, stages, positions, *, inputs, outputs, rows, parts=2, schedule="gpipe", recompute=False, mesh=None):
    """A plan with `stages` (lists of paths) over `positions` devices.

    `inputs`: paths whose dimension 0 is the batch; `outputs`: path -> how its parts are put together.
    """
    mesh = mesh or Mesh(pipeline=positions)
    devices = tuple(PlanDevice(name=f"cpu:{index}", memory_bytes=1 << 34) for index in range(mesh.size))
    placements = {path: f"cpu:{number % positions}" for number, paths in enumerate(stages) for path in paths}
    batch = BatchAxis(
        size=rows,
        inputs=tuple(BatchInput(path=path, dim=0, axis=f"*{rows}") for path in inputs),
        outputs=tuple(
            BatchOutput(path=path, how=how, dim=0, axis=f"*{rows}" if how == "cat" else "")
            for path, how in outputs.items()
        ),
    )
    return Plan(
        strategy="pipeline",
        objective="throughput",
        workload=Workload(mode="training", batch_size=rows),
        devices=devices,
        placements=placements,
        stages=tuple(Stage(paths=tuple(paths), recompute=recompute) for paths in stages),
        mesh=mesh,
        batch=batch,
        num_microbatches=parts,
        schedule=schedule,
        fingerprint=fingerprint(model),
    )
