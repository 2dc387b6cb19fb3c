"""Answers at home: their seconds, experts that are read by hits, and cold parts on the CPU."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.parse import parse_devices
from autoshard.engine.timing import op_seconds
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.profile.answer import op_counts, prompt_and_token
from autoshard.profile.profile import Profile
from autoshard.report.document import estimate_data
from autoshard.strategies import make_plan

EXPERTS, CHOSEN, WIDTH, INNER, LAYERS = 128, 8, 2048, 768, 4
EXPERT_BYTES = EXPERTS * 3 * WIDTH * INNER * 2


def mixture() -> nn.Module:
    """A mixture with the layers of one of 30 B, fewer of them: nearly all is experts, of which a token reads a 16th."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=INNER, intermediate_size=INNER,
        vocab_size=32000, max_position_embeddings=512, tie_word_embeddings=False, norm_topk_prob=True,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def profiled(model: nn.Module, **workload: Any) -> Profile:
    asked = {"batch_size": 1, "sequence_length": 32, "new_tokens": 64, **workload}
    return autoshard.profile(model, workload=Workload(**asked))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profiled(mixture())


def home(profile: Profile, part: float) -> Cluster:
    """Two cards that have room for so large a part of the weights together, and a CPU."""
    each = int(part * profile.parameter_bytes / 2)
    cluster = parse_devices("2xRTX4090,cpu=16GiB")
    limits = {"cuda:0": each, "cuda:1": each}
    devices = tuple(
        replace(device, overhead_bytes=0, memory_bytes=limits.get(device.name, device.memory_bytes))
        for device in cluster.devices
    )
    return replace(cluster, devices=devices)


def read_by_experts(profile: Profile, phase: str) -> int:
    """Bytes that grouped products of a phase move."""
    begin, end = next((begin, end) for name, begin, end in profile.graph.phases if name == phase)
    grouped = [op.index for op in profile.graph.ops[begin:end] if "grouped_mm" in str(op.target)]
    assert grouped
    return sum(profile.op_bytes[index] for index in grouped)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_token_reads_the_experts_that_are_hit(batch: int) -> None:
    profile = profiled(mixture(), batch_size=batch)
    hit = 1 - (1 - CHOSEN / EXPERTS) ** batch  # of all experts, as expected
    expected = LAYERS * EXPERT_BYTES * hit
    assert read_by_experts(profile, "decode") == pytest.approx(expected, rel=0.02)  # with what they compute


def test_an_answer_is_its_prompt_and_a_token_for_each_but_the_first(profile: Profile) -> None:
    halves = prompt_and_token(profile)
    assert halves is not None
    cluster = parse_devices("1xRTX4090")
    plan = make_plan(profile, cluster)
    figures = autoshard.estimate(plan, profile, cluster)
    seconds = [float(op_seconds(half, cluster.devices[0]).sum()) for half in halves]
    assert figures.prompt_seconds == pytest.approx(seconds[0])
    assert figures.token_seconds == pytest.approx(seconds[1])
    assert figures.latency_seconds == pytest.approx(seconds[0] + 63 * seconds[1])
    assert figures.tokens_per_second == pytest.approx(64 / figures.latency_seconds)
    assert figures.devices[0].compute_seconds == pytest.approx(figures.latency_seconds)
    assert figures.lower_bound_seconds <= figures.latency_seconds * (1 + 1e-9)
    weighted = float((op_seconds(profile, cluster.devices[0]) * op_counts(profile)).sum())
    assert weighted == pytest.approx(figures.latency_seconds)
    written = json.loads(json.dumps(estimate_data(figures)))
    for name in ("prompt_seconds", "token_seconds", "tokens_per_second", "latency_seconds"):
        assert written[name] == pytest.approx(getattr(figures, name))


def test_a_pass_has_the_tokens_of_its_inputs() -> None:
    profile, cluster = profiled(mixture(), batch_size=4, new_tokens=0), parse_devices("2xRTX4090")
    for plan in (make_plan(profile, cluster), make_plan(profile, cluster, strategy="sequential")):
        figures = autoshard.estimate(plan, profile, cluster)
        assert figures.tokens_per_second == pytest.approx(4 * 32 / figures.latency_seconds)


def device_of(plan: Plan, path: str) -> str:
    while path not in plan.placements:
        path = path.rpartition(".")[0]
    return plan.placements[path]


def test_experts_go_to_the_cpu_and_attention_does_not(profile: Profile) -> None:
    cluster = home(profile, 0.7)
    plan = make_plan(profile, cluster)
    figures = autoshard.estimate(plan, profile, cluster)
    assert figures.fits and not plan.offloaded
    on_cpu = [i for i in range(LAYERS) if device_of(plan, f"model.layers.{i}.mlp.experts") == "cpu"]
    assert 0 < len(on_cpu) < LAYERS
    for i in range(LAYERS):
        assert device_of(plan, f"model.layers.{i}.self_attn.q_proj").startswith("cuda")
        assert device_of(plan, f"model.layers.{i}.mlp.gate").startswith("cuda")
    assert any("read least for the room they take" in reason for reason in plan.reasons)


HOSTS = "2 hosts of 1xRTX4090"


@pytest.mark.parametrize(
    "strategy", ["auto", *(pytest.param(one, marks=pytest.mark.slow) for one in ("balanced", "sequential"))]
)
def test_two_hosts_are_never_one_process(profile: Profile, strategy: str) -> None:
    cluster = parse_devices(HOSTS)
    small = replace(cluster, devices=tuple(replace(d, memory_bytes=8 * 2**30) for d in cluster.devices))
    for devices in (cluster, small):  # on one host there is room for all, or on two
        try:
            plan = autoshard.plan(mixture(), devices, workload=profile.workload, strategy=strategy)  # type: ignore[arg-type]
        except PlanError as error:
            assert strategy != "auto" and devices is small and "one process has the devices of one host" in str(error)
            continue
        hosts = {device.name: device.host for device in cluster.devices}
        used = {hosts[name] for name in plan.placements.values()}
        assert plan.launch == "processes" or len(used) == 1


def full_size(kind: str) -> nn.Module:
    """A mixture of 30 B with 128 experts, or a dense decoder of 70 B, in bfloat16."""
    transformers = pytest.importorskip("transformers")
    if kind == "mixture":
        config = transformers.Qwen3MoeConfig(
            hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
            num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, intermediate_size=6144,
            vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=False,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
            intermediate_size=28672, vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=False,
        )  # fmt: skip
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.slow
def test_30b_at_home_has_attention_on_cards_and_cold_experts_on_the_cpu() -> None:
    workload = Workload(batch_size=1, sequence_length=512, new_tokens=256)
    plan = autoshard.plan(full_size("mixture"), "2xRTX4090,cpu=96GiB", workload=workload)
    assert not plan.offloaded
    for i in range(48):
        assert device_of(plan, f"model.layers.{i}.self_attn.q_proj").startswith("cuda")
        assert device_of(plan, f"model.layers.{i}.mlp.gate").startswith("cuda")
    cold = [i for i in range(48) if device_of(plan, f"model.layers.{i}.mlp.experts") == "cpu"]
    assert 9 <= len(cold) <= 14  # 57 GiB of weights less some 45 GiB of room, at 1.1 GiB each
    assert any("--dtype int8" in reason for reason in plan.reasons)


@pytest.mark.slow
def test_70b_at_home_is_streamed_or_stays_on_the_cpu_and_4_bit_is_named() -> None:
    """Both at once: the links bring a part while the CPU computes with another one."""
    workload = Workload(batch_size=1, sequence_length=512, new_tokens=256)
    plan = autoshard.plan(full_size("dense"), "2xRTX4090,cpu=192GiB", workload=workload)
    assert len(plan.offloaded) > 30 and all(path.startswith("model.layers.") for path in plan.offloaded)
    assert any("--dtype int4" in reason for reason in plan.reasons)


@pytest.mark.parametrize("strategy", [pytest.param("auto", marks=pytest.mark.slow), "pipeline"])
def test_answers_of_several_sequences(strategy: str) -> None:
    """generate() divides no batch: stages take turns, and nothing says that micro-batches overlap."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=128
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(2, 8, dtype=torch.long)
    plan = autoshard.plan(
        model, "2x1GiB", inputs={"input_ids": ids}, workload=Workload(new_tokens=6), strategy=strategy
    )  # fmt: skip
    said = any("generate() does not divide a batch" in reason for reason in plan.reasons)
    assert said == (strategy == "pipeline") and len(set(plan.placements.values())) == 1 + said
