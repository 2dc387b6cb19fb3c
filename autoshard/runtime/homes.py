"""Where the parameters of a streamed module are between its calls, and how those in files come to a CPU that computes.

file    ····[ q.weight ][ k.weight ]··[ v.weight ]····      pieces of a few MiB, in the order of the file
slab        [ q.weight ]  [ k.weight ]  [ v.weight ]        each at a multiple of 64 bytes, as torch's own memory
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from autoshard.packed import is_packed, stored_tensors
from autoshard.runtime.mapped import ALIGNMENT_BYTES, Region, computes_as_in_memory, merged, region_of

Copies = list[torch.Tensor | None]
"""For each parameter what is computed with instead of it; None: itself."""
PIECE_BYTES = 4 << 20
"""What a thread has in pages at a time when it copies: two large pages."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file, and where in a slab it goes, in bytes from its begin."""

    region: Region
    begin: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """What is done to compute with tensors on the CPU.

    Attributes:
        copied: all of which copies are used.
        in_slab: index of those in one piece of a file -> where they go in a slab of `slab_bytes`; `pieces` of them.
        cloned: indices of the other ones that are copied.
        in_place: what is used of files where it is.
    """

    copied: list[torch.Tensor]
    in_slab: dict[int, int]
    slab_bytes: int
    pieces: list[Piece]
    cloned: list[int]
    in_place: list[Region]


@dataclass(frozen=True, slots=True)
class Homes:
    """The parameters of a module where they are between its calls.

    Attributes:
        regions: what of their memory is in files.
        all_copied, least_copied: computing on the CPU with copies of all that is in files, and only of what would give
            other bits there than in memory of torch's own.
    """

    tensors: list[torch.Tensor]
    regions: list[Region]
    all_copied: Transfer
    least_copied: Transfer

    @classmethod
    def of(cls, parameters: Iterable[torch.Tensor]) -> "Homes":
        with torch.inference_mode(False), torch.no_grad():
            tensors = [parameter.detach() for parameter in parameters]
        in_files = [index for index, home in enumerate(tensors) if home.numel() and region_of(home) is not None]
        unlike = [index for index in in_files if _computes_elsewhere(tensors[index])]
        return cls(tensors, _regions(tensors), _transfer(tensors, in_files), _transfer(tensors, unlike))


def _regions(tensors: Iterable[torch.Tensor]) -> list[Region]:
    stored = (part for tensor in tensors for part in stored_tensors(tensor))
    return merged(region for region in map(region_of, stored) if region is not None)


def _computes_elsewhere(home: torch.Tensor) -> bool:
    """Whether computing with a tensor in a file gives other bits than in memory of torch's own.

    Columns of a matrix in a file do, too: a rank has a part of each of its rows.
    """
    if is_packed(home) or home.dim() < 2:
        return False
    return not (home.is_contiguous() and computes_as_in_memory(home.data_ptr(), home.dtype, home.dim()))


def _transfer(tensors: Sequence[torch.Tensor], copied: Sequence[int]) -> Transfer:
    in_slab: dict[int, int] = {}
    pieces: list[Piece] = []
    end = 0
    for index in copied:
        home = tensors[index]
        if home.is_contiguous():
            in_slab[index] = end
            pieces += _pieces(home, end)
            end += -(-home.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    pieces.sort(key=lambda piece: (piece.region.map.address, piece.region.start))
    return Transfer(
        copied=[tensors[index] for index in copied],
        in_slab=in_slab,
        slab_bytes=end,
        pieces=pieces,
        cloned=[index for index in copied if index not in in_slab],
        in_place=_regions(tensor for index, tensor in enumerate(tensors) if index not in set(copied)),
    )


def _pieces(home: torch.Tensor, begin: int) -> Iterator[Piece]:
    whole = region_of(home)
    assert whole is not None
    first = start = home.data_ptr() - whole.map.address
    last = start + home.nbytes
    while start < last:
        stop = min((start // PIECE_BYTES + 1) * PIECE_BYTES, last)
        yield Piece(Region(whole.map, start, stop - start), begin + start - first)
        start = stop
