"""Torch's stage of a pipeline, with what it does not do by itself: sharded parameters, and less memory for answers.

Torch makes a buffer for what a stage receives when a part of the batch is awaited, and lets go of it after the backward
of that part (before 2.15 it has buffers of all parts). Without gradients it would keep what was received to the end.
"""

from typing import Any

from torch.distributed.pipelining import PipelineStage

from autoshard.runtime.sharded_stages import average_with


class TorchStage(PipelineStage):
    """A stage that lets fully_shard average gradients in its last backward, as torch does for one that is all its."""

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

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; without gradients nothing but the module refers to the memory of its arguments."""
        if self.has_backward or not hasattr(PipelineStage, "release_fwd_send_outputs"):  # or buffers are used again
            return super().forward_maybe_with_nosync(*args, **kwargs)
        own = [tensor.view_as(tensor) for tensor in args]
        for tensor in args:
            tensor.data = tensor.new_empty(0)  # torch keeps these objects to the end of the step
        return super().forward_maybe_with_nosync(*own, **kwargs)
