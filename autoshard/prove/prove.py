"""Turn axis groups into cuts that are known to be right.

For each block that differs: its own Python is run on the local shapes of a rank until the attributes are found that
hold a size of the cut axis; then random values go through the whole block and through all of its ranks, forward and
backward, and must agree. What can't be shown is refused with the reason, and stays whole.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autoshard.axes.groups import AxisGroup
from autoshard.capture.graph import ModelGraph
from autoshard.prove.equal import Unequal, check_equal
from autoshard.prove.expected import axes_near, expected_results
from autoshard.prove.ranks import LoneRank
from autoshard.prove.sample import Sample, sample_block
from autoshard.prove.search import NotFound, Question, Scales, find_scales
from autoshard.prove.trial import Outcome, Watch, run_watched
from autoshard.runtime.cuts import apply_cuts
from autoshard.sharding import Cut, Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A group that can't be cut in these shares, and why."""

    group: int
    shares: tuple[int, ...]
    reason: str


class Prover:
    """Proves groups of one model; remembers what it has made for each block."""

    def __init__(
        self, model: nn.Module, graph: ModelGraph, calls: dict[str, list[tuple[tuple, dict[str, Any]]]]
    ) -> None:
        self._model, self._graph, self._calls = model, graph, calls
        self._samples: dict[str, Sample] = {}
        self._results: dict[tuple[int, tuple[int, ...]], Cut | Refusal] = {}

    def prove(self, group: AxisGroup, shares: tuple[int, ...]) -> Cut | Refusal:
        """Find the scales of one group in these shares and prove the cut, or say why not."""
        key = (group.index, shares)
        if key not in self._results:
            try:
                cut = self._with_scales(group, shares)
                self._results[key] = self._proved(group.blocks[0], (cut,))[0]
            except (NotFound, Unequal) as error:
                self._results[key] = Refusal(group=group.index, shares=shares, reason=str(error))
            except Exception as error:  # the block's own code stumbles over what a rank has, in whatever way
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                self._results[key] = Refusal(group=group.index, shares=shares, reason=reason)
        return self._results[key]

    def prove_together(self, cuts: Sequence[Cut]) -> str:
        """Prove cuts of the same blocks at once; "" if they agree, else why not."""
        try:
            self._proved(cuts[0].blocks[0], tuple(cuts))
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return ""

    def _sample(self, block: str) -> Sample:
        if block not in self._samples:
            module = self._model.get_submodule(block)
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
