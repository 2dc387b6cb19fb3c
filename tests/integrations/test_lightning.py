"""Lightning's Trainer with autoshard's strategies trains to the weights of one device."""

import importlib.util

import pytest

from tests.scripts import run_script

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed: pip install -e .[lightning]"
)


def test_trainer_ends_with_the_weights_of_one_device():
    done = run_script("tests/integrations/lightning_run.py")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all equal to one device: True" in done.stdout, done.stdout
