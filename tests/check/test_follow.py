"""A size of what is cut may reach shapes only: that is found by following ranks, whatever the values are."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.axes.groups import find_groups
from autoshard.capture.capture import capture
from autoshard.check import cuts
from autoshard.check.cuts import check_cuts
from autoshard.plan.sharding import Cut, Refusal
from tests.check import leaks
from tests.check.leaks import Flagged, Numbers, OneMarked, Outside, Spelt, Stack, Unlike, Wide

X = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
LEAK = "a size of what is cut reaches more than shapes"
REFUSED = {
    "Scaled": f"{LEAK}: mul in blocks.0 has 0.144",
    "Mean": f"{LEAK}: div in blocks.0 has 48 as other in the whole and 24 on a rank",
    "Counted": "ones in blocks.0 has a tensor of [24] on a rank, where [48] is due",
    "Constant": "is given another constant on a rank",
    "Threshold": f"{LEAK}: clamp in blocks.0 has 48000.0 as max in the whole and 24000.0 on a rank",
    "Looked": f"{LEAK}: mul in blocks.0 has 0.5 as other in the whole and 0.7 on a rank",
    "Branch": "code takes another way where a size is smaller",
    "Positions": "",
    "Groups": f"{LEAK}: group_norm",
}  # fmt: skip


def outcome(model: nn.Module, inputs: torch.Tensor = X, size: int = 48) -> Cut | Refusal | None:
    """What is said of cutting the largest group of the blocks that has so many slices; None where there is none."""
    graph = capture(model, inputs, composite=True)
    found = find_groups(graph)
    mine = [group for group in found.groups if group.blocks[0] == "blocks.0" and group.size == size]
    if not mine:
        return None
    group = max(mine, key=lambda group: group.nbytes)
    return check_cuts(model, inputs, None, graph, found)([group], [(group.size // 2,) * 2])[0]


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_reach_values_are_refused(name):
    model = Stack(getattr(leaks, name)).eval()
    found = outcome(model)
    assert found is None or (isinstance(found, Refusal) and REFUSED[name] in found.reason)
    plan = autoshard.plan(model, ["cpu:0", "cpu:1"], inputs=X, strategy="column-parallel", objective="memory")
    expected = model(X)
    torch.testing.assert_close(autoshard.apply(model, plan)(X), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Wide", "OpenMean", "Fixed"])
def test_the_same_without_the_size_is_cut(name):
    assert isinstance(outcome(Stack(getattr(leaks, name)).eval(), size=4 if name == "Fixed" else 48), Cut)


@pytest.mark.parametrize("length", [1, 5])
def test_a_temperature_that_is_a_number_of_heads_is_refused_at_any_length(length):
    """Over one key a softmax gives 1, whatever it is divided by."""
    found = outcome(Stack(leaks.Temperature).eval(), X[:, :length], size=4)
    assert isinstance(found, Refusal) and "div in blocks.0 has 4 as other in the whole and 2 on a rank" in found.reason


def test_sizes_of_parameters_are_followed_into_other_modules():
    found = outcome(Outside(Wide).eval())
    assert isinstance(found, Refusal) and "mul in the model itself" in found.reason
    found = outcome(Numbers(Wide).eval())
    assert isinstance(found, Refusal) and "the model returns it" in found.reason


def test_every_block_is_followed_and_not_the_first_of_those_that_are_alike():
    assert isinstance(outcome(Stack(Flagged, 8).eval()), Cut)
    found = outcome(OneMarked().eval())
    assert (
        isinstance(found, Refusal) and "mul in blocks.5 has 48 as other in the whole and 24 on a rank" in found.reason
    )


def test_what_makes_a_difference_is_found_in_few_recordings(monkeypatch):
    """Of ten unlike blocks two differ in the run of the plan, and two stop in another one."""
    model = nn.Sequential(*(Unlike(number, number in (1, 6), number in (3, 8)) for number in range(10))).eval()
    graph = capture(model, X, composite=True)
    found = find_groups(graph)
    groups = [group for group in found.groups if len(group.shards) == 3]
    assert [group.blocks for group in groups] == [(str(number),) for number in range(10)]
    checks = check_cuts(model, X, None, graph, found)
    recorded = []
    record = cuts.record_rank
    monkeypatch.setattr(cuts, "record_rank", lambda *given: recorded.append(given) or record(*given))
    for refused, words, most in (("16", "0.144", 3), ("38", "too narrow", 6), ("", "", 4)):
        recorded.clear()
        made = checks(groups, [(24, 24)] * len(groups))
        reasons = {one.blocks[0]: cut.reason for one, cut in zip(groups, made, strict=True) if isinstance(cut, Refusal)}
        assert "".join(reasons) == refused and all(words in reason for reason in reasons.values())
        assert len(recorded) <= most
        groups = [group for group in groups if group.blocks[0] not in reasons]


def test_blocks_that_call_functions_by_other_names_are_cut_each_in_its_way():
    model = OneMarked(Spelt).eval()
    plan = autoshard.plan(model, ["cpu:0", "cpu:1"], inputs=X, strategy="column-parallel", objective="memory")
    assert {block for cut in plan.cuts for block in cut.blocks} == {f"blocks.{place}" for place in range(8)}
    expected = model(X)
    torch.testing.assert_close(autoshard.apply(model, plan)(X), expected, rtol=1e-5, atol=1e-5)


def test_parameters_with_gradient_hooks_stay_whole():
    model = Stack(Wide).eval()
    model.blocks[1].up.weight.register_hook(lambda gradient: gradient / gradient.norm())
    found = outcome(model)
    assert isinstance(found, Refusal) and "blocks.1.up.weight has a hook on its gradient" in found.reason
