"""Settings for all tests: one thread (bitwise equality needs the same kernels), no chatter from transformers."""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# No example database and no deadline: the same tests run every time, and none is judged by the clock.
settings.register_profile(
    "autoshard", deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("autoshard")


@pytest.fixture(autouse=True)
def _same_start():
    """Every test starts from the same random numbers and leaves gradients switched on."""
    torch.manual_seed(0)
    yield
    assert torch.is_grad_enabled(), "a test left gradients switched off"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `slow` tests unless they are asked for with -m, and `gpu` tests where there is no accelerator."""
    asked = config.getoption("-m")
    for item in items:
        if "slow" in item.keywords and "slow" not in asked:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
