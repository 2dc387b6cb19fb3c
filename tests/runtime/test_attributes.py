"""What models keep in attributes: flags, tables, a device, and what forwards leave there: as it was, or refused."""

import copy
import functools
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.errors import AutoshardError, PlanError
from autoshard.runtime.flags import changed_flag, flags_of

TRAINING = autoshard.Workload(mode="training", optimizer="sgd")
DEVICES = {"cpu:0": "1MiB", "cpu:1": "1MiB"}
WIDTH, ONE = 16, torch.device("cpu:0")


class Flagged(nn.Module):
    """Flags may switch on what mixes rows."""

    centred = False

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.linear, self.gated, self.folded = nn.Linear(8, 8), gated, False

    def forward(self, x):
        self.folded = True
        x = x + self.linear(x).relu()
        return x - x.mean(0) if self.centred else x


def flagged() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Flagged(), Flagged(gated=True), Flagged())


def test_what_changed_is_named():
    """Flags of instances and of classes; not whether they train, nor what nobody knew at planning."""
    model = flagged()
    planned = flags_of(model)
    assert set(planned) >= {"Flagged.centred=False", "Flagged.gated=010", "Flagged.folded=False"}
    assert not [flag for flag in planned if "training" in flag]
    model.train().later = True
    assert not changed_flag(planned, model)
    model[2].gated = True
    assert changed_flag(planned, model) == "gated of Flagged is 011, and was 010 when the plan was made"
    for one in model:  # what is neither True nor False any more has changed, too
        one.gated = None
    assert changed_flag(planned, model) == "gated of Flagged is False, and was 010 when the plan was made"


@pytest.mark.parametrize(
    "settings", [{"strategy": "pipeline", "num_microbatches": 2}, {"strategy": "data-parallel"}], ids=str
)
def test_a_call_with_another_flag_runs_undivided(settings):
    model, x = flagged(), torch.randn(8, 8)
    with autoshard.simulate("2x1MiB") as devices, torch.no_grad():
        plan = autoshard.plan(model, devices, inputs=x, **settings)
        assert "Flagged.centred=False" in plan.batch.flags
        assert not [flag for flag in plan.batch.flags if "folded" in flag]  # the forward sets it itself
        assert autoshard.Plan.from_json(plan.to_json()) == plan
        autoshard.apply(model, plan)
        torch.testing.assert_close(model(x).cpu(), flagged()(x))
        wanted = flagged()
        for one in (model, wanted):
            one[1].centred = True
        with pytest.warns(RuntimeWarning, match="runs undivided.*centred of Flagged is 010, and was False when"):
            found = model(x)
        torch.testing.assert_close(found.cpu(), wanted(x))


class Leaving(nn.Module):
    """Leaves what it is told to, and a table that is made once, and a length that is the same for any rows."""

    def __init__(self, leave) -> None:
        super().__init__()
        self.linear, self.leave, self.rows, self.left = nn.Linear(16, 16), leave, [], None
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x):
        if 16 not in self.tables:
            self.tables[16] = torch.linspace(0, 1, 16, device=x.device)
        x = torch.tanh(self.linear(x)) + self.tables[16]
        x = self.leave(self, x)
        self.length = torch.tensor(x.shape[1])
        return x


def auxiliary_loss(block, x):
    block.left = x.pow(2).mean()
    return x


def statistic(block, x):
    block.left = x.detach().sum(-1)
    return x


def spread(block, x):
    block.left = x.std()
    return x


def buffer_made_anew(block, x):
    if not hasattr(block, "centre"):
        block.register_buffer("centre", torch.zeros(16))
    block.centre = block.centre * 0.9 + x.detach().mean(0) * 0.1
    return x


def growing_list(block, x):
    block.rows.append(x.detach().sum(-1))
    return x


def state(block, x):
    """What the next call reads."""
    x = x if block.left is None else x + block.left
    block.left = x.detach()
    return x


def nothing(block, x):
    return x


def planned(leave, strategy, devices=DEVICES, workload=TRAINING):
    torch.manual_seed(0)
    model, rows = nn.Sequential(*[Leaving(leave) for _ in range(4)]), torch.randn(8, 16)
    kind = {"num_microbatches": 4} if strategy == "pipeline" else {}
    return model, rows, autoshard.plan(model, devices, inputs=rows, strategy=strategy, workload=workload, **kind)


SET = r"{} in 0 is set by every forward, .*Return it from the forward"


@pytest.mark.parametrize(
    ("leave", "strategy", "workload", "words"),
    [
        (auxiliary_loss, "pipeline", TRAINING, SET.format("left")),
        (auxiliary_loss, "data-parallel", TRAINING, SET.format("left")),
        (auxiliary_loss, "pipeline", autoshard.Workload(), SET.format("left")),
        (statistic, "pipeline", TRAINING, SET.format("left")),
        (buffer_made_anew, "pipeline", TRAINING, "it makes 0.centre anew of what depends on the batch"),
        (growing_list, "data-parallel", TRAINING, SET.format(r"rows\.\d")),
        (state, "pipeline", TRAINING, "left in 0 is set by every forward"),
        (state, "data-parallel", TRAINING, "left in 0 is set by every forward"),
        (spread, "pipeline", TRAINING, r"0 \(Leaving\) keeps what mixes its rows \(std in 0, test_attributes.py:\d+\)"),
        (
            spread,
            "pipeline",
            autoshard.Workload(),
            r"0 \(Leaving\) keeps what mixes its rows \(std in 0, test_attributes.py:\d+\)",
        ),
    ],
)
def test_what_parts_would_each_leave_is_refused_with_its_name(leave, strategy, workload, words):
    with pytest.raises(PlanError, match=words):
        planned(leave, strategy, workload=workload)


@pytest.mark.parametrize("strategy", ["pipeline", "data-parallel"])
def test_tables_and_what_does_not_depend_on_rows_may_be_left(strategy):
    with autoshard.simulate("3x1MiB") as devices:
        model, rows, plan = planned(nothing, strategy, devices)
        plain = copy.deepcopy(model)
        autoshard.apply(model, plan)
        for _ in range(2):
            found, wanted = model(rows), plain(rows)
            torch.testing.assert_close(found.cpu(), wanted)
            found.sum().backward()
            wanted.sum().backward()
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.grad.cpu(), own.grad, rtol=1e-4, atol=1e-6)


def test_plans_of_earlier_versions_that_put_attributes_together_are_refused():
    data = json.loads(planned(nothing, "pipeline")[2].to_json())
    data["batch"] |= {"attributes": [], "kept": [], "tracked": [], "cached": ["0.tables"]}
    assert autoshard.Plan.from_json(json.dumps(data)).batch is not None
    data["batch"]["attributes"] = ["0.loss"]
    with pytest.raises(PlanError, match="plan again"):
        autoshard.Plan.from_json(json.dumps(data))


class Block(nn.Module):
    """A residual block; `keep` sets what it keeps, and `extra` gives what is added to its input."""

    def __init__(self, device=ONE):
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
    ("strategy", "training"),
    [("balanced", True), ("data-parallel", False), ("column-parallel", False), ("pipeline", True)],
)
@pytest.mark.parametrize("kind", [Table, pytest.param(HeldTable, marks=pytest.mark.slow), StoredDevice, ScaledWeight])
def test_what_is_on_the_models_device_is_right_or_refused(kind, strategy, training, devices):
    """The model and its inputs are on a device when it is planned for, as with models on a GPU."""
    model, x = kind().train(training), torch.randn(8, WIDTH, device=ONE)
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


@functools.lru_cache(maxsize=8)
def waves(frequencies, length):
    """A table whose key is a buffer, which is the same object wherever it is moved."""
    return torch.arange(length, device=frequencies.device)[:, None] * frequencies


@functools.lru_cache(maxsize=8)
def steps(length, device):
    return torch.arange(1, length + 1, device=device)[:, None] / length


class UsesCaches(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("frequencies", torch.rand(WIDTH))

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def backwards(self, length):
        return torch.arange(length - 1, -1, -1, device=self.frequencies.device)

    def forward(self, x):
        length = x.shape[1]
        x = (x + waves(self.frequencies, length) * steps(length, x.device))[:, self.backwards(length)]
        return x + self.down(torch.relu(self.up(x)))


def test_caches_of_functions_are_empty_of_tensors_after_apply_and_remove_and_after_calls_of_cut_models():
    torch.manual_seed(0)
    model, x = nn.Sequential(UsesCaches(), UsesCaches()), torch.randn(4, 6, WIDTH)
    asked = {
        "column-parallel": {"objective": "memory"}, "balanced": {"pins": {"0": "cpu:0", "1": "cpu:1"}},
        "pipeline": {"num_microbatches": 2}, "data-parallel": {},
    }  # fmt: skip
    with torch.no_grad(), autoshard.simulate(DEVICES):
        expected = model(x)
        for strategy in (*asked, "column-parallel"):
            plan = autoshard.plan(model, DEVICES, inputs=x, strategy=strategy, **asked[strategy])
            autoshard.apply(model, plan)
            torch.testing.assert_close(model(x), expected)
            if plan.cuts:
                assert not steps.cache_info().currsize  # another model would be given the tensors of all ranks
            autoshard.remove(model)
            assert torch.equal(model(x), expected), strategy


class OptimizedModule(nn.Module):
    """A user's class, called as torch calls the module around one that is compiled."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def test_replicas_of_a_class_with_the_name_of_what_torch_compiles_run_its_own_forward():
    torch.manual_seed(0)
    model, x = nn.Sequential(OptimizedModule()), torch.randn(4, WIDTH)
    with torch.no_grad(), autoshard.simulate(DEVICES):
        expected = model(x)
        plan = autoshard.plan(model, DEVICES, inputs=x, strategy="data-parallel", objective="throughput")
        assert plan.batch is not None
        torch.testing.assert_close(autoshard.apply(model, plan)(x), expected)
