"""A step or an answer as it is played: when each class of equal ranks computes, and when it communicates.

Without stages the programs of the layers are played, one pass after the other. With stages the order of the schedule is
played by the clock. Pricing takes what the busiest rank does and the way of one micro-batch through the others, which
is a few percent off the play: the play is stretched to the price, and it is said by how much.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.engine.estimate import Event
from autoshard.engine.generation import prompt_parts, token_parts
from autoshard.engine.memory import RecipeEstimate, Stage
from autoshard.engine.price import (
    Passes,
    Setting,
    all_passes,
    layer_passes,
    optimizer_seconds,
    send_seconds,
    split_stages,
    synchronised_seconds,
)
from autoshard.engine.programs import Layer, pass_program, play
from autoshard.schedules.orders import make_order
from autoshard.schedules.simulate import Times, simulate

MOST_LAYERED = 8
"""Micro-batches of which every layer is played; of more, each pass is one event."""
MOST_EVENTS = 4000
"""Of an answer: tokens after so many are one event."""


Played = tuple[list[Event], float]
"""What was played, in the order in which it begins, and the priced length over the played one."""


def play_step(setting: Setting, names: Sequence[str], seconds: float) -> Played:
    """Play a training step of so many seconds; `names`: of the first device of each pipeline rank."""
    recipe = setting.recipe
    stages = split_stages(setting.work, recipe)
    passes = all_passes(setting, stages)
    found = _staged(setting, passes, names) if recipe.pp > 1 else _whole(setting, stages[0], names[0])
    ends = [
        (max(synchronised_seconds(setting, stages[index], passes[index].backward) for index in own),
         max(optimizer_seconds(setting, stages[index]) for index in own))
        for own in (range(rank, len(stages), recipe.pp) for rank in range(recipe.pp))
    ]  # fmt: skip
    length = seconds - max(end[0] for end in ends) - max(end[1] for end in ends)
    played, stretch = _stretched(list(found), length)
    for name, (synchronised, optimizer) in zip(names, ends, strict=True):
        begin = length + synchronised
        if synchronised:
            played.append(Event(device=name, kind="reduce", begin_seconds=length, end_seconds=begin))
        played.append(Event(device=name, kind="optimizer", begin_seconds=begin, end_seconds=begin + optimizer))
    return sorted(played, key=lambda event: event.begin_seconds), stretch


def _stretched(events: Sequence[Event], seconds: float) -> Played:
    """Events that end when the price says."""
    stretch = seconds / max(event.end_seconds for event in events)
    found = (
        replace(event, begin_seconds=event.begin_seconds * stretch, end_seconds=event.end_seconds * stretch)
        for event in events
    )
    return sorted(found, key=lambda event: event.begin_seconds), stretch


def _whole(setting: Setting, stage: Stage, name: str) -> Iterator[Event]:
    """All micro-batches one after the other, through all layers."""
    layers = {id(block): layer_passes(setting, block) for block, _ in stage}
    ahead = list(_named(stage, [layers[id(block)][0] for block, _ in stage]))
    back = list(_named(stage, [layers[id(block)][1] for block, _ in stage]))[::-1]
    clock = 0.0
    once = setting.recipe.num_microbatches > MOST_LAYERED
    for number in range(setting.recipe.num_microbatches):
        for kind, passed in (("forward", ahead), ("backward", back)):
            begin = clock
            for event in _played(passed, begin, Event(device=name, kind=kind, end_seconds=0.0, microbatch=number)):
                clock = max(clock, event.end_seconds)
                if not once:
                    yield event
            if once:
                yield Event(device=name, kind=kind, begin_seconds=begin, end_seconds=clock, microbatch=number)


def _named(stage: Stage, layers: Sequence[Layer]) -> Iterator[Layer]:
    number = 0
    for (block, count), layer in zip(stage, layers, strict=True):
        for _ in range(count):
            yield replace(layer, name=f"layers.{number}" if block.layer else layer.name)
            number += block.layer


def _played(layers: Sequence[Layer], clock: float, each: Event) -> Iterator[Event]:
    """The events of one pass that begins then; `each`: what they have in common."""
    program, exchange = pass_program(layers), {layer.name: layer.inner for layer in layers}
    played = play(program)
    for task, start, end in zip(program, played.begins, played.ends, strict=True):
        first, _, label = task.name.partition(" ")
        begin, end = clock + start, clock + end
        if task.stream == "network":
            yield replace(each, kind=first, begin_seconds=begin, end_seconds=end, label=label)
        else:
            yield from _pair(replace(each, begin_seconds=begin, label=task.name), end - exchange[task.name], end)


def _pair(event: Event, apart: float, end: float) -> Iterator[Event]:
    """Kernels, and from `apart` on the communication that they wait for."""
    yield replace(event, end_seconds=apart)
    if end > apart:
        yield replace(event, kind="exchange", begin_seconds=apart, end_seconds=end)


def _staged(setting: Setting, passes: Sequence[Passes], names: Sequence[str]) -> Iterator[Event]:
    """The order of the schedule, by the clock; `passes`: of every stage."""
    recipe = setting.recipe
    sends = [send_seconds(setting, setting.share)] * (len(passes) - 1)
    times = Times(
        forward=[one.forward for one in passes], backward=[one.backward for one in passes],
        weight=[one.backward / 2 for one in passes], sends=sends, returns=sends,
    )  # fmt: skip
    shape = recipe.schedule, recipe.pp, recipe.num_microbatches
    played = simulate(make_order(*shape, stages_per_device=recipe.stages_per_rank), times)
    for ran in played.ran:
        kind, stage, number = ran.action
        apart = ran.begin + _kernel_part(passes[stage], kind) * (ran.end - ran.begin)
        event = Event(
            device=names[ran.device], kind={"F": "forward", "W": "weight"}.get(kind, "backward"),
            begin_seconds=ran.begin, end_seconds=ran.end, stage=stage, microbatch=number,
        )  # fmt: skip
        yield from _pair(event, apart, ran.end)


def _kernel_part(one: Passes, kind: str) -> float:
    """The part of a pass in which kernels run."""
    if kind == "F":
        return one.forward_compute / one.forward if one.forward else 1.0
    return one.backward_compute / one.backward if one.backward else 1.0


def play_answer(setting: Setting, names: Sequence[str], answer: RecipeEstimate, new_tokens: int) -> Played:
    """Play an answer: the prompt through all stages, then token after token; those after the first few as one event."""
    recipe = setting.recipe
    stages, groups, found = split_stages(setting.work, recipe), recipe.num_microbatches, list[Event]()
    further = max(0, new_tokens - 1)
    parts = [token_parts(setting, stage, recipe.micro_batch, new_tokens / 2) for stage in stages]
    of_token = [(sum(own.values()) - own["communication"], own["communication"]) for own in parts]

    def through(kind: str, label: str, begin: float, each: Sequence[tuple[float, float]]) -> None:
        """All groups through all stages, each after the group before; `each`: seconds of kernels and of the network."""
        longest = max(map(sum, each))
        for rank, (compute, network) in enumerate(each):
            for group in range(groups):
                at = begin + group * longest
                event = Event(
                    device=names[rank], kind=kind, begin_seconds=at, end_seconds=at, stage=rank, microbatch=group,
                    label=label,
                )  # fmt: skip
                found.extend(_pair(event, at + compute, at + compute + network))
            begin += compute + network

    through("forward", "prompt", 0.0, [prompt_parts(setting, stage) for stage in stages])
    drawn = min(further, max(8, MOST_EVENTS // (2 * groups * len(stages))))
    for token in range(drawn):
        through("decode", f"token {token + 2}", answer.prompt_seconds + token * answer.token_seconds, of_token)
    begin, label = answer.prompt_seconds + drawn * answer.token_seconds, f"{further - drawn} further tokens"
    for rank, own in enumerate(of_token if further > drawn else ()):
        found.append(Event(
            device=names[rank], kind="decode", begin_seconds=begin, end_seconds=answer.seconds, stage=rank, label=label,
        ))  # fmt: skip
        begin += sum(own)
    return _stretched(found, answer.seconds)
