"""Which devices are meant where processes run."""

import pytest
import torch

from autoshard.search.asked import cluster_for
from tests.ranks import run_ranks


def devices():
    return [(device.name, device.memory_bytes) for device in cluster_for("auto").devices]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="has an accelerator")
def test_auto_means_one_device_per_process_where_there_is_no_accelerator():
    ((_, alone),) = devices()
    for found in run_ranks(devices, 2):
        assert [name for name, _ in found] == ["cpu:0", "cpu:1"]
        assert sum(memory for _, memory in found) < 1.5 * alone
