"""Whatever tensor parallel plans in transformers cut, autoshard finds; with no more all-reduces, nor collectives."""

import pytest
import torch

from tests.conformance.tp_plans import compare, tight_plan
from tests.models import HF_CASES, by_name
from tests.models.hf import SMALL, build

QUICK = ("llama", "mixtral")
WITH_PLANS = ("gemma2", "llama-tied", "phi3", "deepseek-v3", "jamba", "llava")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in WITH_PLANS)])
def test_what_a_written_plan_cuts(name):
    case = by_name(name)
    missing, more = compare(case.model(), case.example())
    assert not missing and not more


def test_those_are_all_that_have_a_plan():
    having = {case.name for case in HF_CASES if getattr(case.model(), "_tp_plan", None)}
    assert having == {*QUICK, *WITH_PLANS}


def test_sums_of_one_number_per_row_stand_for_gathers():
    """A norm over all heads: the written plan gathers queries, keys and values, which is three gathers and two sums.

    Ours has two sums, and two gathers of the mean of squares, one number per row.
    """
    model = build("Olmo2ForCausalLM", "Olmo2Config", {**SMALL, "num_key_value_heads": 4})
    inputs = {"input_ids": torch.arange(3, 9).reshape(1, 6), "use_cache": False}
    styles = [model._tp_plan[f"model.layers.*.self_attn.{name}_proj"] for name in "qkvo"]
    assert styles == ["colwise_gather_output"] * 3 + ["rowwise_split_input"]
    assert compare(model, inputs)[1] == {}
    plan = tight_plan(model, inputs)
    layer = [cut for cut in plan.cuts if "model.layers.0" in cut.blocks]
    places = [
        (action.kind, action.module, action.gathered) for cut in layer for action in cut.actions
        if action.kind != "enter"
    ]  # fmt: skip
    assert sorted(places) == [
        ("mean", "self_attn.k_norm", True), ("mean", "self_attn.q_norm", True), ("reduce", "mlp.down_proj", False),
        ("reduce", "self_attn.o_proj", False),
    ]  # fmt: skip
