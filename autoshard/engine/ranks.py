"""Classes of equal ranks: what each pipeline rank holds over a step or an answer, and what it does with the time."""

from collections.abc import Sequence
from dataclasses import replace

from autoshard.engine.estimate import Moment, RankEstimate
from autoshard.engine.generation import answer_memory, prompt_parts, token_parts
from autoshard.engine.memory import Memory
from autoshard.engine.price import (
    Setting,
    all_passes,
    optimizer_seconds,
    rank_memories,
    split_stages,
    synchronised_seconds,
)  # fmt: skip


def step_ranks(setting: Setting, names: Sequence[str], seconds: float) -> list[RankEstimate]:
    """Figures of each pipeline rank in a training step of so many seconds; `names`: of its devices, rank by rank."""
    recipe = setting.recipe
    stages = split_stages(setting.work, recipe)
    passes, count = all_passes(setting, stages), recipe.num_microbatches
    found = []
    for rank, memory in enumerate(rank_memories(setting, stages)):
        own = range(rank, len(stages), recipe.pp)
        kernels = count * sum(passes[index].compute for index in own)
        busy = count * sum(passes[index].forward + passes[index].backward for index in own)
        optimizer = max(optimizer_seconds(setting, stages[index]) for index in own)
        summed = max(synchronised_seconds(setting, stages[index], passes[index].backward) for index in own)
        waits = max(0.0, busy - kernels + summed)
        found.append(_rank(setting, names, rank, tuple(own), kernels + optimizer, waits, seconds, memory))
    return found


def answer_ranks(
    setting: Setting, names: Sequence[str], seconds: float, sequences: int, new_tokens: int
) -> list[RankEstimate]:
    """The same for an answer; `setting` and `sequences` are those of `answer_setting`."""
    recipe = setting.recipe
    groups, found = recipe.num_microbatches, []
    for rank, stage in enumerate(split_stages(setting.work, recipe)):
        compute, network = prompt_parts(setting, stage)
        parts = token_parts(setting, stage, recipe.micro_batch, new_tokens / 2)
        further = groups * max(0, new_tokens - 1)
        network = groups * network + further * parts["communication"]
        compute = groups * compute + further * (sum(parts.values()) - parts["communication"])
        memory = answer_memory(setting, stage, sequences, new_tokens)
        found.append(_rank(setting, names, rank, (rank,), compute, network, seconds, memory))
    return found


def _rank(
    setting: Setting, names: Sequence[str], rank: int, stages: tuple[int, ...], compute: float, waits: float,
    seconds: float, memory: Memory,
) -> RankEstimate:  # fmt: skip
    each, idle = len(names) // setting.recipe.pp, seconds - compute - waits
    curve = (Moment(name=one.name, bytes={kind: int(n) for kind, n in one.bytes.items()}) for one in memory.curve)
    return RankEstimate(
        first=names[rank * each], devices=each, stages=stages, compute_seconds=compute, exposed_seconds=waits,
        idle_seconds=idle if idle > 1e-9 * seconds else 0.0, peak_bytes=int(memory.used), curve=tuple(curve),
    )  # fmt: skip


def equal_ranks(ranks: Sequence[RankEstimate]) -> tuple[RankEstimate, ...]:
    """Pipeline ranks as they are shown; neighbours that differ in their stages alone are one class."""
    found: list[RankEstimate] = []
    for made in ranks:
        last = found[-1] if found else made
        if found and replace(made, first=last.first, devices=last.devices, stages=last.stages) == last:
            stages = tuple(sorted((*last.stages, *made.stages)))
            found[-1] = replace(last, devices=last.devices + made.devices, stages=stages)
        else:
            found.append(made)
    return tuple(found)
