"""Torch's stage of a pipeline, with memory for what it receives only while a part of the batch is under way.

                         torch before 2.15              here, and torch from 2.15 on
    before a step        buffers of all m parts         none: their shapes
    part i is awaited    there                          made
    part i is done       kept for the next step         let go

"Done" is after the backward of a part, or after its forward where no gradients are wanted; with the latter torch 2.15
waits until the end of the step. Torch lets go of what it has sent as late as of what it received; without gradients
that is as soon as it is on its way. Torch 2.11 makes buffers of all parts before the first step here, too.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from autoshard.runtime.sharded_stages import average_with

_META = torch.device("meta")


def stage_class() -> type[PipelineStage]:
    """The class of stages that take and give back their memory for each part, as the torch in use allows it."""
    return HandingStage if hasattr(PipelineStage, "release_fwd_send_outputs") else LeanStage


class AveragingStage(PipelineStage):
    """A stage that lets fully_shard average gradients in its last backward; torch does so for one that is all its."""

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of a part."""
        engines: Any = self.submod.engines
        if engines:
            average_with(engines, last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if engines:
            average_with(engines, False)  # of other stages there may be more backwards


class HandingStage(AveragingStage):
    """A stage of torch 2.15 or newer, which without gradients does not keep what it received."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; without gradients nothing but the module refers to the memory of its arguments."""
        if self.has_backward:
            return super().forward_maybe_with_nosync(*args, **kwargs)
        own = [tensor.view_as(tensor) for tensor in args]
        for tensor in args:
            tensor.data = tensor.new_empty(0)  # torch keeps these objects to the end of the step
        return super().forward_maybe_with_nosync(*own, **kwargs)


class LeanStage(AveragingStage):
    """A stage of torch before 2.15 that takes and gives back its memory for each part; the rest is torch's."""

    fwd_cache: dict[int, Any]

    def _setup_forward_recv_info(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._setup_forward_recv_info(*args, **kwargs)

    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._create_grad_recv_info(*args, **kwargs)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        """Inside, torch makes its buffers of all parts as shapes only."""
        device, self.device = self.device, _META
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Receive what the stage before sends of a part."""
        self._provide("args_recv_info", fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Receive the gradients that the next stage sends of a part."""
        self._provide("grad_recv_info", bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a part."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            self.fwd_cache[fwd_chunk_id] = self.fwd_cache[fwd_chunk_id][0], []
            _let_go(self.args_recv_info[fwd_chunk_id])
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Send a part on."""
        found = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]
        return found

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of a part."""
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        _let_go(self.args_recv_info[bwd_chunk_id])
        _let_go(self.grad_recv_info.get(bwd_chunk_id, ()))
        if loss is not None and full_backward:
            loss.detach_()  # the schedule has it to the end, and its history what was received

    def _provide(self, table: str, number: int) -> None:
        for info in getattr(self, table).get(number, ()):
            if info.buffer is not None:
                info.buffer = _like(info.buffer, self.device)


def _let_go(infos: Iterable[Any]) -> None:
    """Keep the shapes of buffers only."""
    for info in infos:
        if info.buffer is not None:
            info.buffer = _like(info.buffer, _META)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # from or to meta, empty_like takes a tenth of a millisecond: it is written in Python there
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)  # torch 2.11 asks for it once, when it makes a buffer
