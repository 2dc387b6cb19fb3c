"""Which devices are meant where processes run, and what a request costs wherever it is asked for."""

import pytest
import torch

import autoshard
from autoshard.errors import SpecError
from autoshard.plan.choices import STRATEGY_WORDS
from autoshard.search.asked import cluster_for
from tests.models import by_name
from tests.ranks import run_ranks
from tests.search.models import Layer


def memory_of(samples, **sizes):
    model, inputs, workload = (
        torch.nn.Linear(64, 64),
        torch.ones(samples, 8, 64),
        autoshard.Workload(mode="training", **sizes),
    )
    plan = autoshard.plan(model, {"cpu:0": "1GiB"}, inputs=inputs, workload=workload)
    assert plan == autoshard.plan(model, {"cpu:0": "1GiB"}, inputs=inputs, workload=workload, launch="one-process")
    return autoshard.estimate(plan, autoshard.profile(model, inputs, workload=workload)).fullest.peak_bytes


def test_one_process_is_planned_for_the_batch_that_is_asked_for():
    """Inputs of other samples are examples; of another length they would say nothing."""
    assert memory_of(2, batch_size=63) == memory_of(80, batch_size=63) == memory_of(63) > memory_of(2)
    with pytest.raises(SpecError, match=r"sequence_length=16, and no input has that size, of \(2, 8, 64\)"):
        memory_of(2, sequence_length=16)


def devices():
    return [(device.name, device.memory_bytes) for device in cluster_for("auto").devices]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="has an accelerator")
def test_auto_means_one_device_per_process_where_there_is_no_accelerator():
    ((_, alone),) = devices()
    for found in run_ranks(devices, 2):
        assert [name for name, _ in found] == ["cpu:0", "cpu:1"]
        assert sum(memory for _, memory in found) < 1.5 * alone


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    ("devices", "width", "tokens"), [("4xH100-80GB", 1024, 64), ("4xH100-80GB", 64, 8), ("2x1GiB", 64, 8)]
)
def test_strategies_cost_in_a_comparison_what_they_cost_where_they_are_named(devices, width, tokens, mode):
    with torch.device("meta"):
        model = torch.nn.Sequential(*(Layer(width, 4) for _ in range(4)))
    inputs, workload = torch.zeros(4, tokens, width, device="meta"), autoshard.Workload(mode=mode)
    profile = autoshard.profile(model, inputs, workload=workload)
    compared = autoshard.compare(model, devices, inputs=inputs, workload=workload)
    named = {row.name.partition(":")[0]: row for row in compared.alternatives if row.plan is not None}
    for other in ("placement", "one device", "hybrid"):  # no strategies: the last is any mesh where it is named
        named.pop(other, None)
    assert len(named) > 2
    for name, row in named.items():
        plan = autoshard.plan(model, devices, inputs=inputs, workload=workload, strategy=STRATEGY_WORDS.get(name, name))
        assert autoshard.estimate(plan, profile).latency_seconds == pytest.approx(row.estimate.latency_seconds), name


@pytest.mark.parametrize("launch", ["processes", "one-process"])
def test_cuts_that_were_asked_for_say_that_one_device_would_be_faster(launch):
    with torch.device("meta"):
        model = torch.nn.Sequential(*(Layer(64, 4) for _ in range(4)))
    inputs, workload = torch.zeros(4, 8, 64, device="meta"), autoshard.Workload()
    settings = {"strategy": "column-parallel", "launch": launch, "workload": workload}
    said = " ".join(autoshard.plan(model, "4xH100-80GB", inputs=inputs, **settings).reasons)
    assert "alone" in said and "was asked for" in said


def test_a_peer_that_fails_is_a_row_of_the_comparison():
    case = by_name("three-way-tie")
    found = autoshard.compare(case.model(), "2x24GiB", inputs=case.example(), workload=autoshard.Workload())
    assert [row.refused for row in found.peers if row.plan is None]
