"""Training steps by `autoshard.schedule` in one process: gradients are those of the whole batch."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import autoshard
from autoshard.errors import ApplyError, PlanError, SpecError
from tests.runtime.pipelines import VOCAB, pipeline, sentences, words


def gradients(model):
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def close(found, wanted):
    """Equal to the rounding of float64, told from the largest value."""
    torch.testing.assert_close(
        found.detach().cpu(), wanted.detach(), rtol=0, atol=1e-12 * float(wanted.detach().abs().max())
    )


def counted(output, target):
    """A mean over labels that are not ignored."""
    return cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def mean(output, target):
    return mse_loss(output["logits"], target)


def targets(rows):
    return torch.randn(rows, 6, VOCAB, dtype=torch.float64)


@pytest.mark.parametrize("loss", [mean, counted])
def test_a_step_gives_the_gradients_of_the_whole_batch(loss):
    original, model, inputs = words(), words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs))
        steps = autoshard.schedule(model, loss)
        for rows in (8, 7):
            ids, losses = inputs["ids"][:rows], []
            target = targets(rows) if loss is mean else inputs["labels"][:rows]
            output = steps.step(ids, target=target, losses=losses)
            whole = original(ids)
            value = loss(whole, target)
            value.backward()
            close(output["logits"], whole["logits"])
            close(losses[0], value)
            assert len(losses) == 1 and not any(one.requires_grad for one in (*losses, output["logits"]))
        for ours, theirs in zip(gradients(model), gradients(original), strict=True):
            close(ours, theirs)


def test_the_loss_of_the_model_itself():
    """It is a mean over labels, of which one part has none."""
    original, model, inputs = words(), words(), sentences()
    inputs["labels"][2:4] = -100
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs, recompute=True))
        output = autoshard.schedule(model).step(**inputs)
        whole = original(**inputs)
        whole["loss"].backward()
        close(output["loss"], whole["loss"])
        for ours, theirs in zip(gradients(model), gradients(original), strict=True):
            close(ours, theirs)


def test_evaluation_leaves_no_gradients():
    original, model, inputs = words(), words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs))
        target, losses = targets(8), []
        output = autoshard.schedule(model, mean).eval(inputs["ids"], target=target, losses=losses)
        close(output["logits"], original(inputs["ids"])["logits"])
        close(losses[0], mean(original(inputs["ids"]), target))
        assert not gradients(model) and not output["logits"].requires_grad
        assert autoshard.schedule(model, mean).eval(inputs["ids"], target=target, return_outputs=False) is None


def test_what_makes_no_sense_is_refused():
    model, inputs = words(), sentences()
    with pytest.raises(ApplyError, match="a schedule runs a model to which a plan is applied"):
        autoshard.schedule(model)
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs))
        with pytest.raises(SpecError, match="loss is a function"):
            autoshard.schedule(model, "mse")
        with pytest.raises(SpecError, match="reduction is"):
            autoshard.schedule(model, mean, reduction="median")
        with pytest.raises(PlanError, match="no scalars to differentiate"):
            autoshard.schedule(model).step(inputs["ids"])
        for loss, words_of in (
            (lambda output, target: output["logits"], "returned a tensor of shape"),
            (lambda output, target: None, "the loss function returned NoneType"),
            (lambda output, target: torch.tensor(1.0), "the loss has no gradients"),
        ):
            with pytest.raises(SpecError, match=words_of):
                autoshard.schedule(model, loss).step(inputs["ids"], target=inputs["labels"])
        assert not gradients(model)


def test_one_forward_one_backward_takes_processes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(SpecError, match='schedule "1f1b" needs a process per device'):
        autoshard.plan(
            model, "2x16MiB", inputs=torch.randn(4, 4), strategy="pipeline", schedule="1f1b",
            workload=autoshard.Workload(mode="training"),
        )  # fmt: skip
