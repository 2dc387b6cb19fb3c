"""Sequence parallelism: between the cuts of tensor parallelism each rank has a part of the tokens.

    x ─▶ norm ─▶ collect ─▶ attention, cut ─▶ scatter ─▶ + x ─▶ norm ─▶ collect ─▶ MLP, cut ─▶ scatter ─▶ + ─▶ next
        part          whole, on all ranks        part                      whole                   part

Blocks of which one's output is the next one's input are a chain: the first divides its input, the last puts its output
together. It is sound where every op between works on each token by itself: the walk over the axes says so, op by op.
Sums over ranks become a sum of which each rank keeps its tokens; what enters a cut is put together before.

Context parallelism is the same without cuts: attention meets the keys and values of all ranks, which are put together
(Dubey et al. 2024, arXiv 2407.21783, section 3.3.2), and nothing is whole inside of a block.

Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022), section 4.2.2.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from autoshard.axes.axis import Factor, factors_of, resolve
from autoshard.axes.communication import CommunicationPoints, Lookup, Unplaceable
from autoshard.axes.given import plain
from autoshard.axes.groups import AxisGroup, AxisGroups, find_groups, group_of
from autoshard.axes.losses import divide_losses
from autoshard.axes.regions import OUTSIDE, Region, element_of, find_regions
from autoshard.axes.walk import AxisWalk, walk_over
from autoshard.capture.graph import Call, ModelGraph, name_of
from autoshard.common.module_paths import is_below, relative
from autoshard.errors import PlanError
from autoshard.plan.sharding import ATTENTION, Action, Cut, Results, even_shares, result_of

_SHAPING = frozenset({"view", "reshape", "_unsafe_view", "expand", "zeros", "ones", "empty", "new_zeros", ATTENTION})
"""Ops that may be given sizes: what they make has these. Of attention, whether it is causal is written as a mask."""
_ENTERING = ("collect", "whole", "copy_to", "own")
"""Kinds of actions on what ops read."""
_DRAWS = ("bernoulli", "rand", "normal", "multinomial", "exponential")
"""Beginnings of names of ops whose result is another one for each element that is drawn."""


def divide_tokens(
    graph: ModelGraph, found: AxisGroups, cuts: Sequence[Cut], stages: Sequence[Sequence[str]] = ()
) -> tuple[Cut, ...]:
    """Return the cuts with tokens divided over the ranks between them, or as they are where nothing allows it.

    `graph`: captured with `composite=True`; `found`: its axis groups; `cuts`: some of them, over the same ranks;
    `stages`: paths of modules in each stage of a pipeline, between which tensors are whole.
    """
    lookup = Lookup(graph)
    made = list(cuts)
    for region in found.regions:
        own = [cut for cut in made if cut.blocks == region.paths]
        inside = set(region.paths)
        alone = any(block not in inside and element_of(block, inside) for cut in made for block in cut.blocks)
        if region.path == OUTSIDE or len(region.paths) < 2 or not own or alone:  # of modules in it, cut by themselves
            continue
        groups = [group for cut in own if (group := group_of(found, cut)) is not None]
        if len(groups) != len(own):
            continue
        changed, _ = _divided(graph, lookup, region, groups, own, own[0].degree, own[0].training, stages)
        instead = dict(zip(own, changed, strict=False))
        made = [instead.get(cut, cut) for cut in made] + changed[len(own) :]
    return tuple(made)


def can_divide_tokens(graph: ModelGraph, degree: int) -> bool:
    """Whether so many ranks that share the matrices of blocks may divide tokens between them in training.

    `graph`: captured with `composite=True`.
    """
    found, cuts = find_groups(graph), []
    for region in found.regions:
        taken: set[str] = set()
        for group in found.groups:
            names = {shard.name for shard in group.shards}
            if group.blocks == region.paths and group.size % degree == 0 and taken.isdisjoint(names):
                cuts.append(group.as_cut(even_shares(group.size, degree)))
                taken |= names
    kinds = (action.kind for cut in divide_tokens(graph, found, cuts) for action in cut.actions)
    return "scatter" in kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    """What goes through a block: the input and the output of its call, with the dimension of the tokens."""

    call: Call
    given: int
    made: int
    dim: int
    factor: Factor


def _divided(
    graph: ModelGraph, lookup: Lookup, region: Region, groups: Sequence[AxisGroup], cuts: Sequence[Cut], degree: int,
    training: bool, stages: Sequence[Sequence[str]] = (),
) -> tuple[list[Cut], str]:  # fmt: skip
    """The cuts of one region with its tokens divided, then those of the tokens; or none, and why that can't be.

    Without cuts, attention of queries to the keys and values of all ranks is followed.
    """
    reason = "an op in it does not work on each token by itself"
    walk = walk_over(graph, (graph.ops[index] for index in region.ops))
    for stream, merges in product(_streams(graph, region, walk, degree), (False,) if cuts else (True, False)):
        zone = _Zone(
            graph=graph, lookup=lookup, region=region, groups=groups, walk=walk, stream=stream, degree=degree,
            training=training, attends=not cuts, merges=merges,
        )  # fmt: skip
        chains = _chains(graph, lookup, region, stream, stages)
        if zone.follow() and (not cuts or stages or len(chains) < len(region.paths)):
            try:
                return _cuts(zone, cuts, chains), ""
            except Unplaceable as error:
                reason = str(error)
    return [], reason


def divide_context(graph: ModelGraph, degree: int, training: bool) -> tuple[tuple[Cut, ...], tuple[Results, ...]]:
    """Return the cuts that divide the tokens of all blocks with attention over so many ranks, which share no matrix.

    With them, which modules give each rank a part, and what the model gave: anything else may be a rank's part.

    `graph`: captured with `composite=True`; `training`: in training mode. Raises `PlanError` where a block with
    attention can't be.
    """
    lookup, found = Lookup(graph), []
    for region in find_regions(graph):
        if not any(name_of(graph.ops[index]) == ATTENTION for index in region.ops):
            continue
        cuts, reason = _divided(graph, lookup, region, (), (), degree, training)
        if not cuts:
            raise PlanError(
                f"the tokens of {region.path or 'the model'} can't be divided over {degree} ranks, as cp={degree} "
                f"says: {reason}. Plan with --mesh of dp, fsdp, tp and pp only."
            )
        found += cuts
    if not found:
        raise PlanError(f"cp={degree} divides tokens around {ATTENTION}, which this model does not call.")
    divided, results = divide_losses(lookup, found)
    (root,) = (call for call in graph.calls if not call.path)
    places = zip(root.output_paths, root.outputs, strict=True)
    given = tuple(result_of(path, len(graph.values[value].shape)) for path, value in places)
    return divided, (*results, Results(modules=("",), tensors=given))


def depends_on_length(graph: ModelGraph, rank: ModelGraph) -> str:
    """Say which op is given another number where a rank has some of the tokens; "" for none.

    `graph`, `rank`: the model as it is, and as a rank runs it, recorded alike. Sizes of shapes may differ.
    """
    pairs = list(zip(graph.ops, [op for op in rank.ops if op.index not in rank.added_ops], strict=False))
    names = [(name_of(a), name_of(b)) for a, b in pairs]
    other = next((a for (a, _), (x, y) in zip(pairs, names, strict=True) if x != y), None)
    if other is not None or len(graph.ops) != len(rank.ops) - len(rank.added_ops):
        where = graph.calls[other.call].path if other is not None else "the model"
        return f"{where} runs other ops for a part of the tokens"
    for a, b in pairs:
        if name_of(a) not in _SHAPING and repr(plain(a)) != repr(plain(b)):
            return f"{graph.calls[a.call].path} gives {name_of(a)} a number that depends on how many tokens there are"
    return ""


def _streams(graph: ModelGraph, region: Region, walk: AxisWalk, degree: int) -> Iterator[_Stream]:
    """Dimensions that an input of the block and its output have in common, the last of them first: not the width."""
    calls = [call for call in graph.calls if call.path == region.path]
    if len(calls) != 1:
        return
    (call,) = calls
    for made in call.outputs:
        for given in call.inputs:
            shapes = graph.values[given].shape, graph.values[made].shape
            if shapes[0] != shapes[1] or len(shapes[0]) < 3 or not graph.values[made].dtype.is_floating_point:
                continue
            for dim in range(len(shapes[0]) - 2, 0, -1):
                axes = [resolve(walk.axes[value][dim]) for value in (given, made) if value in walk.axes]
                factor = axes[0][0] if len(axes) == 2 and axes[0] == axes[1] and len(axes[0]) == 1 else None
                if isinstance(factor, Factor) and factor.size % degree == 0:
                    yield _Stream(call=call, given=given, made=made, dim=dim, factor=factor)


@dataclass(slots=True, kw_only=True)
class _Zone:
    """Follows which values of a block are divided, and where others begin and end.

    Attributes:
        divided: value -> the dimension of its tokens; merged: those of them in which it is that of other rows as well.
        entering: by kind of action, values on which ops need it, with those ops. collect: divided ones that ops on a
            rank's columns read; whole: divided ones that ops read which do not work on each token by itself; copy_to:
            whole ones without tokens that divided tokens meet; own: whole ones with tokens, beside divided ones.
        scattered: ops that sum over ranks, whose results are divided; dropped: those that drop divided elements.
        merges: such are followed, which can't be put together for an op that needs all tokens.
        attends, attended: attention of queries here to keys and values of all ranks is followed; ops that are such.
        summed: whole parameters that divided tokens meet.
    """

    graph: ModelGraph
    lookup: Lookup
    region: Region
    groups: Sequence[AxisGroup]
    walk: AxisWalk
    stream: _Stream
    degree: int
    training: bool = False
    attends: bool = False
    merges: bool = False
    attended: list[int] = field(default_factory=list)
    divided: dict[int, int] = field(default_factory=dict)
    merged: set[int] = field(default_factory=set)
    entering: dict[str, dict[int, list[int]]] = field(default_factory=lambda: {kind: {} for kind in _ENTERING})
    scattered: set[int] = field(default_factory=set)
    dropped: list[int] = field(default_factory=list)
    summed: dict[int, str] = field(default_factory=dict)

    def follow(self) -> bool:
        """Follow all ops of the block; False where its output is not divided, or it is not worth it."""
        self.divided[self.stream.given] = self.stream.dim
        mixing = self.walk.mixing(self.stream.factor)
        mixing |= {index for index in self.region.ops if name_of(self.graph.ops[index]).startswith(_DRAWS)}
        partial, sums = self._cut_ops()
        means = {one.op for group in self.groups for one in group.walk.contractions if one.mean}
        carried: set[int] = set()
        for index in self.region.ops:
            op = self.graph.ops[index]
            ours = [value for value in dict.fromkeys(op.inputs) if value in self.divided]
            if ours and (index in sums or not set(ours).issuperset(op.mutates)):
                return False
            if index in sums:
                if index not in means and self._scatters(op.outputs, sums[index]):
                    self.scattered.add(index)
                    carried.add(index)
                continue
            if self.attends and name_of(op) == ATTENTION and self._attends(index):
                carried.add(index)
                continue
            drops = not self.attends and index in mixing and name_of(op) == "dropout"
            if index not in partial and ours and (drops or index not in mixing) and self._carries_on(index):
                carried.add(index)
                self.dropped += [index] * drops
                continue
            if ours and (op.mutates or not self.merged.isdisjoint(ours)):
                return False
            for value in ours:
                self._needs("collect" if index in partial else "whole", value, index)
        whole = {value for value in self.summed if not carried.issuperset(self._readers(value))}
        if whole or self._leaving():
            return False
        return 0 < len(self.attended if self.attends else self.scattered) >= len(self.entering["whole"])

    def _needs(self, kind: str, value: int, op: int) -> None:
        self.entering[kind].setdefault(value, []).append(op)

    def _readers(self, value: int) -> list[int]:
        """Ops that read a value, but for those that hand it on as it is: a cast to the dtype that it has."""
        return [index for index in self.lookup.readers[value] if self.graph.ops[index].outputs != (value,)]

    def _leaving(self) -> bool:
        """Whether a divided value leaves the block that is not its output, or its output is whole."""
        inside, stream = set(self.region.ops), self.stream
        others = [value for value in self.divided if value not in (stream.made, stream.given)]
        return stream.made not in self.divided or any(
            value in stream.call.outputs or value in self.graph.outputs
            or not inside.issuperset(self.lookup.readers.get(value, ()))
            for value in others
        )  # fmt: skip

    def _cut_ops(self) -> tuple[set[int], dict[int, int]]:
        """Ops that work on a rank's part of the columns, and those that sum over ranks, with what they add once."""
        sums: dict[int, int] = {}
        parts: set[int] = set()
        for group in self.groups:
            for one in group.walk.contractions:
                if group.factor in factors_of(one.axis):
                    sums[one.op] = one.addend
            parts |= {
                value
                for value, axes in group.walk.axes.items()
                if any(group.factor in factors_of(axis) for axis in axes)
            }
        found: set[int] = set()
        for index in self.region.ops:
            op = self.graph.ops[index]
            if index not in sums and not parts.isdisjoint((*op.inputs, *op.outputs)):
                found.add(index)
                parts.update(op.outputs)
        return found, sums

    def place(self, value: int) -> int:
        """The dimension that the ranks divide in pieces: the only one with tokens, its first factor; -1 for none."""
        dims = self.walk.cut_dims(value, self.stream.factor)
        axis = resolve(self.walk.axes[value][dims[0]]) if len(dims) == 1 else ()
        return dims[0] if axis[:1] == (self.stream.factor,) else -1

    def _scatters(self, outputs: Sequence[int], addend: int) -> bool:
        """Note the results of a sum as divided, if they can be."""
        places = [self.place(value) for value in outputs]
        parameters = self._parameters([addend] if addend >= 0 else [])
        of_each = addend >= 0 and self.walk.cut_dims(addend, self.stream.factor)  # a bias of channels, say
        if min(places) < 0 or parameters is None or of_each:
            return False
        self.divided.update(zip(outputs, places, strict=True))
        self.summed.update(parameters)
        return True

    def _carries_on(self, index: int) -> bool:
        """Note what an op makes of divided tokens as divided, if each token is its own business."""
        op, factor = self.graph.ops[index], self.stream.factor
        dims = [self.walk.cut_dims(value, factor) for value in op.outputs]
        others = [value for value in dict.fromkeys(op.inputs) if value not in self.divided]
        whole = [value for value in others if self.walk.cut_dims(value, factor)]
        parameters = self._parameters(value for value in others if value in self.lookup.tensors)
        beside = any(self.place(value) < 0 or value in self.lookup.tensors for value in whole)
        if not dims or any(len(one) != 1 for one in dims) or parameters is None or beside:
            return False
        merged = {value for value in op.outputs if self.place(value) < 0}
        if merged and not self.merges:
            return False
        for value in whole:
            self._needs("own", value, index)
        for value in others:
            if value not in whole and value not in parameters and value in self.lookup.differentiable:
                self._needs("copy_to", value, index)
        self.divided.update((value, one[0]) for value, one in zip(op.outputs, dims, strict=True))
        self.merged |= merged
        self.summed.update(parameters)
        return True

    def _attends(self, index: int) -> bool:
        """Note the result of attention of divided queries to divided keys and values as divided."""
        op = self.graph.ops[index]
        places = [self.divided.get(value, 0) - len(self.graph.values[value].shape) for value in op.inputs[:3]]
        trained = not self.lookup.differentiable.isdisjoint(op.inputs[3:])  # a bias, of which ranks would use parts
        trained |= any(drawn == index for drawn, _ in self.walk.random_calls)  # and masks of dropout, too
        if places != [-2, -2, -2] or trained or len(op.outputs) != 1 or not self.merged.isdisjoint(op.inputs):
            return False
        self.divided[op.outputs[0]] = len(self.graph.values[op.outputs[0]].shape) - 2
        self.attended.append(index)
        return True

    def _parameters(self, values: Iterable[int]) -> dict[int, str] | None:
        """Trainable tensors among some, by name in the block; None where one is used outside of it, too."""
        found: dict[int, str] = {}
        for value in values:
            if value not in self.lookup.differentiable:
                continue
            names = [name for name in self.lookup.tensors.get(value, ()) if is_below(name, self.region.path)]
            if not names or not set(self.lookup.readers[value]) <= set(self.region.ops):
                return None
            found[value] = relative(names[0], self.region.path)
        return found


def _chains(
    graph: ModelGraph, lookup: Lookup, region: Region, stream: _Stream, stages: Sequence[Sequence[str]]
) -> list[tuple[str, str]]:
    """(first, last) block of each chain: what one makes, the next of the same stage is given; nobody else reads it."""
    place_given = stream.call.inputs.index(stream.given)
    place_made = stream.call.outputs.index(stream.made)
    calls = {call.path: call for call in graph.calls if call.path in region.paths}
    chains: list[list[str]] = []
    before: Call | None = None
    for path in sorted(region.paths, key=lambda one: calls[one].begin):
        call = calls[path]
        value = before.outputs[place_made] if before is not None else -1
        goes_on = value >= 0 and len(call.inputs) > place_given and call.inputs[place_given] == value
        read = lookup.readers.get(value, ())
        asked = any(one == value and not is_below(graph.calls[row].path, path) for one, row in graph.measured)
        goes_on = goes_on and _stage_of(path, stages) == _stage_of(chains[-1][0], stages)
        if goes_on and not asked and all(call.begin <= op < call.end for op in read) and value not in graph.outputs:
            chains[-1].append(path)
        else:
            chains.append([path])
        before = call
    return [(chain[0], chain[-1]) for chain in chains]


def _stage_of(path: str, stages: Sequence[Sequence[str]]) -> int:
    return next((number for number, paths in enumerate(stages) if any(is_below(path, one) for one in paths)), -1)


def _cuts(zone: _Zone, cuts: Sequence[Cut], chains: Sequence[tuple[str, str]]) -> list[Cut]:
    """The cuts without the actions that are others now, and the cut of the tokens."""
    graph, stream, region, degree = zone.graph, zone.stream, zone.region, zone.degree
    axis = f"*{degree}x{stream.factor.size // degree}"
    left = {cut: list(cut.actions) for cut in cuts}
    actions: list[Action] = []
    entered = {value for value in zone.entering["collect"] if value in zone.lookup.differentiable}
    for group, cut in zip(zone.groups, cuts, strict=True):
        places = CommunicationPoints(zone.lookup, region, group.walk, frozenset())
        for index in sorted(zone.scattered):
            for action in places.sum_at(group.factor, index):
                if action not in left[cut]:
                    raise Unplaceable("a sum is somewhere else")
                left[cut].remove(action)
                total = graph.ops[index].outputs[0]
                dim, dims = zone.divided[total], len(graph.values[total].shape)
                actions.append(replace(action, kind="scatter", dim=dim, dims=dims, axis=axis, gathered=False))
        collected = {action for value in entered for action in places.entries_of(group.factor, value)}
        left[cut] = [action for action in left[cut] if action.kind != "copy_to" or action not in collected]
        if any(action.kind == "restore" for action in left[cut]):
            raise Unplaceable("a block hands on what it is given")
    places = CommunicationPoints(zone.lookup, region, zone.groups[0].walk if zone.groups else zone.walk, frozenset())
    actions += [places.call_at("context", index, axis) for index in zone.attended]
    actions += [places.dropping_at(index, zone.divided, axis) for index in zone.dropped]
    for kind, values in zone.entering.items():
        for value, readers in values.items():
            dim = zone.place(value) if kind == "own" else zone.divided.get(value, 0)
            actions += places.entering_at(kind, value, readers, dim, "" if kind == "copy_to" else axis)
    tokens = Cut(
        blocks=region.paths, size=degree, shares=(1,) * degree, shards=(), actions=tuple(dict.fromkeys(actions)),
        summed=tuple(zone.summed.values()), training=zone.training, title="tokens between cuts",
    )  # fmt: skip
    given = stream.call.input_paths[stream.call.inputs.index(stream.given)]
    made = stream.call.output_paths[stream.call.outputs.index(stream.made)]
    dims = len(graph.values[stream.given].shape)
    begin = Action(kind="divide", module="", argument=given, dim=stream.dim, dims=dims, axis=axis)
    end = replace(begin, kind="join", argument=made)
    begins, ends = (
        [replace(tokens, blocks=(chain[at],), summed=(), actions=(action,)) for chain in chains]
        for at, action in enumerate((begin, end))
    )
    if not zone.attends:  # elsewhere `depends_on_length` looks at what becomes of sizes
        _check_sizes(zone, tokens)
    # Actions at one call are carried out in this order: a block divides what it is given before it collects that.
    return [*(replace(cut, actions=tuple(left[cut])) for cut in cuts), *begins, tokens, *ends]


def _check_sizes(zone: _Zone, tokens: Cut) -> None:
    """Raise `Unplaceable` where code asks how large a divided tensor is: it would see a rank's tokens only.

    A module that is given all of them may ask.
    """
    calls, region = zone.graph.calls, zone.region
    whole = {(action.module, action.argument) for action in tokens.actions if action.kind in ("collect", "whole")}
    for value, asking in zone.graph.measured:
        row = asking
        while value in zone.divided and calls[row].path != region.path and is_below(calls[row].path, region.path):
            call, module = calls[row], relative(calls[row].path, region.path)
            given = {path for path, seen in zip(call.input_paths, call.inputs, strict=True) if seen == value}
            if any((module, path) in whole for path in given):
                break
            row = call.parent
        else:
            if value in zone.divided and is_below(calls[asking].path, region.path):
                raise Unplaceable(f"{calls[asking].path} asks how many tokens there are")
