"""Transformers of many kinds, cut over real processes: outputs, tokens, gradients and steps of the whole model.

Starting processes takes a while, so each start checks several models, on one plan that rank 0 makes.
"""

import pytest
import torch

import autoshard
from autoshard.errors import ApplyError, PlanError, RankError
from tests.conformance.rank_checks import CACHES, check_answers, check_models, own_plan
from tests.models import HF_CASES, by_name
from tests.ranks import run_ranks

QUICK = {
    2: ["llama", "convnext"],
    3: ["t5"],  # 4 heads: two ranks have one, and one has two
    4: ["bloom"],
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
def test_equal_to_the_whole_model(count):
    caches = CACHES if count == 2 else CACHES[:1]
    run_ranks(check_models, count, QUICK[count], caches, timeout_seconds=300, group_seconds=120)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", [case.name for case in HF_CASES])
def test_every_kind_is_equal_to_the_whole_model(name, count):
    if name in QUICK[count]:
        pytest.skip("a quick one")
    run_ranks(check_models, count, [name], timeout_seconds=300, group_seconds=120)


def refused_answers(name):
    with pytest.raises((ApplyError, RankError)) as caught:
        check_answers(name, "pp=3")
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in HF_CASES if case.generates])
def test_every_kind_answers_in_stages(name):
    """Of three: the one in the middle begins and ends with layers."""
    if name == "llava":  # a hook inside of a stage collects what its layers give
        said = run_ranks(refused_answers, 3, name)
        assert any("multi_modal_projector is given a tensor that other ranks have" in one for one in said), said
        return
    run_ranks(check_answers, 3, name, "pp=3", timeout_seconds=300, group_seconds=120)


def plans_by_themselves():
    """Every rank plans by itself, as scripts under torchrun do; then what may go wrong, and nobody waits for ever."""
    case = by_name("llama")
    model = case.model()
    plan = own_plan(model, case.example())
    nothing_allows_it()
    shared_with_others(case, plan)
    caches_of_others(case, plan)
    return plan.to_json()


def nothing_allows_it():
    with pytest.raises(PlanError, match="nothing in this model can be cut over 2 devices"):
        own_plan(torch.nn.Sequential(torch.nn.Linear(1, 1)), torch.ones(1, 1))


def shared_with_others(case, plan):
    """A parameter that will have a part of its values, and of its gradient, belongs to another module as well."""
    model = case.model()
    outside = torch.nn.Linear(32, 96, bias=False)
    outside.weight = model.lm_head.weight
    before = outside.weight.clone()
    with pytest.raises((ApplyError, RankError), match=r"lm_head\.weight is also a parameter of a Linear"):
        autoshard.apply(model, plan)
    assert outside.weight is model.lm_head.weight and torch.equal(outside.weight, before)
    del outside
    autoshard.remove(autoshard.apply(model, plan))


def caches_of_others(case, plan):
    model = case.model()
    ids = torch.arange(3, 11).reshape(1, 8)
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        autoshard.apply(model, plan)
        with pytest.raises(RuntimeError):  # a cache of the whole model has the heads of all ranks
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        cache = model(input_ids=ids, use_cache=True).past_key_values
        model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.slow
def test_ranks_plan_alike():
    """Each by itself, while the other waits. By default, cut models are equal in `test_cuts` and `test_loading`."""
    one, other = run_ranks(plans_by_themselves, 2, timeout_seconds=300, group_seconds=120)
    assert one == other
