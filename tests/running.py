"""Settings of a process that runs tests: one thread (bitwise equality needs the same kernels), the same numbers."""

import contextlib
import gc
import importlib

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import ranks

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `slow` tests unless -m names them, and skip `gpu` tests where there is no accelerator."""
    if "slow" not in config.getoption("-m"):
        slow = [item for item in items if "slow" in item.keywords]
        items[:] = [item for item in items if "slow" not in item.keywords]
        config.hook.pytest_deselected(items=slow)
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Keep the collector off what is imported and stays: `verify` collects, and looked through all of it each time.

    Then ranks have a process to be forked off, before any test has run.
    """
    for name in ("transformers.models.llama.modeling_llama", "accelerate"):  # else each rank would import them again
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # records of models are many small objects that stay until they are read
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()  # what ranks print belongs to the test that runs
    ranks.source()
    capture.suspend_global_capture()


def pytest_unconfigure() -> None:
    """Let the interpreter find what is in cycles: libraries in C++ tell of each object that is there at the end."""
    gc.unfreeze()
    ranks.end_source()
