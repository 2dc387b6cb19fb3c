"""What models keep beside parameters and buffers: tables in attributes, attributes of weights, a device."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.errors import AutoshardError

DEVICE = torch.device("cpu:0")
WIDTH = 16
DIVIDING = ("pipeline", "data-parallel", "column-parallel")


class Block(nn.Module):
    """A residual block; `keep` sets what it keeps, and `extra` gives what is added to its input."""

    def __init__(self, device=DEVICE):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.to(device)
        self.keep(device)

    def forward(self, x):
        x = x + self.extra(x)
        return x + F.normalize(self.down(self.up(x).relu()), dim=-1)


class Table(Block):
    def keep(self, device):
        self.table = torch.arange(WIDTH, device=device) * 0.1
        self.tables = [{"mask": torch.ones(WIDTH, device=device)}]

    def extra(self, x):
        return self.table * self.tables[0]["mask"]


class Holder:
    pass


class HeldTable(Block):
    def keep(self, device):
        self.holder = Holder()
        self.holder.table = torch.arange(WIDTH, device=device) * 0.1

    def extra(self, x):
        return self.holder.table


class StoredDevice(Block):
    def keep(self, device):
        self.device = device

    def extra(self, x):
        return torch.zeros(WIDTH, device=self.device) + 0.5


class ScaledWeight(Block):
    """Multiplies by what stands on a weight, if anything does."""

    def keep(self, device):
        self.up.weight.scale = 3.0

    def extra(self, x):
        return x * getattr(self.up.weight, "scale", 1.0)


@pytest.fixture
def devices():
    with autoshard.simulate("2x1MiB") as devices:
        yield devices


@pytest.mark.parametrize(
    ("strategy", "training"), [("balanced", True), *((strategy, False) for strategy in DIVIDING), ("pipeline", True)]
)
@pytest.mark.parametrize("kind", [Table, HeldTable, StoredDevice, ScaledWeight])
def test_what_is_on_the_models_device_is_right_or_refused(kind, strategy, training, devices):
    """The model and its inputs are on a device when it is planned for, as with models on a GPU."""
    model, x = kind().train(training), torch.randn(8, WIDTH, device=DEVICE)
    workload = autoshard.Workload(mode="training" if training else "inference")
    try:
        plan = autoshard.plan(model, devices, inputs=x, strategy=strategy, workload=workload)
        found = autoshard.verify(model, plan, inputs=x, training=training, tolerance=1e-5)
    except AutoshardError as error:
        assert kind in (HeldTable, StoredDevice) and strategy != "balanced"
        assert "on the same device" in str(error)
    else:
        message = "" if found.first_difference is None else found.first_difference.message
        assert found.ok or (kind in (HeldTable, StoredDevice) and "on the same device" in message), found


def test_replicas_have_the_attributes_of_weights_as_they_are_now(devices):
    model, x = ScaledWeight("cpu").eval(), torch.randn(8, WIDTH)
    autoshard.apply(model, autoshard.plan(model, devices, inputs=x, strategy="data-parallel"))
    twin = ScaledWeight("cpu").eval()
    twin.load_state_dict(model.state_dict())
    for scale in (3.0, 5.0, None):
        for one in (model, twin):
            if scale is None:
                del one.up.weight.scale
            else:
                one.up.weight.scale = scale
        with torch.no_grad():
            torch.testing.assert_close(model(x), twin(x))
