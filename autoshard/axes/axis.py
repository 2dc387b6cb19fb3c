"""The algebra of axes: what a dimension of a tensor is made of.

An axis is a product of terms, major to minor; a term is a factor, or a concatenation of axes:

    512 = 8 x 64                   a factor that a view has split: it is bound to (factor 8, factor 64) from then on
    6144 = (4096 | 1024 | 1024)    a fused projection that slices have cut apart: one Cat of three axes

Two dimensions that an op pairs element by element are unified: afterwards they are made of the same factors. What is
learnt is remembered by binding factors, as in the unification of terms, so it holds for all tensors seen before as
well. Sizes never change; factors of size 1 do not exist. The factors of what can't be expressed are `unshardable`:
never cut.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import gcd, prod

Axis = tuple["Factor | Cat", ...]
"""Terms, major to minor; () is an axis of size 1."""
DEEPEST = 32
"""How many concatenations inside of each other are followed."""
MOST_ELEMENTS = 16
"""After so many single elements were taken out of an axis, by a loop, say, all of it is cut into such."""


class Factor:
    """A factor about which nothing more is known; `bound` once something is. `unshardable`: why it can't be cut, or "".

    `rigid`: it stays one factor, as the batch does: what would split it, cut it or pair it with another unshardable or
    rigid one loses it instead. Whoever made it takes `unshardable` back after each op.
    """

    __slots__ = ("bound", "rigid", "size", "unshardable")

    def __init__(self, size: int, *, rigid: bool = False) -> None:
        self.size = size
        self.bound: Axis | None = None
        self.unshardable = ""
        self.rigid = rigid

    def __repr__(self) -> str:
        return f"{self.size}" if self.bound is None else "x".join(map(repr, resolve(self.bound)))


class Cat:
    """Axes one after the other. `apart`: each is one element, so that nothing more can be known of them."""

    __slots__ = ("apart", "segments", "size")

    def __init__(self, segments: Iterable[Axis]) -> None:
        self.segments = tuple(segments)
        self.size = sum(map(size_of, self.segments))
        self.apart = not any(self.segments)

    def __repr__(self) -> str:
        return "(" + "|".join("x".join(map(repr, resolve(axis))) or "1" for axis in self.segments) + ")"


def fresh(size: int) -> Axis:
    """An axis of which nothing is known."""
    return (Factor(size),) if size != 1 else ()


def whole(size: int, why: str) -> Axis:
    """An axis of which nothing is known but that it can't be cut."""
    made = fresh(size)
    make_unshardable(made, why)
    return made


def size_of(axis: Axis) -> int:
    return axis[0].size if len(axis) == 1 else prod(term.size for term in axis)


def local_size(axis: Axis, slices: Mapping["Factor", int]) -> int:
    """The size of an axis on a rank that keeps so many slices of some factors; it must be resolved."""
    return prod(
        slices.get(term, term.size)
        if isinstance(term, Factor)
        else sum(local_size(segment, slices) for segment in term.segments)
        for term in axis
    )


def resolve(axis: Axis) -> Axis:
    """The axis as far as it is known now: bound factors replaced, nested concatenations flattened."""
    for term in axis:  # most are known already
        if type(term) is not Factor or term.bound is not None:
            break
    else:
        return axis
    found: list[Factor | Cat] = []
    for term in axis:
        if isinstance(term, Cat):
            found.append(_flat(term))
        elif term.bound is None:
            found.append(term)
        else:
            found.extend(_bound_of(term))
    return tuple(found)


def _bound_of(term: Factor) -> Axis:
    """What a bound factor is, resolved from the inside: a sequence taken token by token nests as deep as it is long."""
    order: list[Factor] = []
    todo: list[Factor | Cat] = [term]
    while todo:
        one = todo.pop()
        if isinstance(one, Cat):
            todo.extend(() if one.apart else chain(*one.segments))
        elif one.bound is not None:
            order.append(one)
            todo.extend(one.bound)
    found: Axis = ()
    for inner in reversed(order):
        assert inner.bound is not None
        inner.bound = found = resolve(inner.bound)
    return found


def _flat(cat: Cat) -> Cat:
    """The same concatenation, with those in it made a part of it."""
    if cat.apart:
        return cat
    segments: list[Axis] = []
    for segment in map(resolve, cat.segments):
        if len(segment) == 1 and isinstance(segment[0], Cat):
            segments.extend(segment[0].segments)
        else:
            segments.append(segment)
    cat.segments, cat.apart = tuple(segments), not any(segments)  # kept, as one of many parts is looked at often
    return cat


def factors_of(axis: Axis) -> Iterator[Factor]:
    """Every factor in an axis, as often as it occurs."""
    for term in resolve(axis):
        if isinstance(term, Factor):
            yield term
        else:
            for segment in term.segments:
                yield from factors_of(segment)


def covers(axis: Axis, factor: Factor) -> bool:
    """Whether every index along the axis lies in one slice of the factor: no part of a concatenation is without it."""
    return any(
        term is factor if isinstance(term, Factor) else all(covers(segment, factor) for segment in term.segments)
        for term in resolve(axis)
    )


def times(axis: Axis, factor: Factor | None = None) -> int:
    """How often a factor occurs along one way through an axis; without one, how often rigid ones do."""
    return sum(
        (term is factor if factor is not None else term.rigid)
        if isinstance(term, Factor)
        else max((times(part, factor) for part in term.segments), default=0)
        for term in resolve(axis)
    )


def make_unshardable(axis: Axis, why: str) -> None:
    """Block every factor of an axis; the first reason stays."""
    for factor in factors_of(axis):
        factor.unshardable = factor.unshardable or why


def unify(left: Axis, right: Axis, why: str = "", depth: int = 0) -> None:
    """Make two axes of the same size the same; `why` names the place in case they don't match.

    `depth`: how many concatenations they are inside of. An axis that is paired with itself moved by one, as tokens are
    with those before them, would go as deep as it is long: such can't be cut.
    """
    if depth > DEEPEST:
        make_unshardable((*left, *right), f"{why}: an axis would be a part of itself")
        return
    while True:
        left, right = resolve(left), resolve(right)
        while left and right and left[0] is right[0]:
            left, right = left[1:], right[1:]
        if not left or not right:
            return
        major, minor = left[0], right[0]
        if major.size == minor.size:
            _unify_factors(major, minor, why, depth)
            left, right = left[1:], right[1:]
            continue
        common = gcd(major.size, minor.size)
        if common == 1 or not (_split(major, common) and _split(minor, common)):
            here, there = _together(left, [term.size for term in right])
            make_unshardable(
                (*left[:here], *right[:there]),
                f"{why}: sizes {_sizes(left[:here])} and {_sizes(right[:there])} have no common parts",
            )
            left, right = left[here:], right[there:]
            continue
        left, right = (*_halves(major, common), *left[1:]), (*_halves(minor, common), *right[1:])


def reshape(axes: Iterable[Axis], sizes: Iterable[int], why: str = "") -> list[Axis]:
    """The axes of a tensor seen in another shape of as many elements.

    (2, 512 = 8×64) as (2, 8, 64)   ->   2 | 8 | 64          (2, 8, 64) as (16, 64)   ->   2×8 | 64

    Dimensions that are divided anew together are apart from the others: what can't be expressed there loses only them.
    """
    rest = resolve(tuple(term for axis in axes for term in axis))
    left = list(sizes)
    made: list[Axis] = []
    while left:
        terms, count = _together(rest, left)
        part, rest = rest[:terms], rest[terms:]
        for size in left[:count]:
            axis, part = _take(part, size, why)
            made.append(axis)
        left = left[count:]
    return made


def _together(axis: Axis, sizes: Sequence[int]) -> tuple[int, int]:
    """How many leading factors, and how many sizes, hold as many elements as each other: the fewest."""
    if 0 in sizes:
        return len(axis), len(sizes)
    terms, count, have, want = 0, 1, 1, sizes[0]
    while have != want:
        if have < want:
            have, terms = have * axis[terms].size, terms + 1
        else:
            want, count = want * sizes[count], count + 1
    return terms, count


def _take(axis: Axis, size: int, why: str) -> tuple[Axis, Axis]:
    """Split an axis into its major part of `size` and the rest."""
    rest = resolve(axis)
    if size == 0:
        return fresh(0), tuple(term for term in rest if term.size)
    taken: list[Factor | Cat] = []
    while size > 1:
        if not rest or not rest[0].size:  # an empty tensor in another shape
            return _reground(tuple(taken), rest, size, why)
        term = rest[0]
        if size % term.size == 0:
            taken.append(term)
            size, rest = size // term.size, rest[1:]
            continue
        common = gcd(size, term.size)
        if common == 1 or not _split(term, common):
            return _reground(tuple(taken), rest, size, why)
        rest = resolve((*_halves(term, common), *rest[1:]))
    return tuple(taken), rest


def _reground(taken: Axis, rest: Axis, size: int, why: str) -> tuple[Axis, Axis]:
    """Give up on what does not divide: the old factors and the new ones in their place can't be cut."""
    why = f"{why}: {size} is no part of {_sizes(rest)}"
    make_unshardable(rest, why)
    total = size_of(rest)
    return (*taken, *whole(size, why)), whole(total // size if total % size == 0 else 0, why)


def cut(axis: Axis, at: int, why: str = "") -> tuple[Axis, Axis]:
    """Split an axis into what comes before index `at` and the rest: it becomes a concatenation.

    0 < at < size. Where the boundary lies inside a minor factor, nothing can be cut.
    """
    axis = resolve(axis)
    minor = size_of(axis[1:])
    if at % minor:
        why = f"{why}: a part of {at} cuts through {_sizes(axis)}"
        make_unshardable(axis, why)
        return whole(at, why), whole(size_of(axis) - at, why)
    before, after = _cut_factor(axis[0], at // minor, why)
    return resolve((*before, *axis[1:])), resolve((*after, *axis[1:]))


def _cut_factor(term: "Factor | Cat", at: int, why: str) -> tuple[Axis, Axis]:
    if isinstance(term, Factor):
        before, after = fresh(at), fresh(term.size - at)
        if term.rigid:
            make_unshardable((term, *before, *after), f"{why}: takes a part of it")
        else:
            _bind(term, (Cat((before, after)),))
        return before, after
    left: list[Axis] = []
    right = list(term.segments)
    while at:
        size = size_of(right[0])
        if size <= at:
            left.append(right.pop(0))
            at -= size
            continue
        before, after = cut(right[0], at, why)
        left.append(before)
        right[0] = after
        at = 0
    return _joined(left), _joined(right)


def cut_out(axis: Axis, at: int, why: str = "") -> None:
    """Make index `at` of an axis a part of its own.

    A loop over all of them would cut the rest again each time, which is quadratic in their number: it is taken for one.
    """
    axis = resolve(axis)
    if len(axis) == 1 and isinstance(axis[0], Cat):
        if axis[0].apart:
            return
        if sum(not segment for segment in axis[0].segments) > MOST_ELEMENTS:
            for segment in filter(None, axis[0].segments):
                unify(segment, (Cat([()] * size_of(segment)),), why)
            return
    for end in (at + 1, at):
        if 0 < end < size_of(axis):
            axis, _ = cut(axis, end, why)


def concatenate(segments: Iterable[Axis]) -> Axis:
    """One axis after the other."""
    return _joined([segment for segment in segments if size_of(segment)])


def _joined(segments: list[Axis]) -> Axis:
    return segments[0] if len(segments) == 1 else (Cat(segments),)


def every(axis: Axis, step: int, why: str = "") -> Axis:
    """Every `step`-th index: the major factor, if the step divides the size; the minor one can't be cut then."""
    if size_of(axis) % step:
        why = f"{why}: a step of {step} does not divide {_sizes(axis)}"
        make_unshardable(axis, why)
        return whole(-(-size_of(axis) // step), why)
    major, minor = _take(axis, size_of(axis) // step, why)
    make_unshardable(minor, f"{why}: takes one of every {step}")
    return major


def _unify_factors(left: "Factor | Cat", right: "Factor | Cat", why: str, depth: int) -> None:
    """Make two factors of the same size the same. Where a factor is a part of the other one, that one can't be cut."""
    if isinstance(left, Factor) and not left.rigid:
        if isinstance(right, Cat) and left in factors_of((right,)):
            make_unshardable((right,), f"{why}: an axis would be a part of itself")
        elif left.unshardable and any(factor.rigid for factor in factors_of((right,))):
            # What can't be cut meets it here, and not wherever it was before.
            make_unshardable((right,), left.unshardable)
        else:
            _bind(left, (right,))
        return
    if isinstance(right, Factor) and not right.rigid:
        _unify_factors(right, left, why, depth)
        return
    if isinstance(left, Factor) or isinstance(right, Factor):
        make_unshardable((left, right), f"{why}: pairs different factors")
        return
    ours, theirs = list(left.segments), list(right.segments)
    while ours and theirs:
        mine, other = ours.pop(0), theirs.pop(0)
        here, there = size_of(mine), size_of(other)
        if here > there:
            mine, rest = cut(mine, there, why)
            ours.insert(0, rest)
        elif there > here:
            other, rest = cut(other, here, why)
            theirs.insert(0, rest)
        unify(mine, other, why, depth + 1)


def _bind(factor: Factor, axis: Axis) -> None:
    factor.bound = axis
    if factor.unshardable:
        make_unshardable(axis, factor.unshardable)


def _split(term: "Factor | Cat", major: int) -> bool:
    """Make a factor a product of `major` and the rest; False if a concatenation does not allow it."""
    if isinstance(term, Factor):
        if term.rigid and term.size != major:
            return False
        if term.size != major:
            _bind(term, (*fresh(major), *fresh(term.size // major)))
        return True
    minor = term.size // major
    return all(size_of(segment) % minor == 0 for segment in term.segments)


def _halves(term: "Factor | Cat", major: int) -> Axis:
    """The parts of a factor that `_split` said can be split. (a×m | b×m) is (a | b) × m, the same m in all segments."""
    if isinstance(term, Factor):
        return resolve((term,))
    minor = term.size // major
    if minor == 1:
        return (term,)
    majors, minors = [], []
    for segment in term.segments:
        above, below = _take(segment, size_of(segment) // minor, "")
        majors.append(above)
        minors.append(below)
    for below in minors[1:]:
        unify(minors[0], below)
    return (*_joined([resolve(above) for above in majors]), *resolve(minors[0]))


def _sizes(axis: Axis) -> str:
    return "x".join(map(repr, resolve(axis))) or "1"


def describe(axis: Axis, factor: Factor) -> str:
    """The axis as text in the form of `sharding`, with the factor starred: "8x*4x64", "(*32x64|512)"."""
    parts: list[str] = []
    plain = 1
    for term in resolve(axis):
        texts = [describe(segment, factor) for segment in term.segments] if isinstance(term, Cat) else []
        if term is factor or any("*" in text for text in texts):
            parts += [str(plain)] if plain > 1 else []
            parts.append(f"*{term.size}" if term is factor else f"({'|'.join(texts)})")
            plain = 1
        else:
            plain *= term.size
    return "x".join([*parts, str(plain)] if plain > 1 else parts) or "1"
