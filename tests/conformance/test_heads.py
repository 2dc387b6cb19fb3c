"""Head counts that do and don't divide: cut and equal to the whole model, or refused in planning, never a shape error.

Ranks are threads of this process, so that all degrees can be tried in a short time.
"""

import copy

import pytest
import torch

import autoshard
from autoshard.axes.groups import find_groups
from autoshard.capture.capture import capture
from autoshard.check.cuts import check_cuts
from autoshard.cluster.parse import parse_devices
from autoshard.errors import PlanError
from autoshard.plan.workload import Workload
from autoshard.runtime.cuts import apply_cuts
from autoshard.strategies.column_parallel import column_parallel
from tests.models.case import energise
from tests.models.hf import TEXT, build
from tests.threads import run_ranks

HEAD = 2  # the width of a head


def grouped(heads, groups):
    width = {"hidden_size": heads * HEAD, "head_dim": HEAD, "intermediate_size": 48, "num_hidden_layers": 2}
    config = {**TEXT, **width, "num_attention_heads": heads, "num_key_value_heads": groups}
    torch.manual_seed(0)
    return energise(build("LlamaForCausalLM", "LlamaConfig", config))


def fused(heads):
    """One key and value head for all, in one matrix with the queries."""
    config = {**TEXT, "hidden_size": heads * HEAD, "num_hidden_layers": 2, "num_attention_heads": heads,
              "multi_query": True, "new_decoder_architecture": False, "alibi": False}  # fmt: skip
    torch.manual_seed(0)
    return energise(build("FalconForCausalLM", "FalconConfig", config))


def planner(model, inputs):
    """degree -> a plan for so many processes; the model is captured and followed once."""
    profile = autoshard.profile(model, inputs)
    forward = Workload()
    graph = capture(model, inputs, workload=forward, composite=True)
    found = find_groups(graph)
    prove = check_cuts(model, inputs, forward, graph, found)

    def plan(degree):
        devices = parse_devices({f"cpu:{rank}": "1GiB" for rank in range(degree)})
        return column_parallel(profile, devices, found, prove, objective="memory", degree=degree)

    return plan


def check_degrees(model, degrees):
    """degree -> (is attention cut, the message of a refusal)."""
    inputs = {"input_ids": torch.arange(3, 15).reshape(2, 6), "use_cache": False}
    plan = planner(model, inputs)
    said = {}
    with torch.no_grad():
        wanted = model(**inputs).logits
    for degree in degrees:
        try:
            cuts = plan(degree).cuts
        except PlanError as error:
            assert "Degrees that its sizes allow" in str(error)
            said[degree] = (False, str(error))
            continue

        def work(ranks, cuts=cuts):
            local = copy.deepcopy(model)
            apply_cuts(local, cuts, ranks)
            return local(**inputs).logits

        with torch.no_grad():
            for logits in run_ranks(work, degree):
                assert logits.shape == wanted.shape
                assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max(), degree
        cut = any("attn" in shard.name or "attention" in shard.name for c in cuts for shard in c.shards)
        said[degree] = (cut, "")
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads, groups, cut",
    [(32, 8, {2, 3, 4, 8}), (28, 4, {2, 3, 4}), (25, 25, {2, 3, 5}), (40, 10, {2, 3, 5}), (32, 2, {2, 4})],
)
def test_grouped_heads(heads, groups, cut):
    said = check_degrees(grouped(heads, groups), range(2, 9))
    assert all(said[degree][0] for degree in cut), said


@pytest.mark.parametrize("heads, degrees", [(7, (3,)), pytest.param(71, range(2, 9), marks=pytest.mark.slow)])
def test_one_key_and_value_head_for_all(heads, degrees):
    said = check_degrees(fused(heads), degrees)
    assert all(attention for attention, _ in said.values()), said
