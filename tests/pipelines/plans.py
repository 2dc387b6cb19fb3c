"""Plans of pipelines made by hand, as a strategy would make them: contiguous modules, one after the other."""

from autoshard.fingerprint import fingerprint
from autoshard.plan import Mesh, Plan, PlanDevice, Stage
from autoshard.prove.batch import find_batch_axis
from autoshard.workload import Workload


def plan_of(model, stages, positions, inputs, *, parts=2, schedule="gpipe", recompute=False, mesh=None):
    """A plan with `stages` (lists of paths) over `positions` devices for keyword inputs."""
    batch = find_batch_axis(model, inputs, Workload(mode="training"))
    mesh = mesh or Mesh(pipeline=positions)
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
        batch=batch,
        num_microbatches=parts,
        schedule=schedule,
        fingerprint=fingerprint(model),
    )
