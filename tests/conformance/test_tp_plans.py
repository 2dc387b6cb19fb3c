"""Whatever the tensor parallel plans written in transformers cut, autoshard finds. Only tests read those plans."""

import re

import pytest

import autoshard
from autoshard.common.module_paths import is_below, join
from autoshard.runtime.moves import named_tensors, tied_groups
from tests.conformance.tp_plans import slow_devices
from tests.models import by_name

CUTTING = ("colwise", "rowwise")  # with what comes before and after in the names of styles
WITH_PLANS = ("mixtral", "llama", "gemma2", "llama-tied", "phi3", "deepseek-v3", "jamba", "llava")


def written_cuts(model):
    """The matrices that the plan written for a model cuts."""
    names = [*dict(model.named_modules()), *dict(model.named_parameters())]
    cut = [
        name for pattern, style in model._tp_plan.items() if any(word in style for word in CUTTING)
        for name in names if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name)
    ]  # fmt: skip
    matrices = [name for name, t in model.named_parameters(remove_duplicate=False) if t.dim() > 1]
    return {name for name in matrices if any(is_below(name, path) for path in cut)}


def least_memory(model, inputs):
    return autoshard.plan(model, slow_devices(2), inputs=inputs, strategy="column-parallel", objective="memory")


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_PLANS)
def test_what_a_written_plan_cuts(name):
    model = by_name(name).model()
    plan, written = least_memory(model, by_name(name).example()), written_cuts(model)
    ours = {join(block, shard.name) for cut in plan.cuts for block in cut.blocks for shard in cut.shards}
    for group in tied_groups(named_tensors(model)):
        ours |= set(group) if ours & set(group) else set()
    assert written and not written - ours
