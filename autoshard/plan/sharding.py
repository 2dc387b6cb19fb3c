"""How a module is cut over ranks: pure data, made by planning, read by the runtime.

A dimension of a tensor is described by an axis: what it is made of, major to minor, with the factor that is cut marked
by a star. Every rank keeps the slices of the starred factor that are its share, and all of what has no star.

    "*32x64"              32 heads of 64 rows each; the heads are cut          rank 0 of 2: rows 0 to 1023
    "8x*4x64"             8 groups of 4 heads; cut inside every group          rank 0 of 2: 2 heads of each group
    "(*32x64|*8x64|512)"  three parts one after the other: 32 and 8 heads, both cut, and 512 rows that every rank keeps
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy

ActionKind = Literal[
    "reduce", "mean", "copy_to", "slice", "gather", "lookup", "dropout", "copy_from", "restore", "length", "scatter",
    "collect", "whole", "divide", "join", "own", "context", "dispatch", "spread", "loss", "loss_in_parts",
    "spread_tokens", "dropout_tokens",
]  # fmt: skip

LONGEST_DIMENSION = 2**27
"""An axis of a damaged plan must not make the runtime list billions of indices."""
MOST_BRACKETS = 100
DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d"})
"""Functions that multiply by a random mask of the shape of their first argument, where a `dropout` action may be."""
ATTENTION = "scaled_dot_product_attention"
"""The function in which a `dropout` action may be, too: its random mask is of the shape of the scores."""
LOSSES = ("loss", "loss_in_parts")
"""Kinds of actions at losses of which each rank computes a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One dimension of one parameter or buffer that is cut; `name` is relative to the block it belongs to."""

    name: str
    dim: int
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the runtime does at one place of a module's forward, so that cut and uncut tensors meet correctly.

    The place is the `occurrence`-th call (from 0; -1: every call) of the torch function `function` while `module` runs
    (calls made by its children count; there were `calls` of them when it was planned, 0 if that is not known, and this
    one was made by `line` of the model's code, as `source_lines.calling_line` has it, "" if that is not known), or,
    where `function` is "", the call of the module itself. `argument` is the
    path of what it is done to, as `nested.leaves_in((args, kwargs))` or `(result)` give it. A tensor of which dimension
    `dim` is an `axis` had `dims` dimensions when it was planned (0 in plans of earlier versions).

    kind      at                what
    reduce    result            sum over ranks; backward: nothing. `addend`: the argument that is added once, after it.
                                `gathered`: little enough that every rank gets all summands and adds them up
    mean      result            as reduce, of a mean over the cut dimension: weighted by every rank's share first
    copy_to   argument          nothing; backward: sum over ranks
    slice     argument          this rank's part of dimension `dim`, an `axis`; backward: gather
    gather    result            all parts of dimension `dim`, an `axis`, put in order; backward: this rank's part
    copy_from result            nothing; backward: only rank 0 hands the gradient on, since all computed the same
    restore   the module        arguments that it hands on, and that were changed for it, leave as they came
    lookup    the call          rows of a cut table: rows of other ranks count as zeros; then sum over ranks
    dropout   the call          the mask is drawn for all of dimension `dim`, an `axis`; this rank's part of it is used
    scatter   result            as reduce, and this rank's part of dimension `dim` is kept; backward: all parts
    collect   argument          all parts of dimension `dim`; backward: as scatter
    whole     argument          all parts of dimension `dim`; backward: this rank's part
    divide    argument          blocks begin to divide tokens: this rank's part of dimension `dim`; backward: all parts
    join      result            they end: all parts of dimension `dim`; backward: this rank's part
    own       argument          as divide, of a tensor that divided tokens meet between the two
    context   attention         queries of this rank's tokens meet keys and values of all ranks'
                                Without gradients scatter is reduce, and the others are nothing
    dispatch  the module        rows go to the ranks of their experts, and what those make of them comes back.
                                `argument`: paths of rows, choices and weights; `axis`: the numbers of experts, with a
                                star where a rank counts its own from 0 (see `runtime.experts`)
    spread    result            while gradients are enabled and a loss is awaited, all parts stay where they are: the
                                result is a DTensor, divided along dimension `dim`, an `axis`. Else gather
    loss      the call          cross entropy of spread logits, of which each rank has some classes or tokens, an
                                `axis`; what the module gives of them is put together
    loss_in_parts  the call     as loss, but what the module gives of them stays a DTensor
    spread_tokens  result       as join; but while a loss is awaited, and of one sample, as spread
    dropout_tokens  the call    as dropout, of this rank's part of the tokens along dimension `dim`
    length    an integer        how long an `axis` is, which code has read from a whole tensor: as long as it is here.
                                At every call: one of `dim` sizes that do not fit together (see `runtime.lengths`)
    """

    kind: ActionKind
    module: str
    function: str = ""
    occurrence: int = -1
    argument: str = ""
    dim: int = 0
    dims: int = 0
    axis: str = ""
    addend: str = ""
    gathered: bool = False
    calls: int = 0
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor in what a module gives (`path` as `nested.tensors_in` has it) of which a rank has a part.

    `axis`: dimension `dim` of it, divided as cut number `cut` of the plan.
    """

    path: str
    dim: int
    axis: str
    cut: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What some modules (by path) gave when the plan was made: whole tensors, as `result_of` has them, and parts.

    Modules that are not blocks hand parts to the next module, and to whom calls them by themselves the whole.
    """

    modules: tuple[str, ...]
    tensors: tuple[str, ...]
    parts: tuple[Part, ...] = ()


def result_of(path: str, dims: int) -> str:
    """Name a tensor in what a module gives: where `nested.tensors_in` finds it, and how many dimensions it has."""
    return f"{path}:{dims}"


def count_collectives(actions: Iterable[Action]) -> tuple[int, int]:
    """All-reduces and all-gathers of one forward in which the place of every action is passed once."""
    listed = list(actions)
    reductions = sum(action.kind in ("reduce", "mean", "lookup", "scatter") for action in listed)
    added = sum(action.gathered for action in listed)
    gathers = ("gather", "collect", "whole", "join", "spread", "loss", "spread_tokens")
    return reductions - added, added + sum(action.kind in gathers for action in listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """An integer attribute of a module that must be smaller on a rank: `value` is the whole, `local` one per rank.

    `attribute` may be dotted ("settings.width"): objects on the way are copied, so other modules keep theirs.
    """

    module: str
    attribute: str
    value: int
    local: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One axis, cut in the same way in each of `blocks` (module paths; names inside are relative to them).

    Attributes:
        size: how many slices the axis has; `shares`: how many of them each rank keeps, in rank order.
        summed: replicated parameters used inside the cut; every rank has a part of their gradient.
        with_parts: modules inside of a block that are given, or give, a rank's part of a tensor.
        training: whether the blocks were in training mode when it was found; if not, they may not drop anything in it.
        proof: how it was checked, for people.
    """

    blocks: tuple[str, ...]
    size: int
    shares: tuple[int, ...]
    shards: tuple[Shard, ...]
    actions: tuple[Action, ...] = ()
    scales: tuple[Scale, ...] = ()
    summed: tuple[str, ...] = ()
    with_parts: tuple[str, ...] = ()
    training: bool = False
    title: str = ""
    proof: str = ""

    @property
    def degree(self) -> int:
        """How many ranks it is cut over."""
        return len(self.shares)

    def bounds(self, rank: int) -> tuple[int, int]:
        """The first slice of the axis that a rank keeps, and the first that it does not."""
        begin = sum(self.shares[:rank])
        return begin, begin + self.shares[rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Parameters that every rank has whole, in each of `blocks` alike (`names` are relative to them), and why."""

    blocks: tuple[str, ...]
    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why something that could be cut by its axes is not."""

    reason: str


def resized(axis: str, size: int) -> str:
    """The axis of the same dimension when it has `size` indices, as in a run with another batch size or length.

    "2x*4", 12  ->  "3x*4". Raises ValueError where it is not known what has grown: on both sides of what is cut there
    is something else, or nothing is, or parts of a concatenation.
    """
    if size == len(coordinates_of(axis)):
        return axis
    product = re.fullmatch(r"((?:\d+x)*)\*(\d+)((?:x\d+)*)", axis)
    if product is None or bool(product[1]) == bool(product[3]) or size % int(product[2]):
        raise ValueError(f"{axis!r} can't have a size of {size}.")
    count = int(product[2])
    return f"{size // count}x*{count}" if product[1] else f"*{count}x{size // count}"


@dataclass(frozen=True, slots=True)
class LocalLength:
    """How long an axis is on a rank: `whole` in all and `local` here; with `each`, as it may also grow.

    `each`: how many slices there are in all and on the rank, where nothing but them is cut: "2x*4" with shares 3 and 1
    is 8, and 6 on rank 0; where it is 12, 9. None for a concatenation.
    """

    whole: int
    local: int
    each: tuple[int, int] | None

    @classmethod
    def of(cls, axis: str, shares: tuple[int, ...], rank: int) -> "LocalLength":
        """Work it out. Raises ValueError for what is not an axis."""
        product = re.fullmatch(r"(\d+x)*\*(\d+)(x\d+)*", axis)
        each = (int(product[2]), shares[rank]) if product else None
        return cls(len(coordinates_of(axis)), len(kept(axis, shares, rank)), each)

    def takes(self, length: int) -> bool:
        """Whether the axis may have this length in all."""
        return length == self.whole or (self.each is not None and length % self.each[0] == 0)

    def __call__(self, length: int) -> int:
        """Return the length on the rank of what is `length` in all. Raises ValueError if it can't be."""
        if not self.takes(length):
            raise ValueError(f"{length} is no length of this axis, which has {self.whole}.")
        return self.local if length == self.whole or self.each is None else length // self.each[0] * self.each[1]


def even_shares(size: int, degree: int) -> tuple[int, ...]:
    """Divide slices as evenly as they go; the first ranks get one more."""
    return tuple(size // degree + (rank < size % degree) for rank in range(degree))


def shares_of(size: int, count: int, parts: Sequence[int] = ()) -> tuple[int, ...]:
    """Divide slices among so many, in proportion to `parts`, or evenly where there are none."""
    return proportional_shares(size, parts) if parts else even_shares(size, count)


def proportional_shares(size: int, parts: Sequence[int]) -> tuple[int, ...]:
    """Divide slices in proportion to `parts`, each of which has one at least if there are enough.

    12 slices, 3:1 -> 9, 3; 10 slices, 3:1 -> 8, 2 (rounded down, then one more for whoever lacks most, the first of
    equals).
    """
    total = sum(parts)
    given = [size * part // total for part in parts]
    lacking = sorted(range(len(parts)), key=lambda index: -(size * parts[index] % total))
    for index in lacking[: size - sum(given)]:
        given[index] += 1
    while 0 in given and max(given) > 1:
        given[given.index(max(given))] -= 1
        given[given.index(0)] += 1
    return tuple(given)


def kept(axis: str, shares: tuple[int, ...], rank: int) -> numpy.ndarray:
    """Indices along a dimension that one rank keeps, ascending."""
    coordinates = coordinates_of(axis)
    begin = sum(shares[:rank])
    return numpy.flatnonzero((coordinates < 0) | ((coordinates >= begin) & (coordinates < begin + shares[rank])))


Factor = int | tuple["Product", ...]
"""A number of indices, less than 0 where it is the starred one; or parts one after the other."""
Product = tuple[Factor, ...]
"""Factors of a dimension, major to minor."""


@cache
def coordinates_of(axis: str) -> numpy.ndarray:
    """For every index along the dimension its slice of the starred factor, -1 where it has none.

    "2x*2"  ->  0 1 0 1        "(*2x2|1)"  ->  0 0 1 1 -1        Raises ValueError for what is not an axis.
    """
    made = _coordinates(parse_axis(axis))
    made.flags.writeable = False
    return made


def is_axis(axis: str, size: int) -> bool:
    """Whether a text describes an axis that has factors *size, and at most one in every product."""
    try:
        stars, length = _stars_and_length(parse_axis(axis), size)
    except ValueError:
        return False
    return stars == 1 and length <= LONGEST_DIMENSION


def parse_axis(axis: str) -> Product:
    """Return the factors that a text describes. Raises ValueError for what is not an axis."""
    tokens = re.findall(r"\d+|[*x()|]", axis)
    if "".join(tokens) != axis or tokens.count("(") > MOST_BRACKETS:
        raise ValueError(f"{axis!r} does not describe an axis.")
    tokens.reverse()
    try:
        product = _parse_product(tokens)
    except (IndexError, ValueError):
        tokens = [axis]
    if tokens:
        raise ValueError(f"{axis!r} does not describe an axis.")
    return product


def _parse_product(tokens: list[str]) -> Product:
    factors = [_parse_factor(tokens)]
    while tokens and tokens[-1] == "x":
        tokens.pop()
        factors.append(_parse_factor(tokens))
    return tuple(factors)


def _parse_factor(tokens: list[str]) -> Factor:
    token = tokens.pop()
    if token == "(":
        parts = [_parse_product(tokens)]
        while tokens[-1] == "|":
            tokens.pop()
            parts.append(_parse_product(tokens))
        if tokens.pop() != ")":
            raise ValueError("a bracket is not closed in an axis.")
        return tuple(parts)
    number = int(tokens.pop() if token == "*" else token)
    if number < 1:
        raise ValueError("a size in an axis is at least 1.")
    return -number if token == "*" else number


def _coordinates(product: Product) -> numpy.ndarray:
    made = numpy.full(1, -1)
    for factor in product:
        if isinstance(factor, tuple):
            minor = numpy.concatenate([_coordinates(part) for part in factor])
        else:
            minor = numpy.arange(-factor) if factor < 0 else numpy.full(factor, -1)
        # (major index, minor index): the coordinate is that of the one that has a star
        made = numpy.where(made[:, None] >= 0, made[:, None], minor[None, :]).reshape(-1)
    return made


def _stars_and_length(product: Product, size: int) -> tuple[int, int]:
    """How many factors have a star in them, and how many indices there are. Raises ValueError for another star."""
    stars, length = 0, 1
    for factor in product:
        if isinstance(factor, tuple):
            parts = [_stars_and_length(part, size) for part in factor]
            stars += any(starred for starred, _ in parts)
            length *= sum(part for _, part in parts)
        elif factor < 0 and -factor != size:
            raise ValueError("another factor is cut.")
        else:
            stars += factor < 0
            length *= abs(factor)
    if stars > 1:
        raise ValueError("two factors of a product are cut.")
    return stars, length
