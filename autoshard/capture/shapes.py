"""Run ops on shapes alone: fake tensors through torch's fake mode, with what it answered remembered per metadata.

    (mm, (4096, 512) strided (512, 1), (512, 64) strided (1, 512))  ──▶  fresh (4096, 64) strided (64, 1)
    (view, (8, 16) …, [4, 32])                                      ──▶  memory of argument 0, offset + 0, …

A decoder asks the same few hundred questions in every layer, and the memory answers them some ten times faster.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.capture.traits import swap_tensors
from autoshard.torch_private import FakeTensor, FakeTensorMode, fake_from_meta

_SCALARS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True)
class _Made:
    """How to make one output again: fresh (`source` -1), or in the memory of tensor argument `source`."""

    source: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


Answers = dict[Any, tuple[Any, type | None, tuple[_Made, ...]]]
"""Results by what was asked, with the op, which is part of the key by its address, so that this stays its own."""
_shared: ContextVar[Answers | None] = ContextVar("answers", default=None)


@contextmanager
def shared_answers() -> Iterator[None]:
    """Inside, runs remember together: a model is run some ten times to plan it, mostly with the same shapes.

    Which kernels the user allows (of attention, say) must be the same for all of them, as it is within one call.
    """
    known = _shared.get()
    token = _shared.set({} if known is None else known)
    try:
        yield
    finally:
        _shared.reset(token)


class Shapes:
    """Makes fake tensors and runs ops on them."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._shadows: dict[Any, FakeTensor] = {}
        known = _shared.get()
        self._answers: Answers = {} if known is None else known

    def fresh(self, shape: Any, stride: Any, dtype: torch.dtype) -> FakeTensor:
        """A fake tensor in memory of its own, just large enough."""
        return fake_from_meta(self.mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"))

    def inside(
        self, storage: torch.UntypedStorage, offset: int, shape: Any, stride: Any, dtype: torch.dtype
    ) -> FakeTensor:
        """A fake tensor in the memory of others."""
        meta = torch.empty(0, dtype=dtype, device="meta")
        meta.set_(storage, offset, shape, stride)
        return fake_from_meta(self.mode, meta)

    def placeholder(self, tensor: torch.Tensor, storage: torch.UntypedStorage | None = None) -> FakeTensor:
        """A fake tensor laid out like `tensor`, in `storage`, or in one as large as the original's."""
        nbytes = tensor.untyped_storage().nbytes()
        if storage is None and nbytes == tensor.numel() * tensor.element_size():
            return self.fresh(tensor.shape, tensor.stride(), tensor.dtype)
        if storage is None:
            storage = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
        return self.inside(storage, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run one op on shapes. Real arguments count as shapes too. Written arguments are the caller's to hand back."""
        state = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()
        parts: list[Any] = [id(func), state]
        tensors: list[torch.Tensor] = []
        remember = _describe(args, parts, tensors)
        if kwargs:
            remember = remember and _describe(tuple(kwargs.items()), parts, tensors)
        key = tuple(parts) if remember else None
        known = self._answers.get(key) if key is not None else None
        if known is not None:
            return self._again(known[1], known[2], tensors)
        args = tuple(swap_tensors(value, self._shadow) for value in args)
        kwargs = {name: swap_tensors(value, self._shadow) for name, value in kwargs.items()}
        out = self.mode.dispatch(func, (), args, kwargs)
        shadows = {id(shadow) for shadow in self._shadows.values()}
        if any(id(made) in shadows for made in (out if isinstance(out, (list, tuple)) else (out,))):
            out = swap_tensors(out, lambda made: self._own(made, shadows))
        for made in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(made, FakeTensor) and not any(made is tensor for tensor in tensors):
                made.fake_device = torch.device("cpu")  # torch gives it the object that an argument has
        if key is not None:
            answer = _answer(out, tensors)
            if answer is not None:
                self._answers[key] = func, *answer
        return out

    def _again(self, kind: type | None, made: tuple[_Made, ...], tensors: list[torch.Tensor]) -> Any:
        results = []
        for item in made:
            if item.source < 0:
                results.append(self.fresh(item.shape, item.stride, item.dtype))
            else:
                base = tensors[item.source]
                offset = int(base.storage_offset()) + item.offset
                results.append(self.inside(base.untyped_storage(), offset, item.shape, item.stride, item.dtype))
        return results[0] if kind is None else kind(results)

    def _own(self, made: torch.Tensor, shadows: set[int]) -> torch.Tensor:
        """A result of an op, and a tensor like it where an op gives what it was given: shadows stay ours."""
        return self.fresh(made.shape, made.stride(), made.dtype) if id(made) in shadows else made

    def _shadow(self, tensor: torch.Tensor) -> FakeTensor:
        """A fake placeholder for a real argument. Only its shape is read, so one per shape is enough."""
        if type(tensor) is FakeTensor:
            return tensor
        layout = (tensor.shape, tensor.stride(), tensor.dtype)
        if layout not in self._shadows:
            self._shadows[layout] = self.fresh(*layout)
        return self._shadows[layout]


def _describe(values: Any, parts: list[Any], tensors: list[torch.Tensor]) -> bool:
    """Append what the answer depends on to `parts`; False if something can't be described."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or _is_lazy(value):
                return False
            tensors.append(value)
            # Of a real one only the shape is used: an op that gives what it was given makes another tensor then.
            parts += (value.shape, value.stride(), value.dtype, value.requires_grad, type(value) is FakeTensor)
        elif isinstance(value, (list, tuple)):
            parts.append(len(value))
            if not _describe(value, parts, tensors):
                return False
        elif isinstance(value, _SCALARS):
            parts += (type(value), value)
        else:
            return False
    return True


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are still to be conjugated or negated: what reads it then makes a copy."""
    return tensor.is_conj() or tensor.is_neg()


def _answer(out: Any, tensors: list[torch.Tensor]) -> tuple[type | None, tuple[_Made, ...]] | None:
    """What to remember of a result; None if it can't be made again from metadata."""
    if isinstance(out, torch.Tensor):
        kind, results = None, [out]
    elif type(out) in (tuple, list):
        kind, results = type(out), out
    else:
        return None
    memory = {tensor.untyped_storage(): index for index, tensor in reversed(list(enumerate(tensors)))}
    made, seen = [], set()
    for result in results:
        is_plain = type(result) is FakeTensor and result.layout is torch.strided and not _is_lazy(result)
        if not is_plain or any(result is tensor for tensor in tensors):
            return None
        storage = result.untyped_storage()
        source = memory.get(storage, -1)
        offset = int(result.storage_offset())
        if source >= 0:
            offset -= int(tensors[source].storage_offset())
        elif (
            offset
            or storage in seen
            or (
                storage.nbytes()
                != torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
                .untyped_storage()
                .nbytes()
            )
        ):
            return None
        seen.add(storage)
        made.append(_Made(source, offset, result.shape, result.stride(), result.dtype))
    return kind, tuple(made)
