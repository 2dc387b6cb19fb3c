"""What a forward leaves in attributes of modules is that of the whole batch, though parts of it ran one by one."""

import copy

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import PlanError
from tests.ranks import run_ranks

TRAINING = autoshard.Workload(mode="training", optimizer="sgd")


class Block(nn.Module):
    """Leaves an auxiliary loss, one number per row, and a table that is made once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.loss: torch.Tensor | None = None
        self.rows: list[torch.Tensor] = []
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x):
        if 16 not in self.tables:
            self.tables[16] = torch.linspace(0, 1, 16, device=x.device)
        x = torch.tanh(self.linear(x)) + self.tables[16]
        self.loss = x.pow(2).mean()
        self.rows.append(x.detach().sum(-1))
        return x


def model_and_rows():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)]), torch.randn(8, 16)


def planned(model, rows, devices, strategy, workload=TRAINING):
    kind = {"num_microbatches": 4} if strategy == "pipeline" else {}
    return autoshard.plan(model, devices, inputs=rows, strategy=strategy, workload=workload, **kind)


def loss_of(model, output):
    return output.pow(2).mean() + sum(block.loss.cpu() for block in model)


@pytest.mark.parametrize("strategy", ["pipeline", "data-parallel"])
def test_what_parts_leave_is_put_together(strategy):
    model, rows = model_and_rows()
    plain = copy.deepcopy(model)
    with autoshard.simulate("3x1MiB") as devices:
        autoshard.apply(model, planned(model, rows, devices, strategy))
        for step in range(3):  # tables are there the second time; losses of the first one are not added up
            wanted = loss_of(plain, plain(rows))
            found = loss_of(model, model(rows))
            torch.testing.assert_close(found, wanted)
            wanted.backward()
            found.backward()
            for (name, own), other in zip(plain.named_parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(other.grad.cpu(), own.grad, msg=name, rtol=1e-4, atol=1e-6)
            for mine, theirs in zip(plain, model, strict=True):
                assert list(theirs.tables) == [16]
                assert len(theirs.rows) == step + 1
                torch.testing.assert_close([one.cpu() for one in theirs.rows], mine.rows)


def test_a_schedule_gives_its_loss_what_each_part_left():
    model, rows = model_and_rows()
    plain = copy.deepcopy(model)
    with autoshard.simulate("3x1MiB") as devices:
        autoshard.apply(model, planned(model, rows, devices, "pipeline"))
        schedule = autoshard.schedule(model, lambda output, _: loss_of(model, output))
        schedule.step(rows, target=torch.zeros(8))
        loss_of(plain, plain(rows)).backward()
        for own, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.grad.cpu(), own.grad)
        torch.testing.assert_close(model[0].loss.cpu(), plain[0].loss.detach())
        assert not model[0].loss.requires_grad  # its graph is gone


def test_the_plan_says_it_and_comes_back_from_its_file():
    model, rows = model_and_rows()
    plan = planned(model, rows, {"cpu:0": "1MiB", "cpu:1": "1MiB"}, "pipeline")
    hows = {one.path: one.how for one in plan.batch.kept}
    assert hows["0.loss"] == "mean"
    assert hows["0.rows.1"] == "cat"
    assert "0.tables" in plan.batch.cached
    assert "0.loss" in plan.batch.attributes
    assert set(plan.batch.tracked) == {f"{block}.loss" for block in range(4)}
    assert autoshard.Plan.from_json(plan.to_json()) == plan


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
    with pytest.raises(
        PlanError, match=r"another in a second call, by what the first one leaves in 0\.state, 2\.state"
    ):
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


def a_loss_of_stages():
    model, rows = model_and_rows()
    autoshard.apply(model, planned(model, rows, {"cpu:0": "1MiB", "cpu:1": "1MiB"}, "pipeline"))
    autoshard.schedule(model, lambda output, _: output.pow(2).mean()).step(rows, target=torch.zeros(8))
    said = []
    for use in (lambda loss: loss + 1, lambda loss: torch.zeros(()) + loss, float, lambda loss: loss.item()):
        with pytest.raises(PlanError, match="Return it from the forward") as error:
            use(model[1].loss)
        said.append(str(error.value).split()[0])
    return said


def test_over_processes_a_use_of_what_stages_leave_is_an_error():
    assert run_ranks(a_loss_of_stages, 2) == [["1.loss"] * 4] * 2
