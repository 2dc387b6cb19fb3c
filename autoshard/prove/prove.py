"""Turn axis groups into cuts that are known to be right.

For each block that differs: its own Python is run on the local shapes of a rank until the attributes are found that
hold a size of the cut axis; then random values go through the whole block and through all of its ranks, forward and
backward, and must agree. What can't be shown is refused with the reason, and stays whole.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.capture.capture import observe_calls
from autoshard.capture.graph import ModelGraph
from autoshard.plan_cuts import Refusal
from autoshard.prove.equal import Unequal, check_equal
from autoshard.prove.expected import axes_near, expected_results
from autoshard.prove.ranks import LoneRank
from autoshard.prove.sample import Sample, sample_block
from autoshard.prove.search import NotFound, Question, Scales, find_scales
from autoshard.prove.trial import Outcome, Watch, run_watched
from autoshard.runtime.cuts import apply_cuts
from autoshard.sharding import Cut, Scale
from autoshard.workload import Workload


class Prover:
    """Proves groups of one model; remembers what it has made for each block."""

    def __init__(self, model: nn.Module, graph: ModelGraph, calls: Mapping[str, Sequence[tuple[tuple, dict]]]) -> None:
        self._model, self._graph, self._calls = model, graph, calls
        self._samples: dict[str, Sample] = {}
        self._results: dict[tuple[int, tuple[int, ...]], Cut | Refusal] = {}

    def __call__(self, groups: Sequence[AxisGroup], shares: Sequence[tuple[int, ...]]) -> list[Cut | Refusal]:
        """Prove groups of the same blocks, each alone and then all at once; one outcome for each."""
        outcomes = [self.prove(group, share) for group, share in zip(groups, shares, strict=True)]
        cuts = [outcome for outcome in outcomes if isinstance(outcome, Cut)]
        if len(cuts) < 2:
            return outcomes
        reason = _tried(lambda: self._proved(groups[0].blocks[0], tuple(cuts)))
        if reason:  # each is right alone: the one that saves least stays whole
            least = min(range(len(groups)), key=lambda index: groups[index].nbytes)
            outcomes[least] = Refusal(reason=f"not together with others: {reason}")
        return outcomes

    def prove(self, group: AxisGroup, shares: tuple[int, ...]) -> Cut | Refusal:
        """Find the scales of one group in these shares and prove the cut, or say why not."""
        key = (group.index, shares)
        if key not in self._results:
            made: list[Cut] = []

            def work() -> None:
                made.extend(self._proved(group.blocks[0], (self._with_scales(group, shares),)))

            reason = _tried(work)
            self._results[key] = Refusal(reason=reason) if reason else made[0]
        return self._results[key]

    def _sample(self, block: str) -> Sample:
        if block not in self._samples:
            module = self._model.get_submodule(block)
            if not self._calls.get(block):
                raise NotFound(f"{block} was not called")
            self._samples[block] = sample_block(module, self._calls[block])
        return self._samples[block]

    def _with_scales(self, group: AxisGroup, shares: tuple[int, ...]) -> Cut:
        """The cut of a group with the integers that its blocks need; they are searched in the first block."""
        cut = Cut(
            blocks=group.blocks, size=group.size, shares=shares, shards=group.shards, actions=group.actions,
            summed=group.summed,
        )  # fmt: skip
        block = group.blocks[0]
        sample = self._sample(block)
        calls = [call for call in self._graph.calls if call.path == block][: len(sample.calls)]
        scales: Scales = {}
        for call, given in zip(calls, sample.calls, strict=False):
            question = Question(
                block=sample.block,
                leaf=group.leaf,
                expected=expected_results(self._graph, group.walk, call),
                near=axes_near(self._graph, group.walk, call, group.leaf),
            )
            scales = find_scales(question, self._runner(question, cut, given), scales)
        return replace(cut, scales=_scales(scales, shares))

    def _runner(self, question: Question, cut: Cut, given: tuple[tuple, dict[str, Any]]) -> Callable[[Scales], Outcome]:
        """Run the first rank of a cut with some scales."""

        def run(scales: Scales) -> Outcome:
            local = copy.deepcopy(question.block)
            one = replace(cut, blocks=("",), scales=_scales(scales, cut.shares))
            apply_cuts(local, (one,), LoneRank(rank=0, size=cut.degree))
            args, kwargs = copy.deepcopy(given)
            return run_watched(local, args, kwargs, Watch(question.expected, {question.leaf: cut.shares[0]}))

        return run

    def _proved(self, block: str, cuts: tuple[Cut, ...]) -> list[Cut]:
        local = tuple(replace(cut, blocks=("",)) for cut in cuts)
        backward = check_equal(self._sample(block), local)
        proof = (
            f"equal on {cuts[0].degree} ranks with random values, {'forward and backward' if backward else 'forward'}"
        )
        return [replace(cut, proof=proof) for cut in cuts]


def _tried(work: Callable[[], Any]) -> str:
    """Run a proof; "" if it holds, else why not. A block's own code may stumble over what a rank has in any way."""
    try:
        work()
    except (NotFound, Unequal) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def _scales(scales: Scales, shares: tuple[int, ...]) -> tuple[Scale, ...]:
    return tuple(
        Scale(
            module=module,
            attribute=attribute,
            value=number.whole,
            local=tuple(number.local(share) for share in shares),
        )
        for (module, attribute), number in scales.items()
    )


def make_prover(
    model: nn.Module, inputs: Any, workload: Workload | None, graph: ModelGraph, found: AxisGroups
) -> Prover:
    """Observe how the blocks of a model are called, and return what proves their groups."""
    paths = dict.fromkeys(group.blocks[0] for group in found.groups)
    return Prover(model, graph, observe_calls(model, inputs, workload, paths))
