"""Training steps by `autoshard.schedule` in one process: gradients are those of the whole batch."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import autoshard
from autoshard.errors import ApplyError, PlanError, SpecError
from tests.runtime.pipelines import VOCAB, close, pipeline, sentences, words


def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def counted(output, target):
    """A mean over labels that are not ignored."""
    return cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def mean(output, target):
    return mse_loss(output["logits"], target)


@pytest.fixture
def applied():
    """A model with a plan applied, the same without, and inputs; one part has no labels."""
    original, model, inputs = words(), words(), sentences()
    inputs["labels"][2:4] = -100
    with autoshard.simulate("3x16MiB"):
        yield autoshard.apply(model, pipeline(model, inputs, recompute=True)), original, inputs


@pytest.mark.parametrize("loss", [mean, counted, None])
def test_a_step_gives_the_gradients_of_the_whole_batch(loss, applied):
    """With a function for the loss, or with that of the model itself."""
    model, original, inputs = applied
    steps = autoshard.schedule(model, loss)
    for rows in (8, 7):
        given = {name: one[:rows] for name, one in inputs.items()}
        target = given.pop("labels") if loss is not None else None
        target = torch.randn(rows, 6, VOCAB, dtype=torch.float64) if loss is mean else target
        losses = []
        output, whole = steps.step(**given, target=target, losses=losses), original(**given)
        value = whole["loss"] if loss is None else loss(whole, target)
        value.backward()
        close(output["logits"], whole["logits"])
        close(losses[0], value)
        assert len(losses) == 1 and not any(one.requires_grad for one in (*losses, output["logits"]))
    for ours, theirs in zip(gradients(model), gradients(original), strict=True):
        close(ours, theirs)


def test_evaluation_leaves_no_gradients(applied):
    model, original, inputs = applied
    ids, target, losses = inputs["ids"], torch.randn(8, 6, VOCAB, dtype=torch.float64), []
    output = autoshard.schedule(model, mean).eval(ids, target=target, losses=losses)
    close(output["logits"], original(ids)["logits"])
    close(losses[0], mean(original(ids), target))
    assert not gradients(model) and not output["logits"].requires_grad
    assert autoshard.schedule(model, mean).eval(ids, target=target, return_outputs=False) is None


def test_what_makes_no_sense_is_refused(applied):
    model, original, inputs = applied
    with pytest.raises(ApplyError, match="a schedule runs a model to which a plan is applied"):
        autoshard.schedule(original)
    with pytest.raises(SpecError, match="loss is a function"):
        autoshard.schedule(model, "mse")
    with pytest.raises(SpecError, match="reduction is"):
        autoshard.schedule(model, mean, reduction="median")
    with pytest.raises(PlanError, match="no scalars to differentiate"):
        autoshard.schedule(model).step(inputs["ids"])
    for loss, said in (
        (lambda output, target: output["logits"], "returned a tensor of shape"),
        (lambda output, target: None, "the loss function returned NoneType"),
        (lambda output, target: torch.tensor(1.0), "the loss has no gradients"),
    ):
        with pytest.raises(SpecError, match=said):
            autoshard.schedule(model, loss).step(inputs["ids"], target=inputs["labels"])
    assert not gradients(model)
    with pytest.raises(SpecError, match='schedule "1f1b" needs a process per device'):
        autoshard.plan(
            nn.Linear(4, 4), "2x16MiB", inputs=torch.randn(4, 4), strategy="pipeline", schedule="1f1b",
            workload=autoshard.Workload(mode="training"),
        )  # fmt: skip
