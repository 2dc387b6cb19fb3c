"""What can be cut is found whatever modules and parameters are called."""

import dataclasses

import pytest
import torch

from autoshard.axes.groups import find_groups
from autoshard.capture.capture import capture
from tests.models import WORKING_CASES, by_name
from tests.models.renamed import as_before, rename

QUICK = ("bloom", "t5")


def groups_of(model, inputs, renamed=False):
    """All that was found, under the names of the model; `renamed`: the analysis sees random ones."""
    words = rename(model) if renamed else {}
    torch.manual_seed(0)
    graph = capture(model, inputs, composite=True)
    assert not renamed or all(word in words for tensor in graph.tensors for word in tensor.name.split("."))
    found = find_groups(graph)

    def old(name):
        return as_before(name, words)

    rows = []
    for group in found.groups:
        row = {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
        row["factor"] = row["walk"] = None
        row["blocks"] = tuple(map(old, group.blocks))
        row["summed"] = tuple(map(old, group.summed))
        row["with_parts"] = tuple(map(old, group.with_parts))
        row["shards"] = tuple(dataclasses.replace(shard, name=old(shard.name)) for shard in group.shards)
        row["actions"] = tuple(dataclasses.replace(action, module=old(action.module)) for action in group.actions)
        rows.append(row)
    unshardable = [(old(row.name), row.dim) for row in found.unshardable]
    return rows, unshardable, [tuple(map(old, region.paths)) for region in found.regions]


@pytest.mark.parametrize(
    "name",
    [pytest.param(c.name, marks=() if c.name in QUICK else pytest.mark.slow) for c in WORKING_CASES],
)
def test_the_same_groups_under_random_names(name):
    case = by_name(name)
    assert groups_of(case.model(), case.example(), renamed=True) == groups_of(case.model(), case.example())
