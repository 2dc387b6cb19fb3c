"""Find the integers that code has for the size of a cut axis: what must be smaller on a rank.

    self.heads = 8      y.view(b, s, self.heads, 16)      where [b, s, 4, 16] is due: `heads` is 4 on a rank

A rank runs the module's own Python, which may hold sizes in attributes (`self.heads`, `groups`, a field of a config).
The first rank of a block is run on shapes alone. Where a function first gives another shape than it should, the
attributes nearby that hold a product of the factors there are tried, and what lets the run get further is kept. Code
may as well read a size from a whole tensor (`y.view(*x.shape)`): then it is a length among the arguments of the
function that stumbles. What is found here decides nothing: `follow` does.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoshard import nested
from autoshard.axes.axis import Axis, Factor, describe, factors_of, local_size, size_of
from autoshard.axes.walk import AxisWalk
from autoshard.capture.fake import FakeFloats, silenced
from autoshard.capture.graph import Call, ModelGraph
from autoshard.capture.material import placeholders, put_placeholders
from autoshard.capture.observe import TensorSpec, fill_specs
from autoshard.capture.record import Recorder
from autoshard.capture.run import applied_to_placeholders
from autoshard.capture.sites import PROPERTIES
from autoshard.check.rank import Arguments, LoneRank
from autoshard.check.reads import ALL, noted_reads
from autoshard.common.attention import written_out
from autoshard.common.module_paths import is_below, relative
from autoshard.plan.sharding import DROPOUTS, Action, Cut, Scale
from autoshard.runtime.cuts import apply_cuts
from autoshard.runtime.lengths import sizes_of
from autoshard.runtime.moves import copied

Key = tuple[str, int, str, int]
"""(module path below the block, how-manieth call of it, function, how-manieth call of that inside)"""
MOST_TRIALS = 60
"""Runs after which a search gives up."""


class NotFound(Exception):
    """No attribute explains what a run on local shapes stumbles over; the message says where that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """An integer of the whole that depends on the cut: `fixed + each * slices`, for a rank with so many slices."""

    whole: int
    fixed: int
    each: int


class Length(NamedTuple):
    """An integer among the arguments of a function that a module calls: how long an axis is, as text.

    `dim`: how many sizes the function was given with it, where it is one of them and the occurrence -1.
    """

    module: str
    function: str
    occurrence: int
    argument: str
    axis: str
    dim: int


Sizes = dict[tuple[str, str] | Length, Number]
"""(module path, attribute), or a length -> what it holds"""


def with_sizes(cut: Cut, sizes: Sizes) -> Cut:
    """The cut with these integers: attributes to scale, and lengths that calls are given."""
    lengths = tuple(Action(kind="length", **key._asdict()) for key in sizes if isinstance(key, Length))
    scales = tuple(
        Scale(
            module=key[0], attribute=key[1], value=number.whole,
            local=tuple(number.fixed + number.each * share for share in cut.shares),
        )
        for key, number in sizes.items() if not isinstance(key, Length)
    )  # fmt: skip
    return replace(cut, actions=(*cut.actions, *lengths), scales=scales)


def numbers_in(axis: Axis, factor: Factor) -> list[Number]:
    """Integers that code may hold for an axis: products of neighbouring terms with the factor in one, and part sums.

    8x4x128 with the factor 8   ->   8, 32, 4096          (16|8|8) with a factor in all   ->   also 32
    """
    found: list[Number] = []
    for place, term in enumerate(axis):
        if factor not in factors_of((term,)):
            continue
        for begin in range(place, -1, -1):
            for end in range(place + 1, len(axis) + 1):
                run = axis[begin:end]
                whole, none = local_size(run, {}), local_size(run, {factor: 0})
                found.append(Number(whole=whole, fixed=none, each=(whole - none) // factor.size))
        if not isinstance(term, Factor):
            for segment in term.segments:
                found += numbers_in(segment, factor)
    return list(dict.fromkeys(found))


# ---- what the functions of a block should give


@dataclass(slots=True)
class Site:
    """The call of a function: its results, and the axes with the factor in what it reads and makes.

    `results`: tensors that it should give: where each is in what the function returns, and its axes.
    """

    results: list[tuple[str, tuple[Axis, ...]]] = field(default_factory=list)
    near: list[Axis] = field(default_factory=list)


def sites_of(graph: ModelGraph, walk: AxisWalk, block: Call, factor: Factor) -> dict[Key, Site]:
    """The functions that one call of a block ran, those of other regions inside of it left out."""
    below: dict[int, tuple[str, int]] = {}
    times: dict[str, int] = {}
    for call in graph.calls[block.index :]:
        if block.begin <= call.begin and call.end <= block.end:
            path = relative(call.path, block.path)
            below[call.index] = (path, times.get(path, 0))
            times[path] = times.get(path, 0) + 1
    found: dict[Key, Site] = {}
    for row in graph.sites:
        if row.call not in below or not walk.ops.issuperset(range(row.begin, row.end)):
            continue
        site = found.setdefault((*below[row.call], row.function, row.occurrence), Site())
        for path, value in row.outputs:
            if value in walk.axes:
                site.results.append((path, walk.axes[value]))
        axes = [axis for _, value in (*row.inputs, *row.outputs) for axis in walk.axes.get(value, ())]
        site.near = list(dict.fromkeys(axis for axis in axes if factor in factors_of(axis)))
    return found


# ---- one run of the first rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run went: `reached` counts the functions that gave what they should; `failed` is the one that did not.

    `failed` is None if all went well; `message` says what was wrong with it, `lengths` what integers it was given, and
    `sizes` how many of them are sizes of which such a call shows by itself that they do not fit. `read`: module paths
    and attributes that code asked for.
    """

    reached: int
    failed: Key | None
    read: frozenset[tuple[str, str]]
    message: str = ""
    lengths: Mapping[str, int] = field(default_factory=dict)
    sizes: int = 0

    def further(self, reached: int | None) -> bool:
        """Whether the run went on after so many functions; None: whether it went to its end."""
        return self.failed is None or (reached is not None and self.reached > reached)

    def depends_on(self, keys: Iterable[tuple[str, str] | Length]) -> bool:
        """Whether a run with other integers there may go otherwise: not if nobody read these attributes."""
        return any(
            isinstance(key, Length) or not self.read.isdisjoint({(key[0], key[1].partition(".")[0]), (key[0], ALL)})
            for key in keys
        )


class _Watch(TorchFunctionMode):
    """Compares the results of every torch function with what one rank should see, and stops at the first other one."""

    def __init__(self, sites: Mapping[Key, Site], slices: Mapping[Factor, int]) -> None:
        super().__init__()
        self.reached = 0
        self.current: Key = ("", 0, "", 0)
        self.given: tuple[tuple, dict[str, Any]] = (), {}
        self._sites, self._slices = sites, dict(slices)
        self._stack: list[tuple[str, int, dict[str, int]]] = []
        self._calls: dict[str, int] = {}

    @contextmanager
    def inside(self, block: nn.Module) -> Iterator[None]:
        """Note where modules of the block begin and end."""
        handles = []
        for path, module in block.named_modules():

            def enter(module: nn.Module, args: Any, path: str = path) -> None:
                self._calls[path] = self._calls.get(path, 0) + 1
                self._stack.append((path, self._calls[path] - 1, {}))

            def leave(module: nn.Module, args: Any, output: Any) -> None:
                self._stack.pop()

            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if not self._stack or name in PROPERTIES:
            return func(*args, **kwargs)
        if (inside := written_out(func, args, kwargs)) is not None:
            with self:
                return inside()
        path, time, own = self._stack[-1]
        self.current, self.given = (path, time, name, own.get(name, 0)), (args, kwargs)
        for _, _, counts in self._stack:
            counts[name] = counts.get(name, 0) + 1
        key = self.current
        result = func(*args, **kwargs)
        site = self._sites.get(key)
        if site is not None and site.results and name not in DROPOUTS:  # whose masks are drawn for the whole tensor
            self._compare(result, site)
            self.reached += 1
        return result

    def _compare(self, result: Any, site: Site) -> None:
        found = dict(nested.tensors_in(result))
        for path, axes in site.results:
            wanted = tuple(local_size(axis, self._slices) for axis in axes)
            shape = tuple(found[path].shape) if path in found else wanted
            # Other dimensions may depend on values, which are wrong on a rank that runs alone.
            if len(shape) != len(wanted) or any(shape[dim] != wanted[dim] for dim in _cut_dims(axes, self._slices)):
                raise ValueError(f"{shape} where {wanted} is due")


def _cut_dims(axes: tuple[Axis, ...], slices: Mapping[Factor, int]) -> list[int]:
    return [dim for dim, axis in enumerate(axes) if any(factor in slices for factor in factors_of(axis))]


def _run(
    block: nn.Module, given: Arguments, cut: Cut, sites: Mapping[Key, Site], factor: Factor, invent: bool
) -> Outcome:
    """Run the first rank of a cut on shapes; `block` is on meta, `given` has specs. What it raises is an outcome."""
    local = copied(block)
    apply_cuts(local, (cut,), LoneRank(rank=0, size=cut.degree), shapes_only=True)
    engine = FakeFloats(lambda _: None, invent=invent)  # as in the run that was recorded: code takes the same branches
    recorder = Recorder(engine)

    def fake(spec: TensorSpec) -> torch.Tensor:
        if spec.value is not None:
            return spec.value.clone()
        tensor = engine.shapes.placeholder(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
        recorder.enter(tensor, "input", "")
        return tensor

    put_placeholders(local, placeholders(engine))
    for kind, state in (("parameter", local.named_parameters()), ("buffer", local.named_buffers())):
        for name, tensor in state:
            recorder.enter(tensor, kind, name)
    args, kwargs = fill_specs(given, fake)
    watch = _Watch(sites, {factor: cut.shares[0]})
    with silenced(), recorder, torch.no_grad(), applied_to_placeholders(), noted_reads(local) as read:
        try:
            with watch.inside(local):
                local(*args, **kwargs)
        except Exception as error:
            message = " ".join(str(error).split())[:200]
            lengths = {path: item for path, item in nested.leaves_in(watch.given) if type(item) is int}
            seen = sizes_of(watch.current[2], *watch.given)
            return Outcome(
                reached=watch.reached, failed=watch.current, read=frozenset(read), message=message, lengths=lengths,
                sizes=0 if seen is None else len(seen[0]),
            )  # fmt: skip
    return Outcome(reached=watch.reached, failed=None, read=frozenset(read))


# ---- the search


def find_sizes(
    block: nn.Module, given: Arguments, cut: Cut, sites: Mapping[Key, Site], factor: Factor, known: Sizes, invent: bool
) -> Sizes:
    """Search the integers that the first rank of a cut needs, with some known already. Raises `NotFound`.

    `block`: on meta; `given`: the arguments of one call of it, with specs in place of tensors. `invent`: values that
    decide what the block does were invented when it was recorded, and are again.
    """
    return _Search(block, given, cut, sites, factor, invent).find(known)


@dataclass(frozen=True, slots=True)
class _Search:
    block: nn.Module
    given: Arguments
    cut: Cut
    sites: Mapping[Key, Site]
    factor: Factor
    invent: bool
    known: dict[tuple, Outcome] = field(default_factory=dict)

    def run(self, sizes: Sizes) -> Outcome:
        key = tuple(sizes.items())
        if key not in self.known:
            cut = with_sizes(self.cut, sizes)
            self.known[key] = _run(self.block, self.given, cut, self.sites, self.factor, self.invent)
        return self.known[key]

    def find(self, known: Sizes) -> Sizes:
        sizes = dict(known)
        outcome = self.run(sizes)
        trials = 1
        while outcome.failed is not None:
            for more in self._candidates(outcome, sizes):
                trials += 1
                tried = self.run({**sizes, **more}) if outcome.depends_on(more) else outcome
                if tried.further(outcome.reached):
                    sizes, outcome = {**sizes, **more}, tried
                    break
                if trials > MOST_TRIALS:
                    raise _not_found(outcome, "too many attributes might be meant")
            else:
                fewer = self._needed(sizes, known, outcome.reached - 1)
                if len(fewer) == len(sizes):
                    raise _not_found(outcome, "no attribute nearby holds that size")
                sizes, outcome = self._by_lengths(fewer, outcome)
        return self._needed(sizes, known, None)

    def _needed(self, sizes: Sizes, known: Sizes, reached: int | None) -> Sizes:
        """Leave out what the run does not need to get further than `reached` functions, or to its end."""
        outcome = self.run(sizes)
        for name in [name for name in sizes if name not in known]:
            fewer = {key: number for key, number in sizes.items() if key != name}
            tried = self.run(fewer) if outcome.depends_on([name]) else outcome
            if tried.further(reached):
                sizes, outcome = fewer, tried
        return sizes

    def _by_lengths(self, sizes: Sizes, before: Outcome) -> tuple[Sizes, Outcome]:
        """Get further than before by lengths alone: attributes that were taken too soon are left out of `sizes`.

        One that holds the same number for something else may have been all that was wrong.
        """
        outcome = self.run(sizes)
        if outcome.further(before.reached):
            return sizes, outcome
        for more in self._lengths(outcome):
            tried = self.run({**sizes, **more})
            if tried.further(before.reached):
                return {**sizes, **more}, tried
        raise _not_found(before, "no attribute nearby holds that size")

    def _candidates(self, outcome: Outcome, known: Sizes) -> Iterator[Sizes]:
        """Sets of integers to try. Attributes come first, unless the module has a length already: it reads sizes."""
        assert outcome.failed is not None
        reads = any(isinstance(key, Length) and key.module == outcome.failed[0] for key in known)
        repairs = [self._attributes(outcome.failed, known), self._lengths(outcome)]
        for way in reversed(repairs) if reads else repairs:
            yield from way

    def _lengths(self, outcome: Outcome) -> Iterator[Sizes]:
        """Lengths of what it should make that the function which stumbled was given: all together, then each alone."""
        assert outcome.failed is not None
        path, _, function, occurrence = outcome.failed
        occurrence = -1 if outcome.sizes else occurrence
        found: Sizes = {}
        for _, axes in self.sites.get(outcome.failed, Site()).results:
            for dim in _cut_dims(axes, {self.factor: 0}):
                numbers, axis = numbers_in(axes[dim], self.factor), describe(axes[dim], self.factor)
                for argument, length in outcome.lengths.items():
                    if length == size_of(axes[dim]):
                        key = Length(path, function, occurrence, argument, axis, outcome.sizes)
                        found[key] = next(one for one in numbers if one.whole == length)
        yield from _together_then_alone(found)

    def _attributes(self, failed: Key, known: Sizes) -> Iterator[Sizes]:
        """Sets of attributes to try, nearest modules first: all of one module together, then each alone; then all."""
        numbers: dict[int, list[Number]] = {}
        for axis in self.sites.get(failed, Site()).near:
            for number in numbers_in(axis, self.factor):
                if number not in numbers.setdefault(number.whole, []):
                    numbers[number.whole].append(number)
        everywhere: Sizes = {}
        for path, module in _by_distance(self.block, failed[0]):
            found: dict[tuple[str, str] | Length, list[Number]] = {
                (path, attribute): numbers[value]
                for attribute, value in integers_of(module)
                if value in numbers and (path, attribute) not in known
            }
            first = {key: options[0] for key, options in found.items()}
            yield from _together_then_alone(first)
            yield from ({key: number} for key, options in found.items() for number in options[1:])
            everywhere = {**first, **everywhere}
        yield everywhere


def _together_then_alone(sizes: Sizes) -> Iterator[Sizes]:
    if sizes:
        yield sizes
    if len(sizes) > 1:
        yield from ({key: number} for key, number in sizes.items())


def _not_found(outcome: Outcome, why: str) -> NotFound:
    assert outcome.failed is not None
    path, _, function, _ = outcome.failed
    return NotFound(f"{function or 'the call'} in {path or 'the block'}: {outcome.message}; {why}")


def _by_distance(block: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Modules of a block: the one at `path`, those around it from the inside, those in it, then all others."""

    def distance(item: tuple[str, nn.Module]) -> tuple[int, int]:
        other = item[0]
        if is_below(path, other):
            return 0, len(path) - len(other)
        return (1 if is_below(other, path) else 2), len(other)

    return sorted(block.named_modules(), key=distance)


def integers_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    """(attribute, value) of the integers a module holds: itself, in tuples and lists, in objects such as a config."""
    for name, value in vars(module).items():
        if not name.startswith("_") and not isinstance(value, (torch.Tensor, nn.Module)):
            yield from _integers(name, value, 1)


def _integers(name: str, value: Any, depth: int) -> Iterator[tuple[str, int]]:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int):
        yield name, value
    elif isinstance(value, (tuple, list)) and depth:
        for index, item in enumerate(value[:16]):
            yield from _integers(f"{name}.{index}", item, 0)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        for inner, item in vars(value).items():
            if not inner.startswith("_"):
                yield from _integers(f"{name}.{inner}", item, 0)
