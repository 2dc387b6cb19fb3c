"""Inputs derived from a config and a workload; the cached step after a prompt. Tiny models, random weights."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from autoshard.capture.capture import capture
from autoshard.capture.inputs import derive_inputs, sequence_length
from autoshard.errors import CaptureError
from autoshard.plan.workload import Workload
from tests.models import by_name
from tests.models.hf import SMALL


def built(name):
    return by_name(name).build().eval()


@pytest.mark.parametrize(
    "name, expected",
    [
        ("llama", {"input_ids": (3, 7), "attention_mask": (3, 7)}),
        ("t5", {"input_ids": (3, 7), "attention_mask": (3, 7), "decoder_input_ids": (3, 7)}),
        ("vit", {"pixel_values": (3, 3, 16, 16)}),
        ("whisper", {"input_features": (3, 16, 40), "decoder_input_ids": (3, 7)}),
    ],
)
def test_derived_from_signature_config_and_workload(name, expected):
    with torch.device("meta"):
        model = built(name)
    graph = capture(model, workload=Workload(batch_size=3, sequence_length=7))
    said = ", ".join(f"{name} {shape}" for name, shape in expected.items())
    assert graph.notes[-1] == f"inputs derived from the config: {said}" or name == "whisper"
    shapes = [graph.values[value].shape for value in graph.inputs]
    assert sorted(shapes) == sorted(expected.values())
    assert graph.level == "fake"


def test_labels_in_training_and_limits_of_the_model():
    graph = capture(built("llama"), workload=Workload(mode="training"))
    assert [graph.values[value].shape for value in graph.inputs] == [(1, 64)] * 3  # ids, mask, labels
    assert graph.values[graph.outputs[0]].shape == ()  # the loss


class Configured(nn.Module):
    def __init__(self, **config) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)

    def forward(self, graph_nodes):
        return graph_nodes


@pytest.mark.parametrize(
    "model, said",
    [
        (nn.Linear(2, 2), "Linear has no config to derive inputs from: pass inputs="),
        (Configured(vocab_size=3), "does not say what its forward's argument 'graph_nodes' looks like: pass inputs="),
    ],
)
def test_refused_when_nothing_is_known(model, said):
    with pytest.raises(CaptureError, match=said):
        capture(model)


def test_fewer_tokens_where_the_limit_is_one_of_positions():
    """Positions of this model begin after that of the padding token, so it takes fewer tokens than it has of them."""
    config = transformers.RobertaConfig(**SMALL)
    model = transformers.RobertaForMaskedLM(config).eval()
    assert "inputs derived from the config: input_ids (1, 32), attention_mask (1, 32)" in capture(model).notes
    with pytest.raises(CaptureError, match="no inputs that the config suggests fit"):
        capture(model, workload=Workload(sequence_length=64))  # what was asked for is not changed


def cache_bytes(graph):
    return sum(graph.storages[s].nbytes for s in {graph.values[value].storage for value in graph.state})


def test_a_forward_that_returns_a_cache_has_state():
    graph = capture(built("llama"), torch.ones(2, 5, dtype=torch.long))
    assert len(graph.state) == 6 and not set(graph.state) & set(graph.outputs)
    assert cache_bytes(graph) == 3 * 2 * (2 * 2 * 5 * 8) * 4  # layers, keys and values, (batch, heads, length, size)
    owners = {graph.calls[graph.ops[graph.values[value].op].call].path for value in graph.state}
    assert owners == {f"model.layers.{number}.self_attn" for number in range(3)}


def test_decode_is_one_step_on_the_longest_context():
    ids = {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    graph = capture(built("llama"), ids, workload=Workload(new_tokens=4))
    names, begins, ends = zip(*graph.phases, strict=True)
    assert names == ("forward", "context", "decode")
    assert begins == (0, *ends[:-1]) and ends[-1] == len(graph.ops)
    assert graph.uncounted == range(begins[1], ends[1])
    embeds = [op for op in graph.ops if op.target is torch.ops.aten.embedding.default]
    lengths = [graph.values[op.outputs[0]].shape[1] for op in embeds]
    assert lengths == [5, 6, 1, 1]  # the prompt; a context and a step that stand for the steps left out; the last step
    assert embeds[-2].index < begins[2] <= embeds[-1].index
    assert cache_bytes(graph) == 3 * 2 * (2 * 2 * 8 * 8) * 4  # the prompt, and the new tokens but the last
    assert graph.values[graph.outputs[0]].shape == (2, 1, 96)  # only the last logits, as generate asks


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_decode_of_encoder_decoders_runs_the_encoder_with_the_prompt(name):
    graph = capture(built(name), workload=Workload(batch_size=2, sequence_length=6, new_tokens=3))
    assert [name for name, _, _ in graph.phases] == ["forward", "context", "decode"]
    encoders = [call for call in graph.calls if call.path in ("encoder", "model.encoder")]
    assert [call.begin in graph.uncounted for call in encoders] == [False, True]
    assert encoders[-1].end <= graph.phases[-1][1]
    assert graph.state


def test_no_cached_step_is_noted():
    graph = capture(built("vit"), workload=Workload(new_tokens=2))
    assert len(graph.phases) == 1 and any("no cached step" in note for note in graph.notes)


def test_the_limit_may_be_in_a_config_inside_and_too_many_tokens_are_not_made():
    assert sequence_length(transformers.CLIPConfig(), Workload()) == 77
    with torch.device("meta"):
        model = transformers.GPT2Model(transformers.GPT2Config(n_layer=1))
    with pytest.raises(CaptureError, match="give a smaller batch or shorter sequences"):
        derive_inputs(model, Workload(batch_size=10**11, sequence_length=8))
    with pytest.raises(CaptureError, match="too many"):  # 8 GB of ids, as much for a mask, and again for copies
        derive_inputs(model, Workload(batch_size=2, sequence_length=5 * 10**8))
