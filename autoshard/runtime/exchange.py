"""Sums and gathers among processes of gloo in which everybody sends to all others at once.

    gloo's all-reduce    2 (p - 1) steps, each by way of a thread of gloo that the computing one waits for
    exchange             1 step, sent by the thread that computed; then each rank adds up for itself

A gather sends as many bytes either way, a sum p / 2 times those of a ring and more to add: large ones are left to gloo.
`benchmarks/collectives.py` measures where that begins to be quicker.

All ranks add in the order of ranks, so they have the same bits. Compiled code calls ops that do the same: some ranks
may run compiled, and others not.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist

from autoshard.errors import RankError

_as_array = torch.Tensor.numpy  # seen by no mode; another may stand there while a module of a pipeline is watched

MOST_BYTES = 2**20
"""What a rank gets at most from all others together, to be summed."""
_TAG = 0x5A5D
"""Of our messages, so that they are not taken for those of others who send in the same group."""
_UNSET = {2: (torch.int16, 0x7FA5), 4: (torch.int32, 0x7FA5A5A5), 8: (torch.int64, 0x7FF5A5A5A5A5A5A5)}
"""By bytes of a number: its bits before any has come, as an integer; no processor makes such a NaN."""

_groups: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()


def can_exchange(group: Any) -> bool:
    """Whether the tensors of a group that are on the CPU travel by gloo; compiled code may then name the group."""
    backends = dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    if backends.get("cpu") != "gloo" or dist.get_world_size(group) < 2:
        return False
    _groups[group.group_name] = group
    return True


def is_exchanged(tensor: torch.Tensor) -> bool:
    """Whether the functions below are for a tensor. What stands for one sees ops of torch, such as collectives."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    known = tensor.device.type == "cpu" and tensor.dtype.is_floating_point and tensor.element_size() in _UNSET
    return known and tensor.numel() > 0


def exchange(tensor: torch.Tensor, rank: int, size: int, group: Any) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in their order; this rank's is the very one, contiguous as all must be."""
    if torch.compiler.is_compiling():
        parts = list(torch.ops.autoshard.exchange(tensor, rank, size, group.group_name))
    else:
        parts = _Sent(tensor, rank, size, group).wait()
    parts.insert(rank, tensor)
    return parts


def add_up(tensor: torch.Tensor, rank: int, size: int, group: Any) -> torch.Tensor:
    """Sum a contiguous tensor over all ranks, in its memory unless this is being compiled."""
    if torch.compiler.is_compiling():
        return torch.ops.autoshard.add_up(tensor, rank, size, group.group_name)
    if tensor.numel() * tensor.element_size() * (size - 1) > MOST_BYTES:
        sent = _Sent(tensor.view(-1)[:1].clone(), rank, size, group)  # a rank with a smaller tensor waits for that
        dist.all_reduce(tensor, group=group)
        sent.wait()
        return tensor
    parts = exchange(tensor, rank, size, group)
    if size == 2:
        return tensor.add_(parts[1 - rank])
    total = parts[0].add_(parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total if total is tensor else tensor.copy_(total)


class _Sent:
    """A contiguous tensor on its way to all other ranks, and theirs, as integers, on their way to this one."""

    __slots__ = ("others", "parts", "rank", "tensor", "works")

    def __init__(self, tensor: torch.Tensor, rank: int, size: int, group: Any) -> None:
        self.tensor, self.rank = tensor, rank
        self.others = [other for other in range(size) if other != rank]
        dtype, unset = _UNSET[tensor.element_size()]
        self.parts = [torch.empty(tensor.numel(), dtype=dtype) for _ in self.others]
        for part in self.parts:
            _as_array(part)[-1] = unset
        # First of all say that there is room: then what comes goes straight there.
        pairs = list(zip(self.parts, self.others, strict=True))
        self.works: list[Any] = [dist.irecv(part, group=group, group_src=other, tag=_TAG) for part, other in pairs]
        self.works += [dist.isend(tensor, group=group, group_dst=other, tag=_TAG) for other in self.others]

    def wait(self) -> list[torch.Tensor]:
        """Return what came. Raises `RankError` for too little, of which gloo says nothing; too much ends a process."""
        for work in self.works:
            work.wait()
        _, unset = _UNSET[self.tensor.element_size()]
        short = [
            str(other) for part, other in zip(self.parts, self.others, strict=True) if _as_array(part)[-1] == unset
        ]
        if short:
            raise RankError(
                f"rank {self.rank} got less from rank {', '.join(short)} than it sent there: they run with inputs of "
                "different shapes. Give all ranks the same inputs, and start them all again."
            )
        return [part.view(self.tensor.dtype).view(self.tensor.shape) for part in self.parts]


@torch.library.custom_op("autoshard::exchange", mutates_args=())
def _exchange(tensor: torch.Tensor, rank: int, size: int, group: str) -> list[torch.Tensor]:
    return _Sent(tensor, rank, size, _groups[group]).wait()


@_exchange.register_fake
def _(tensor: torch.Tensor, rank: int, size: int, group: str) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for _ in range(size - 1)]


@torch.library.custom_op("autoshard::add_up", mutates_args=())
def _add_up(tensor: torch.Tensor, rank: int, size: int, group: str) -> torch.Tensor:
    return add_up(tensor.clone(), rank, size, _groups[group])


@_add_up.register_fake
def _(tensor: torch.Tensor, rank: int, size: int, group: str) -> torch.Tensor:
    return torch.empty_like(tensor)
