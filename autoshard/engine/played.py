"""A step or an answer as it is played: when each class of equal ranks computes, and when it communicates.

Without stages the programs of the layers are played, one pass after the other. With stages the order of the schedule is
played by the clock. Pricing takes what the busiest rank does and the way of one micro-batch through the others, which
is a few percent off the play: the play is stretched to the price, and `PlayedPlan.stretch` says by how much.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard.engine.generation import prompt_parts, token_parts
from autoshard.engine.memory import RecipeEstimate, Stage
from autoshard.engine.price import (
    Passes,
    Setting,
    all_passes,
    layer_passes,
    optimizer_seconds,
    split_stages,
    stage_send_seconds,
    synchronised_seconds,
)
from autoshard.engine.programs import Layer, pass_program, play
from autoshard.schedules.orders import make_order
from autoshard.schedules.simulate import Times, simulate

MOST_LAYERED = 8
"""Micro-batches of which every layer is played; of more, each pass is one span."""
MOST_SPANS = 4000
"""Of an answer: tokens after so many are one span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a pipeline rank does for a while.

    `kind`: "forward", "backward", "weight", "decode", "optimizer", "exchange" (collectives that kernels wait for), and
    on the stream of collectives "gather" (of parameters) and "reduce" (of gradients).
    """

    rank: int
    kind: str
    begin: float
    end: float
    stage: int = -1
    microbatch: int = -1
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPlan:
    """What was played; `stretch`: the priced length over the played one."""

    spans: tuple[Span, ...]
    stretch: float = 1.0


def play_step(setting: Setting, step: RecipeEstimate) -> PlayedPlan:
    """Play a training step."""
    recipe = setting.recipe
    stages = split_stages(setting.work, recipe)
    spans = list(_staged(setting, stages) if recipe.pp > 1 else _whole(setting, stages[0]))
    ends = [
        (max(synchronised_seconds(setting, stages[index]) for index in own),
         max(optimizer_seconds(setting, stages[index]) for index in own))
        for own in (range(rank, len(stages), recipe.pp) for rank in range(recipe.pp))
    ]  # fmt: skip
    after = max(end[0] for end in ends) + max(end[1] for end in ends)
    length = step.seconds - after
    played = _stretched(spans, length)
    spans = list(played.spans)
    for rank, (synchronised, optimizer) in enumerate(ends):
        begin = length
        if synchronised:
            spans.append(Span(rank=rank, kind="reduce", begin=begin, end=begin + synchronised))
            begin += synchronised
        spans.append(Span(rank=rank, kind="optimizer", begin=begin, end=begin + optimizer))
    return replace(played, spans=tuple(sorted(spans, key=lambda span: span.begin)))


def _stretched(spans: Sequence[Span], seconds: float) -> PlayedPlan:
    """Spans that end when the price says."""
    stretch = seconds / max(span.end for span in spans)
    spans = [replace(span, begin=span.begin * stretch, end=span.end * stretch) for span in spans]
    return PlayedPlan(spans=tuple(sorted(spans, key=lambda span: span.begin)), stretch=stretch)


def _whole(setting: Setting, stage: Stage) -> Iterator[Span]:
    """All micro-batches one after the other, through all layers."""
    layers = {id(block): layer_passes(setting, block) for block, _ in stage}
    ahead = list(_named(stage, [layers[id(block)][0] for block, _ in stage]))
    back = list(_named(stage, [layers[id(block)][1] for block, _ in stage]))[::-1]
    clock = 0.0
    once = setting.recipe.num_microbatches > MOST_LAYERED
    for number in range(setting.recipe.num_microbatches):
        for kind, passed in (("forward", ahead), ("backward", back)):
            begin = clock
            for span in _played(kind, passed, begin, number):
                clock = max(clock, span.end)
                if not once:
                    yield span
            if once:
                yield Span(rank=0, kind=kind, begin=begin, end=clock, microbatch=number)


def _named(stage: Stage, layers: Sequence[Layer]) -> Iterator[Layer]:
    number = 0
    for (block, count), layer in zip(stage, layers, strict=True):
        for _ in range(count):
            yield replace(layer, name=f"layers.{number}" if block.layer else layer.name)
            number += block.layer


def _played(kind: str, layers: Sequence[Layer], begin: float, number: int) -> Iterator[Span]:
    program = pass_program(layers)
    exchange = {layer.name: layer.inner for layer in layers}
    played = play(program)
    for task, start, end in zip(program, played.begins, played.ends, strict=True):
        first, _, label = task.name.partition(" ")
        if task.stream == "network":
            yield Span(rank=0, kind=first, begin=begin + start, end=begin + end, microbatch=number, label=label)
            continue
        apart = end - exchange[task.name]
        yield Span(rank=0, kind=kind, begin=begin + start, end=begin + apart, microbatch=number, label=task.name)
        if exchange[task.name]:
            yield Span(
                rank=0, kind="exchange", begin=begin + apart, end=begin + end, microbatch=number, label=task.name
            )


def _staged(setting: Setting, stages: Sequence[Stage]) -> Iterator[Span]:
    """The order of the schedule, by the clock."""
    recipe, passes = setting.recipe, all_passes(setting, stages)
    sends = [stage_send_seconds(setting)] * (len(stages) - 1)
    times = Times(
        forward=[one.forward for one in passes], backward=[one.backward for one in passes],
        weight=[one.backward / 2 for one in passes], sends=sends, returns=sends,
    )  # fmt: skip
    shape = recipe.schedule, recipe.pp, recipe.num_microbatches
    played = simulate(make_order(*shape, stages_per_device=recipe.stages_per_rank), times)
    for ran in played.ran:
        kind, stage, number = ran.action
        kernels = _kernel_part(passes[stage], kind)
        apart = ran.begin + kernels * (ran.end - ran.begin)
        name = {"F": "forward", "W": "weight"}.get(kind, "backward")
        yield Span(rank=ran.device, kind=name, begin=ran.begin, end=apart, stage=stage, microbatch=number)
        if ran.end > apart:
            yield Span(rank=ran.device, kind="exchange", begin=apart, end=ran.end, stage=stage, microbatch=number)


def _kernel_part(one: Passes, kind: str) -> float:
    """The part of a pass in which kernels run."""
    if kind == "F":
        return one.forward_compute / one.forward if one.forward else 1.0
    return one.backward_compute / one.backward if one.backward else 1.0


def play_answer(setting: Setting, answer: RecipeEstimate, new_tokens: int) -> PlayedPlan:
    """Play an answer: the prompt through all stages, then token after token; those after the first few as one span."""
    recipe, prompt = setting.recipe, round(setting.share.length * setting.work.tokens)
    stages = split_stages(setting.work, recipe)
    groups, spans = recipe.num_microbatches, list[Span]()
    begin, longest = 0.0, max(sum(prompt_parts(setting, stage)) for stage in stages)
    for rank, stage in enumerate(stages):
        compute, network = prompt_parts(setting, stage)
        for group in range(groups):
            spans += _pair("forward", rank, begin + group * longest, compute, network, group, "prompt")
        begin += compute + network
    further = max(0, new_tokens - 1)
    parts = [token_parts(setting, stage, recipe.micro_batch, prompt + new_tokens / 2) for stage in stages]
    drawn = min(further, max(8, MOST_SPANS // (2 * groups * len(stages))))
    for token in range(drawn):
        begin = answer.prompt_seconds + token * answer.token_seconds
        for rank, own in enumerate(parts):
            seconds = sum(own.values())
            for group in range(groups):
                network = own["communication"]
                at = begin + group * max(sum(one.values()) for one in parts)
                spans += _pair("decode", rank, at, seconds - network, network, group, f"token {token + 2}")
            begin += seconds
    begin, label = answer.prompt_seconds + drawn * answer.token_seconds, f"{further - drawn} further tokens"
    for rank, own in enumerate(parts if further > drawn else ()):
        spans.append(Span(rank=rank, kind="decode", begin=begin, end=answer.seconds, stage=rank, label=label))
        begin += sum(own.values())
    return _stretched(spans, answer.seconds)


def _pair(
    kind: str, rank: int, begin: float, compute: float, network: float, group: int, label: str
) -> Iterator[Span]:  # fmt: skip
    """Kernels, and the communication after them."""
    apart = begin + compute
    yield Span(rank=rank, kind=kind, begin=begin, end=apart, stage=rank, microbatch=group, label=label)
    if network:
        yield Span(
            rank=rank, kind="exchange", begin=apart, end=apart + network, stage=rank, microbatch=group, label=label
        )
