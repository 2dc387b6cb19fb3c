"""Replicas in one process: equal to the model itself on the whole batch, and invisible."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.check.batch import find_batch_axis
from autoshard.engine.replicas import estimate_replicas
from autoshard.errors import PlanError
from autoshard.plan import Mesh, Plan, PlanDevice
from autoshard.plan.sharding import proportional_shares
from autoshard.plan.workload import Workload

DEVICES = "3x64MiB"
TRAINING = Workload(mode="training")


class Decoder(nn.Module):
    """Tied weights, a counter, a checkpointed block, a mean loss; a helper that is called through a bound method."""

    def __init__(self):
        super().__init__()
        self.table, self.mix = nn.Embedding(40, 16), nn.Linear(16, 48)
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 40, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.checkpointed = True
        self.inner = self.feed

    def feed(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, ids, labels=None):
        self.calls += 1
        x = self.table(ids)
        q, k, v = self.mix(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.checkpointed and torch.is_grad_enabled():
            x = x + checkpoint(self.inner, x, use_reentrant=False)
        else:
            x = x + self.inner(x)
        logits = self.head(x)
        out = {"logits": logits}
        if labels is not None:
            out["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return out


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps, self.head = nn.LSTM(8, 12, num_layers=2, batch_first=True), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.steps(x)[0])


def inputs(rows=8, length=5, labels=True):
    generator = torch.Generator().manual_seed(rows)
    made = {"ids": torch.randint(0, 40, (rows, length), generator=generator)}
    return made | ({"labels": torch.randint(0, 40, (rows, length), generator=generator)} if labels else {})


def replicated(model, given, devices, workload=TRAINING, shares=()):
    return autoshard.apply(model, plan_for(model, given, devices, workload, shares))


def plan_for(model, given, devices, workload, shares=()):
    return Plan(
        strategy="data-parallel",
        objective="throughput",
        workload=workload,
        devices=tuple(PlanDevice(name=name, memory_bytes=64 << 20) for name in devices),
        placements={"": next(iter(devices))},
        mesh=Mesh(dp=len(devices), shares=shares),
        batch=find_batch_axis(model, given, workload),
    )


def train(model, batches, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def close(one, other):
    one, other = one.detach().cpu(), other.detach().cpu()
    assert torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


@pytest.fixture
def devices():
    with autoshard.simulate(DEVICES) as here:
        yield here


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Decoder()


@pytest.mark.parametrize("shares", [(), (5, 2, 1)])
def test_training_equals_the_whole_batch(model, devices, shares):
    alone = copy.deepcopy(model)
    batches = [inputs(8), inputs(7), inputs(12)]
    expected = train(alone, batches)
    found = train(replicated(model, inputs(8), devices, shares=shares), batches)
    assert found == pytest.approx(expected, rel=1e-5)
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        close(own, other)
    assert model.calls == alone.calls == 3


def test_every_device_has_its_part(model, devices):
    replicated(model, inputs(6), devices)
    devices.reset_peak()
    before = [devices.memory(name)[0] for name in devices]
    with torch.no_grad():
        model(**inputs(6))
    assert all(devices.memory(name)[1] > held for name, held in zip(devices, before, strict=True))


def check_peaks(figures, model, given, devices, name):
    """Hold what is predicted against the second of two passes; in training back from the sum of an output."""
    given = {key: tensor.to("cpu:0") for key, tensor in given.items()}
    for _ in range(2):
        model.zero_grad()
        devices.reset_peak()
        with torch.set_grad_enabled(model.training):
            output = model(**given)
        if model.training:
            output[name].sum().backward()
        del output
    for device in figures.devices:
        assert device.peak_bytes == pytest.approx(devices.memory(device.name)[1], rel=0.1), device.name


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_predicted_peaks(model, devices, mode):
    workload, given = Workload(mode=mode, optimizer="sgd"), inputs(24, 32)
    model.train(mode == "training")
    profile = autoshard.profile(model, given, workload=workload)
    plan = plan_for(model, given, devices, workload)
    figures = estimate_replicas(plan, profile, devices.cluster)
    autoshard.apply(model, plan)
    check_peaks(figures, model, given, devices, "loss")


def test_nobody_sees_the_replicas(model, devices):
    modules, keys = list(model.modules()), list(model.state_dict())
    parameters = list(model.parameters())
    alone = copy.deepcopy(model)
    replicated(model, inputs(), devices)
    train(model, [inputs()])
    assert list(model.modules()) == modules and list(model.state_dict()) == keys
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    autoshard.remove(model)
    train(alone, [inputs()])
    assert {str(one.device) for one in model.parameters()} == {"cpu"}
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        close(one, other)
    assert torch.equal(model(**inputs())["logits"], copy.deepcopy(model)(**inputs())["logits"])


def test_losses_of_several_calls_can_be_added(model, devices):
    alone = copy.deepcopy(model)
    replicated(model, inputs(), devices)
    for one in (alone, model):
        (one(**inputs(8))["loss"] + one(**inputs(6))["loss"]).backward()
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        close(own.grad, other.grad)


def test_gradients_can_be_asked_for(model, devices):
    alone = copy.deepcopy(model)
    replicated(model, inputs(), devices)
    found, expected = (torch.autograd.grad(one(**inputs())["loss"], list(one.parameters())) for one in (model, alone))
    for own, other in zip(found, expected, strict=True):
        close(own, other)


def test_writes_that_torch_does_not_count_are_seen(model, devices):
    alone = copy.deepcopy(model)
    replicated(model, inputs(), devices)
    for one in (alone, model):
        for _ in range(2):  # a step written by hand
            one(**inputs())["loss"].backward()
            for parameter in one.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
        for parameter in one.parameters():  # and averaged weights put in its place
            parameter.data.mul_(0.5)
    with torch.no_grad():
        close(model(**inputs())["logits"], alone(**inputs())["logits"])


def test_attributes_that_change_are_seen(model, devices):
    replicated(model, inputs(), devices)
    model(**inputs())
    model.checkpointed = False
    model.inner = lambda x: x * 0
    alone = autoshard.remove(copy.deepcopy(model))
    close(model(**inputs())["logits"], alone(**inputs())["logits"])
    model.eval()
    assert not any(module.training for module in model.modules())


class Kept:
    """What a call leaves for the next one: no container."""

    def __init__(self, keys):
        self.keys = keys


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.head = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x, kept=None):
        keys = self.key(x)
        keys = keys if kept is None else torch.cat([kept.keys, keys], 1)
        return {"y": self.head(keys.cumsum(1) * keys)[:, -x.shape[1] :], "kept": Kept(keys)}


def test_caches_belong_to_all_rows(devices):
    """Parts of a batch make caches of their own, which nobody can use; what is called with one runs whole."""
    torch.manual_seed(0)
    model, x = Remembering(), torch.randn(24, 8, 16)
    alone = copy.deepcopy(model)
    replicated(model, {"x": x}, devices, Workload())
    with torch.no_grad():
        found, wanted = model(x), alone(x)
        close(found["y"], wanted["y"])
        with pytest.raises(PlanError, match="the output kept is a Kept of which every part"):
            found["kept"].keys  # noqa: B018
        start, started = Kept(torch.zeros(24, 0, 64, device="cpu:0")), Kept(torch.zeros(24, 0, 64))
        close(model(x, start)["kept"].keys, alone(x, started)["kept"].keys)


SEEN = []


class Watched(nn.Module):
    """Registers hooks of its own at its first forward, as libraries do that collect hidden states."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.installed = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x):
        if not self.installed:
            for layer in (self.one, self.two):
                layer.register_forward_hook(lambda layer, args, output: SEEN.append(output))
            self.installed = True
        SEEN.clear()
        self.two(self.one(x))
        return torch.stack(SEEN, 1)


def test_hooks_that_a_forward_registers(devices):
    torch.manual_seed(0)
    model, x = Watched(), torch.randn(6, 4)
    alone = copy.deepcopy(model)
    replicated(model, {"x": x}, devices)
    for _ in range(3):
        assert model(x).shape == (6, 2, 4)
    close(model(x), alone(x))


def test_modules_that_are_compiled_in_place(model, devices):
    alone = copy.deepcopy(model)
    call = model.up._call_impl
    model.up._compiled_call_impl = lambda *args, **kwargs: call(*args, **kwargs)  # as torch does in `compile`
    replicated(model, inputs(), devices)
    close(model(**inputs())["loss"], alone(**inputs())["loss"])


def test_hooks_of_the_users_around_whole_calls(model, devices):
    alone = copy.deepcopy(model)
    replicated(model, inputs(), devices)
    for one in (model, alone):
        one.register_forward_pre_hook(shifted, with_kwargs=True)
        one.register_forward_hook(lambda module, args, output: {**output, "rows": len(output["logits"])}, prepend=True)
    for _ in range(2):
        found, wanted = model(**inputs()), alone(**inputs())
        assert found["rows"] == wanted["rows"]
        close(found["loss"], wanted["loss"])


def shifted(module, args, kwargs):
    return args, {**kwargs, "ids": (kwargs["ids"] + 1) % 40}


def test_recurrent_layers(devices):
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(7, 4, 8)
    alone = copy.deepcopy(model)
    replicated(model, {"x": x}, devices)
    for one in (model, alone):
        for _ in range(2):
            one.zero_grad()
            one(x).square().mean().backward()
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        close(own.grad, other.grad)


def test_fewer_rows_than_devices(model, devices):
    alone = copy.deepcopy(model)
    replicated(model, inputs(), devices)
    for rows in (1, 2):
        close(model(**inputs(rows))["logits"], alone(**inputs(rows))["logits"])


def test_a_copy_has_replicas_of_its_own(model, devices):
    replicated(model, inputs(), devices)
    model(**inputs())
    other = copy.deepcopy(model)
    train(other, [inputs()])
    alone = autoshard.remove(copy.deepcopy(model))
    close(model(**inputs())["logits"], alone(**inputs())["logits"])
    assert not torch.equal(other.table.weight.cpu(), model.table.weight.cpu())


def test_frozen_parameters_and_no_gradients(model, devices):
    alone = copy.deepcopy(model)
    replicated(model, inputs(), devices)
    for one in (model, alone):
        one.mix.requires_grad_(False)
        one(**inputs())["loss"].backward()
        assert one.mix.weight.grad is None
    for own, other in zip(model.up.parameters(), alone.up.parameters(), strict=True):
        close(own.grad, other.grad)
    with torch.no_grad():
        close(model(**inputs())["logits"], alone(**inputs())["logits"])


def test_rows_in_proportion():
    assert proportional_shares(12, (2, 10)) == (2, 10), "the rows that were planned"
    assert proportional_shares(10, (3, 1)) == (8, 2)
    assert proportional_shares(6, (2, 10)) == (1, 5)
    assert proportional_shares(4, (1, 40)) == (1, 3)
    for rows in range(3, 40):
        made = proportional_shares(rows, (5, 3, 1))
        assert sum(made) == rows and min(made) >= 1


@pytest.mark.parametrize("rows", [16, 8, 3, 1])
def test_replicas_have_the_rows_that_were_planned(model, devices, rows):
    """Seen from the modules: on two devices 3 rows of 16, and 13."""
    seen = []
    model.up.register_forward_hook(lambda module, args, output: seen.append((str(output.device), len(output))))
    replicated(model, inputs(16), list(devices)[:2], shares=(3, 13))
    seen.clear()
    with torch.no_grad():
        model(**inputs(rows))
    wanted = (
        dict(zip(("cpu:0", "cpu:1"), proportional_shares(rows, (3, 13)), strict=True)) if rows > 1 else {"cpu:0": 1}
    )
    assert dict(seen) == wanted
