"""One run of a whole model with a batch of samples, beside one with very many: which ops keep the samples apart.

runs       with 3 rows and with very many: the same ops in the same order
outputs    of one sample each, of none, or a sum or a mean of samples: merged in this way only
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoshard import nested
from autoshard.axes.axis import Factor, describe
from autoshard.axes.batch_rules import FOR_REPLICAS, TABLE
from autoshard.axes.batch_walk import BatchWalk
from autoshard.axes.contents import NO_END
from autoshard.axes.given import ops_behind, origin
from autoshard.axes.hits import named_hits, numbers_found
from autoshard.axes.questions import asked_of_all, asked_of_each, number_asked_for, number_of_each, read_values
from autoshard.axes.reshaping import COPIES
from autoshard.axes.rules import rule_of
from autoshard.axes.switches import Numbering
from autoshard.axes.walk import where
from autoshard.capture.call_log import CallLog, Opaque, Ref, TooManyOps, ValueGuard
from autoshard.capture.graph import ModelGraph, Op, maker_of, name_of
from autoshard.capture.guards import Guard
from autoshard.check.alike import first_difference, first_out_of_line, first_uneven, is_same
from autoshard.check.functions import keeps_apart
from autoshard.check.inputs import NotRun, Padded, is_mask, starts
from autoshard.check.records import (
    ROWS,
    Apart,
    Left,
    Mixed,
    Question,
    RecordedSamples,
    left_by_parts,
    record_samples,
)
from autoshard.plan.batching import BatchAxis, BatchOutput
from autoshard.runtime.chunks import PLAIN
from autoshard.runtime.merging import of_rows

MANY_ROWS = (1024, 254, 64, 16)
"""Rows of the run beside it: code may look whether there are many. Fewer if not all is known. From 3, all are a prime
number away, by which no number that is not a multiple of the rows is likely to be divided."""
MOST_REAL_ROWS = 64
"""Rows where values have to be computed."""


class SampleRun:
    """One forward with some rows, beside the same with very many, or one more.

    Attributes:
        absent: numbers that stand nowhere in an input, but where `padded` says so.
        limits: of both runs, guards that compare a number with a limit; `asked_by_all`: the guards of the larger one.
        switches: values of which Python asked whether all elements are true, or false: (the answer, which of the two).
    """

    def __init__(self, question: Question, batch: BatchAxis, padded: Padded, absent: Sequence[tuple[str, int]]) -> None:
        self.question, self.batch, self.padded, self.absent = question, batch, padded, absent
        left = Left(question.model)
        self.graph, self.call_log = self._recorded(ROWS, at_end=left.note)
        self.other, other_log, rows = self._larger()
        self.recorded = RecordedSamples(graph=self.graph, left=left, other=self.other, rows=rows)
        self._check_sequence(self.other, rows)
        uneven = first_uneven(self.graph, self.other, (ROWS, rows)) if rows > ROWS + 1 else None
        if uneven is not None:
            what = f"mixes its rows: it looks how many there are, as {rows} show beside {ROWS}"
            raise self.refuse(self.graph.ops[uneven], what)
        asked = [[one.guard for one in log.value_guards if one.guard is not None] for log in (self.call_log, other_log)]
        self.limits, self.asked_by_all = [[one for one in run if one.limit is not None] for run in asked], {*asked[1]}
        self._check_slices(other_log)
        self._check_log(other_log, rows)
        factor = Factor(ROWS, rigid=True)
        begin = starts(self.paths, self.graph, batch, factor)
        self.walk = BatchWalk(
            self.graph, self.other, begin, factor, (ROWS, rows), FOR_REPLICAS if question.for_replicas else TABLE
        )
        self.switches: dict[int, tuple[bool, bool]] = {}
        self.guards: set[Guard] = set()
        self._follow()
        for guard in sorted(self.guards, key=lambda guard: guard.place):
            self._check_raises(guard)
        if self.walk.sound.hits.found:
            self._check_hits()

    def check_number(self, rows: int) -> None:
        """Refuse code that looks whether there are just so many rows: as in a part of the batch, or in all of it."""
        if self.graph.level == "real" and rows > MOST_REAL_ROWS:
            return
        try:
            run, call_log = self._recorded(rows)
        except NotRun:  # such a part raises an error
            return
        those = "one row alone" if rows == 1 else f"{rows} rows"
        if not self.guards <= {reading.guard for reading in call_log.value_guards}:
            raise self.refuse(None, f"mixes its rows: it does not ask for {those} whether to raise an error")
        alike = run.level == self.graph.level and call_log.left_out == self.call_log.left_out
        at = first_out_of_line(run, self.graph, self.other, (rows, ROWS, self.recorded.rows)) if alike else None
        if at is not None:
            raise self.refuse(self.graph.ops[at], f"mixes its rows: it does something else for {those}")

    def _check_raises(self, guard: Guard) -> None:
        """Refuse an error that somebody catches, to do something else instead."""
        file, line = guard.place[0] if guard.place else ("torch", 0)
        try:
            graph, _ = self._recorded(ROWS, failing=guard)
        except NotRun:
            return
        what = f"an error that {file}:{line} raises for values of single rows is caught"
        if guard.is_text:
            if any(guard.is_of(one) for one in self.guards) and is_same(graph, self.graph):
                return
            what = f"the text at {file}:{line} says numbers of several rows, and may decide anything"
        raise Mixed(f"{what}. {self.question.advice}")

    def _check_hits(self) -> None:
        """Refuse loops over chosen experts which do more than the work of those that are chosen."""
        sound, numbering = self.walk.sound, Numbering()
        order = sorted(sound.hits.found)
        every = {op: set(numbers_found(self.graph, op)) for op in order}
        tied = [(op, hit) for op, entries in sound.entries.puts if (hit := sound.hits.tied(entries.mask)) is not None]
        left = {op: set[int]() for op in order}
        for ranks in ("first", "last", "all but one"):
            graph, _ = self._recorded(ROWS, ranks=ranks)
            lists, named = named_hits(graph)
            ops = sorted(set(lists.values()))
            refused = self.refuse(self.graph.ops[order[0]], "does something else where other experts are chosen")
            if len(ops) != len(order):
                raise refused
            gone = {op: every[op] - set(numbers_found(graph, its)) for op, its in zip(order, ops, strict=True)}
            without = {op for op, hit in tied if hit.number in gone[hit.op]}
            mine = numbering.of(self.graph, {}, named_hits(self.graph)[1], without)
            its = numbering.of(graph, {}, named)
            if [mine[value] for value in self.graph.outputs] != [its[value] for value in graph.outputs]:
                raise refused
            for op in order:
                left[op] |= gone[op]
        if left != every:
            raise self.refuse(
                self.graph.ops[order[0]], "calls experts of which each token needs too many to try others"
            )

    def _larger(self) -> tuple[ModelGraph, CallLog, int]:
        """The same with many rows, where that is known as well, else with one row more; and how many."""
        stopped: NotRun | None = None
        for rows in () if self.padded else MANY_ROWS:
            if self.graph.level == "real" and rows > MOST_REAL_ROWS:
                continue
            try:
                many, call_log = self._recorded(rows, most_ops=100 + 2 * len(self.graph.ops))
            except TooManyOps:  # a loop over rows: with one row more, it is seen where
                self._check_sequence(self._recorded(ROWS + 1)[0], ROWS + 1)
                raise self.refuse(None, f"mixes its rows: it runs more ops for {rows} rows than for {ROWS}") from None
            except NotRun as error:  # its own tables are shorter
                stopped = stopped or error
                continue
            if many.level == self.graph.level and call_log.left_out == self.call_log.left_out:
                return many, call_log, rows
        if stopped is not None:
            raise stopped
        return (*self._recorded(ROWS + 1), ROWS + 1)

    def _recorded(self, rows: int, **options: Any) -> tuple[ModelGraph, CallLog]:
        graph, call_log, self.paths = record_samples(
            self.question, self.batch, rows, padded=self.padded, absent=self.absent, **options
        )
        return graph, call_log

    # ---- refusals

    def refuse(self, op: Op | None, what: str) -> Mixed:
        """The error that names an op, its module and line of code, and what it does."""
        if op is None:
            return Mixed(f"the model {what}. {self.question.advice}")
        call = self.graph.calls[op.call]
        kind = next(module.class_name for module in self.graph.modules if module.path == call.path)
        place = f"{call.path} ({kind})" if call.path else "the model's own forward"
        file, line, _ = op.code
        line_of_code = f", {os.path.basename(file)}:{line}" if file else ""
        return Mixed(f"{place} {what} ({where(self.graph, op)}{line_of_code}). {self.question.advice}")

    def _check_sequence(self, other: ModelGraph, rows: int) -> None:
        found = first_difference(self.graph, other)
        if found is not None:
            op = self.graph.ops[found[0]] if self.graph.ops else None
            raise self.refuse(op, f"mixes its rows: it runs other ops for {rows} rows than for {ROWS}, here {found[1]}")

    def _check_slices(self, other: CallLog) -> None:
        """Refuse a slice of the batch that ends at a constant: it is all there is for few rows, and no op tells."""
        for mine, its in zip(self.call_log.slices, other.slices, strict=False):
            for (dim, part), (_, same) in zip(mine.bounds, its.bounds, strict=False):
                longer = dim < len(mine.shape) and mine.shape[dim] != its.shape[dim]
                if longer and part.stop == same.stop and mine.shape[dim] <= part.stop < NO_END:
                    op = self.graph.ops[min(mine.begin, len(self.graph.ops) - 1)] if self.graph.ops else None
                    raise self.refuse(op, f"mixes its rows: it works on the first {part.stop} of them by their places")

    def _check_log(self, other: CallLog, rows: int) -> None:
        """Refuse numbers among the outputs that count rows, and gradients that are hooked, or divided by counts."""
        logs = () if self.question.for_replicas else (self.call_log, other)  # there each has outputs of its own
        mine, its = [dict(nested.leaves_in(call_log.calls[0].output)) for call_log in logs] or ({}, {})
        for path, leaf in mine.items():
            if isinstance(leaf, PLAIN) and path in its and its[path] != leaf and leaf == leaf:
                raise Mixed(f"the output {path} is {leaf!r} for {ROWS} rows and {its[path]!r} for {rows}")
            if not isinstance(leaf, (Ref, Opaque)) and (what := of_rows(leaf)):
                raise Mixed(f"the output {path} is {what}")
        for path, kind in self.graph.sealed:
            raise Mixed(f"the output {path} is a {kind}, in which nobody knows what belongs to the rows of a part")
        if not self.question.workload.training:
            return
        if self.call_log.hooked:
            line = next(iter(self.call_log.hooked.values()))
            raise Mixed(f"its forward hangs a hook on gradients at {line}, which may mix rows. {self.question.advice}")
        for op in self.graph.ops:
            if name_of(op) == "embedding" and op.node is not None and True in (*op.node.args[3:4],):
                raise self.refuse(
                    op, "mixes its rows: it divides gradients by how often the batch has a row of its table"
                )

    # ---- the walk

    def _follow(self) -> None:
        walk, graph = self.walk, self.graph
        value_guards = sorted(self.call_log.value_guards, key=lambda guard: guard.begin)
        for op in graph.ops:
            while value_guards and value_guards[0].begin <= op.index:
                self._read(value_guards.pop(0))
            walk.step(op)
        for guard in value_guards:
            self._read(guard)
        for call in self.call_log.functions if self.question.workload.training else ():
            if not keeps_apart(walk, call):
                op = graph.ops[min(call.begin, len(graph.ops) - 1)]
                raise self.refuse(op, f"calls {call.function.__name__}, whose backward may mix its rows")
        for value in graph.outputs:
            if walk.state(value) == "mixed" and value not in walk.merges.known:
                raise self._mixed(value, "mixes its rows")
            if (made := walk.sound.entries.made_by(value)) >= 0:
                raise self.refuse(graph.ops[made], "mixes its rows: it gives them in an order that all of them decide")
        asked = {value for value, _ in graph.measured}
        for value in sorted(asked & {*walk.sound.entries.sized, *walk.sound.hits.lists}):
            what = "mixes its rows: Python asks for the size of a tensor that depends on values of all of them"
            raise self.refuse(graph.ops[graph.values[value].op], what)
        if walk.sized:
            what = "mixes its rows: how large a tensor is depends on values of all of them"
            raise self.refuse(graph.ops[walk.sized[0]], what)
        if walk.placed:
            raise self.refuse(graph.ops[walk.placed[0]], "mixes its rows: it works on a part of them by their places")
        for index, value in walk.written:
            name = next((one.name for one in graph.tensors if one.storage == graph.values[value].storage), "an input")
            raise self.refuse(graph.ops[index], f"mixes its rows: it writes into {name} what depends on the batch")
        left = self.recorded.left
        named = {one.name: one.value for one in graph.tensors}
        replaced = {
            name: value for name, value in left.buffers.items() if value is not None and value != named.get(name)
        }
        for place, value in (*left.tensors.items(), *replaced.items()):
            if graph.values[value].op >= 0 and (walk.state(value) == "apart" or value in walk.merges.known):
                if place in replaced:
                    what = f"mixes its rows: it makes {place} anew of what depends on the batch"
                    raise self.refuse(maker_of(graph, value), what)
                raise left_by_parts(place, self.question.model)
        for value in graph.alive_after:
            known = value in walk.merges.known or value in graph.outputs or value in graph.state
            if not known and walk.state(value) == "mixed":
                raise self._mixed(value, "keeps what mixes its rows")
            if not known and (made := walk.sound.entries.made_by(value)) >= 0:
                raise self.refuse(graph.ops[made], "keeps its rows in an order that all of them decide")

    def _read(self, guard: ValueGuard) -> None:
        """Something was read by Python: a question about all of a mask, or nothing that the batch decides."""
        if guard.assumed:
            if "a value that is not known" in guard.assumed:
                op = self.graph.ops[max(guard.begin - 1, 0)] if self.graph.ops else None
                raise self.refuse(op, "decides what to do by values of all rows")
            return
        hits = self.walk.sound.hits
        for value in read_values(guard):
            if self.walk.state(value) == "shared" or self._is_guarded(guard, value) or hits.tells(value):
                continue
            asked = asked_of_all(self.graph, value)
            if asked is not None and self.walk.is_the_same(asked[0]):
                continue
            if asked is None or len(read_values(guard)) > 1 or not self._is_of_rows(asked[0]):
                what = "reads values of several rows as numbers, which may decide anything"
                raise self.refuse(maker_of(self.graph, origin(self.graph, value, *COPIES)), what)
            tensor, truth = asked
            self.switches[tensor] = bool(guard.result) == truth, truth  # all are true, or none is

    def _is_guarded(self, reading: ValueGuard, value: int) -> bool:
        """Whether what is asked of each element only decides whether an error is raised.

        It is asked whether all of them are true, or none is, or the largest or the least of them is compared with a
        limit that other rows have as well; or if a mask has as many places as there are features (`scattered`). Numbers
        in the text of such an error tell nobody else.
        """
        guard, graph, scattered = reading.guard, self.graph, self.walk.sound.scattered
        if guard is None or len(read_values(reading)) > 1:
            return False
        sources: list[int] = []
        if guard.limit is not None:
            source = number_of_each(graph, value, largest=guard.passes)
            if source is None or self.limits[0] != self.limits[1]:
                return False
            sources = [source]
        elif not guard.is_text and not (guard in self.asked_by_all and scattered.note(value, bool(reading.result))):
            asked = asked_of_each(graph, value)
            if asked is None or asked[0] is not bool(reading.result):
                return False
            sources = asked[1]
            if any(map(self.walk.resized, ops_behind(graph, value, sources))):
                return False  # a number on the way says how many rows there are
        if any(self.walk.state(one) == "mixed" for one in sources):
            return False
        self.guards.add(guard)
        return True

    def _is_of_rows(self, value: int) -> bool:
        return self.walk.state(value) != "mixed" and self.walk.sound.entries.made_by(value) < 0

    def _mixed(self, value: int, what: str) -> Mixed:
        cause = self.walk.cause.get(value, -1)
        op = self.graph.ops[cause] if cause >= 0 else None
        if op is not None and rule_of(op.target, TABLE) is None:
            what = f"may mix its rows: no rule says what {name_of(op)} does with them"
        return self.refuse(op, what)

    def compared_switches(self) -> tuple[tuple[str, int], ...]:
        """Numbers of which is asked whether they stand anywhere in an input of the batch, with its path."""
        bound = self.question.bound
        given = {item.path for item in self.batch.inputs if not is_mask(nested.tensor_at(bound, item.path))}
        asked = [found for value in self.switches if (found := number_asked_for(self.graph, value))]
        return tuple(dict.fromkeys((self.paths[at], number) for at, number in asked if self.paths[at] in given))

    def outputs(self) -> Apart:
        """The samples of all outputs. Raises `Mixed`."""
        graph, walk = self.graph, self.walk
        axes: dict[str, tuple[str, ...]] = {}
        merges: dict[str, BatchOutput] = {}
        shared = set()
        for path, value in zip(graph.calls[0].output_paths, graph.outputs, strict=True):
            if walk.state(value) != "mixed":
                if walk.state(value) == "shared":
                    shared.add(path)
                    dims = range(len(walk.axes(value)))
                    axes[path] = tuple("" if walk.is_same_along(value, dim) else "-" for dim in dims)
                else:
                    axes[path] = tuple(describe(axis, walk.batch) for axis in walk.axes(value))
                continue
            known = walk.merges.known.get(value)
            assert known is not None
            if known.how == "each":
                if not self.question.for_replicas:
                    what = "combines sums or means over its rows so that those of parts can't be put together"
                    raise self.refuse(maker_of(graph, value), what)
                continue
            merges[path] = BatchOutput(path=path, how=known.how)
            if known.labels is not None:
                place, ignored, skipped = known.labels
                merges[path] = replace(merges[path], weights=self.paths[place], ignored=ignored, skipped=skipped)
        return Apart(
            axes=axes, merges=merges, shared=frozenset(shared), recorded=self.recorded, check_number=self.check_number
        )
