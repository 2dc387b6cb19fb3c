"""Settings for all tests: one thread (bitwise equality needs the same kernels), no chatter from transformers."""

import gc
import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# No example database and no deadline: the same tests run every time, and none is judged by the clock.
settings.register_profile(
    "autoshard",
    deadline=None,
    database=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("autoshard")


@pytest.fixture(autouse=True)
def _same_start():
    """Every test starts from the same random numbers and leaves gradients switched on."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed asks every kind of card first, each time
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    yield
    assert torch.is_grad_enabled(), "a test left gradients switched off"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Give workers stretches of tests, for neighbours share fixtures and plans; who is done takes from the others."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the collector off what is imported and stays: `verify` collects, and looked through all of it each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the interpreter find what is in cycles: libraries in C++ tell of each object that is there at the end."""
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `slow` tests unless -m names them, and skip `gpu` tests where there is no accelerator."""
    if "slow" not in config.getoption("-m"):
        slow = [item for item in items if "slow" in item.keywords]
        items[:] = [item for item in items if "slow" not in item.keywords]
        config.hook.pytest_deselected(items=slow)
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
