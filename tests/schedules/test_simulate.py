"""The simulator against a longest path through a graph of actions and copies, and against closed forms."""

import random
from graphlib import TopologicalSorter

import pytest

from autoshard.errors import SpecError
from autoshard.schedules.orders import PipeAction, make_order
from autoshard.schedules.simulate import Times, simulate


def longest_path(order, times: Times) -> dict[tuple, float]:
    """End of every action and copy: nodes with seconds, edges to what each of them must wait for."""
    devices, stages = len(order), len(times.forward)
    seconds, after = {}, {}
    for row in order:
        previous = None
        links = {}
        for action in row:
            kind, stage, microbatch = action
            seconds[action] = times.of(action)
            needs = after.setdefault(action, [])
            needs += [previous] if previous else []
            gradient = "I" if PipeAction("I", stage + 1, microbatch) in order[(stage + 1) % devices] else "B"
            if kind == "F" and stage:
                needs.append(("to", "F", stage, microbatch) if devices > 1 else PipeAction("F", stage - 1, microbatch))
            if kind in "BI" and stage < stages - 1:
                made = PipeAction(gradient, stage + 1, microbatch)
                needs.append(("to", "B", stage, microbatch) if devices > 1 else made)
            if kind == "W":
                needs.append(PipeAction("I", stage, microbatch))
            previous = action
            target = stage + 1 if kind == "F" else stage - 1
            if devices > 1 and kind != "W" and 0 <= target < stages:
                copy = ("to", "F" if kind == "F" else "B", target, microbatch)
                seconds[copy] = (times.sends if kind == "F" else times.returns)[min(stage, target)]
                after[copy] = [action, *links.get(target % devices, [])]
                links[target % devices] = [copy]
    end = {}
    for node in TopologicalSorter(after).static_order():
        end[node] = max((end[other] for other in after.get(node, ())), default=0.0) + seconds[node]
    return end


def random_case(seed: int):
    draw = random.Random(seed)
    name = draw.choice(["gpipe", "1f1b", "interleaved", "zero-bubble"])
    devices = draw.randint(1, 5)
    microbatches = devices * draw.randint(1, 3)
    per_device = draw.randint(1, 3) if name in ("interleaved", "zero-bubble") else 1
    stages = devices * per_device
    order = make_order(name, devices, microbatches, stages_per_device=per_device, training=draw.random() < 0.8)
    top = draw.choice([0.5, 3.0])
    backward = [draw.uniform(0, 6) for _ in range(stages)]
    times = Times(
        forward=[draw.uniform(0, 3) for _ in range(stages)],
        backward=backward,
        weight=[each * draw.random() for each in backward],
        sends=[draw.uniform(0, top) for _ in range(stages - 1)],
        returns=[draw.uniform(0, top) for _ in range(stages - 1)],
    )
    return order, times


@pytest.mark.parametrize("begin", range(0, 1000, 250))
def test_equals_the_longest_path_on_random_cases(begin):
    for seed in range(begin, begin + 250):
        order, times = random_case(seed)
        found, expected = simulate(order, times), longest_path(order, times)
        assert found.seconds == pytest.approx(max(expected.values()), abs=1e-9), seed
        for ran in found.ran:
            assert ran.end == pytest.approx(expected[ran.action], abs=1e-9), (seed, ran)


def test_interleaving_makes_the_bubble_smaller_and_zero_bubble_smaller_than_1f1b():
    devices, microbatches = 4, 8
    one = Times(forward=[2.0] * 4, backward=[4.0] * 4, weight=[2.0] * 4, sends=[0.0] * 3, returns=[0.0] * 3)
    two = Times(forward=[1.0] * 8, backward=[2.0] * 8, weight=[1.0] * 8, sends=[0.0] * 7, returns=[0.0] * 7)
    plain = simulate(make_order("1f1b", devices, microbatches), one).bubble
    assert plain == pytest.approx(3 / 11)
    interleaved = simulate(make_order("interleaved", devices, microbatches, stages_per_device=2), two).bubble
    assert interleaved == pytest.approx(1.5 / 9.5)  # (p - 1) / v of m + (p - 1) / v
    assert simulate(make_order("zero-bubble", devices, microbatches), one).bubble < plain * 0.7


def test_an_order_that_waits_for_itself_is_refused():
    order = ((PipeAction("B", 0, 0), PipeAction("F", 0, 0)), (PipeAction("F", 1, 0), PipeAction("B", 1, 0)))
    times = Times(forward=[1.0] * 2, backward=[1.0] * 2, sends=[0.0], returns=[0.0])
    with pytest.raises(SpecError, match="wait for each other"):
        simulate(order, times)
