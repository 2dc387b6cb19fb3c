"""Which sample of the batch every element of a tensor belongs to.

    tokens [2, 3]      0 0 0      masks, hidden states      0 0 0      a weight     -1 -1      x - x.mean(0)    -2 -2 -2
                       1 1 1      of them                   1 1 1                   -1 -1                       -2 -2 -2

An element belongs to sample `s` if nothing else of the batch decides its value. Every op hands this on (see
`sample_rules`), forwards, and what is not known to keep samples apart mixes them. No value of a weight, a buffer or an
activation is asked.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

import torch

SHARED = -1
"""An element that depends on no sample."""
MIXED = -2
"""An element that depends on several samples, or that may."""
PLACE = -3
"""An element that depends on how many samples there are, or on which place in the batch it has."""
FIRST_ENTRY = 1 << 20
"""Codes from here on are entries of a selection: each belongs to one sample, which values decide (see `entries`)."""
Shape = tuple[int, ...]
Varies = bool | int


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """The samples of one tensor. Equal layers share them: what is made of them is looked up by which objects they are.

    Attributes:
        owner: their numbers, or codes; of size 1 along a dimension along which they are all the same.
        varies: by dimension, whether elements that depend on no sample may differ along it. A number above 1: they
            are the same again after so many places, as those of a table that is repeated for every sample.
    """

    shape: Shape
    owner: torch.Tensor
    varies: tuple[Varies, ...]

    @cached_property
    def shared(self) -> bool:
        """Whether nothing of it depends on the batch."""
        return bool((self.owner == SHARED).all())

    @cached_property
    def apart(self) -> bool:
        """Whether every element belongs to one sample at most."""
        return not bool(((self.owner == MIXED) | (self.owner == PLACE)).any())

    def full(self) -> torch.Tensor:
        """The numbers in the shape of the tensor, without memory of their own."""
        return self.owner.expand(self.shape)


def samples(shape: Sequence[int], owner: torch.Tensor | int, varies: Sequence[Varies] | bool = False) -> Samples:
    """Samples in their shortest form."""
    shape = tuple(shape)
    if isinstance(owner, int):
        owner = torch.full((1,) * len(shape), owner, dtype=torch.int32)
    for dim in range(owner.dim()):  # before anything is compared: this costs nothing
        if owner.shape[dim] > 1 and owner.stride(dim) == 0:
            owner = owner.narrow(dim, 0, 1)
    for dim in range(owner.dim()):
        if owner.shape[dim] > 1 and bool((owner == owner.narrow(dim, 0, 1)).all()):
            owner = owner.narrow(dim, 0, 1)
        elif owner.shape[dim] == 0:
            owner = owner.new_full((*owner.shape[:dim], 1, *owner.shape[dim + 1 :]), SHARED)
    flags: tuple[Varies, ...] = (varies,) * len(shape) if isinstance(varies, bool) else tuple(varies)
    if not bool((owner < 0).any()):
        flags = (False,) * len(shape)
    flags = tuple(flag if size > 1 else False for flag, size in zip(flags, shape, strict=True))
    return Samples(shape=shape, owner=owner.contiguous(), varies=flags)


@cache
def uniform(shape: Shape) -> Samples:
    """Samples of a tensor that holds one number, whatever the batch is."""
    return samples(shape, SHARED)


@cache
def fixed(shape: Shape) -> Samples:
    """Samples of a tensor that the batch does not decide: a weight, a table."""
    return samples(shape, SHARED, True)


@cache
def all_of(shape: Shape, code: int) -> Samples:
    """Samples of a tensor all of whose elements have one code."""
    return samples(shape, code, code == SHARED)


def join(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """What two elements make together, one by one: shared with a sample is the sample, two samples are mixed."""
    both = torch.where(left == right, left, torch.full((), MIXED, dtype=torch.int32))
    return torch.where(left == SHARED, right, torch.where(right == SHARED, left, both))


def reduce(owner: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
    """What all elements along dimensions make together; the dimensions stay, of size 1."""
    dims = [dim for dim in dims if owner.shape[dim] != 1]
    if not dims:
        return owner
    largest = owner.amax(dims, keepdim=True)
    least = torch.where(owner == SHARED, largest, owner).amin(dims, keepdim=True)
    return torch.where(least == largest, largest, torch.full((), MIXED, dtype=torch.int32))


def whole(item: Samples) -> int:
    """The one code that all elements make together."""
    if 0 in item.shape:
        return SHARED
    return int(reduce(item.owner, range(item.owner.dim())))


def differs(owner: torch.Tensor, dim: int, varies: Varies = True) -> bool:
    """Whether two samples stand in different places along a dimension, or in what repeats along it."""
    size = owner.shape[dim]
    if size == 1:
        return False
    if varies > 1 and size % varies == 0:
        owner, dim = owner.unflatten(dim, (-1, int(varies))), dim + 1
    together = reduce(owner, [dim]) == MIXED
    return bool((together & ~(owner == MIXED).any(dim, keepdim=True)).any())


def both(left: Varies, right: Varies) -> Varies:
    """How two elements differ along a dimension together."""
    if not left or not right:
        return left or right
    return left if left == right else True


def combine(items: Sequence[Samples], shape: Sequence[int]) -> Samples:
    """What an op that works element by element makes of tensors, which broadcast to `shape`.

    A shared element that differs from place to place of the batch would meet other samples in a part of it: mixed.
    """
    ndim = len(shape)
    owner = torch.full((1,) * ndim, SHARED, dtype=torch.int32)
    varies: list[Varies] = [False] * ndim
    owners, flags = [], []
    for item in items:
        left = ndim - len(item.shape)
        owners.append(item.owner.reshape((1,) * left + tuple(item.owner.shape)))
        flags.append([False] * left + [
            flag if size == shape[left + dim] else bool(flag)
            for dim, (flag, size) in enumerate(zip(item.varies, item.shape, strict=True))
        ])  # fmt: skip
        owner = join(owner, owners[-1])
        varies = [both(*pair) for pair in zip(varies, flags[-1], strict=True)]
    for place, own in enumerate(flags):
        if any(own) and _meets(owners[place], owners[:place] + owners[place + 1 :], own):
            owner = torch.where(owner >= 0, torch.full((), MIXED, dtype=torch.int32), owner)
            break
    return samples(shape, owner, varies)


def _meets(owner: torch.Tensor, others: Sequence[torch.Tensor], varies: Sequence[Varies]) -> bool:
    """Whether shared elements that differ along the batch meet elements of samples."""
    shared = owner == SHARED
    met = torch.full((1,) * owner.dim(), SHARED, dtype=torch.int32)
    for other in others:
        met = join(met, torch.where(shared, other, torch.full((), SHARED, dtype=torch.int32)))
    return any(flag and differs(met, dim, flag) for dim, flag in enumerate(varies))


def taken_together(item: Samples, dims: Iterable[int]) -> torch.Tensor:
    """The numbers of what all elements along dimensions make together, which stay, of size 1.

    Shared elements that differ along the batch would go together with other samples in a part of it: mixed.
    """
    dims = list(dims)
    owner = reduce(item.owner, dims)
    if any(item.varies) and bool((item.owner == SHARED).any()) and owner.shape != item.owner.shape:
        absorbed = torch.where((item.owner == SHARED).any(dim=dims, keepdim=True), owner, SHARED) if dims else owner
        if any(flag and differs(absorbed, d, flag) for d, flag in enumerate(item.varies) if d not in dims):
            return torch.where(owner >= 0, torch.full((), MIXED, dtype=torch.int32), owner)
    return owner


def moved(item: Samples, places: Mapping[int, int], shape: Sequence[int]) -> Samples:
    """Dimensions of a tensor in the places of another one's; all elements along the others are taken together.

    `places`: by dimension of the tensor, which one of `shape` it becomes.
    """
    owner = taken_together(item, [dim for dim in range(len(item.shape)) if dim not in places])
    order = sorted(places, key=places.__getitem__)
    sizes = [1] * len(shape)
    varies: list[Varies] = [False] * len(shape)
    for dim in order:
        sizes[places[dim]] = owner.shape[dim]
        same = item.shape[dim] == shape[places[dim]]
        varies[places[dim]] = item.varies[dim] if same else bool(item.varies[dim])
    rest = [dim for dim in range(len(item.shape)) if dim not in places]
    return Samples(shape=tuple(shape), owner=owner.permute([*order, *rest]).reshape(sizes), varies=tuple(varies))


def reshaped(item: Samples, shape: Sequence[int], counts: Sequence[bool] = ()) -> Samples:
    """The same elements in another shape. Dimensions that are divided anew together are apart from the others.

    `counts`: which dimensions of the tensor are longer for a larger batch.
    """
    shape = tuple(shape)
    if 0 in shape or 0 in item.shape:
        return samples(shape, whole(item), True)
    sizes: list[int] = []
    varies: list[Varies] = []
    owner = item.owner
    done: list[int] = []
    for old, new in _groups(item.shape, shape):
        kept = all(owner.shape[dim] == 1 for dim in old)
        sizes += [1] * len(new) if kept else [shape[dim] for dim in new]
        done += [1] if kept else [prod(item.shape[dim] for dim in old)]
        if not kept:
            owner = owner.expand([item.shape[d] if d in old else size for d, size in enumerate(owner.shape)])
        varies += _divided_anew(item, old, [shape[dim] for dim in new], counts)
    return samples(shape, owner.reshape(done).reshape(sizes), varies)


def _divided_anew(item: Samples, old: Sequence[int], new: Sequence[int], counts: Sequence[bool]) -> list[Varies]:
    """How elements differ along dimensions of these sizes that are made of others."""
    flags = [item.varies[dim] for dim in old]
    if not any(flags) or not new:
        return [False] * len(new)
    if len(old) == len(new) == 1:
        return flags
    at = next(place for place, flag in enumerate(flags) if flag)  # a table, and how often it is repeated
    inner = old[at + (flags[at] > 1) :]
    fixed = not any(dim < len(counts) and counts[dim] for dim in inner)
    period = prod([int(flags[at]), *(item.shape[dim] for dim in inner)])
    if fixed and 1 < period < prod(new):
        return _split(period, new)
    return [True] * len(new)


def _split(period: int, sizes: Sequence[int]) -> list[Varies]:
    """How elements differ along dimensions that were one, along which they are the same after so many places."""
    at = next((at for at in reversed(range(len(sizes))) if prod(sizes[at:]) % period == 0), None)
    if at is None or period % prod(sizes[at + 1 :]):
        return [True] * len(sizes)
    steps = period // prod(sizes[at + 1 :])
    own: Varies = steps if 1 < steps < sizes[at] else steps > 1
    return [*[False] * at, own, *[True] * (len(sizes) - at - 1)]


def _groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Dimensions of two shapes of as many elements that hold as many as each other: the fewest at a time."""
    found: list[tuple[list[int], list[int]]] = []
    at, to = 0, 0
    while at < len(old) or to < len(new):
        left, right, have, want = [], [], 1, 1
        if at < len(old):
            left, have, at = [at], old[at], at + 1
        if (to < len(new) and (have != 1 or not left)) or not left:
            right, want, to = [to], new[to], to + 1
        while have != want:
            if have < want:
                left, have, at = [*left, at], have * old[at], at + 1
            else:
                right, want, to = [*right, to], want * new[to], to + 1
        found.append((left, right))
    return found
