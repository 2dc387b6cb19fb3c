"""What is to be run on a GPU runs on simulated devices, and finds what it should there."""

import importlib
import sys
from pathlib import Path

import pytest

import autoshard

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def gpu():
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("gpu")
    sys.path.remove(str(FOLDER))


def rows_of(gpu, *parts):
    with autoshard.simulate("2x64GiB") as devices:
        return gpu.run_parts(gpu.Machine(devices), parts)


def test_kernels_and_links_are_priced_and_measured(gpu):
    rows = rows_of(gpu, "kernels", "links")
    assert not any(row.failed for row in rows), [row.failed for row in rows]
    assert all(row.measured > 0 and row.predicted > 0 for row in rows)
    assert len({row.case for row in rows}) == len(rows) > 8


@pytest.mark.slow
def test_ways_are_equal_memory_is_predicted_and_times_are_measured(gpu):
    equal, memory = rows_of(gpu, "equal"), rows_of(gpu, "memory")
    assert len(equal) == 6 and not any(row.failed for row in equal) and max(row.error for row in equal) < 1e-5
    assert len(memory) == 32
    for row in memory:  # of training less exactly: gradients of copies
        assert row.ratio == pytest.approx(1, abs=0.05 if "training" in row.case else 0.01), row
    times = rows_of(gpu, "kernels", "runs", "links")
    assert not any(row.failed for row in times) and all(row.measured > 0 and row.predicted > 0 for row in times)
