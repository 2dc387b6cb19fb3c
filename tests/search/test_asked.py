"""Which devices are meant where processes run."""

import pytest
import torch

import autoshard
from autoshard.errors import SpecError
from autoshard.search.asked import cluster_for
from tests.ranks import run_ranks


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
