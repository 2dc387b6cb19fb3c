"""Where cut and uncut tensors meet: every such place as an `Action` that the runtime can find again.

A place is a module call and one of its arguments or results, or else one call of a torch function inside a module. The
first is preferred: other runs may call other functions. The smaller the better, as parts of a model may be called
without the rest; but what enters a block does so at the largest, since a block is called whole and hooks take time.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autoshard.axes.axis import Factor, describe, factors_of
from autoshard.axes.regions import OUTSIDE, Region, tensor_names
from autoshard.axes.rules import Contraction
from autoshard.axes.walk import AxisWalk, where
from autoshard.capture.graph import Call, ModelGraph, SiteCall, name_of
from autoshard.common.module_paths import above, is_below, join, relative
from autoshard.plan.sharding import ATTENTION, DROPOUTS, Action

_OF_ELEMENTS = frozenset({"sum", "nansum", "mean"})
"""Functions that are one op of the same name, and sum the elements of one tensor."""
_MANY = 8
"""Ranks that share one layer: seldom more, since then they are on several machines."""


class Unplaceable(Exception):
    """An action is needed at a place that the runtime can't reach; the message says where."""


class Lookup:
    """What all regions ask of a graph, worked out once.

    `readers`: value -> ops that read it; `tensors`: value -> names of the parameter or buffer it is; `sites` in order,
    and where they begin.
    """

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        self.readers: dict[int, list[int]] = {}
        for op in graph.ops:
            for value in dict.fromkeys(op.inputs):
                self.readers.setdefault(value, []).append(op.index)
        self.tensors = tensor_names(graph)
        self.sites = sorted(graph.sites, key=lambda site: site.begin)
        self.begins = [site.begin for site in self.sites]
        self.differentiable = differentiable(graph)


class CommunicationPoints:
    """Finds the actions of factors of one region; `shared`: parameters that are read in others too, in other ways."""

    def __init__(self, lookup: Lookup, region: Region, walk: AxisWalk, shared: frozenset[int]) -> None:
        graph = lookup.graph
        self._shared = shared
        self.graph, self.region, self.walk = graph, region, walk
        self._inside = set(region.ops)
        self._readers, self._tensors = lookup.readers, lookup.tensors
        self._sites, self._begins, self._differentiable = lookup.sites, lookup.begins, lookup.differentiable
        self._calls = [call for call in graph.calls if is_below(call.path, region.path)]
        # Not all outputs: a cast to the dtype that a tensor has already returns the tensor itself.
        made_here = {value for value in walk.axes if graph.values[value].op in self._inside}
        self._incoming = [value for value in walk.axes if value not in made_here and value not in self._tensors]
        outputs = {value for call in self._calls if call.path == region.path for value in call.outputs}
        outputs.update(graph.outputs or graph.state)  # a result may be an object of any class
        self._outgoing = [
            value for value in walk.axes
            if value in made_here and (value in outputs or not self._inside.issuperset(self._readers.get(value, ())))
        ]  # fmt: skip

    def where(self, op: int) -> str:
        """An op, by its index, for people; -1 stands for what the model is given."""
        return where(self.graph, self.graph.ops[op]) if op >= 0 else "the inputs"

    def is_residual(self, factor: Factor) -> bool:
        """Whether a factor is on something that comes in and on something of the same shape that goes out."""
        shapes = self.graph.values
        coming = {shapes[value].shape for value in self._incoming if self.walk.cut_dims(value, factor)}
        return any(shapes[value].shape in coming for value in self._outgoing if self.walk.cut_dims(value, factor))

    def actions(self, factor: Factor) -> tuple[tuple[Action, ...], tuple[str, ...], tuple[str, ...]]:
        """All actions of a factor, the whole parameters whose gradients every rank has a part of, and `_with_parts`.

        Raises `Unplaceable`.
        """
        try:
            return self._actions(factor, smallest=True)
        except Unplaceable:  # a small module may be called for other tensors as well
            return self._actions(factor, smallest=False)

    def _actions(self, factor: Factor, smallest: bool) -> tuple[tuple[Action, ...], tuple[str, ...], tuple[str, ...]]:
        due: list[tuple[Action, int]] = []
        edges: dict[int, list[Action]] = {}
        few = self._little_sums(factor)
        for value in self._incoming:
            for dim in self.walk.cut_dims(value, factor):
                readers = [op for op in self._readers.get(value, ()) if op in self._inside]
                found = self._entering("slice", value, readers, dim, self._axis(value, dim, factor), smallest)
                edges[value] = [action for action, _ in found]
                due += found
        for contraction in self.walk.contractions:
            if factor in factors_of(contraction.axis):
                due.append(self._reduction(contraction, factor, contraction.op in few))
        for op, value in self.walk.random_calls:
            for dim in self.walk.cut_dims(value, factor):
                due.append(self._drawing(op, value, dim, self._axis(value, dim, factor)))
        entering, staying, summed, _ = self._crossings(factor)
        for value, readers in entering.items():
            due += self._entering("copy_to", value, readers, 0, "", smallest and self.region.path == OUTSIDE)
        for value in staying:
            due.append(self._leaving("copy_from", value, 0, ""))
        for value in self._outgoing:
            for dim in self.walk.cut_dims(value, factor):
                due.append(self._leaving("gather", value, dim, self._axis(value, dim, factor)))
                edges[value] = [due[-1][0]]
        return tuple(self._checked(due)), summed, self._with_parts(factor, edges)

    def _with_parts(self, factor: Factor, edges: Mapping[int, list[Action]]) -> tuple[str, ...]:
        """The modules inside that are given, or give, what a factor cuts; `edges`: where it is sliced or put together.

        A value that enters or leaves the region is a part inside of the module that slices it, or puts it together.
        """
        cut = self.walk.values_with(factor)

        def is_part(value: int, path: str) -> bool:
            at_calls = [action.module for action in edges.get(value, ()) if not action.function]
            return value in cut and (value not in edges or not set(at_calls).isdisjoint(above(path)))

        calls = [(self._relative(call.path), (*call.inputs, *call.outputs)) for call in self._calls]
        found = (path for path, values in calls if path and any(is_part(value, path) for value in values))
        return tuple(dict.fromkeys(found))

    def _axis(self, value: int, dim: int, factor: Factor) -> str:
        return describe(self.walk.axes[value][dim], factor)

    def sum_at(self, factor: Factor, op: int) -> list[Action]:
        """The actions of the sums over a factor that one op makes."""
        few = self._little_sums(factor)
        return [
            self._reduction(one, factor, op in few)[0]
            for one in self.walk.contractions if one.op == op and factor in factors_of(one.axis)
        ]  # fmt: skip

    def entering_at(self, kind: str, value: int, ops: list[int], dim: int, axis: str) -> list[Action]:
        """The actions on a value before some ops read it, at modules as large as can be. Raises `Unplaceable`."""
        return self._checked(self._entering(kind, value, ops, dim, axis, False))

    def entries_of(self, factor: Factor, value: int) -> list[Action]:
        """The actions that a factor has where a value enters its cut, wherever they may have been put."""
        readers = self._crossings(factor)[0].get(value, [])
        found = (self._entering("copy_to", value, readers, 0, "", smallest) for smallest in (False, True))
        return [action for actions in found for action, _ in actions]

    def sent_bytes(self, factor: Factor) -> tuple[int, int, int]:
        """Bytes in one forward: of what is summed over ranks, of what each gives to be added up by all (see
        `_little_sums`), of what is put together."""
        sums, few = self._sums(factor), self._little_sums(factor)
        added = sum(sums[op] for op in few)
        return sum(sums.values()) - added, added, sum(self._gathers(factor))

    def _sums(self, factor: Factor) -> dict[int, int]:
        """Ops that sum over a factor -> bytes."""
        ops = {contraction.op for contraction in self.walk.contractions if factor in factors_of(contraction.axis)}
        return {op: sum(self.graph.values[value].nbytes for value in self.graph.ops[op].outputs) for op in ops}

    def _gathers(self, factor: Factor) -> list[int]:
        return [self.graph.values[value].nbytes for value in self._outgoing if self.walk.cut_dims(value, factor)]

    def _little_sums(self, factor: Factor) -> set[int]:
        """Ops that sum the elements of a tensor to so little that it is gathered from all ranks and added up there.

        That is one message where an all-reduce takes two, one after the other. It is more to send: so it is done where
        the summands of many ranks together are no more than what else is sent at once for this cut. One number per row
        always is. Of the calls of a function in a module all are little, or none.
        """
        sums = self._sums(factor)
        most = max([*sums.values(), *self._gathers(factor)], default=0)
        places: dict[int, tuple[str, str]] = {}
        for op in sums:
            site = self._site(op)
            if site is not None and site.function == name_of(self.graph.ops[op]) and site.function in _OF_ELEMENTS:
                places[op] = self.graph.calls[site.call].path, site.function
        much = {place for op, place in places.items() if sums[op] * min(factor.size, _MANY) > most}
        return {op for op, place in places.items() if place not in much}

    # ---- what needs an action

    def partial(self, factor: Factor) -> frozenset[int]:
        """The values that a factor cuts, and those of which each rank has a part of the gradient while it is cut."""
        return self._crossings(factor)[3]

    def _crossings(self, factor: Factor) -> tuple[dict[int, list[int]], list[int], tuple[str, ...], frozenset[int]]:
        """Where gradients change between whole (the same on every rank) and partial (their sum is the true one).

        Returns uncut activations with the ops that read them together with cut ones; uncut activations made of parts
        that all ranks keep, which leave the region; parameters that stay whole and get partial gradients; and all that
        is cut or has partial gradients.
        """
        addends = {(c.op, c.addend) for c in self.walk.contractions if c.addend >= 0 and factor in factors_of(c.axis)}
        summing = {c.op for c in self.walk.contractions if factor in factors_of(c.axis)}
        cut = self.walk.values_with(factor)
        partial = set(cut)
        found: dict[int, list[int]] = {}
        for index in self.region.ops:
            op = self.graph.ops[index]
            if partial.isdisjoint((*op.inputs, *op.outputs)):
                continue
            for value in dict.fromkeys(op.inputs):
                if value not in partial and (index, value) not in addends and value in self._differentiable:
                    found.setdefault(value, []).append(index)
            if index not in summing:
                partial |= self._differentiable.intersection(op.outputs)
        summed = []
        for value in [value for value in found if value in self._tensors]:
            readers, names = found.pop(value), self._tensors[value]
            name = next((name for name in names if is_below(name, self.region.path)), names[0])
            used = {op for op in self._inside.intersection(self._readers[value]) if not self._gives_back(op)}
            if set(readers) != used or value in self._shared:
                raise Unplaceable(f"{name} is used both inside and outside of the cut")
            summed.append(self._relative(name))
        staying = [value for value in self._outgoing if value in partial - cut]
        return found, staying, tuple(summed), frozenset(partial)

    def _gives_back(self, index: int) -> bool:
        """Whether an op does nothing: a cast to the dtype that a tensor has already returns the tensor itself."""
        op = self.graph.ops[index]
        return op.outputs == op.inputs and not op.mutates

    # ---- the places

    def _reduction(self, contraction: Contraction, factor: Factor, gathered: bool) -> tuple[Action, int]:
        op = self.graph.ops[contraction.op]
        site = self._site(contraction.op)
        if site is None:
            raise Unplaceable(f"{self.where(contraction.op)} sums outside of any function that can be reached")
        results = [path for path, value in site.outputs if value in op.outputs]
        inner = [reader for reader in self._readers.get(op.outputs[0], ()) if site.begin <= reader < site.end]
        if not results or inner:
            raise Unplaceable(f"{self.where(contraction.op)} sums inside of {site.function}")
        addend = ""
        if contraction.addend >= 0:
            addend = next((path for path, value in site.inputs if value == contraction.addend), "")
            if not addend:
                raise Unplaceable(f"{self.where(contraction.op)} adds what {site.function} was not given")
            self._check_added_only(contraction)
        kind = "lookup" if contraction.lookup else "mean" if contraction.mean else "reduce"
        axis = describe(contraction.axis, factor) if kind != "reduce" else ""
        return replace(self._at(site, kind, results[0], 0, axis), addend=addend, gathered=gathered), site.call

    def _check_added_only(self, contraction: Contraction) -> None:
        """What is added behind a sum over ranks is hidden from the code that runs before it."""
        function = name_of(self.graph.ops[contraction.op])
        for reader in self._readers[contraction.addend]:
            if contraction.addend in self._tensors and name_of(self.graph.ops[reader]) != function:
                raise Unplaceable(f"{self.where(reader)} reads what {self.where(contraction.op)} adds")

    def _drawing(self, op: int, value: int, dim: int, axis: str) -> tuple[Action, int]:
        site = self._site(op)
        if site is None or site.function not in (*DROPOUTS, ATTENTION):
            raise Unplaceable(f"{self.where(op)} draws random numbers for a part of a tensor")
        return self._at(site, "dropout", "", dim, axis, value), site.call

    def _entering(
        self, kind: str, value: int, ops: list[int], dim: int, axis: str, smallest: bool
    ) -> list[tuple[Action, int]]:
        """Actions on a value before all of `ops` read it, and before nobody else does."""
        rest = set(ops)
        actions: list[tuple[Action, int]] = []
        for call in sorted(self._calls, key=lambda call: (call.end - call.begin) * (1 if smallest else -1)):
            if not rest or value not in call.inputs:
                continue
            readers = {op for op in self._readers.get(value, ()) if call.begin <= op < call.end}
            if readers and readers <= rest:
                rest -= readers
                for path, seen in zip(call.input_paths, call.inputs, strict=True):
                    if seen == value:
                        actions.append((self._of_module(call, kind, path, dim, axis, value), call.index))
                if value in call.outputs:
                    actions.append((self._of_module(call, "restore", "", 0, "", value), call.index))
        for op in sorted(rest):
            site = self._site(op)
            if site is None or value not in [seen for _, seen in site.inputs]:
                raise Unplaceable(f"{self.where(op)} reads a tensor that no call hands over")
            if not rest.issuperset(reader for reader in self._readers[value] if site.begin <= reader < site.end):
                raise Unplaceable(f"{site.function} uses a tensor both inside and outside of the cut")
            for path, seen in site.inputs:
                if seen == value:
                    actions.append((self._at(site, kind, path, dim, axis, value), site.call))
        return actions

    def _leaving(self, kind: str, value: int, dim: int, axis: str) -> tuple[Action, int]:
        """An action behind the smallest module call, or function, that nobody inside reads past."""
        readers = [op for op in self._readers.get(value, ()) if op in self._inside]
        for call in sorted(self._calls, key=lambda call: call.end - call.begin):
            if value in call.outputs and value not in call.inputs and all(op < call.end for op in readers):
                path = call.output_paths[call.outputs.index(value)]
                return self._of_module(call, kind, path, dim, axis, value), call.index
        site = self._site(self.graph.values[value].op)
        if site is not None and not readers:
            for path, seen in site.outputs:
                if seen == value:
                    return self._at(site, kind, path, dim, axis, value), site.call
        raise Unplaceable(
            f"a cut tensor of {self.where(self.graph.values[value].op)} leaves where it can't be gathered"
        )

    def _checked(self, due: Iterable[tuple[Action, int]]) -> list[Action]:
        """Every action must be due in every call of its module, or the runtime would act where it must not."""
        found: dict[Action, set[int]] = {}
        for action, call in due:
            found.setdefault(action, set()).add(call)
        calls = Counter(call.path for call in self.graph.calls)
        for action, ops in found.items():
            path = join(self.region.path, action.module)
            if len(ops) != calls[path]:
                raise Unplaceable(f"{path or 'the model'} is called in different ways")
        return list(found)

    # ---- making actions: on a value, with how many dimensions it has where they are about one of them

    def _of_module(self, call: Call, kind: str, path: str, dim: int, axis: str, value: int) -> Action:
        made = Action(kind=kind, module=self._relative(call.path), argument=path, dim=dim, axis=axis)  # type: ignore[arg-type]
        return replace(made, dims=len(self.graph.values[value].shape)) if axis else made

    def _at(self, site: SiteCall, kind: str, path: str, dim: int, axis: str, value: int = -1) -> Action:
        made = Action(
            kind=kind,  # type: ignore[arg-type]
            module=self._relative(self.graph.calls[site.call].path),
            function=site.function,
            occurrence=site.occurrence,
            calls=site.calls,
            line=site.line,
            argument=path,
            dim=dim,
            axis=axis,
        )
        return replace(made, dims=len(self.graph.values[value].shape)) if axis and value >= 0 else made

    def call_at(self, kind: str, op: int, axis: str) -> Action:
        """An action around the call of the torch function that ran an op."""
        site = self._site(op)
        if site is None:
            raise Unplaceable(f"{self.where(op)} is in no call that can be found again")
        return self._at(site, kind, "", 0, axis)

    def dropping_at(self, op: int, divided: Mapping[int, int], axis: str) -> Action:
        """The action at a dropout of a value whose tokens are divided along a dimension: `divided`, by value."""
        (value,) = self.graph.ops[op].inputs
        action = self.call_at("dropout_tokens", op, axis)
        if action.function not in DROPOUTS:
            raise Unplaceable(f"{self.where(op)} draws random numbers for some of the tokens")
        return replace(action, dim=divided[value], dims=len(self.graph.values[value].shape))

    def _relative(self, path: str) -> str:
        return relative(path, self.region.path)

    def _site(self, op: int) -> SiteCall | None:
        """The torch function call that ran an op."""
        place = bisect_right(self._begins, op) - 1
        if place >= 0 and op < self._sites[place].end:
            return self._sites[place]
        return None


def differentiable(graph: ModelGraph) -> set[int]:
    """Values that a gradient may reach: parameters, floating-point inputs, and what is computed from them.

    Frozen parameters as well: those of the first of equal blocks may be, and of others not, or not for long.
    """
    parameters = [tensor.value for tensor in graph.tensors if tensor.kind == "parameter"]
    found = {value for value in parameters if _is_continuous(graph, value)}
    found |= {value for value in graph.inputs if graph.values[value].dtype.is_floating_point}
    for op in graph.ops:
        if not found.isdisjoint(op.inputs):
            found |= {value for value in op.outputs if _is_continuous(graph, value)}
    return found


def _is_continuous(graph: ModelGraph, value: int) -> bool:
    dtype = graph.values[value].dtype
    return dtype.is_floating_point or dtype.is_complex
