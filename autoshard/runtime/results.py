"""What modules of a cut model give: a tensor that no check saw may be a rank's own part, and is not handed out.

    recorded when the plan was made          as it is
    another one (maps of attention, say)     the same on all ranks: as it is, and from then on      else ApplyError

Ranks compare hashes, once for each place: values made by the same work on the same numbers have the same bits. Blocks
and the root are always looked at; modules between them only when they are called by themselves: what one of them hands
to the next may be cut, and is put together for others. In a pipeline, those compare that have the stage.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.errors import ApplyError, PlanError
from autoshard.nested import replace_at, tensor_at, tensors_in
from autoshard.runtime.collectives import Axis, ProcessRanks, Ranks
from autoshard.runtime.rank_tensor import RankTensor
from autoshard.sharding import Cut, Part, Results, result_of

_as_array = torch.Tensor.numpy  # another may stand there while a module of a pipeline is watched


def watch_results(model: nn.Module, cuts: Sequence[Cut], results: Sequence[Results], ranks: Ranks) -> list[Any]:
    """Look at what modules give that the plan knows, and return the handles. Raises `PlanError` for others."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in (path for row in results for path in row.modules if path not in modules):
        raise PlanError(f"the plan knows what {path!r} gives, which this {type(model).__name__} does not have.")
    blocks = {block for cut in cuts for block in cut.blocks}
    running = Running()
    handles: list[Any] = []
    for row in results:
        for path in row.modules:
            module, around = modules[path], not path or path not in blocks
            if around:
                handles.append(module.register_forward_pre_hook(Begin(running, path)))
            if path and around:
                handles.append(module.register_forward_hook(Together(row.parts, cuts, ranks, path, running)))
            check = KnownResults(row.tensors, ranks, path, running if path and around else None)
            handles.append(module.register_forward_hook(check))
            if around:
                handles.append(module.register_forward_hook(End(running, path), always_call=True))
    return handles


class Running:
    """The path of the module, of the root and those around blocks, that was called by itself; None: none runs."""

    __slots__ = ("path",)

    def __init__(self) -> None:
        self.path: str | None = None


class Begin:
    """Pre-hook of a module around blocks; that of the root forgets what was interrupted, where torch calls no hooks."""

    __slots__ = ("path", "running")

    def __init__(self, running: Running, path: str) -> None:
        self.running = running
        self.path = path

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if not torch.compiler.is_compiling() and (self.running.path is None or not self.path):
            self.running.path = self.path


class End:
    """Hook of the same, also after an exception."""

    __slots__ = ("path", "running")

    def __init__(self, running: Running, path: str) -> None:
        self.running = running
        self.path = path

    def __call__(self, module: nn.Module, args: tuple, result: Any) -> None:
        if not torch.compiler.is_compiling() and self.running.path == self.path:
            self.running.path = None


class Together:
    """Hook of a module between the root and blocks that was called by itself: it gives whole tensors."""

    __slots__ = ("parts", "path", "running")

    def __init__(self, parts: Sequence[Part], cuts: Sequence[Cut], ranks: Ranks, path: str, running: Running) -> None:
        self.parts = [(part.path, part.dim, Axis.of(ranks, part.axis, cuts[part.cut].shares)) for part in parts]
        self.path = path
        self.running = running

    def __call__(self, module: nn.Module, args: tuple, result: Any) -> Any:
        if torch.compiler.is_compiling() or self.running.path != self.path:
            return result
        for path, dim, axis in self.parts:
            tensor = tensor_at(result, path)
            if tensor is not None and dim < tensor.dim() and tensor.shape[dim] == axis.width:
                result = replace_at(result, path, axis.gather(tensor, dim))
        return result


class KnownResults:
    """Hook of a block, or of a module around blocks: refuse what a rank may have only a part of.

    `known`: what it gave when the plan was made, and what was the same on all ranks since, as `result_of` has it.
    `running`: look only if the module was called by itself; None: always.
    """

    __slots__ = ("known", "path", "ranks", "running")

    def __init__(self, known: Collection[str], ranks: Ranks, path: str, running: Running | None = None) -> None:
        self.known = set(known)
        self.ranks = ranks
        self.path = path
        self.running = running

    def __call__(self, module: nn.Module, args: tuple, result: Any) -> None:
        if self.running is not None and (torch.compiler.is_compiling() or self.running.path != self.path):
            return
        if isinstance(result, torch.Tensor) and result_of("", result.dim()) in self.known:
            return
        new = dict(self._new(result))
        if not new:
            return
        where = self.path or type(module).__name__
        if torch.compiler.is_compiling():
            raise ApplyError(
                f"{where} gives a tensor at {next(iter(new))!r} that the plan does not know. Call the model once "
                "like this before it is compiled, so that ranks can compare what they have."
            )
        with torch_private.no_modes():
            differing = _differing(list(new.values()), self.ranks)
        for (path, tensor), differs in zip(new.items(), differing, strict=True):
            if differs:
                raise ApplyError(
                    f"{where} gives a tensor of shape {list(tensor.shape)} at {path or 'its result'!r} that the "
                    "plan does not know, and each rank has a part of it, or may have: the plan was made for inputs "
                    "that do not ask for it. Plan again with inputs like these, or do not ask for it."
                )
        self.known.update(result_of(path, tensor.dim()) for path, tensor in new.items())

    def _new(self, result: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """What of a result is not known yet."""
        for path, tensor in tensors_in(result):
            if result_of(path, tensor.dim()) not in self.known:
                yield path, tensor


def _differing(tensors: list[torch.Tensor], ranks: Ranks) -> list[bool]:
    """For each tensor, whether ranks have other values than the first, or it can't be told: all are one number."""
    if isinstance(ranks, ProcessRanks):
        marks = ranks.exchange([_mark(tensor) for tensor in tensors])
    else:
        parts = [tensor.parts if isinstance(tensor, RankTensor) else (tensor,) * ranks.size for tensor in tensors]
        marks = [[_mark(own) for own in of_rank] for of_rank in zip(*parts, strict=True)]
    return [len(set(found)) > 1 or found[0] is None for found in zip(*marks, strict=True)]


def _mark(tensor: torch.Tensor) -> str | None:
    """A hash of a tensor's values; None for one whose values are all alike: parts of a map of one token are ones."""
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if values.is_floating_point() and values.dim() and values.numel() and bool((values == values.flatten()[0]).all()):
        return None
    seen = f"{tuple(values.shape)} {values.dtype}".encode()
    return hashlib.sha256(seen + _as_array(values.flatten().view(torch.uint8)).tobytes()).hexdigest()
