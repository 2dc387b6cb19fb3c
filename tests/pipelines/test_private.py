"""What `pipelines/torch_stage.py` knows of torch's stages and has no promise of: if one of these fails, look there."""

import inspect

import pytest
from torch.distributed.pipelining import PipelineStage

from autoshard.pipelines.torch_stage import TorchStage

lets_go = pytest.mark.skipif(
    not hasattr(PipelineStage, "release_fwd_send_outputs"), reason="this torch keeps its buffers"
)


def test_torch_has_what_is_overridden():
    for name in (key for key, item in vars(TorchStage).items() if callable(item) and key[0] != "_"):
        ours, theirs = (
            tuple(inspect.signature(getattr(kind, name)).parameters) for kind in (TorchStage, PipelineStage)
        )
        assert theirs[: len(ours)] == ours, f"PipelineStage.{name} takes {theirs} now"


@lets_go
def test_torch_runs_modules_by_what_is_overridden():
    source = inspect.getsource(PipelineStage.forward_one_chunk)
    assert "self.forward_maybe_with_nosync" in source, "stages no longer run their module by this method"
    made = {name for kind in PipelineStage.__mro__ if "__init__" in vars(kind) and kind is not object
            for name in kind.__init__.__code__.co_names}  # fmt: skip
    assert "has_backward" in made, "PipelineStage.has_backward is gone"


@lets_go
def test_torch_makes_buffers_when_they_are_awaited():
    assert "allocate_buffer" in inspect.getsource(PipelineStage._get_recv_ops), "buffers are made elsewhere now"
    assert "take_buffer" in inspect.getsource(PipelineStage._retrieve_recv_grads), "buffers are kept now"
