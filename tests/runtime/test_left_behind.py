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
    model, rows = nn.Sequential(*[Block(leave) for _ in range(4)]), torch.randn(8, 16)
    kind = {"num_microbatches": 4} if strategy == "pipeline" else {}
    return model, rows, autoshard.plan(model, devices, inputs=rows, strategy=strategy, workload=workload, **kind)


SET = r"{} in 0 is set by every forward, .*Return it from the forward"


@pytest.mark.parametrize(
    ("leave", "strategy", "workload", "words"),
    [
        (auxiliary_loss, "pipeline", TRAINING, SET.format("left")),
        (auxiliary_loss, "data-parallel", TRAINING, SET.format("left")),
        (statistic, "pipeline", TRAINING, SET.format("left")),
        (growing_list, "data-parallel", TRAINING, SET.format(r"rows\.\d")),
        (state, "pipeline", TRAINING, "left in 0 is set by every forward"),
        (state, "data-parallel", TRAINING, "left in 0 is set by every forward"),
        (spread, "pipeline", TRAINING, r"0 \(Block\) keeps what mixes its rows \(std in 0\)"),
        (spread, "pipeline", autoshard.Workload(), r"0 \(Block\) keeps what mixes its rows \(std in 0\)"),
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
