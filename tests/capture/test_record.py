"""What a recorded forward says: ops, calls, lifetimes, ties, where devices came from."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.capture import capture
from autoshard.errors import CaptureError
from tests.capture.helpers import bitwise, measured_peak, own_answer, predicted_peak
from tests.replay import replay

aten = torch.ops.aten


def check_forward(model, inputs):
    """Capture, then compare replay and peak with the model itself."""
    graph = capture(model, inputs)
    outputs, gradients = replay(graph, model, inputs)
    expected, _ = own_answer(model, inputs, training=False)
    assert len(outputs) == len(expected) and all(map(bitwise, outputs, expected))
    assert not gradients
    assert predicted_peak(graph) == measured_peak(model, inputs, training=False)
    return graph


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 4)

    def forward(self, x, scale=None, *, flag=False, names=()):
        hidden = self.inner(x).relu()
        del x
        hidden = hidden * scale if scale is not None else hidden
        return self.outer(hidden) if flag else {"out": self.outer(hidden), "names": names}


@pytest.mark.parametrize(
    "inputs",
    [
        torch.randn(3, 4),
        (torch.randn(3, 4), torch.tensor(2.0)),
        {"x": torch.randn(3, 4), "flag": True},
        {"x": torch.randn(3, 4), "scale": torch.randn(8), "names": ("a", None, 3)},
        lambda: {"x": torch.randn(2, 4)},
    ],
    ids=["tensor", "tuple", "dict", "other-arguments", "callable"],
)
def test_forms_of_inputs(inputs):
    if callable(inputs) and not isinstance(inputs, torch.Tensor):
        inputs = inputs()
        assert capture(Small(), lambda: inputs).inputs == capture(Small(), inputs).inputs
    graph = check_forward(Small(), inputs)
    assert graph.level == "fake" and graph.notes == ()
    assert [call.path for call in graph.calls] == ["", "inner", "outer"]


class Grouped(nn.Module):
    def forward(self, x, weights, ends):
        return torch._grouped_mm(x, weights, ends)


def test_flops_of_experts_and_recurrence():
    ends = torch.tensor([4, 12], dtype=torch.int32)
    graph = capture(Grouped(), (torch.randn(12, 16), torch.randn(2, 16, 8), ends))
    assert sum(op.flops for op in graph.ops) == 2 * 12 * 16 * 8
    graph = capture(nn.LSTM(6, 8), torch.randn(5, 3, 6))
    assert sum(op.flops for op in graph.ops) == 2 * 5 * 3 * (4 * 8 * 6 + 4 * 8 * 8)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        graph = capture(encoder, torch.randn(3, 5, 8))
    matrices = 4 * 8 * 8 + 2 * 8 * 16
    assert sum(op.flops for op in graph.ops) == 2 * 3 * 5 * matrices + 4 * 3 * 5 * 5 * 8


def test_grouped_products_that_torch_refuses_are_refused():
    """So that experts are not cut to rows that the kernel does not take."""
    given = torch.randn(12, 6), torch.randn(2, 6, 8), torch.tensor([4, 12], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="strides should be multiple of 16 bytes"):
        Grouped()(*given)
    with pytest.raises(CaptureError, match="multiple of 16 bytes"):
        capture(Grouped(), given)


def test_a_recorded_run_is_a_module_of_fx():
    """It lints, other passes read it, and it computes what the model does."""
    model, x = Small(), torch.randn(3, 4)
    module = capture(model, x).module()
    module.graph.lint()
    (found,), gradients = module(x)
    assert bitwise(found, model(x)["out"]) and gradients == {}
    node = next(node for node in module.graph.nodes if node.target is aten.relu.default)
    assert node.meta["val"].shape == (3, 8) and [path for path, _ in node.meta["nn_module_stack"].values()] == [""]
    assert "in forward\n    " in node.meta["stack_trace"] and "relu" in node.meta["stack_trace"]
    assert "relu" in module.print_readable(print_output=False)
    assert all("val" in node.meta for node in module.graph.nodes if node.op in ("placeholder", "get_attr"))
    other, _ = torch.fx.Interpreter(capture(Small(), x).module(model)).run(x)
    assert bitwise(other[0], found)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.part = nn.Parameter(self.embed.weight.data[:5])

    def forward(self, tokens):
        return self.head(self.embed(tokens)) + self.part.sum()


def test_ties_are_found_by_storage():
    graph = check_forward(Tied(), torch.tensor([[1, 2, 3]]))
    assert graph.tied() == (("part", "embed.weight", "head.weight"),)
    by_name = {tensor.name: tensor for tensor in graph.tensors}
    assert by_name["embed.weight"].value == by_name["head.weight"].value != by_name["part"].value
    assert len([storage for storage in graph.storages if storage.kind == "parameter"]) == 1


def test_meta_model_needs_no_memory():
    """A model of 256 GiB and its inputs on meta."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 15, 1 << 15, dtype=torch.bfloat16) for _ in range(128)))
    graph = capture(model, torch.empty(8, 1 << 15, dtype=torch.bfloat16, device="meta"))
    assert sum(tensor.nbytes for tensor in graph.tensors) > 1 << 38
    assert graph.level == "fake" and predicted_peak(graph) > 1 << 38
    assert all(parameter.is_meta for parameter in model.parameters())


class Experts(nn.Module):
    """Masked selection with a mask that is known, and finite checks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, mask):
        x = self.layer(x)
        if torch.isinf(x).any() or not torch.isfinite(x).all():
            x = x.clamp(-1, 1)
        return x[mask], x.masked_select(mask.unsqueeze(-1)), x[:, mask[0]]


def test_known_masks_select_and_floats_are_taken_to_be_finite():
    graph = check_forward(Experts(), (torch.randn(2, 3, 4), torch.tensor([[True, False, True], [True, True, True]])))
    assert graph.level == "fake" and any("finite" in note and __file__ in note for note in graph.notes)


class Transcriber(nn.Module):
    """A CTC loss: how large its alphas are depends on the longest target, which is known."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x, labels):
        scores = self.head(self.up(x).relu()).log_softmax(-1).transpose(0, 1)
        known = labels >= 0
        lengths = torch.full((len(x),), x.shape[1])
        return nn.functional.ctc_loss(scores, labels.masked_select(known), lengths, known.sum(-1))


def test_ctc_losses_are_recorded_without_values_and_the_layers_before_them_can_be_cut():
    model, inputs = Transcriber(), (torch.randn(2, 6, 8), torch.tensor([[1, 2, 3, -1], [1, -1, -1, -1]]))
    training = autoshard.Workload(mode="training")
    graph = capture(model, inputs, workload=training)
    assert graph.level == "fake"
    assert predicted_peak(graph) == measured_peak(model, inputs, training=True)
    assert check_forward(Transcriber(), tuple(tensor.clone() for tensor in inputs)).level == "fake"
    devices = {"cpu:0": "1GiB", "cpu:1": "1GiB"}
    plan = autoshard.plan(
        model, devices, inputs=inputs, strategy="column-parallel", objective="memory", workload=training
    )
    assert "up.weight" in {shard.name for cut in plan.cuts for shard in cut.shards}


class Router(nn.Module):
    """Counts how many tokens each expert has, and works on them group by group."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x):
        chosen = self.gate(x).topk(2, dim=-1).indices
        counts = x.new_zeros(len(x), 4, dtype=torch.long).scatter(1, chosen, 1).sum(0).tolist()
        return torch.cat([self.expert(part) for part in x.repeat(2, 1).split(counts)])


@pytest.mark.parametrize("tokens", [32, 2048])
def test_counts_of_many_tokens_are_known_as_those_of_few_are(tokens):
    graph = capture(Router(), torch.randn(tokens, 8), level="invented", composite=True)
    assert sum(call.path == "expert" for call in graph.calls) == 4
