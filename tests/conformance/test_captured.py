"""Every model is captured, and the recorded graph is the model: replayed with its weights it gives the same bits."""

import pytest

from autoshard.capture.backward import training_loss
from tests.conformance.checks import difference_when_replayed, named_tensors
from tests.conformance.test_placed import profile_of
from tests.models import WORKING_CASES, over


@pytest.mark.parametrize("training", [False, True], ids=["forward", "backward"])
@over(WORKING_CASES)
def test_replayed(case, training):
    """Outputs, and in training every gradient."""
    assert not difference_when_replayed(case.model, case.example(), profile_of(case.name, training).graph, training)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@over(WORKING_CASES)
def test_profiled(case, training):
    """Parameters and buffers are counted once, whatever ties them; the root's peak covers them."""
    model, profile = case.model(), profile_of(case.name, training)
    parameters = {tensor.untyped_storage().data_ptr(): tensor.nbytes for _, tensor in model.named_parameters()}
    assert profile.parameter_bytes == sum(parameters.values())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in named_tensors(model)}
    assert profile.parameter_bytes + profile.buffer_bytes == sum(storages.values())
    assert profile.peak_bytes >= profile.parameter_bytes + profile.buffer_bytes
    assert {row.path for row in profile.modules} == {path for path, _ in model.named_modules()}
    if training:
        training_loss(model(**case.example()), case.name).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert profile.gradient_bytes == sum(gradient.nbytes for gradient in gradients)
        assert profile.optimizer_bytes == 2 * profile.gradient_bytes
