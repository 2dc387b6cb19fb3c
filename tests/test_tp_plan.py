"""Plans are said as a `tp_plan`, and one is carried out: what is written is cut, or refused with the reason."""

from dataclasses import replace

import pytest
import torch

import autoshard
from autoshard.errors import PlanError, SpecError
from autoshard.plan.tp_plan import pattern_of
from tests.conformance.tp_plans import slow_devices
from tests.models import by_name
from tests.models.hf import SMALL, build
from tests.runtime.cut_models import CASES


def small():
    """A decoder with one layer, and inputs."""
    config = {**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 2}
    return build("LlamaForCausalLM", "LlamaConfig", config), by_name("llama").example()


def planned(model, inputs, devices=2, **settings):
    return autoshard.plan(model, slow_devices(devices), inputs=inputs, strategy="column-parallel", **settings)


@pytest.mark.slow
def test_the_cuts_of_a_llama_are_those_that_transformers_has_written():
    model, inputs = small()
    plan = planned(model, inputs)
    written = {key: style for key, style in model._tp_plan.items() if "layers" in key or "head" in key}
    found = plan.tp_plan
    assert written.items() <= found.items(), set(written.items()) - set(found.items())


@pytest.mark.slow  # the page on plans of transformers, which is run as well, carries one out
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_written_plan_is_carried_out(name):
    case = by_name(name)
    model, inputs = case.model(), case.example()
    written = {key: style for key, style in model._tp_plan.items() if "layers.*" in key}
    with autoshard.simulate("2x1GiB") as devices, torch.no_grad():
        plan = autoshard.plan(model, devices, inputs=inputs, strategy="column-parallel", tp_plan=written)
        expected = model(**inputs)[0]
        autoshard.apply(model, plan)
        found = model(**inputs)[0].cpu()
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max())  # sums in another order
    cut = {
        pattern_of(f"{block}.{shard.name}").rpartition(".")[0]
        for c in plan.cuts
        for block in c.blocks
        for shard in c.shards
    }
    assert cut == set(written)
    assert plan.tp_plan == written


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("fused", "in the model itself, heads of the block must be smaller"),
        ("means", "up.weight is cut along dimension 0"),
        ("words", "its shares differ"),
    ],
)
def test_what_cannot_be_said_names_the_block(case, words):
    whole = autoshard.Plan.from_device_map({"": "cpu"})
    with pytest.raises(PlanError, match=f"can't be said as a tp_plan: .*{words}"):
        replace(whole, cuts=CASES[case].cuts(2)).tp_plan  # noqa: B018
    with pytest.raises(PlanError, match="cuts no parameters"):
        whole.tp_plan  # noqa: B018


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"model.layers.*.self_attn.nothing": "colwise"}, "no module or parameter"),
        ({"model.layers.*.mlp.up_proj": "sideways"}, "style 'sideways'"),
        ({"model.norm": 3}, "a tp_plan is a dict"),
    ],
)
def test_a_written_plan_that_makes_no_sense(written, words):
    with pytest.raises(PlanError, match=words):
        planned(*small(), tp_plan=written)


def test_what_is_written_and_cannot_be_cut_is_refused():
    written = {"model.layers.*.self_attn.q_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise"}
    with pytest.raises(PlanError, match="7"):  # nothing in it is a multiple of 7, and one process cuts evenly
        planned(*small(), devices=7, tp_plan=written)


def test_a_tp_plan_wants_its_strategy():
    model, inputs = small()
    with pytest.raises(SpecError, match="column-parallel"):
        autoshard.plan(model, slow_devices(2), inputs=inputs, tp_plan={})
