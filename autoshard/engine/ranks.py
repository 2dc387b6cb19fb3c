"""Classes of equal ranks: what each pipeline rank holds over a step or an answer, and what it does with the time."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.engine.generation import GenerationEstimate, answer_memory, prompt_parts, token_parts
from autoshard.engine.memory import live_bytes, outside_bytes
from autoshard.engine.price import (
    Setting,
    StepEstimate,
    all_passes,
    optimizer_seconds,
    rank_memories,
    split_stages,
    synchronised_seconds,
)  # fmt: skip

Curve = tuple[tuple[str, Mapping[str, float]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """The ranks of one pipeline position.

    `compute_seconds`: in which kernels run, the optimizer's included; `exposed_seconds`: in which communication is
    waited for; `idle_seconds`: the rest, in which other stages have the work. `curve`: (moment, bytes by kind);
    `used_bytes`: taken of the device at the fullest moment, as a driver's tool shows it.
    """

    stages: tuple[int, ...]
    compute_seconds: float
    exposed_seconds: float
    idle_seconds: float
    curve: Curve
    used_bytes: float


def step_ranks(setting: Setting, step: StepEstimate) -> list[RankCost]:
    """Figures of each pipeline rank in a training step."""
    recipe = setting.recipe
    stages = split_stages(setting.work, recipe)
    passes, count = all_passes(setting, stages), recipe.num_microbatches
    found = []
    for rank, memory in enumerate(rank_memories(setting, stages)):
        own = range(rank, len(stages), recipe.pp)
        kernels = count * sum(passes[index].compute for index in own)
        busy = count * sum(passes[index].forward + passes[index].backward for index in own)
        optimizer = max(optimizer_seconds(setting, stages[index]) for index in own)
        waits = busy - kernels + max(synchronised_seconds(setting, stages[index]) for index in own)
        curve = tuple((moment.name, moment.kinds) for moment in memory.curve)
        found.append(
            RankCost(
                stages=tuple(own), compute_seconds=kernels + optimizer, exposed_seconds=max(0.0, waits),
                idle_seconds=_rest(step.seconds, kernels + optimizer + max(0.0, waits)), curve=curve,
                used_bytes=memory.used,
            )
        )  # fmt: skip
    return found


def answer_ranks(setting: Setting, sequences: int, answer: GenerationEstimate, new_tokens: int) -> list[RankCost]:
    """Figures of each pipeline rank in an answer; `setting` and `sequences` are those of `answer_setting`."""
    recipe, prompt = setting.recipe, round(setting.share.length * setting.work.tokens)
    groups, found = recipe.num_microbatches, []
    for rank, stage in enumerate(split_stages(setting.work, recipe)):
        compute, network = prompt_parts(setting, stage)
        parts = token_parts(setting, stage, recipe.micro_batch, prompt + new_tokens / 2)
        further = groups * max(0, new_tokens - 1)
        network = groups * network + further * parts["communication"]
        compute = groups * compute + further * (sum(parts.values()) - parts["communication"])
        full = answer_memory(setting, stage, sequences, prompt + new_tokens)
        begin = answer_memory(setting, stage, sequences, prompt)
        loaded = {kind: nbytes for kind, nbytes in begin.items() if kind in ("weights", "workspace")}
        curve: Curve = (("weights loaded", loaded), ("prompt", begin), ("last token", full))
        used = live_bytes(sum(full.values()), setting.card) + sum(outside_bytes(recipe, setting.card).values())
        found.append(
            RankCost(
                stages=(rank,), compute_seconds=compute, exposed_seconds=network,
                idle_seconds=_rest(answer.seconds, compute + network), used_bytes=used,
                curve=curve if new_tokens else curve[:2],
            )
        )  # fmt: skip
    return found


def _rest(seconds: float, busy: float) -> float:
    """What is left of a time; rounding is none."""
    rest = seconds - busy
    return rest if rest > 1e-9 * seconds else 0.0
