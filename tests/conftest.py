"""What holds before anything is imported, and who runs tests. The rest is in `tests.running`."""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Settings for tests, where they run; workers of xdist start seconds earlier if who starts them has no torch."""
    if not config.getoption("numprocesses", 0):
        from tests import running

        config.pluginmanager.register(running)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Give workers stretches of tests, for neighbours share fixtures and plans; who is done takes from the others."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None
