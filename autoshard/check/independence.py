"""Whether the samples of a batch are kept apart, by what the ops of whole runs say; no number of the model is asked.

runs       each says of its ops which keep samples apart (`sample_run`)
masks      without padding, and with some: each branch is followed, and gives rows without padding the same
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

from autoshard import nested
from autoshard.axes.switches import Numbering
from autoshard.check.inputs import Padded, is_mask
from autoshard.check.records import Apart, Mixed, Question
from autoshard.check.sample_run import SampleRun
from autoshard.plan.batching import BatchAxis
from autoshard.torch_private import backward_hooks

MOST_SWITCHES = 3
"""Masks, and numbers in tokens, for which all branches are followed."""
OTHER = 2
"""What stands in a mask that is neither 0 nor 1: code may ask for either."""


def check_apart(question: Question, batch: BatchAxis) -> Apart:
    """Follow the samples of the batch through runs of the whole model. Raises `Mixed` naming the op, or `NotRun`."""
    for path, module in question.model.named_modules():  # torch can't call them where ops are recorded whole
        if question.workload.training and backward_hooks(module):
            raise Mixed(f"{path or 'the model'} has a hook on its gradients, which may mix rows. {question.advice}")
    masks = [item.path for item in batch.inputs if is_mask(nested.tensor_at(question.bound, item.path))]
    first = SampleRun(question, batch, frozenset(), ())
    compared_switches = first.compared_switches()
    if compared_switches:
        first = SampleRun(question, batch, frozenset(), compared_switches)
    choices = [*((path, 0) for path in masks), *compared_switches]
    runs: dict[Padded, SampleRun] = {frozenset(): first}
    if first.switches and len(choices) <= MOST_SWITCHES:
        for count in range(1, len(choices) + 1):
            for chosen in map(frozenset, combinations(choices, count)):
                runs[chosen] = SampleRun(question, batch, chosen, compared_switches)
    if len(masks) == 1 and not compared_switches and len(first.switches) > 1:
        other = frozenset({(masks[0], OTHER)})
        runs[other] = SampleRun(question, batch, other, ())
    _check_switches(runs, choices)
    if not question.for_replicas:  # there each has samples of its own, as without a plan
        for rows in (1, 2):
            first.check_number(rows)
    return first.outputs()


def _check_switches(runs: Mapping[Padded, SampleRun], choices: Sequence[tuple[str, int]]) -> None:
    """Refuse branches that were not seen, and those that give a row something else."""
    whole = runs[frozenset()]
    if not any(run.switches for run in runs.values()):
        return
    last = runs.get(frozenset(choices))
    numbering = Numbering()
    answers: dict[Any, dict[Padded, bool]] = {}
    pinned = set()  # questions of which a yes says what all of the mask is
    facts: dict[Padded, dict[Any, bool | int]] = {}
    for padded, run in runs.items():
        numbers = numbering.of(run.graph, {})
        facts[padded] = {}
        for value, (answer, truth) in run.switches.items():
            found = numbering.fact_of(run.graph, value, numbers, truth)
            asked = found[-1][0] if found else value
            answers.setdefault(asked, {})[padded] = answer
            if any(type(said) is int for _, said in found):
                pinned.add(asked)
            if answer:
                facts[padded].update(found)
    for value in whole.switches:
        if last is None or not _all_were_seen(answers, pinned, runs, choices):
            op = whole.graph.values[value].op
            raise whole.refuse(whole.graph.ops[op] if op >= 0 else None, "decides what to do by values of all rows")
    assert last is not None
    for padded, run in runs.items():
        if run is not last:
            mine, its = (numbering.of(one.graph, facts[padded]) for one in (run, last))
            for path, left, right in zip(
                run.graph.calls[0].output_paths, run.graph.outputs, last.graph.outputs, strict=True
            ):
                if mine[left] != its[right]:
                    op = run.graph.values[next(iter(run.switches))].op if run.switches else -1
                    what = f"asks whether any row is masked, and gives {path or 'its output'} other numbers if one is"
                    raise run.refuse(run.graph.ops[op] if op >= 0 else None, what)


def _all_were_seen(
    answers: Mapping[Any, Mapping[Padded, bool]], pinned: Collection[Any], runs: Collection[Padded],
    choices: Sequence[tuple[str, int]],
) -> bool:  # fmt: skip
    """Whether all answers to questions about masks were seen together that there can be.

    Of two about one mask, a yes to one that says what all of it is decides the other; a no leaves both answers to it.
    """
    if any(len({*seen.values()}) < 2 for seen in answers.values()):
        return False
    if len(answers) <= max(1, len(choices)):
        return True
    together = {tuple(seen.get(padded) for seen in answers.values()) for padded in runs}
    known = len(together) == 3 and (False, False) in together and not any(None in seen for seen in together)
    return len(choices) == 1 and len(answers) == 2 and bool(pinned) and known
