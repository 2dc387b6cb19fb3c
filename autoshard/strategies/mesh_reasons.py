"""Why a pipeline or a mesh is as it is, or why none fits: sentences for people."""

from collections.abc import Sequence

from autoshard.estimate import Estimate
from autoshard.sizes import format_bytes, format_seconds
from autoshard.strategies.mesh_lines import MeshLines
from autoshard.strategies.mesh_search import Priced
from autoshard.strategies.mesh_shapes import Shape


def explain_stages(lines: MeshLines, best: Priced, processes: int) -> tuple[str, ...]:
    """Say how a pipeline runs, what is recomputed, which device is fullest, and which are not used."""
    shape, found, figures = best.candidate.shape, best.candidate.found, best.figures
    pipelining = figures.pipelining
    assert pipelining is not None
    used = [device.name for device in lines.devices(shape)]
    reasons = [
        f"{shape.stages} stages on {len(used)} devices, the batch of {lines.batch.size} in {shape.microbatches} "
        f"micro-batches, schedule {shape.schedule}: devices wait {pipelining.bubble:.0%} of the time"
    ]
    again = [i for i, yes in enumerate(found.recompute) if yes]
    if again:
        several = f"stage{'s' * (len(again) > 1)} {', '.join(map(str, again))}"
        reasons.append(
            f"{'all stages' if len(again) == shape.stages else several} compute activations again in backward instead "
            f"of keeping them: else the activations of {max(s.in_flight for s in pipelining.stages)} micro-batches "
            "don't fit"
        )
    if shape.schedule == "1f1b" and not processes:
        reasons.append(
            "keeping all micro-batches' activations is slower or too much here: train with autoshard.schedule(model), "
            "which runs backwards in between; output.backward() would keep them all"
        )
    reasons.append(_fullest(figures))
    unused = [device.name for device in lines.cluster.devices if device.name not in used]
    if unused:
        reasons.append(f"{', '.join(unused)} not used: more stages would wait for each other longer")
    alone = min(lines.seconds)
    if figures.objective != "memory" and _one_device_fits(lines) and alone < figures.latency_seconds:
        reasons.append(
            f"one device alone would be faster ({alone / figures.latency_seconds:.0%} of the time): a pipeline was "
            "asked for"
        )
    return tuple(reasons)


def explain_mesh(lines: MeshLines, best: Priced) -> tuple[str, ...]:
    """Say what a mesh is made of, how it waits, what is recomputed and summed, and which devices are left out."""
    shape, figures = best.candidate.shape, best.figures
    every = ((shape.data, "replicas"), (shape.stages, "stages"), (shape.tensor, "tensor-parallel ranks"))
    parts = [f"{n} {what}" for n, what in every if n > 1]
    reasons = [f"a mesh of {' x '.join(parts)}, {shape.size} devices with a process each (torchrun)"]
    if shape.pipeline > 1:
        bubble = figures.pipelining.bubble if figures.pipelining else 0.0
        reasons.append(
            f"each replica divides its rows into {shape.microbatches} micro-batches, schedule {shape.schedule}: "
            f"devices wait {bubble:.0%} of the time"
        )
    if any(best.candidate.found.recompute):
        reasons.append("activations are computed again in backward where they don't fit")
    if figures.collective_seconds:
        reasons.append(f"{format_seconds(figures.collective_seconds)} of a pass are sums between devices")
    reasons.append(_fullest(figures))
    left = len(lines.cluster.devices) - shape.size
    if left:
        reasons.append(f"{left} device{'s' if left > 1 else ''} left out: with more a pass takes no less")
    return tuple(reasons)


def _fullest(figures: Estimate) -> str:
    full = figures.fullest
    return f"{full.name} is fullest: {format_bytes(full.peak_bytes)} of {format_bytes(full.memory_bytes)}"


def _one_device_fits(lines: MeshLines) -> bool:
    most = max(device.budget_bytes for device in lines.cluster.devices)
    return lines.profile.peak_bytes <= most


def pipeline_refusal(lines: MeshLines, shapes: Sequence[Shape], figures: Estimate | None) -> str:
    """Say what is lacking, and one change."""
    if figures is not None:
        short = [f"{one.name} {format_bytes(-one.free_bytes)}" for one in figures.devices if one.free_bytes < 0]
        start = f"no pipeline fits: in the last one tried there is too little on {', '.join(short)}"
        return f'{start}. Use more micro-batches, more devices, a smaller batch, or strategy="balanced".'
    microbatches = max(shape.microbatches for shape in shapes)
    line = lines.whole.line(1 / microbatches, lines.whole.count)
    alone = line.static + microbatches * line.lasting + line.transient
    largest, room = int(alone.argmax()), max(lines.cluster.devices, key=lambda device: device.budget_bytes)
    if alone[largest] > room.budget_bytes:
        path = next(iter(lines.units.paths[int(line.begins[largest])]), "") or "the model"
        return (
            f"no pipeline fits: {path} alone needs {format_bytes(float(alone[largest]))}, with what it hands out "
            f"for the whole batch, and {room.name} has {format_bytes(room.budget_bytes)}. Use a smaller batch, a "
            'device with more memory, or strategy="balanced".'
        )
    needed = float((line.static + microbatches * line.lasting).sum())
    there = sum(device.budget_bytes for device in lines.cluster.devices)
    more = ", more while they run" if needed <= there else ""
    return (
        f"no pipeline fits: its stages need at least {format_bytes(needed)} at the end of a pass{more}, and the "
        f"devices have {format_bytes(there)} together. Use more micro-batches, more devices, a smaller batch, or "
        'strategy="balanced".'
    )


def mesh_refusal(lines: MeshLines, figures: Estimate | None) -> str:
    """Say what is lacking, and one change."""
    if figures is not None:
        worst = min(figures.devices, key=lambda device: device.free_bytes)
        return (
            f"no mesh fits: in the last one tried {worst.name} lacks {format_bytes(-worst.free_bytes)}. "
            "Use more devices, a smaller batch, or another optimizer."
        )
    return (
        f"no mesh of {len(lines.cluster.devices)} devices fits, or can be made: the model holds "
        f"{format_bytes(float(lines.whole.held.sum()))} all the time, and a batch of {lines.batch.size} rows is "
        "divided. Use more devices, or another batch."
    )
