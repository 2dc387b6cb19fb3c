"""What a rank should see: the local shape of every result of a block when a leaf of it is cut."""

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.axes.axis import Axis, Leaf, leaves, local_size
from autoshard.axes.walk import Walk
from autoshard.capture.graph import Call, ModelGraph, SiteCall
from autoshard.module_paths import relative

Key = tuple[str, int, str, int]
"""(module path below the block, how-manieth call of it, function, how-manieth call of that inside)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """An integer of the whole that depends on the cut: `fixed + each * slices`, for a rank with so many slices."""

    whole: int
    fixed: int
    each: int

    def local(self, slices: int) -> int:
        """What it is on a rank that keeps `slices` slices."""
        return self.fixed + self.each * slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One result of a function: where it is in what the function returned, its shape and its axes."""

    path: str
    axes: tuple[Axis, ...]
    shape: tuple[int, ...]

    def local_shape(self, leaves: dict[Leaf, int]) -> tuple[int, ...]:
        """Its shape on a rank that keeps so many slices of each leaf."""
        return tuple(
            local_size(axis, leaves) if axis else size for axis, size in zip(self.axes, self.shape, strict=True)
        )

    def cut_dims(self, slices: dict[Leaf, int]) -> list[int]:
        """Its dimensions that are smaller on a rank."""
        return [dim for dim, axis in enumerate(self.axes) if any(leaf in slices for leaf in leaves(axis))]


def numbers_in(axis: Axis, leaf: Leaf) -> list[Number]:
    """Integers that code may hold for an axis: products of neighbouring factors with the leaf in one, and part sums.

    8x4x128 with the leaf 8   ->   8, 32, 4096          (16|8|8) with a leaf in all   ->   also 32
    """
    found: list[Number] = []
    places = [place for place, factor in enumerate(axis) if _has(factor, leaf)]
    for place in places:
        for begin in range(place, -1, -1):
            for end in range(place + 1, len(axis) + 1):
                run = axis[begin:end]
                whole, none = local_size(run, {}), local_size(run, {leaf: 0})
                found.append(Number(whole=whole, fixed=none, each=(whole - none) // leaf.size))
        factor = axis[place]
        if not isinstance(factor, Leaf):
            for segment in factor.segments:
                found += numbers_in(segment, leaf)
    return list(dict.fromkeys(found))


def _has(factor: object, leaf: Leaf) -> bool:
    if isinstance(factor, Leaf):
        return factor is leaf
    return any(_has(inner, leaf) for segment in factor.segments for inner in segment)  # type: ignore[attr-defined]


def sites_of(graph: ModelGraph, block: Call) -> Iterator[tuple[Key, SiteCall]]:
    """The function calls of one call of a block, by what they are called there."""
    below: dict[int, tuple[str, int]] = {}
    times: dict[str, int] = {}
    for call in graph.calls[block.index :]:
        if block.begin <= call.begin and call.end <= block.end:
            path = relative(call.path, block.path)
            below[call.index] = (path, times.get(path, 0))
            times[path] = times.get(path, 0) + 1
    for site in graph.sites:
        if site.call in below:
            yield (*below[site.call], site.function, site.occurrence), site


def expected_results(graph: ModelGraph, walk: Walk, block: Call) -> dict[Key, list[Expected]]:
    """Results of the functions that one call of a block ran, those of other regions inside of it left out."""
    found: dict[Key, list[Expected]] = {}
    for key, site in _walked(graph, walk, block):
        for path, value in site.outputs:
            if value in walk.axes:
                row = Expected(path=path, axes=walk.axes[value], shape=graph.values[value].shape)
                found.setdefault(key, []).append(row)
    return found


def axes_near(graph: ModelGraph, walk: Walk, block: Call, leaf: Leaf) -> dict[Key, list[Axis]]:
    """For every function, the axes with a leaf in what it reads and makes."""
    found: dict[Key, list[Axis]] = {}
    for key, site in _walked(graph, walk, block):
        axes = [axis for _, value in (*site.inputs, *site.outputs) for axis in walk.axes.get(value, ())]
        found[key] = list(dict.fromkeys(axis for axis in axes if leaf in leaves(axis)))
    return found


def _walked(graph: ModelGraph, walk: Walk, block: Call) -> Iterator[tuple[Key, SiteCall]]:
    """The function calls of a block without those of other regions inside of it."""
    for key, site in sites_of(graph, block):
        if walk.ops.issuperset(range(site.begin, site.end)):
            yield key, site
