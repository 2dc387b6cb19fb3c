"""The counters are exact: storages of live tensors, once, gone when they are gone."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autoshard.errors import SpecError
from autoshard.simulate import SimulatedOutOfMemoryError, simulate


def test_live_and_peak_are_counted_by_storage():
    with simulate("2x1MiB") as devices:
        x = torch.zeros(100, device="cpu:1")
        assert devices.memory("cpu:1") == (400, 400) and devices.memory("cpu:0") == (0, 0)
        views = [x[10:], x.view(10, 10).t(), x.expand(5, 100), x.detach()]
        assert devices.memory("cpu:1") == (400, 400)
        y = x + 1
        assert devices.memory("cpu:1") == (800, 800)
        del y
        assert devices.memory("cpu:1") == (400, 800)
        devices.reset_peak()
        assert devices.memory("cpu:1") == (400, 400)
        del x
        assert devices.memory("cpu:1") == (400, 400)
        del views
        assert devices.memory("cpu:1") == (0, 400)
        with pytest.raises(SpecError, match="cpu:2"):
            devices.memory("cpu:2")


def test_ordinary_tensors_are_not_counted_and_copies_are():
    with simulate("2x1MiB") as devices:
        x = torch.zeros(100)
        y = x.to("cpu:0")
        z = y.to("cpu:1")
        back = z.cpu()
        assert [devices.memory(name)[0] for name in devices] == [400, 400]
        assert back.data_ptr() != z.data_ptr()


def test_resizing_in_place_is_counted():
    with simulate("1MiB") as devices:
        x = torch.zeros(10, device="cpu:0")
        x.resize_(100)
        assert devices.memory("cpu:0") == (400, 400)
        x.set_(torch.zeros(5, device="cpu:0"))
        assert devices.memory("cpu:0")[0] == 20
        out = torch.empty(0, device="cpu:0")
        torch.cat([x, x], out=out)
        assert devices.memory("cpu:0")[0] == 60


def test_out_of_memory():
    with simulate("1000B") as devices:
        kept = torch.zeros(100, device="cpu:0")
        with pytest.raises(torch.OutOfMemoryError, match=r"cpu:0 .* 800 B .*400 B.* of .*1000 B") as caught:
            torch.zeros(200, device="cpu:0")
        error = caught.value
        assert isinstance(error, SimulatedOutOfMemoryError)
        assert (error.device, error.asked_bytes, error.live_bytes, error.limit_bytes) == ("cpu:0", 800, 400, 1000)
        assert devices.memory("cpu:0") == (400, 400)
        filling = torch.zeros(150, device="cpu:0")
        assert devices.memory("cpu:0") == (1000, 1000)
        with pytest.raises(torch.OutOfMemoryError):
            kept + filling[:100]


@pytest.mark.parametrize("foreach", [False, True])
def test_a_training_step_leaves_no_garbage(foreach):
    gc.disable()
    try:
        with simulate("1MiB") as devices:
            model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.GELU()).to("cpu:0")
            weights = devices.memory("cpu:0")[0]
            assert weights == sum(p.nbytes for p in model.parameters())
            update = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
            for _ in range(2):
                model(torch.ones(4, 8, device="cpu:0")).square().sum().backward()
                update.step()
                update.zero_grad()
            states = [t for state in update.state.values() for t in state.values() if torch.is_tensor(t)]
            assert devices.memory("cpu:0")[0] == weights + sum(t.nbytes for t in states if t.device.index == 0)
            del update, states, model
            assert devices.memory("cpu:0")[0] == 0
    finally:
        gc.enable()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=40))
def test_counters_follow_any_sequence_of_ops(steps):
    with simulate("1GiB") as devices:
        held: list[torch.Tensor] = []
        peak = 0
        for kind, number in steps:
            pick = held[number % len(held)] if held else None
            if kind == 0 or pick is None:
                held.append(torch.zeros(number, device="cpu:0"))
            elif kind == 1:
                held.append(pick[number % (len(pick) + 1) :])
            elif kind == 2:
                held.append(pick * 2)
            elif kind == 3:
                pick.add_(1)
            elif kind == 4:
                held.pop(number % len(held))
            else:
                held.append(pick.clone().reshape(-1))
            pick = None
            storages = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in held}
            peak = max(peak, sum(storages.values()))
            assert devices.memory("cpu:0")[0] == sum(storages.values())
        assert devices.memory("cpu:0")[1] >= peak
        del held
        assert devices.memory("cpu:0")[0] == 0
