"""A rank that dies in a step: the others stop with an error that names it."""

import os
import signal
import time

import pytest
import torch

import autoshard
from autoshard.errors import RankError
from tests.pipelines.models import decoder
from tests.pipelines.plans import plan_of
from tests.ranks import run_ranks


class Dies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        os.kill(os.getpid(), signal.SIGKILL)


def killed(phase):
    """How long it took this rank to raise, and what."""
    torch.manual_seed(0)
    model, stages, inputs = decoder(4, 4)
    model.train()
    plan = plan_of(model, stages, 4, inputs, parts=4, schedule="1f1b")
    autoshard.apply(model, plan)
    runner = autoshard.schedule(model)
    runner.step(**inputs)
    model.zero_grad()
    if torch.distributed.get_rank() == 2:
        layer = model.model.layers[2]
        usual, count = layer.forward, [0]

        def deadly(*args, **kwargs):
            result = usual(*args, **kwargs)
            count[0] += 1
            if count[0] == 3 and phase == "forward":
                os.kill(os.getpid(), signal.SIGKILL)
            return Dies.apply(result) if count[0] == 3 else result

        layer.forward = deadly
    begin = time.monotonic()
    with pytest.raises(RankError) as error:
        runner.step(**inputs)
    unchanged = all(parameter.grad is None for parameter in model.parameters())
    return time.monotonic() - begin, str(error.value), unchanged


@pytest.mark.parametrize("phase", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_others_stop_and_name_it(phase):
    results = run_ranks(killed, 4, phase, may_die=True)
    assert results[2] is None
    for rank in (0, 1, 3):
        seconds, message, unchanged = results[rank]
        assert seconds < 30
        assert "lost rank 2" in message, (rank, message)
        assert unchanged
