"""Models of torch's own encoder layers are compared off their fused path, which a layer with hooks leaves."""

import pytest
import torch


@pytest.fixture(autouse=True)
def unfused():
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)
