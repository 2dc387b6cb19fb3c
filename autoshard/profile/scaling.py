"""How the figures of a profile grow with the batch, the sequence and the new tokens: from two profiles of other sizes.

Every dimension of every tensor is compared in both. With b = 1 -> 3 and s = 2048 -> 1024:

    1 -> 3          b                    4096 -> 4096    does not change
    2048 -> 1024    s                    2048 -> 3072    b s     (tokens, flattened)
    2047 -> 1023    s - 1

so the bytes of a tensor are a polynomial in b, s and t, where t = s + new tokens is what a cache holds. FLOPs are found
the same way, from their own ratio. A lookup in a table reads what it does at the profile's size: rows, or all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from autoshard.capture.graph import ModelGraph, Value
from autoshard.profile.experts import is_grouped
from autoshard.profile.measure import counted_values
from autoshard.profile.profile import Profile
from autoshard.workload import Workload

Monomial = tuple[int, int, int, int]
"""Powers of b, s and t; 1 at the end: only for batches of more than one."""
Polynomial = dict[Monomial, float]
_CONSTANT: Monomial = (0, 0, 0, 0)
_SHAPES: tuple[Monomial, ...] = (
    (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (1, 1, 0, 0), (1, 0, 1, 0), (0, 2, 0, 0), (0, 1, 1, 0), (1, 2, 0, 0),
    (1, 1, 1, 0), (0, 0, 2, 0), (1, 0, 2, 0),
)  # fmt: skip
"""What a dimension or a count of FLOPs may be proportional to, the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """An op that only runs for batches of more than one, before op `before` of the profile; beside op `beside`.

    `flops`, `moved`: polynomials. `made`: (polynomial, died) of every storage it makes, by the profile's op times.
    """

    before: int
    beside: int
    dtype: str
    flops: int
    moved: int
    made: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scaling:
    """Polynomials of a profile as rows of coefficients; columns are `monomials`.

    Attributes:
        sizes: (b, s, t) of the profile; 0 for what can't be varied.
        table: [polynomials, monomials]. The others are rows of it: per value its bytes, per storage its bytes, per op
            its FLOPs and the bytes it moves.
        guessed: quantities that fit none of the shapes above: they are taken to grow in proportion to s, or to b.
    """

    sizes: tuple[int, int, int]
    monomials: tuple[Monomial, ...]
    table: np.ndarray
    value: np.ndarray
    storage: np.ndarray
    flops: np.ndarray
    moved: np.ndarray
    extra: tuple[Extra, ...]
    guessed: int

    def at(self, batch: float, sequence: float, total: float) -> np.ndarray:
        """Return the value of every polynomial at some sizes."""
        return self.table @ powers(self.monomials, batch, sequence, total)


def powers(monomials: Sequence[Monomial], batch: float, sequence: float, total: float) -> np.ndarray:
    """Return the value of every monomial at some sizes."""
    return np.array([batch**i * sequence**j * total**k * (not many or batch > 1) for i, j, k, many in monomials])


def other_size(workload: Workload) -> Workload | None:
    """Return the workload for the second profile: three times the batch, half the sequence. None if not known."""
    batch, length, new = workload.batch_size, workload.sequence_length, workload.new_tokens
    if batch is None and length is None:
        return None
    half = None if length is None else length // 2 if length % 2 == 0 and length > 2 else 2 * length
    return replace(
        workload,
        batch_size=None if batch is None else 3 * batch,
        sequence_length=half,
        new_tokens=5 * new if length is not None else new,
    )


def find_scaling(profile: Profile, other: Profile) -> Scaling | None:
    """Compare two profiles of one model; None if it runs quite other ops at other sizes."""
    one, two = profile.graph, other.graph
    pairs = align([op.target for op in one.ops], [op.target for op in two.ops])
    partner = _partners(one, two, pairs) if pairs is not None else None
    if pairs is None or partner is None:
        return None
    fit = _Fit(_sizes(profile.workload), _sizes(other.workload))
    value = np.zeros(len(one.values), np.int64)
    back: dict[int, int] = {}  # value of the other graph -> polynomial
    full: dict[int, int] = {}
    for a in one.values:
        b = two.values[partner[a.index]] if a.index in partner else a
        value[a.index] = fit.tensor_of(a, b)
        back[b.index] = int(value[a.index]) if b is not a else back.get(b.index, 0)
        if a.nbytes == one.storages[a.storage].nbytes and b.nbytes == two.storages[b.storage].nbytes and b is not a:
            full.setdefault(a.storage, int(value[a.index]))
    other_storage = {
        a.storage: two.values[partner[a.index]].storage for a in reversed(one.values) if a.index in partner
    }
    storage = np.array([
        full[a.index] if a.index in full
        else fit.amount(a.nbytes, two.storages[other_storage[a.index]].nbytes if a.index in other_storage else a.nbytes)
        for a in one.storages
    ], np.int64)  # fmt: skip
    matched = {i: j for i, j in pairs if i >= 0 and j >= 0}
    flops = [
        fit.amount(op.flops, two.ops[matched[op.index]].flops if op.index in matched else op.flops) for op in one.ops
    ]
    smaller = [value.nbytes > one.storages[value.storage].nbytes for value in one.values]
    read = [int(storage[row.storage] if smaller[i] else value[i]) for i, row in enumerate(one.values)]
    moved = [fit.sum(tuple(sorted(read[v] for v in counted))) for counted in counted_values(one)]
    for op in one.ops:
        if is_grouped(op):  # how many experts are read does not follow from sizes alone
            same = matched.get(op.index)
            now = profile.op_bytes[op.index]
            moved[op.index] = fit.amount(now, now if same is None else other.op_bytes[same])
    extra = _extra(fit, one, two, pairs, back, other) if len(matched) < len(two.ops) else ()
    return Scaling(
        sizes=fit.base, monomials=tuple(fit.columns), table=fit.rows(), value=value, storage=storage,
        flops=np.array(flops, np.int64), moved=np.array(moved, np.int64), extra=extra, guessed=fit.guessed,
    )  # fmt: skip


_WINDOW = 48
"""Ops that are looked at together where two sequences differ."""
_FEW = 8
"""So many at an end may be in one of them only."""


def align(one: Sequence[object], two: Sequence[object]) -> list[tuple[int, int]] | None:
    """Return pairs of equal items of two sequences, in order; -1 beside what only one of them has.

    Where they differ, as many as possible of the next items are paired. None if that is fewer than half.
    """
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(one) or j < len(two):
        if i < len(one) and j < len(two) and one[i] == two[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
            continue
        found = _window(one[i : i + _WINDOW], two[j : j + _WINDOW])
        length = max(len(one[i : i + _WINDOW]), len(two[j : j + _WINDOW]))
        if 2 * sum(a >= 0 and b >= 0 for a, b in found) < length > _FEW:
            return None
        taken = found if max(len(one) - i, len(two) - j) <= _WINDOW else found[: len(found) // 2]
        pairs += [(i + a if a >= 0 else -1, j + b if b >= 0 else -1) for a, b in taken]
        i, j = i + sum(a >= 0 for a, _ in taken), j + sum(b >= 0 for _, b in taken)
    return pairs


def _window(one: Sequence[object], two: Sequence[object]) -> list[tuple[int, int]]:
    """Align two short sequences by their longest common subsequence."""
    most = [[0] * (len(two) + 1) for _ in range(len(one) + 1)]
    for i in range(len(one) - 1, -1, -1):
        for j in range(len(two) - 1, -1, -1):
            most[i][j] = most[i + 1][j + 1] + 1 if one[i] == two[j] else max(most[i + 1][j], most[i][j + 1])
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(one) or j < len(two):
        if i < len(one) and j < len(two) and one[i] == two[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif j == len(two) or (i < len(one) and most[i + 1][j] >= most[i][j + 1]):
            pairs.append((i, -1))
            i += 1
        else:
            pairs.append((-1, j))
            j += 1
    return pairs


def _partners(one: ModelGraph, two: ModelGraph, pairs: Sequence[tuple[int, int]]) -> dict[int, int] | None:
    """Value of the first graph -> the same one of the second; None if parameters and inputs differ."""
    given = [[value.index for value in graph.values if value.op < 0] for graph in (one, two)]
    if len(given[0]) != len(given[1]):
        return None
    partner = dict(zip(*given, strict=True))
    for i, j in pairs:
        if i >= 0 and j >= 0 and len(one.ops[i].outputs) == len(two.ops[j].outputs):
            partner.update(zip(one.ops[i].outputs, two.ops[j].outputs, strict=True))
    for i, j in pairs:  # a view in one may be a copy in the other: what reads it tells which
        if i >= 0 and j >= 0 and len(one.ops[i].inputs) == len(two.ops[j].inputs):
            for a, b in zip(one.ops[i].inputs, two.ops[j].inputs, strict=True):
                partner.setdefault(a, b)
    return partner


def _extra(
    fit: "_Fit",
    one: ModelGraph,
    two: ModelGraph,
    pairs: Sequence[tuple[int, int]],
    back: dict[int, int],
    other: Profile,
) -> tuple[Extra, ...]:
    """What only runs in the other graph: its tensors are as large as others that are known."""
    time = np.zeros(len(two.ops) + 1, np.int64)  # of the other graph -> of the first
    at = 0
    for i, j in pairs:
        at = i if i >= 0 else at
        if j >= 0:
            time[j] = at if i >= 0 else at + 1
    time[-1] = at + 1
    counted = [*counted_values(two)]
    found = []
    for i, j in pairs:
        if i >= 0:
            continue
        op = two.ops[j]
        for v in op.outputs:
            if v not in back:
                back[v] = fit.like(two.values[v].nbytes, [back[u] for u in op.inputs if u in back])
        before = int(time[j])
        near = [i for i in (before - 1, before) if 0 <= i < len(one.ops)]
        path = two.calls[op.call].path
        beside = next((i for i in near if one.calls[one.ops[i].call].path == path), near[-1])
        made = {two.values[v].storage: back[v] for v in op.outputs if two.storages[two.values[v].storage].born == j}
        found.append(
            Extra(
                before=before, beside=beside, dtype=other.op_dtypes[j], flops=fit.many(fit.like(op.flops, [])),
                moved=fit.many(fit.sum(tuple(sorted(back[v] for v in counted[j])))),
                made=tuple((fit.many(p), int(time[min(two.storages[s].died, len(two.ops))])) for s, p in made.items()),
            )
        )  # fmt: skip
    return tuple(found)


def _sizes(workload: Workload) -> tuple[int, int, int]:
    length = workload.sequence_length or 0
    return workload.batch_size or 0, length, length + workload.new_tokens


@dataclass(slots=True)
class _Fit:
    """Polynomials found so far, numbered; each distinct question is answered once."""

    base: tuple[int, int, int]
    other: tuple[int, int, int]
    columns: dict[Monomial, int] = field(default_factory=lambda: {_CONSTANT: 0})
    numbers: dict[tuple[tuple[Monomial, float], ...], int] = field(default_factory=dict)
    amounts: dict[tuple[int, int], int] = field(default_factory=dict)
    tensors: dict[tuple[tuple[int, ...], tuple[int, ...], int], int] = field(default_factory=dict)
    sums: dict[tuple[int, ...], int] = field(default_factory=dict)
    found: list[Polynomial] = field(default_factory=list)
    guessed: int = 0

    def number(self, polynomial: Polynomial) -> int:
        key = tuple(sorted(polynomial.items()))
        if key not in self.numbers:
            self.numbers[key] = len(self.found)
            self.found.append(polynomial)
            for monomial in polynomial:
                self.columns.setdefault(monomial, len(self.columns))
        return self.numbers[key]

    def rows(self) -> np.ndarray:
        table = np.zeros((len(self.found), len(self.columns)))
        for i, polynomial in enumerate(self.found):
            for monomial, coefficient in polynomial.items():
                table[i, self.columns[monomial]] = coefficient
        return table

    def amount(self, before: int, after: int) -> int:
        """Number of the polynomial of a quantity."""
        if (before, after) not in self.amounts:
            self.amounts[before, after] = self.number(self.shape(before, after))
        return self.amounts[before, after]

    def tensor_of(self, a: Value, b: Value) -> int:
        """Number of the polynomial of a tensor's bytes, from the tensor in both graphs."""
        size = a.dtype.itemsize
        shaped = a.nbytes == prod(a.shape) * size and b.nbytes == prod(b.shape) * size and len(a.shape) == len(b.shape)
        return self.tensor(a.shape, b.shape, size) if shaped else self.amount(a.nbytes, b.nbytes)

    def like(self, after: int, likely: Sequence[int]) -> int:
        """Number of the first polynomial that is `after` at the other sizes; a constant if none is."""
        for number in (*likely, *range(len(self.found))):
            if sum(c * _value(m, self.other) for m, c in self.found[number].items()) == after:
                return number
        return self.amount(after, after)

    def many(self, number: int) -> int:
        """Number of the same polynomial for batches of more than one."""
        return self.number({(i, j, k, 1): c for (i, j, k, _), c in self.found[number].items() if c})

    def tensor(self, before: Sequence[int], after: Sequence[int], itemsize: int) -> int:
        """Number of the polynomial of a tensor's bytes: the product of its dimensions."""
        key = (tuple(before), tuple(after), itemsize)
        if key not in self.tensors:
            made: Polynomial = {_CONSTANT: float(itemsize)}
            for a, b in zip(before, after, strict=True):
                made = _product(made, self.shape(a, b))
            self.tensors[key] = self.number(made)
        return self.tensors[key]

    def sum(self, parts: tuple[int, ...]) -> int:
        """Number of the sum of some polynomials."""
        if parts not in self.sums:
            total: Polynomial = {}
            for part in parts:
                for monomial, coefficient in self.found[part].items():
                    total[monomial] = total.get(monomial, 0.0) + coefficient
            self.sums[parts] = self.number(total)
        return self.sums[parts]

    def shape(self, before: int, after: int) -> Polynomial:
        """What a number is, that is `before` at the first sizes and `after` at the others."""
        if before == after:
            return {_CONSTANT: float(before)}
        for monomial in _SHAPES:
            a, b = _value(monomial, self.base), _value(monomial, self.other)
            if a and b and a != b and before * b == after * a:
                return {monomial: before / a}
        for axis in (1, 2, 0):  # k s + c
            a, b = self.base[axis], self.other[axis]
            if a != b and (after - before) % (b - a) == 0 and (slope := (after - before) // (b - a)) > 0:
                unit: Monomial = (int(axis == 0), int(axis == 1), int(axis == 2), 0)
                return {unit: float(slope), _CONSTANT: float(before - slope * a)}
        self.guessed += 1
        axis = 1 if self.base[1] != self.other[1] else 0
        a, b = self.base[axis], self.other[axis]
        unit = (int(axis == 0), int(axis == 1), 0, 0)
        slope_of_guess = (after - before) / (b - a)
        return {unit: slope_of_guess, _CONSTANT: before - slope_of_guess * a}


def _value(monomial: Monomial, sizes: tuple[int, int, int]) -> int:
    return prod(size**power for size, power in zip(sizes, monomial[:3], strict=True))


def _product(one: Polynomial, other: Polynomial) -> Polynomial:
    made: Polynomial = {}
    for a, x in one.items():
        for b, y in other.items():
            monomial = (a[0] + b[0], a[1] + b[1], a[2] + b[2], max(a[3], b[3]))
            made[monomial] = made.get(monomial, 0.0) + x * y
    return made
