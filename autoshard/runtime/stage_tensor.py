"""A tensor that one stage of a pipeline has, while every process runs the model's own code between the stages.

    rank of the stage     values                           the same object in the model's code on both:
    rank of another one   shape and dtype alone (meta)     shape, strides, dtype, and the device where its rank computes

An op on tensors of one stage makes another tensor of that stage, on every rank. Where values are needed on all of them
(tensors of several stages meet, Python reads a number, the model's outputs) the stage sends its own, once: all ranks
run the same code, so all take part.
"""

from collections.abc import Callable
from typing import Any

import numpy
import torch

from autoshard import torch_private
from autoshard.common.schemas import reads_shape_alone, schema_of, written_by
from autoshard.errors import ApplyError
from autoshard.nested import flat_tensors, map_tensors

INSTEAD = 'Plan without stages: mesh="tp=…" or strategy="column-parallel".'
_ABSENT = f"the model's code between stages uses a parameter that only one stage has. {INSTEAD}"
_PART = (
    "the model's code between stages writes into a part of what a stage gave, which other ranks don't have. " + INSTEAD
)


class StageTensor(torch.Tensor):
    """A tensor of a stage.

    Attributes:
        value: the tensor itself where this rank has it, else one on meta.
        stage: the position in the pipeline that has it.
        send: gives all ranks the values: (value, stage) -> value.
        sent: all ranks have the values.
        is_part: a view of another one.
    """

    value: torch.Tensor
    stage: int
    send: Callable[[torch.Tensor, int], torch.Tensor]
    sent: bool
    is_part: bool

    __torch_function__ = torch_private.not_overridden

    @staticmethod
    def __new__(
        cls, value: torch.Tensor, stage: int, send: Callable[[torch.Tensor, int], torch.Tensor], device: torch.device
    ) -> "StageTensor":
        self = torch_private.wrapper(cls, value, device)
        self.value, self.stage, self.send, self.sent, self.is_part = value, stage, send, False, False
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return _run_op(func, args, kwargs or {})

    def everywhere(self) -> torch.Tensor:
        """The values, on all ranks; all of them call it."""
        if not self.sent:
            self.value, self.sent = self.send(self.value, self.stage), True
        return self.value

    # What torch would read from memory that this tensor, seen from C++, does not have.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.value) if self.sent else f"{self.value!r} of stage {self.stage}"

    def __format__(self, spec: str) -> str:
        return self.everywhere().__format__(spec)

    def tolist(self) -> Any:
        return self.everywhere().tolist()

    def numpy(self, *, force: bool = False) -> numpy.ndarray:
        return self.everywhere().numpy(force=force)

    def data_ptr(self) -> int:
        return self.everywhere().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.everywhere().untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.everywhere().__reduce_ex__(protocol)


def _run_op(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an op of the model's code between stages."""
    given = [one for one in flat_tensors((args, kwargs)) if isinstance(one, StageTensor)]
    device = given[0].device
    if reads_shape_alone(func):  # every rank makes the same
        kwargs = {**kwargs, "device": kwargs.get("device") or device}
        return func(*map_tensors(args, lambda one: one.value if isinstance(one, StageTensor) else one), **kwargs)
    stage = _stage_of(func, given, args, kwargs)
    by_value = {id(one.value): one for one in given}

    def take(one: torch.Tensor) -> torch.Tensor:
        if isinstance(one, StageTensor):
            one = one.value
        if absent and not one.is_meta:
            return torch.empty_like(one, device="meta")
        if not absent and one.is_meta:
            raise ApplyError(_ABSENT)
        return one

    absent = stage is not None and any(one.value.is_meta for one in given if not one.sent)
    result = func(*map_tensors(args, take), **map_tensors(kwargs, take))
    if stage is None:
        return map_tensors(result, lambda one: by_value.get(id(one), one))

    def made(one: torch.Tensor) -> torch.Tensor:
        if id(one) in by_value:
            return by_value[id(one)]
        if one.is_meta and not absent:
            raise ApplyError(_ABSENT)
        tensor = StageTensor(one, stage, given[0].send, device)
        tensor.is_part = any(value.alias_info is not None for value in schema_of(func).returns)
        return tensor

    return map_tensors(result, made)


def _stage_of(func: Any, given: list[StageTensor], args: tuple, kwargs: dict[str, Any]) -> int | None:
    """The stage that runs an op, None if every rank does; what it needs of other stages they send."""
    written = written_by(func, args, kwargs)
    if any(isinstance(one, StageTensor) and one.is_part for one in written):
        raise ApplyError(_PART)
    open_ones = [one for one in written if isinstance(one, StageTensor) and not one.sent]
    waiting = [one for one in given if not one.sent]
    kept = open_ones[0].stage if open_ones else None
    reads = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    everywhere = reads or kwargs.get("device") is not None or (written and kept is None)
    stages = {one.stage for one in waiting}
    if kept is None and not everywhere and len(stages) == 1:
        kept = stages.pop()
    for one in waiting:
        if one.stage != kept:
            one.everywhere()
    return kept
