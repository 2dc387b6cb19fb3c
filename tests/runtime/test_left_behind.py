"""A batch is not divided where forwards leave in attributes of modules what each part would make for itself."""

import copy
import json

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import PlanError

TRAINING = autoshard.Workload(mode="training", optimizer="sgd")
DEVICES = {"cpu:0": "1MiB", "cpu:1": "1MiB"}


class Block(nn.Module):
    """Leaves what it is told to, and a table that is made once, and a length that is the same for any rows."""

    def __init__(self, leave) -> None:
        super().__init__()
        self.linear, self.leave, self.rows, self.loss = nn.Linear(16, 16), leave, [], None
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x):
        if 16 not in self.tables:
            self.tables[16] = torch.linspace(0, 1, 16, device=x.device)
        x = torch.tanh(self.linear(x)) + self.tables[16]
        self.leave(self, x)
        self.length = torch.tensor(x.shape[1])
        return x


def auxiliary_loss(block, x):
    block.loss = x.pow(2).mean()


def statistic(block, x):
    block.loss = x.detach().sum(-1)


def growing_list(block, x):
    block.rows.append(x.detach().sum(-1))


def nothing(block, x):
    pass


def made(leave):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(leave) for _ in range(4)]), torch.randn(8, 16)


def planned(model, rows, devices, strategy, workload=TRAINING):
    kind = {"num_microbatches": 4} if strategy == "pipeline" else {}
    return autoshard.plan(model, devices, inputs=rows, strategy=strategy, workload=workload, **kind)


@pytest.mark.parametrize("strategy", ["pipeline", "data-parallel"])
@pytest.mark.parametrize("leave", [auxiliary_loss, statistic, growing_list])
def test_what_parts_would_each_leave_is_refused_with_its_name(strategy, leave):
    model, rows = made(leave)
    place = r"rows\.\d" if leave is growing_list else "loss"
    with pytest.raises(PlanError, match=rf"{place} in 0 is set by every forward, .*Return it from the forward"):
        planned(model, rows, DEVICES, strategy)


@pytest.mark.parametrize("strategy", ["pipeline", "data-parallel"])
def test_tables_and_what_does_not_depend_on_rows_may_be_left(strategy):
    model, rows = made(nothing)
    plain = copy.deepcopy(model)
    with autoshard.simulate("3x1MiB") as devices:
        autoshard.apply(model, planned(model, rows, devices, strategy))
        for _ in range(2):
            found, wanted = model(rows), plain(rows)
            torch.testing.assert_close(found.cpu(), wanted)
            found.sum().backward()
            wanted.sum().backward()
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.grad.cpu(), own.grad, rtol=1e-4, atol=1e-6)


def test_plans_of_earlier_versions_that_put_attributes_together_are_refused():
    model, rows = made(nothing)
    data = json.loads(planned(model, rows, DEVICES, "pipeline").to_json())
    for names, good in (([], True), (["0.loss"], False)):
        data["batch"] |= {"attributes": names, "kept": [], "tracked": [], "cached": ["0.tables"]}
        if good:
            assert autoshard.Plan.from_json(json.dumps(data)).batch is not None
        else:
            with pytest.raises(PlanError, match="plan again"):
                autoshard.Plan.from_json(json.dumps(data))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.state = nn.Linear(16, 16), None

    def forward(self, x):
        x = self.linear(x if self.state is None else x + self.state)
        self.state = x.detach()
        return x


@pytest.mark.parametrize("strategy", ["pipeline", "data-parallel"])
def test_state_that_the_next_call_reads_is_refused(strategy):
    model = nn.Sequential(Recurrent(), nn.Linear(16, 16), Recurrent())
    with pytest.raises(PlanError, match="state in 0 is set by every forward"):
        planned(model, torch.randn(8, 16), {"cpu:0": "1MiB", "cpu:1": "1MiB"}, strategy)


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spread = nn.Linear(16, 16), None

    def forward(self, x):
        x = self.linear(x)
        self.spread = x.std()
        return x


@pytest.mark.parametrize("workload", [autoshard.Workload(mode="training"), autoshard.Workload()])
def test_a_statistic_of_all_rows_that_is_kept_is_refused(workload):
    model, rows = nn.Sequential(Spread(), nn.Linear(16, 16)), torch.randn(8, 16)
    devices = {"cpu:0": "1MiB", "cpu:1": "1MiB"}
    with pytest.raises(PlanError, match=r"0 \(Spread\) keeps what mixes its rows \(std in 0\)"):
        planned(model, rows, devices, "pipeline", workload)
