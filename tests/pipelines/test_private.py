"""What `pipelines/lean.py` knows of torch's stages and has no promise of: if one of these fails, look there."""

import inspect

import pytest
from torch.distributed.pipelining import PipelineStage, schedules, stage

from autoshard.pipelines.lean import HandingStage, LeanStage, stage_class

lean = pytest.mark.skipif(stage_class() is not LeanStage, reason="this torch gives back the memory itself")
handing = pytest.mark.skipif(stage_class() is not HandingStage, reason="this torch keeps its buffers")

MADE = ("_setup_forward_recv_info", "_create_grad_recv_info")
"""Where torch makes the buffers of all parts, on the stage's device."""
METHODS = {
    "get_fwd_recv_ops": ("fwd_chunk_id",),
    "get_bwd_recv_ops": ("bwd_chunk_id",),
    "get_fwd_send_ops": ("fwd_chunk_id",),
    "forward_one_chunk": ("fwd_chunk_id", "args", "kwargs"),
    "backward_one_chunk": ("bwd_chunk_id", "loss", "full_backward", "last_backward"),
}
READS = {
    "get_fwd_recv_ops": "args_recv_info",
    "get_bwd_recv_ops": "grad_recv_info",
    "get_fwd_send_ops": "fwd_cache",
    "get_bwd_send_ops": "bwd_cache",
    "forward_one_chunk": "fwd_cache",
    "backward_one_chunk": "fwd_cache",
}


def made_by(kind):
    """Attributes that the constructors of a class set."""
    return {name for base in kind.__mro__ if "__init__" in vars(base) and base is not object
            for name in base.__init__.__code__.co_names}  # fmt: skip


@lean
@pytest.mark.parametrize("name", METHODS)
def test_torch_calls_what_is_overridden(name):
    parameters = tuple(inspect.signature(getattr(PipelineStage, name)).parameters)[1:]
    assert parameters[: len(METHODS[name])] == METHODS[name], f"PipelineStage.{name} takes {parameters} now"
    assert set(METHODS) == {key for key, item in vars(LeanStage).items() if callable(item) and key[0] != "_"}
    assert f".{name}(" in inspect.getsource(schedules), f"torch's schedules no longer call {name}"


@lean
@pytest.mark.parametrize("name", READS)
def test_stages_keep_what_is_let_go_of(name):
    names = {*getattr(PipelineStage, name).__code__.co_names}
    assert READS[name] in names, f"PipelineStage.{name} no longer uses {READS[name]}"
    assert READS[name] in made_by(PipelineStage), f"PipelineStage has no {READS[name]} any more"


@lean
@pytest.mark.parametrize("name", MADE)
def test_torch_makes_all_buffers_where_it_did(name):
    method = getattr(PipelineStage, name, None)
    if method is None and hasattr(stage, "_RootArgPlaceholder"):
        pytest.skip(
            "torch 2.11 makes them where it infers shapes: all parts have buffers from the start of a first step"
        )
    assert method is not None, f"PipelineStage.{name} is gone: all parts have buffers from the start of a first step"
    names = {name for code in (method.__code__, *method.__code__.co_consts) if hasattr(code, "co_names")
             for name in code.co_names}  # fmt: skip
    assert "device" in names, f"PipelineStage.{name} makes no buffers any more"


@lean
def test_what_is_received_has_a_buffer():
    assert "buffer" in inspect.signature(stage._RecvInfo).parameters, "_RecvInfo.buffer is gone"
    assert "has_backward" in made_by(PipelineStage), "PipelineStage.has_backward is gone"


@handing
def test_torch_runs_modules_by_what_is_overridden():
    source = inspect.getsource(PipelineStage.forward_one_chunk)
    assert "self.forward_maybe_with_nosync" in source, "stages no longer run their module by this method"
    assert "has_backward" in made_by(PipelineStage), "PipelineStage.has_backward is gone"


@handing
def test_torch_makes_buffers_when_they_are_awaited():
    assert "allocate_buffer" in inspect.getsource(PipelineStage._get_recv_ops), "buffers are made elsewhere now"
    assert "take_buffer" in inspect.getsource(PipelineStage._retrieve_recv_grads), "buffers are kept now"
