"""Turn axis groups into cuts that are known to be right.

For each block that differs: its own Python is run on the local shapes of a rank until the attributes are found that
hold a size of the cut axis; then ranks are followed through the whole model, op by op; then random values go through
the whole block and through all of its ranks, forward and backward, and must agree. What can't be shown is refused with
the reason, and stays whole.

What decides is `follow`; the numbers may only refuse more. A block too large to be run has none.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.axes.places import differentiable
from autoshard.axes.regions import OUTSIDE
from autoshard.axes.unproved import as_cut
from autoshard.capture.capture import capture, observe_calls
from autoshard.capture.fake import FakeFloats, silenced
from autoshard.capture.graph import Call, ModelGraph
from autoshard.capture.observe import TensorSpec, fill_specs
from autoshard.capture.record import Recorder
from autoshard.capture.run import own_random_numbers
from autoshard.module_paths import join
from autoshard.plan_cuts import Refusal
from autoshard.progress import tell
from autoshard.prove.equal import Unequal, check_equal
from autoshard.prove.expected import axes_near, expected_results
from autoshard.prove.findings import find_misuse
from autoshard.prove.follow import Differs, due_on, follow
from autoshard.prove.local_run import call_of, record_rank
from autoshard.prove.other_runs import Seen, other_runs
from autoshard.prove.ranks import LoneRank
from autoshard.prove.sample import Sample, sample_block
from autoshard.prove.search import Length, NotFound, Question, Scales, find_scales
from autoshard.prove.shapes import Arguments, as_fake, elements_of, on_meta
from autoshard.prove.stubs import outside_of
from autoshard.prove.trial import Outcome, Watch, run_watched
from autoshard.runtime.cuts import apply_cuts
from autoshard.sharding import Action, Cut, Scale
from autoshard.torch_private import gradient_hooks, has_accumulation_hooks
from autoshard.workload import Workload

Key = tuple[tuple[int, tuple[int, ...]], ...]
"""(index of a group, shares) of groups that are cut at once."""
RUN_ELEMENTS = 1 << 25
"""Blocks with more elements than this in their parameters are followed on shapes, and not run."""


class Prover:
    """Proves groups of one model; remembers what it has made for each block."""

    def __init__(
        self, model: nn.Module, graph: ModelGraph, found: AxisGroups, calls: Mapping[str, Sequence[Arguments]],
        first: Seen, others: Callable[[], Sequence[Seen]],
    ) -> None:  # fmt: skip
        self._model, self._graph, self._calls = model, graph, calls
        self._runs, self._others = [first], others
        self._groups, self._regions = found.groups, found.regions
        self._elements = [path for region in found.regions if region.path != OUTSIDE for path in region.paths]
        self._blocks: dict[str, nn.Module] = {}
        self._differentiable = differentiable(graph)
        self._samples: dict[str, Sample] = {}
        self._scales: dict[tuple[int, tuple[int, ...]], Scales | NotFound] = {}
        self._results: dict[Key, list[Cut | Refusal]] = {}
        self._followed: dict[Key, dict[int, str]] = {}

    def __call__(self, groups: Sequence[AxisGroup], shares: Sequence[tuple[int, ...]]) -> list[Cut | Refusal]:
        """Check groups that are all cut at once; one outcome for each. If any is a refusal, the others may be one, too.

        What code does is looked at first, then numbers.
        """
        found = [self._cut(group, share) for group, share in zip(groups, shares, strict=True)]
        cuts = [one for one in found if isinstance(one, Cut)]
        if len(cuts) == len(groups):
            for place, reason in self._follow(groups, cuts).items():
                found[place] = Refusal(reason=reason)
        if not all(isinstance(one, Cut) for one in found):
            return found
        together: dict[tuple[str, ...], list[int]] = {}
        for place, group in enumerate(groups):
            together.setdefault(group.blocks, []).append(place)
        for number, places in enumerate(together.values()):
            tell("blocks", number, len(together))
            outcomes = self._of_blocks([groups[place] for place in places], [cuts[place] for place in places])
            for place, outcome in zip(places, outcomes, strict=True):
                found[place] = outcome
        return found

    def prove(self, group: AxisGroup, shares: tuple[int, ...]) -> Cut | Refusal:
        """Find the scales of one group in these shares and check the cut, or say why not."""
        return self([group], [shares])[0]

    def _cut(self, group: AxisGroup, shares: tuple[int, ...]) -> Cut | Refusal:
        """The cut of a group with the integers to scale, or why there are none."""
        hooked = self._hooked(group)
        if hooked:
            return Refusal(
                reason=f"{hooked} has a hook on its gradient (register_hook, register_post_accumulate_grad_hook), of "
                "which a rank has a part"
            )
        made: list[Cut] = []
        reason = _tried(lambda: made.append(_cut(group, shares, self._find_scales(group, shares))))
        return Refusal(reason=reason) if reason else made[0]

    def _hooked(self, group: AxisGroup) -> str:
        """A parameter of which ranks get parts of the gradient while a hook of the user's expects all of it."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        names = [join(block, name) for block in group.blocks
                 for name in (*(shard.name for shard in group.shards), *group.summed)]  # fmt: skip
        found = {name for name, one in parameters.items() if gradient_hooks(one) or has_accumulation_hooks(one)}
        return next((name for name in names if name in found), "")

    def _of_blocks(self, groups: Sequence[AxisGroup], cuts: Sequence[Cut]) -> list[Cut | Refusal]:
        """Compare numbers for groups of the same blocks, all at once if that works."""
        key = tuple((group.index, cut.shares) for group, cut in zip(groups, cuts, strict=True))
        if key not in self._results:
            self._results[key] = self._compared(groups, cuts)
        return self._results[key]

    def _compared(self, groups: Sequence[AxisGroup], cuts: Sequence[Cut]) -> list[Cut | Refusal]:
        made: list[Cut] = []
        reason = _tried(lambda: made.extend(self._proved(groups, cuts)))
        if not reason:
            return list(made)
        if len(groups) == 1:
            return [Refusal(reason=reason)]
        outcomes = [self._of_blocks([group], [cut])[0] for group, cut in zip(groups, cuts, strict=True)]
        if all(isinstance(outcome, Cut) for outcome in outcomes):
            # Each is right alone, and not all at once: the one that saves least stays whole.
            least = min(range(len(groups)), key=lambda index: groups[index].nbytes)
            outcomes[least] = Refusal(reason="it can't be cut together with what else is cut there")
        return outcomes

    # ---- what ranks do beside the whole

    def _follow(self, groups: Sequence[AxisGroup], cuts: Sequence[Cut]) -> dict[int, str]:
        """Follow what ranks do with these cuts in the whole model; places of those that can't be, with the reason."""
        key = tuple((group.index, cut.shares) for group, cut in zip(groups, cuts, strict=True))
        if key not in self._followed:
            self._followed[key] = self._to_blame(groups, cuts, self._difference(groups, cuts))
        return self._followed[key]

    def _difference(self, groups: Sequence[AxisGroup], cuts: Sequence[Cut]) -> "tuple[Seen, Differs] | None":
        """What some rank does otherwise than the whole model in one of the runs. Ranks of equal shares do the same."""
        shares = [cut.shares for cut in cuts]
        ranks = {column: rank for rank, column in enumerate(zip(*shares, strict=True))}.values()
        for run in self._all_runs():
            found = [self._in_run(run, group) for group in groups]
            if [] in found:
                missing = groups[found.index([])]
                return run, Differs(-1, f"{missing.shards[0].name} can't be cut by its axes")
            theirs = [group for same in found for group in same]
            its_shares = [share for same, share in zip(found, shares, strict=True) for _ in same]
            try:
                for rank in ranks:
                    with own_random_numbers():
                        due = due_on(run.graph, theirs, its_shares, rank)
                        find_misuse(self._model, run.graph, run.tape, due)
                        follow(run.graph, record_rank(self._model, cuts, rank, run.record), due, rank)
            except Differs as error:
                return run, error
            except Exception as error:
                return run, Differs(-1, f"a rank can't run it: {' '.join(str(error).split())[:200]}")
        return None

    def _in_run(self, run: Seen, group: AxisGroup) -> list[AxisGroup]:
        """What cuts the same in another run; [] if nothing does."""
        return [group] if run is self._runs[0] else run.of(group)

    def _all_runs(self) -> Iterator[Seen]:
        """The run of the plan, then the others, which are recorded when they are needed first."""
        yield self._runs[0]
        if len(self._runs) == 1:
            self._runs += self._others()
        yield from self._runs[1:]

    def _to_blame(
        self, groups: Sequence[AxisGroup], cuts: Sequence[Cut], found: "tuple[Seen, Differs] | None"
    ) -> dict[int, str]:
        """Which of the cuts make a difference: those that work where it is, else those that make one alone."""
        if found is None:
            return {}
        run, error = found
        places = list(range(len(groups)))
        own = [self._in_run(run, group) for group in groups]
        at = [
            place for place, (same, cut) in enumerate(zip(own, cuts, strict=True))
            if not same or error.op in due_on(run.graph, same, [cut.shares] * len(same), 0)
        ]  # fmt: skip
        if len(groups) == 1 or len(at) == 1:
            return {(at or places)[0]: _said(found)}
        alone = {place: self._difference([groups[place]], [cuts[place]]) for place in at or places}
        reasons = {place: _said(one) for place, one in alone.items() if one is not None}
        least = min(at or places, key=lambda place: groups[place].nbytes)
        return reasons or {least: _said(found)}

    # ---- the numbers

    def _proved(self, groups: Sequence[AxisGroup], cuts: Sequence[Cut]) -> list[Cut]:
        """Compare ranks with the whole where they can be run, and note in the cuts how. Raises what does not hold."""
        path = groups[0].blocks[0]
        proof = "followed op by op"
        if not self._is_large(path) and len(set(cuts[0].shares)) == 1:
            ways = check_equal(self._sample(path), tuple(replace(cut, blocks=("",)) for cut in cuts))
            proof += f", equal on {cuts[0].degree} ranks with random values, {ways}"
        training = all(part.training for part in self._model.get_submodule(path).modules())
        return [replace(cut, training=training, proof=proof) for cut in cuts]

    def _block(self, path: str) -> nn.Module:
        """The module at a path; of a large model, where all of it is asked for, without its repeated elements."""
        if path not in self._blocks:
            block = self._model.get_submodule(path)
            if path == OUTSIDE and self._elements and elements_of(block) > RUN_ELEMENTS:
                block = outside_of(block, self._graph, self._elements)
            self._blocks[path] = block
        return self._blocks[path]

    def _is_large(self, path: str) -> bool:
        return elements_of(self._block(path)) > RUN_ELEMENTS

    def _given(self, path: str) -> Sequence[Arguments]:
        if not self._calls.get(path):
            raise NotFound(f"{path} was not called")
        return self._calls[path]

    def _sample(self, path: str) -> Sample:
        if path not in self._samples:
            self._samples[path] = sample_block(
                self._block(path), self._given(path), self._tracked(path), self._trained(path)
            )
        return self._samples[path]

    def _tracked(self, path: str) -> list[set[str]]:
        """For each call of a block, the paths of the arguments that a gradient may reach."""
        return [
            {where for where, value in zip(call.input_paths, call.inputs, strict=True) if value in self._differentiable}
            for call in self._calls_of(path)
        ]

    def _trained(self, path: str) -> set[str]:
        """The parameters of a block that have gradients there, or in one of the blocks that are like it."""
        alike = next((region.paths for region in self._regions if region.path == path), (path,))
        blocks = [self._model.get_submodule(other) for other in alike]
        return {name for block in blocks for name, one in block.named_parameters() if one.requires_grad}

    # ---- the scales

    def _find_scales(self, group: AxisGroup, shares: tuple[int, ...]) -> Scales:
        """The integers that must be smaller on a rank; they are searched in the first block. Raises `NotFound`."""
        key = (group.index, shares)
        if key not in self._scales:
            try:
                self._scales[key] = self._searched(group, shares)
            except NotFound as error:
                self._scales[key] = error
        found = self._scales[key]
        if isinstance(found, NotFound):
            raise found
        return found

    def _searched(self, group: AxisGroup, shares: tuple[int, ...]) -> Scales:
        path = group.blocks[0]
        large = self._is_large(path)
        block = on_meta(self._block(path)) if large else self._sample(path).block
        given = self._given(path) if large else self._sample(path).calls
        cut = replace(_cut(group, shares, {}), blocks=("",))
        scales: Scales = {}
        for call, arguments in zip(self._calls_of(path), given, strict=False):
            question = Question(
                block=block,
                leaf=group.leaf,
                expected=expected_results(self._graph, group.walk, call),
                near=axes_near(self._graph, group.walk, call, group.leaf),
            )
            scales = find_scales(question, partial(_run_first_rank, question, cut, arguments, large), scales)
        return scales

    def _calls_of(self, path: str) -> list[Call]:
        return [call for call in self._graph.calls if call.path == path]


def _said(found: tuple[Seen, Differs]) -> str:
    """A difference for people, with the run in which it is."""
    run, error = found
    return f"{error} ({run.what})" if run.what else str(error)


def _run_first_rank(question: Question, cut: Cut, given: Arguments, shapes_only: bool, scales: Scales) -> Outcome:
    """Run the first rank of a cut with some scales; `shapes_only`: the block is on meta, and `given` are specs."""
    local = copy.deepcopy(question.block)
    one = replace(cut, scales=_scales(scales, cut.shares), actions=(*cut.actions, *_lengths(scales)))
    apply_cuts(local, (one,), LoneRank(rank=0, size=cut.degree), shapes_only=shapes_only)
    watch = Watch(question.expected, {question.leaf: cut.shares[0]})
    if not shapes_only:
        args, kwargs = copy.deepcopy(given)
        return run_watched(local, args, kwargs, watch)

    engine = FakeFloats(lambda _: None)  # as in the run that was recorded: code takes the same branches
    recorder = Recorder(engine)

    def fake(spec: TensorSpec) -> torch.Tensor:
        if spec.value is not None:
            return spec.value.clone()
        tensor = engine.shapes.stand_in(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
        recorder.enter(tensor, "input", "")
        return tensor

    as_fake(local, engine.shapes.mode)
    for kind, state in (("parameter", local.named_parameters()), ("buffer", local.named_buffers())):
        for name, tensor in state:
            recorder.enter(tensor, kind, name)
    args, kwargs = fill_specs(given, fake)
    with silenced(), recorder:
        return run_watched(local, args, kwargs, watch)


def _tried(work: Callable[[], Any]) -> str:
    """Run a proof; "" if it holds, else why not. A block's own code may stumble over what a rank has in any way.

    Random numbers after it are as if nothing had run.
    """
    try:
        with own_random_numbers():
            work()
    except (NotFound, Unequal) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def _cut(group: AxisGroup, shares: tuple[int, ...], scales: Scales) -> Cut:
    cut = as_cut(group, shares)
    return replace(cut, actions=(*cut.actions, *_lengths(scales)), scales=_scales(scales, shares))


def _lengths(scales: Scales) -> tuple[Action, ...]:
    return tuple(name.action for name in scales if isinstance(name, Length))


def _scales(scales: Scales, shares: tuple[int, ...]) -> tuple[Scale, ...]:
    """Scales for these shares."""
    return tuple(
        Scale(
            module=name[0], attribute=name[1], value=number.whole, local=tuple(number.local(share) for share in shares)
        )
        for name, number in scales.items()
        if not isinstance(name, Length)
    )


def make_prover(
    model: nn.Module, inputs: Any, workload: Workload | None, graph: ModelGraph, found: AxisGroups
) -> Prover:
    """Observe how the blocks of a model are called, and return what proves their groups."""
    paths = dict.fromkeys(group.blocks[0] for group in found.groups)
    workload = workload or Workload()
    args, kwargs = call_of(model, inputs, workload, graph)

    def record(local: nn.Module) -> ModelGraph:
        return capture(local, kwargs or args, workload=workload, level=graph.level, composite=True)

    first = Seen(what="", graph=graph, groups={}, record=record)
    others = partial(other_runs, model, (args, kwargs), workload, found.groups)
    return Prover(model, graph, found, observe_calls(model, inputs, workload, paths), first, others)
