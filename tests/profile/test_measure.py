"""Bytes and FLOPs per module on runs written by hand, and on small models against independent measurements."""

import pytest
import torch
from torch import nn

from autoshard.capture.capture import capture
from autoshard.plan.workload import Workload
from autoshard.profile.measure import live_bytes, optimizer_step_bytes, profile_graph
from tests.live_bytes import LiveBytes
from tests.models import by_name
from tests.profile.handmade import Builder

INFERENCE, TRAINING = Workload(), Workload(mode="training")


def two_linears(training: bool = False):
    """a: 10 -> 20, b: 20 -> 30; every size in float32 elements."""
    make = Builder()
    make.module("")
    first = make.module("a", weight=100)["weight"]
    second = make.module("b", weight=50)["weight"]
    x = make.input(10)
    make.begin("", x)
    make.begin("a", x)
    h = make.op(x, first, size=20, flops=200)
    kept = make.save(x) if training else None
    make.end(h)
    make.begin("b", h)
    view = make.op(h, size=20, view_of=h)
    y = make.op(view, second, size=30, flops=1000)
    saved = make.save(view) if training else None
    make.dies(view)
    make.end(y)
    make.dies(h)
    make.end(y)
    if training:
        make.backward()
        ones = make.op(size=30)
        gradient_second = make.op(ones, view, size=50, forward=2, flops=1000)
        gradient_h = make.op(ones, second, size=20, forward=2, flops=1000)
        make.dies(ones)
        make.release(saved)
        gradient_first = make.op(gradient_h, x, size=100, forward=0, flops=200)
        make.dies(gradient_h)
        make.release(kept)
        make.gradient("b.weight", gradient_second)
        make.gradient("a.weight", gradient_first)
    return make.graph(y)


def test_inference_by_hand():
    profile = profile_graph(two_linears(), INFERENCE)
    root, a, b = profile.modules
    assert (root.parameter_bytes, a.parameter_bytes, b.parameter_bytes) == (600, 400, 200)
    assert (a.activation_bytes, b.activation_bytes, root.activation_bytes) == (80, 120, 200)
    # x 10 + h 20 while a runs; h is alive while b makes y (the view shares it)
    assert (a.peak_bytes, b.peak_bytes, profile.activation_peak_bytes) == (120, 240, 240)
    assert profile.peak_bytes == 600 + 240
    assert (a.flops, b.flops, profile.flops) == (200, 1000, 1200)
    # a reads x and its weight and writes h; the view is free; b reads the view and its weight and writes y
    assert profile.op_bytes == (4 * (10 + 100 + 20), 0, 4 * (20 + 50 + 30))
    assert profile.gradient_bytes == profile.optimizer_bytes == profile.modules[1].saved_bytes == 0
    assert profile.dtype == "float32"


def test_training_by_hand():
    graph = two_linears(training=True)
    profile = profile_graph(graph, TRAINING)
    _, a, b = profile.modules
    assert (a.saved_bytes, b.saved_bytes) == (0, 80)  # a saves its input, which is not its to count
    assert (profile.gradient_bytes, profile.optimizer_bytes) == (600, 1200)
    #                                a     view  y     ones      grad b     grad h     grad a
    assert (live_bytes(graph)[:-1] / 4).tolist() == [30, 30, 60, 90, 140, 160, 10 + 30 + 50 + 20 + 100]
    step = optimizer_step_bytes([400, 200], "adamw")
    assert step == max(2 * 400, 400 + 2 * 200)
    # weights, both moments, all gradients, x, y (the caller still has them) and the step's own temporaries
    assert profile.peak_bytes == max(600 + 1200 + 4 * 210, 600 + 1200 + 600 + 4 * (10 + 30) + step)


def test_tied_tensors_count_once_at_their_first_name():
    make = Builder()
    make.module("")
    weight = make.module("a", weight=100)["weight"]
    make.module("b")
    make.tie("b", "weight", weight)
    x = make.input(10)
    make.begin("", x)
    make.begin("a", x)
    make.end(make.op(x, weight, size=10))
    make.end()
    profile = profile_graph(make.graph(), TRAINING)
    assert [m.parameter_bytes for m in profile.modules] == [400, 400, 0]
    assert profile.gradient_bytes == 400


def test_a_parameter_nobody_reads_has_no_gradient():
    make = Builder()
    make.module("", used=10, unused=20)
    make.begin("")
    make.end(make.op(0, size=1))
    profile = profile_graph(make.graph(), TRAINING)
    assert (profile.parameter_bytes, profile.gradient_bytes, profile.optimizer_bytes) == (120, 40, 80)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_optimizer_step_takes_what_is_said(name):
    """Count what torch allocates in a step, storage by storage."""
    parameters = [nn.Parameter(torch.randn(size)) for size in (300, 1000, 50)]
    make = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1),
        "momentum": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adam": lambda: torch.optim.Adam(parameters),
        "adamw": lambda: torch.optim.AdamW(parameters),
    }
    optimizer = make[name]()
    with LiveBytes(parameters) as live:
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            live.reset()
            before = live.peak
            optimizer.step()
    assert live.peak - before == optimizer_step_bytes([1200, 4000, 200], name)


CACHES = {
    "grouped": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2}),
    "sliding": ("MistralForCausalLM", "MistralConfig", {"num_key_value_heads": 2, "sliding_window": 4}),
    "latent": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24,
         "first_k_dense_replace": 1},
    ),
    "state-space": ("MambaForCausalLM", "MambaConfig", {"state_size": 4}),
}  # fmt: skip
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


@pytest.mark.parametrize("kind", CACHES)
def test_cache_bytes_are_those_of_the_tensors_the_model_makes(kind):
    import transformers

    from autoshard.capture.run import opaque_tensors

    class_name, config_name, special = CACHES[kind]
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**{**COMMON, **special})).eval()
    inputs = {"input_ids": torch.randint(3, 90, (2, 9)), "use_cache": True}
    profile = profile_graph(capture(model, inputs, workload=INFERENCE), INFERENCE)
    with torch.no_grad():
        tensors = list(opaque_tensors(model(**inputs)))
    made = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    assert profile.cache_bytes == sum(made.values()) > 0
    # A layer's keys, values or states are counted in the layer; a counter that the cache object makes is not.
    layers = [m for m in profile.modules if m.path.count(".") == 2 and m.path.split(".")[1] == "layers"]
    states = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_floating_point()}
    assert sum(m.cache_bytes for m in layers) == sum(states.values())


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "mixtral", "vit", "convnext"])
def test_whole_model_agrees_with_torchs_memory_tracker(name):
    from torch.distributed._tools.mem_tracker import MemTracker

    case = by_name(name)
    model, inputs = case.model().eval(), case.example()
    predicted = profile_graph(capture(model, inputs, workload=INFERENCE), INFERENCE).peak_bytes
    tracker = MemTracker()
    tracker.track_external(model, *(t for t in inputs.values() if isinstance(t, torch.Tensor)))
    with tracker, torch.no_grad():
        output = model(**inputs)
    del output
    measured = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert predicted == pytest.approx(measured, rel=0.005)
