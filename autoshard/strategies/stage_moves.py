"""Why a pipeline is as it is: its slowest stage, what devices wait for, and pipelines that differ in one thing."""

from collections.abc import Iterator
from dataclasses import replace

from autoshard.estimate import Pipelining
from autoshard.plan import Plan, Stage
from autoshard.sizes import format_seconds


def stages_of(plan: Plan, paths: list[str]) -> list[int]:
    """Return the stages that have some of these entries of the placements."""
    return [index for index, stage in enumerate(plan.stages) if any(path in stage.paths for path in paths)]


def stage_sentences(plan: Plan, run: Pipelining, here: list[int]) -> Iterator[str]:
    """Say which stage the others wait for, how `here` compares with it, and how long devices wait."""
    seconds = [stage.forward_seconds + stage.backward_seconds for stage in run.stages]
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    passes = "forward and backward" if any(stage.backward_seconds for stage in run.stages) else "forward"
    text = (
        f"Stage {slowest} of {len(seconds)}, on {run.stages[slowest].device}, is the slowest, and the others wait for "
        f"it: {format_seconds(seconds[slowest])} for a micro-batch, {passes}"
    )
    if here == [slowest]:
        yield f"{text}. This is the stage that binds the time of a pass."
    elif len(here) == 1:
        less = 1 - seconds[here[0]] / max(seconds[slowest], 1e-30)
        yield f"{text}. Stage {here[0]}, which this is, takes {format_seconds(seconds[here[0]])}, {less:.0%} less."
    else:
        yield f"{text}."
    count = f"{run.num_microbatches} micro-batch{'es' if run.num_microbatches > 1 else ''}"
    yield (
        f"Devices wait {run.bubble:.0%} of a pass (the bubble): {len(seconds)} stages begin and end one after another, "
        f"with {count} in the order of {run.schedule}."
    )


def otherwise_staged(plan: Plan, paths: list[str]) -> Iterator[tuple[str, Plan]]:
    """Yield pipelines with a stage boundary elsewhere beside some entries of the placements, each with its title.

    The entries go to the stage before or after theirs, with all that lies between them and that stage.
    """
    for index in stages_of(plan, paths) if len(stages_of(plan, paths)) == 1 else []:
        own = plan.stages[index].paths
        places = [place for place, path in enumerate(own) if path in paths]
        for other, moved in ((index - 1, own[: places[-1] + 1]), (index + 1, own[places[0] :])):
            if 0 <= other < len(plan.stages) and len(moved) < len(own):
                yield _moved(plan, index, other, moved)


def otherwise_run(plan: Plan, training: bool) -> Iterator[tuple[str, Plan]]:
    """Yield pipelines with more or fewer micro-batches, and with the other simple schedule, each with its title."""
    rows = plan.batch.size if plan.batch is not None else 1
    for count in (plan.num_microbatches // 2, 2 * plan.num_microbatches):
        if 1 <= count <= rows and rows % count == 0 and count != plan.num_microbatches:
            yield f"{count} micro-batch{'es' if count > 1 else ''}", replace(plan, num_microbatches=count)
    if training and plan.schedule in ("gpipe", "1f1b"):
        other = "1f1b" if plan.schedule == "gpipe" else "gpipe"
        yield f"schedule {other}", replace(plan, schedule=other)


def _moved(plan: Plan, index: int, other: int, moved: tuple[str, ...]) -> tuple[str, Plan]:
    device = plan.placements[plan.stages[other].paths[0]]
    stages: list[Stage] = list(plan.stages)
    left = tuple(path for path in stages[index].paths if path not in moved)
    there = (*stages[other].paths, *moved) if other < index else (*moved, *stages[other].paths)
    stages[index], stages[other] = replace(stages[index], paths=left), replace(stages[other], paths=there)
    home = {path: device if path in moved else plan.placements[path] for path in plan.placements}
    span = moved[0] if len(moved) == 1 else f"{moved[0]} to {moved[-1]}"
    placements = {path: home[path] for stage in stages for path in stage.paths}
    return f"{span} in stage {other}", replace(plan, stages=tuple(stages), placements=placements)
