"""What is summed to little over ranks is gathered and added up; what is summed to much takes an all-reduce."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.axes.groups import find_groups
from autoshard.capture.capture import capture
from autoshard.report.axes import axis_rows

WIDTH, INNER = 16, 32
X = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))


class Norm(nn.Module):
    """Normalises over all of what is between two matrices; `mean`: as a mean of squares, else as their sum."""

    def __init__(self, mean):
        super().__init__()
        self.mean = mean

    def forward(self, h):
        power = h.square().mean(-1, keepdim=True) if self.mean else h.square().sum(-1, keepdim=True) / INNER
        return h * torch.rsqrt(power + 1e-5)


class Normed(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, INNER), Norm(mean), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


class Many(nn.Module):
    """Several matrices in one tensor, whose results are averaged; `both`: and one number of each is, too."""

    def __init__(self, both):
        super().__init__()
        self.both = both
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x):
        each = torch.einsum("bsd,edh->bseh", x, self.weight)
        much = each.mean(2)
        return much * each[..., 0].mean(2).unsqueeze(-1) if self.both else much


def stack(kind, *given):
    return nn.Sequential(kind(*given), kind(*given))


def group_of(model, size):
    groups = find_groups(capture(model, X, composite=True)).groups
    (found,) = [group for group in groups if group.size == size and group.blocks == ("0", "1")]
    return found


def gathered(group):
    return {(one.module, one.function): one.gathered for one in group.actions if one.kind in ("reduce", "mean")}


@pytest.mark.parametrize("mean", [True, False])
def test_one_number_per_row_is_gathered(mean):
    group = group_of(stack(Normed, mean), INNER)
    assert gathered(group) == {("norm", "mean" if mean else "sum"): True, ("down", "linear"): False}
    assert (group.reductions, group.gathers) == (1, 1)
    assert (group.reduced_bytes, group.added_bytes, group.gathered_bytes) == (2 * 3 * WIDTH * 4, 2 * 3 * 4, 0)


def test_a_sum_as_wide_as_the_model_is_not():
    group = group_of(stack(Many, False), 4)
    assert gathered(group) == {("", "mean"): False} and group.added_bytes == 0


def test_calls_of_one_function_in_a_module_are_all_little_or_none():
    assert gathered(group_of(stack(Many, True), 4)) == {("", "mean"): False}


def test_gathered_sums_are_named():
    model = stack(Normed, True)
    rows = axis_rows(autoshard.profile(model, X), find_groups(capture(model, X, composite=True)))
    costs = [row.cost for block in rows for row in block.rows if row.group.size == INNER]
    assert any(cost.endswith("one all-reduce of 384 B and one gathered sum of 24 B") for cost in costs), costs


@pytest.mark.parametrize("mean", [True, False])
def test_plans_with_gathered_sums_are_equal(mean):
    """Proved, read back from a file, applied in one process."""
    torch.manual_seed(0)
    model = stack(Normed, mean)
    devices = {"cpu:0": "1GiB", "cpu:1": "1GiB"}
    plan = autoshard.plan(model, devices, inputs=X, strategy="column-parallel", objective="memory")
    assert any(action.gathered for cut in plan.cuts for action in cut.actions)
    assert "2 all-reduces and 2 all-gathers" in plan.reasons[0]
    assert autoshard.Plan.from_json(plan.to_json()) == plan
    expected = model(X)
    expected.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    with autoshard.simulate(devices):
        autoshard.apply(model, plan)
        found = model(X)
        found.sum().backward()
        autoshard.remove(model)
    torch.testing.assert_close(found, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
