"""How tensors go from one position of a pipeline to another while all processes run the same program.

    position 0: layers.3 gives h ──▶ h is an argument of layers.4, which is at position 1: send
    position 1: h is remote      ──▶ h is an argument of its own layers.4: receive
    position 2: h is remote      ──▶ h is an argument of layers.4: nothing to do but to note that position 1 has a copy

Every message begins with a header that says what follows; one that is not what the receiver expects is an error.
"""

import pickle
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autoshard.errors import RankError
from autoshard.runtime.agreement import random_states, set_random_states
from autoshard.runtime.collectives import ProcessRanks, lost
from autoshard.runtime.devices import copy_tensor
from autoshard.runtime.pipeline_record import PipelineRecord
from autoshard.runtime.remembered import Remembered
from autoshard.runtime.remote_tensor import StageTensor, shape_of, staged
from autoshard.runtime.shape_rules import Shape, ShapeRules
from autoshard.torch_private import no_dispatch_modes

_MAX_DIMS = 10
_DTYPES = sorted(
    (value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=lambda dtype: str(dtype)
)
_SEED_BYTES = 64 << 10  # integers up to this size are compared between processes


@dataclass(slots=True)
class Kind:
    """What is known of calls of one module with one kind of arguments.

    Attributes:
        reads: Python reads values, or shapes that depend on them; `writes`: arguments are written into.
        may_draw: there are ops that can draw random numbers (attention, with its dropout); `draws`: they do.
    """

    reads: bool = False
    may_draw: bool = False
    draws: bool = False
    writes: bool = False


class Wire:
    """What this process needs to follow the others, and they it.

    Attributes:
        inside: position whose module is running in every process, None in code between modules; `path` of the module,
            `kind` of its call; `watched`: all its ops are seen, in every process.
        runs: forwards begun so far; `depth`: calls of the model's modules in progress.
        unlike: what of the published was expected to be otherwise.
    """

    def __init__(self, record: PipelineRecord) -> None:
        self.record = record
        self.position, self.device = record.position, record.device
        self.ranks: ProcessRanks = record.across
        self.control: ProcessRanks = record.control or record.across
        self.rules, self.remembered = ShapeRules(), Remembered()
        self.inside: int | None = None
        self.watched, self.path, self.kind = False, "", Kind()
        self.runs = 0
        self.depth = 0
        self.unlike = ""
        self.seed = 0
        self._sent: deque[tuple[list[Any], list[torch.Tensor]]] = deque()
        self._homes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._count = [0] * self.ranks.size
        self.own_storages: set[int] = set()

    def __deepcopy__(self, memo: dict) -> "Wire":
        return self

    def begin(self, inputs: list[torch.Tensor]) -> None:
        """A forward begins with inputs that should be the same in all processes."""
        self.runs += 1
        self.unlike = ""
        self._homes.clear()
        self.seed = _digest(inputs)

    def settled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a tensor is: made by an own module and kept somewhere, it is of this position."""
        if type(tensor) is not StageTensor and tensor.is_inference() and self.depth:
            return staged(self, self.position, tensor)
        return tensor

    def at_home(self, tensor: torch.Tensor) -> torch.Tensor:
        """An ordinary tensor, that all have, on the device of this process."""
        if tensor.device == self.device:
            return tensor
        if id(tensor) not in self._homes:
            self._homes[id(tensor)] = tensor, copy_tensor(tensor, self.device)
        return self._homes[id(tensor)][1]

    def moved(self, tensor: StageTensor, position: int) -> StageTensor:
        """Return a tensor at a position: sent once per forward, unless it is written in between."""
        if tensor.position == position:
            return tensor
        known = tensor.copies.get(position)
        if known is not None and known[:2] == (tensor.writes[0], self.runs):
            return known[2]
        value, shape = None, shape_of(tensor)
        if self.position == tensor.position:
            assert tensor.value is not None
            self.send(tensor.value, position)
        elif self.position == position:
            value = self.receive(tensor.position, shape)
            shape = shape_of(value)
        copy = staged(self, position, value, shape)
        tensor.copies[position] = tensor.writes[0], self.runs, copy
        return copy

    def published(self, tensor: StageTensor) -> torch.Tensor:
        """Return a tensor as an ordinary one that all processes have. All of them call this, and `check` at the end."""
        value = tensor.value
        header = self._header(value, shape_of(tensor)) if value is not None else self._header(None, None)
        self._call(dist.broadcast, header, group=self.control.group, group_src=tensor.position)
        shape, problem = self._read(header, tensor.position, shape_of(tensor))
        self.unlike = self.unlike or problem
        if value is not None:
            flat = _flat(value)
            result = value.detach().clone()
        else:
            result, flat = _landing(shape, self.device)
        if flat.numel():
            self._call(dist.broadcast, flat.view(torch.uint8), group=self.ranks.group, group_src=tensor.position)
        return result if value is not None else _landed(result, flat, shape)

    def check(self) -> None:
        """Raise `RankError` if something published had been expected otherwise; the others went on meanwhile."""
        problem, self.unlike = self.unlike, ""
        if problem:
            raise RankError(problem)

    def send(self, tensor: torch.Tensor, position: int) -> None:
        """Send a tensor as it is now: what is written to it later, while it is still on the way, is not received."""
        flat = _flat(tensor)
        if flat.numel() and flat.data_ptr() == tensor.data_ptr():
            flat = flat.clone()
        header = self._header(tensor, shape_of(tensor))
        works = [self._call(dist.isend, header, group=self.control.group, group_dst=position)]
        if flat.numel():
            works.append(self._call(dist.isend, flat.view(torch.uint8), group=self.ranks.group, group_dst=position))
        self._sent.append((works, [header, flat]))
        while self._sent and all(work.is_completed() for work in self._sent[0][0]):
            self._sent.popleft()

    def receive(self, position: int, expected: Shape) -> torch.Tensor:
        """Receive the tensor that a position sends next. Raises `RankError` if it is not of the expected shape."""
        header = torch.empty(_HEADER, dtype=torch.int64)
        self._call(dist.recv, header, group=self.control.group, group_src=position)
        shape, problem = self._read(header, position, expected)
        if problem:
            raise RankError(problem)
        result, flat = _landing(shape, self.device)
        if flat.numel():
            self._call(dist.recv, flat.view(torch.uint8), group=self.ranks.group, group_src=position)
        return _landed(result, flat, shape)

    def told(self, position: int, word: Any) -> Any:
        """Return what a position has to say, in all processes: values that Python reads. All of them call this."""
        if self.inside is not None and not self.watched:
            raise RankError(
                f"Python reads values of a tensor in this call of {self.path}, which it did not in others like it. Use "
                "arguments of one kind, or a plan without a pipeline."
            )
        if self.inside is not None:
            self.kind.reads = True
        data = pickle.dumps(word) if position == self.position else b""
        first = bytearray(_WORD_BYTES)
        first[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")
        beginning = data[: _WORD_BYTES - _LENGTH_BYTES]
        first[_LENGTH_BYTES : _LENGTH_BYTES + len(beginning)] = beginning
        self._broadcast_bytes(first, position)
        size = int.from_bytes(first[:_LENGTH_BYTES], "little")
        rest = bytearray(data[len(beginning) :]) or bytearray(max(0, size - (_WORD_BYTES - _LENGTH_BYTES)))
        if rest:
            self._broadcast_bytes(rest, position)
        return pickle.loads((first[_LENGTH_BYTES:] + rest)[:size])

    def _broadcast_bytes(self, data: bytearray, position: int) -> None:
        buffer = torch.frombuffer(data, dtype=torch.uint8)
        self._call(dist.broadcast, buffer, group=self.control.group, group_src=position)

    def share_generator(self, position: int) -> None:
        """A position drew random numbers: all go on from where its generators are."""
        own = random_states(self.device) if position == self.position else None
        set_random_states(self.told(position, own), self.device)

    def _header(self, tensor: torch.Tensor | None, shape: Shape | None) -> torch.Tensor:
        header = torch.zeros(_HEADER, dtype=torch.int64)
        if tensor is None or shape is None:
            return header
        dims = len(shape.sizes)
        if dims > _MAX_DIMS:
            raise RankError(f"a tensor of {dims} dimensions can't go from one process to another, at most {_MAX_DIMS}.")
        own = shape_of(tensor)
        words = [self.seed, _DTYPES.index(own.dtype), dims, *own.sizes, *own.strides]
        header[: len(words)] = torch.tensor(words, dtype=torch.int64)
        return header

    def _read(self, header: torch.Tensor, position: int, expected: Shape) -> tuple[Shape, str]:
        """What a position says that it sends, and what is wrong with it. Raises `RankError` if its inputs differ."""
        seed, dtype, dims, *rest = _as_list(header)
        own, other = self.ranks.members[self.ranks.rank], self.ranks.members[position]
        shape = Shape(tuple(rest[:dims]), tuple(rest[dims : 2 * dims]), 0, _DTYPES[dtype])
        if seed != self.seed:
            raise RankError(
                f"rank {own} and rank {other} run this forward with different inputs. "
                "Call the model with the same inputs, in the same order, on all ranks."
            )
        if shape.sizes == expected.sizes and shape.dtype == expected.dtype:
            return shape, ""
        part = " It may be a rank's part of what is cut: don't ask for it." if self.record.plan.cuts else ""
        return shape, (
            f"rank {other} sends a {_said(shape)}, and rank {own} expects a {_said(expected)}: they "
            f"run different code, or another version of it. Start all ranks with the same program.{part}"
        )

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            with no_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
                return function(*arguments, **options)
        except RuntimeError as error:
            raise lost(self.ranks, error) from error


_HEADER = 3 + 2 * _MAX_DIMS
_WORD_BYTES, _LENGTH_BYTES = 256, 8
_as_list = torch.Tensor.tolist  # while a module is watched, reading values means to tell them


def _said(shape: Shape) -> str:
    return f"{str(shape.dtype).removeprefix('torch.')} tensor of {list(shape.sizes)}"


def _digest(inputs: list[torch.Tensor]) -> int:
    """A number that is the same where the inputs are; values count for small integers (ids of tokens, masks)."""
    found = 0
    for tensor in inputs:
        found = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode(), found)
        whole = not tensor.is_floating_point() and not tensor.is_complex()
        if whole and tensor.nbytes <= _SEED_BYTES and type(tensor) is torch.Tensor:
            found = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), found)
    return found


def _is_dense(shape: Shape) -> bool:
    """Whether the elements fill their memory without holes, in some order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(shape.strides, shape.sizes, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in one dimension, in the order of memory where there are no holes."""
    tensor = tensor.detach()
    shape = shape_of(tensor)
    if tensor.numel() == 0:
        return tensor.reshape(-1)
    if _is_dense(shape):
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    distinct = _distinct(tensor, shape).contiguous()
    return distinct.as_strided((distinct.numel(),), (1,), distinct.storage_offset())  # one element may have any stride


def _distinct(tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Each element of an expanded tensor once."""
    for dim, (stride, size) in enumerate(zip(shape.strides, shape.sizes, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _landing(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make room for a tensor that comes; returns it and the one dimension that its elements come in."""
    with torch.inference_mode(False), torch.no_grad():
        result = torch.empty_strided(shape.sizes, shape.strides, dtype=shape.dtype, device=device)
        if result.numel() == 0:
            return result, result.reshape(-1)
        if _is_dense(shape):
            return result, result.as_strided((result.numel(),), (1,))
        return result, result.new_empty(_distinct(result, shape).numel())


def _landed(result: torch.Tensor, flat: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Put the elements that came where they belong."""
    if result.numel() and not _is_dense(shape):
        with torch.inference_mode(False), torch.no_grad():
            target = _distinct(result, shape)
            target.copy_(flat.view(target.shape))
    return result
