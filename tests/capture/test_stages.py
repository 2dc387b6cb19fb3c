"""Stages of a recorded run: ops go forward only, shared parameters are held twice, writes across a cut are named."""

import pytest
import torch
from torch import nn

from autoshard.capture.capture import capture
from autoshard.capture.stages import divide
from autoshard.errors import PlanError
from autoshard.plan.workload import Workload


class Tied(nn.Module):
    """An embedding whose matrix is the head's, two blocks, and a mask that both blocks read."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        mask = (tokens > 2)[..., None].float()
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x) * mask
        return self.head(self.norm(x))


class Writes(nn.Module):
    """The second module writes into what the first one returned."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        z = self.second(y)
        y += z
        return y


STAGES = (("embed", "blocks.0"), ("blocks.1",), ("norm", "head"))
TOKENS = torch.arange(6)[None]


@pytest.fixture(params=[False, True], ids=["forward", "training"])
def graph(request):
    workload = Workload(mode="training" if request.param else "inference")
    return capture(Tied(), TOKENS, workload=workload)


def test_a_tied_parameter_is_held_by_both_and_a_mask_is_read_by_both(graph):
    staged = divide(graph, STAGES)
    assert staged.stage_parameters["embed.weight"] == staged.stage_parameters["head.weight"] == (0, 2)
    assert staged.stage_parameters["blocks.1.weight"] == (1,)
    shapes = [(graph.values[c.value].shape, c.source, c.readers) for c in staged.crossings]
    assert ((1, 6, 1), 0, (1,)) in shapes  # the mask
    assert ((1, 6, 4), 0, (1,)) in shapes and ((1, 6, 4), 1, (2,)) in shapes
    assert not staged.problems


def test_writing_into_what_an_earlier_stage_made_is_a_problem():
    graph = capture(Writes(), torch.ones(2, 4))
    (problem,) = divide(graph, (("first",), ("second",))).problems
    assert "writes into a tensor that stage 0 made" in problem
    assert not divide(graph, (("first", "second"), ())).problems


def test_a_parameter_in_no_stage_is_named():
    with pytest.raises(PlanError, match=r"no stage of the plan has second\.weight"):
        divide(capture(Writes(), torch.ones(2, 4)), (("first",),))


def test_every_token_of_an_answer_begins_at_the_first_stage():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    graph = capture(model, {"input_ids": torch.ones(1, 8, dtype=torch.int64)}, workload=Workload(new_tokens=8))
    stages = [
        ["model.embed_tokens", "model.rotary_emb"],
        *([f"model.layers.{n}"] for n in range(4)),
        ["model.norm", "lm_head"],
    ]
    found = divide(graph, stages)
    layers = {f"model.layers.{n}": n + 1 for n in range(4)}
    for op in graph.ops:
        of = next((stage for path, stage in layers.items() if graph.calls[op.call].path.startswith(path)), None)
        assert of is None or found.op_stage[op.index] == of
    weights = {tensor.name for tensor in graph.tensors}
    crossing = {graph.storages[graph.values[one.value].storage].name for one in found.crossings}
    assert not weights & crossing
