"""Check that groups of axes can be cut over ranks, and find what must be smaller there.

For each group the integers are found that code has for the size of the cut axis (`local_sizes`). Then ranks are
followed through the whole model, op by op, in several runs (`follow`, `runs`): that decides. What can't be shown is
refused with the reason, and stays whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard.axes.given import is_sized_by_values
from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.axes.regions import OUTSIDE
from autoshard.axes.tokens import depends_on_length, divide_context
from autoshard.capture.capture import capture, observe_calls
from autoshard.capture.graph import ModelGraph, name_of
from autoshard.capture.run import MODULE_PATH, own_random_numbers
from autoshard.check.follow import Differs, follow, required_on
from autoshard.check.local_sizes import NotFound, Sizes, find_sizes, sites_of, with_sizes
from autoshard.check.misuse import find_misuse
from autoshard.check.rank import Arguments, call_of, record_rank
from autoshard.check.runs import RankRuns, other_runs
from autoshard.common.module_paths import is_below, join
from autoshard.common.progress import tell
from autoshard.errors import ApplyError, CaptureError, PlanError, first_line
from autoshard.plan.sharding import Cut, Refusal, Results
from autoshard.plan.workload import Workload
from autoshard.runtime.moves import on_meta
from autoshard.torch_private import gradient_hooks, has_accumulation_hooks, no_dispatch_modes

Key = tuple[tuple[int, tuple[int, ...]], ...]
"""(index of a group, shares) of groups that are cut at once."""
Cuts = Mapping[int, tuple[AxisGroup, Cut]]
"""Groups and their cuts, by the places at which they were given."""


class CutChecks:
    """Checks groups of one model; remembers what it has found out."""

    def __init__(
        self, model: nn.Module, graph: ModelGraph, found: AxisGroups, calls: Mapping[str, Sequence[Arguments]],
        first: RankRuns, others: Callable[[], Sequence[RankRuns]],
    ) -> None:  # fmt: skip
        self._model, self._graph, self._calls = model, graph, calls
        self._runs, self._others = [first], others
        self._has_blocks = any(region.path != OUTSIDE for region in found.regions)
        self._by_values = _modules_by_values(graph)
        self._blocks: dict[str, nn.Module] = {}
        self._cuts: dict[tuple[int, tuple[int, ...]], Cut | Refusal] = {}
        self._followed: dict[Key, dict[int, str]] = {}
        self._worked: dict[tuple[str, int, tuple[int, ...]], frozenset[int]] = {}

    def __call__(self, groups: Sequence[AxisGroup], shares: Sequence[tuple[int, ...]]) -> list[Cut | Refusal]:
        """Check groups that are all cut at once; one outcome for each. If one is a refusal, others may be one, too."""
        found: list[Cut | Refusal] = []
        for number, (group, share) in enumerate(zip(groups, shares, strict=True)):
            tell("blocks", number, len(groups))
            found.append(self._cut(group, share))
        cuts = [one for one in found if isinstance(one, Cut)]
        if len(cuts) == len(groups):
            for place, reason in self._follow(groups, cuts).items():
                found[place] = Refusal(reason=reason)
        return found

    # ---- one cut

    def _cut(self, group: AxisGroup, shares: tuple[int, ...]) -> Cut | Refusal:
        """The cut of a group with the integers that are smaller on a rank, or why there is none."""
        key = group.index, shares
        if key not in self._cuts:
            reason = self._reason_against(group)
            self._cuts[key] = Refusal(reason=reason) if reason else self._with_sizes(group, shares)
        return self._cuts[key]

    def _reason_against(self, group: AxisGroup) -> str:
        """Why a group can't be cut in any shares, "" if nothing is known against it."""
        if self._graph.level == "real":
            why = next(iter(self._graph.notes), "it was captured with them")
            return f"ranks are followed without values, and values decide what the model does: {why}"
        if hooked := self._hooked(group):
            return (
                f"{hooked} has a hook on its gradient (register_hook, register_post_accumulate_grad_hook), "
                "of which a rank has a part"
            )
        if varying := self._varying(group):
            return (
                f"{varying} picks elements by their values, so how often it calls functions is known for one input "
                "only. Experts that are modules of their own can be cut"
            )
        return ""

    def _hooked(self, group: AxisGroup) -> str:
        """A parameter of which ranks get parts of the gradient while a hook of the user's expects all of it."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        names = [join(block, name) for block in group.blocks
                 for name in (*(shard.name for shard in group.shards), *group.summed)]  # fmt: skip
        found = {name for name, one in parameters.items() if gradient_hooks(one) or has_accumulation_hooks(one)}
        return next((name for name in names if name in found), "")

    def _varying(self, group: AxisGroup) -> str:
        """A module where something is due at one of several calls of a function, and the number of calls may differ."""
        places = {join(group.blocks[0], one.module) for one in group.actions if one.function and one.occurrence >= 0}
        return next((path for path in sorted(places) if path in self._by_values), "")

    def _with_sizes(self, group: AxisGroup, shares: tuple[int, ...]) -> Cut | Refusal:
        """Search the integers in the first block; a block's own code may stumble over a rank's sizes in any way."""
        path = group.blocks[0]
        cut = group.as_cut(shares)
        training = all(part.training for part in self._model.get_submodule(path).modules())
        try:
            with own_random_numbers(), no_dispatch_modes():
                sizes = self._sizes(group, path, replace(cut, blocks=("",)))
        except NotFound as error:
            return Refusal(reason=str(error))
        except Exception as error:
            return Refusal(reason=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return replace(with_sizes(cut, sizes), training=training, proof="followed op by op")

    def _sizes(self, group: AxisGroup, path: str, cut: Cut) -> Sizes:
        if path == OUTSIDE and self._has_blocks:
            return {}  # what is around blocks is a table or a projection: if it needs sizes, following a rank shows so
        if not self._calls.get(path):
            raise NotFound(f"{path} was not called")
        if path not in self._blocks:
            self._blocks[path] = on_meta(self._model.get_submodule(path))
        sizes: Sizes = {}
        invent = self._graph.level == "invented"
        calls = [call for call in self._graph.calls if call.path == path]
        for call, given in zip(calls, self._calls[path], strict=False):
            sites = sites_of(self._graph, group.walk, call, group.factor)
            sizes = find_sizes(self._blocks[path], given, cut, sites, group.factor, sizes, invent)
        return sizes

    # ---- what ranks do beside the whole

    def _follow(self, groups: Sequence[AxisGroup], cuts: Sequence[Cut]) -> dict[int, str]:
        """Follow what ranks do with these cuts in the whole model; places of those that can't be, with the reason.

        In the first run with a difference, cuts are taken out until there is none. What is left is followed in all runs
        when it is checked by itself: no cuts are kept unless every run was followed with all of them.
        """
        key = tuple((group.index, cut.shares) for group, cut in zip(groups, cuts, strict=True))
        if key in self._followed:
            return self._followed[key]
        reasons: dict[int, str] = {}
        for run in self._all_runs():
            what = f" ({run.what})" if run.what else ""
            found = dict(enumerate(zip(groups, cuts, strict=True)))
            for place, (group, _) in tuple(found.items()):
                if not self._in_run(run, group):
                    reasons[place] = f"{group.shards[0].name} can't be cut by its axes{what}"
                    del found[place]
            while found and (error := self._difference(run, found)) is not None:
                place, error = self._to_blame(run, found, error)
                reasons[place] = f"{error}{what}"
                del found[place]
            if reasons:
                break
        self._followed[key] = reasons
        return reasons

    def _difference(self, run: RankRuns, found: Cuts) -> Differs | None:
        """What some rank does otherwise than the whole model in a run. Ranks of equal shares do the same."""
        both = [(same, cut.shares) for group, cut in found.values() for same in self._in_run(run, group)]
        groups, shares = [group for group, _ in both], [share for _, share in both]
        ranks = {column: rank for rank, column in enumerate(zip(*shares, strict=True))}
        cuts = [cut for _, cut in found.values()]
        try:
            for rank in ranks.values():
                with own_random_numbers():
                    required = required_on(run.graph, groups, shares, rank)
                    find_misuse(self._model, run.graph, run.call_log, required)
                    follow(run.graph, record_rank(self._model, cuts, rank, run.record), required, rank)
        except Differs as error:
            return error
        except Exception as error:
            path = getattr(error.__cause__, MODULE_PATH, "")
            return Differs(-1, f"a rank can't run it: {' '.join(str(error).split())[:200]}", path)
        return None

    def _in_run(self, run: RankRuns, group: AxisGroup) -> list[AxisGroup]:
        """What cuts the same in another run; [] if nothing does."""
        return [group] if run is self._runs[0] else run.of(group)

    def _all_runs(self) -> Iterator[RankRuns]:
        """The run of the plan, then the others, which are recorded when they are needed first."""
        yield self._runs[0]
        if len(self._runs) == 1:
            self._runs += self._others()
        yield from self._runs[1:]

    def _to_blame(self, run: RankRuns, found: Cuts, error: Differs) -> tuple[int, Differs]:
        """The place of one of these cuts, which together make a difference, and that which it makes.

        It is one of those that work where the difference is, and in a half of them that makes one. Where only both
        halves together do, the smallest is given up.
        """
        at = self._at(run, found, error)
        if error.op < 0 and len(at) < len(found):
            other = self._difference(run, at)  # what can't be run may have come from elsewhere
            at, error = (found, error) if other is None else (at, other)
        if len(at) == 1:
            return next(iter(at)), error
        places = list(at)
        for part in (places[: len(at) // 2], places[len(at) // 2 :]):
            half = {place: at[place] for place in part}
            if (other := self._difference(run, half)) is not None:
                return self._to_blame(run, half, other)
        return min(at, key=lambda place: at[place][0].nbytes), error

    def _at(self, run: RankRuns, found: Cuts, error: Differs) -> Cuts:
        """The cuts that work on the op, or in the module, where a difference is; all of them if none does."""
        paths = [run.graph.calls[op.call].path for op in run.graph.ops]
        ops = {error.op} if error.op >= 0 else {op for op, path in enumerate(paths) if is_below(path, error.module)}
        at = {place: pair for place, pair in found.items() if not ops.isdisjoint(self._works_on(run, *pair))}
        return at or found

    def _works_on(self, run: RankRuns, group: AxisGroup, cut: Cut) -> frozenset[int]:
        """The ops of a run that work on what a cut makes smaller."""
        key = run.what, group.index, cut.shares
        if key not in self._worked:
            same = self._in_run(run, group)
            self._worked[key] = frozenset(required_on(run.graph, same, [cut.shares] * len(same), 0))
        return self._worked[key]


def _modules_by_values(graph: ModelGraph) -> set[str]:
    """Modules whose own code picks elements by values that were invented: a loop over them may be of any length."""
    if graph.level != "invented":
        return set()
    found = set()
    for op in graph.ops:
        by_mask = "index" in name_of(op) and any(graph.values[value].dtype is torch.bool for value in op.inputs)
        if by_mask or is_sized_by_values(graph, op):
            found.add(graph.calls[op.call].path)
    return found


def check_cuts(
    model: nn.Module, inputs: Any, workload: Workload | None, graph: ModelGraph, found: AxisGroups
) -> CutChecks:
    """Observe how the blocks of a model are called, and return what checks its groups."""
    paths = dict.fromkeys(group.blocks[0] for group in found.groups)
    workload = workload or Workload()
    args, kwargs = call_of(model, inputs, workload, graph)

    def record(local: nn.Module) -> ModelGraph:
        return capture(local, kwargs or args, workload=workload, level=graph.level, composite=True)

    first = RankRuns(what="", graph=graph, groups={}, record=record)
    others = partial(other_runs, model, (args, kwargs), workload, found.groups)
    return CutChecks(model, graph, found, observe_calls(model, inputs, workload, paths, graph.level), first, others)


def find_context(
    model: nn.Module, graph: ModelGraph, inputs: Any, workload: Workload, degree: int
) -> tuple[tuple[Cut, ...], tuple[Results, ...]]:
    """Return the cuts that divide the tokens of a model over so many ranks, and which modules give each rank a part.

    Raises `PlanError` where it can't be.

    `graph`: a forward with these inputs, captured with `composite=True`. Code that reads a length sees that of a rank's
    part: the last rank is recorded, and must run the same ops.
    """
    cuts, results = divide_context(graph, degree, model.training)
    forward = replace(workload, mode="inference", new_tokens=0)

    def record(local: nn.Module) -> Any:
        return capture(local, inputs, workload=forward, composite=True)

    try:
        reason = depends_on_length(graph, record_rank(model, cuts, degree - 1, record))
    except (ApplyError, CaptureError) as error:
        reason = f"a rank can't run with a part of them ({first_line(error)})"
    if reason:
        raise PlanError(
            f"sequences can't be divided over {degree} ranks, as cp={degree} says: {reason}. Plan without cp."
        )
    return cuts, results
