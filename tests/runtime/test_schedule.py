"""Training steps in micro-batches: gradients are those of the whole batch, whatever the order and the loss."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import autoshard
from autoshard.errors import ApplyError, PlanError, SpecError
from autoshard.plan import Plan, PlanDevice
from autoshard.runtime.copies import Copies
from autoshard.runtime.schedule import LocalSchedule
from autoshard.sharding import Action, Cut, Shard
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


def total(output, target):
    return ((output["logits"] - target) ** 2).sum()


def count(target):
    return (target != -100).sum()


LOSSES = {
    "mean": (mean, "mean", lambda rows: torch.randn(rows, 6, VOCAB, dtype=torch.float64)),
    "sum": (total, "sum", lambda rows: torch.randn(rows, 6, VOCAB, dtype=torch.float64)),
    "counted": (counted, count, lambda rows: sentences(rows)["labels"]),
}


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_step_gives_the_gradients_of_the_whole_batch(order, kind):
    loss, reduction, make = LOSSES[kind]
    original, model, inputs = words(), words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs, schedule=order))
        steps = autoshard.schedule(model, loss, reduction=reduction)
        for rows in (8, 7):
            ids, target, losses = inputs["ids"][:rows], make(rows), []
            output = steps.step(ids, target=target, losses=losses)
            whole = original(ids)
            value = loss(whole, target)
            value.backward()
            close(output["logits"], whole["logits"])
            assert len(losses) == 4 and not any(one.requires_grad for one in (*losses, output["logits"]))
            if kind == "sum":
                close(sum(losses), value)
        for ours, theirs in zip(gradients(model), gradients(original), strict=True):
            close(ours, theirs)


def check_own_loss(model, original, inputs):
    """One step gives the loss, and the gradients, that the original gives by itself."""
    output = autoshard.schedule(model).step(**inputs)
    whole = original(**inputs)
    whole["loss"].backward()
    close(output["loss"], whole["loss"])
    for ours, theirs in zip(gradients(model), gradients(original), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_the_loss_of_the_model_itself(order):
    """It is a mean over labels, of which one part has none."""
    original, model, inputs = words(), words(), sentences()
    inputs["labels"][2:4] = -100
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs, schedule=order, recompute=True))
        check_own_loss(model, original, inputs)


def test_three_steps_of_an_optimizer():
    original, model = words(), words()
    runs = {}
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, sentences()))
        for name, one in (("original", original), ("model", model)):
            torch.manual_seed(1)
            optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
            steps = None if one is original else autoshard.schedule(one)
            runs[name] = []
            for _ in range(3):
                inputs = sentences()
                optimizer.zero_grad()
                if steps is None:
                    loss = one(**inputs)["loss"]
                    loss.backward()
                else:
                    loss = steps.step(**inputs)["loss"]
                optimizer.step()
                runs[name].append(float(loss.detach()))
    assert runs["model"] == pytest.approx(runs["original"], rel=1e-9)


def test_a_step_after_modules_were_added():
    """All parts go the same way: what is new is taken in before the first of them."""
    original, model, inputs = words(), words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs))
        for one in (original, model):
            torch.manual_seed(1)
            one.blocks.append(nn.Linear(16, 16).double())
        check_own_loss(model, original, inputs)


def test_one_forward_one_backward_keeps_less():
    """Of twelve micro-batches, those of three are on a device at once."""
    peaks, inputs = {}, sentences(24, 18)
    for order in ("gpipe", "1f1b"):
        model = words()
        with autoshard.simulate("3x16MiB") as devices:
            autoshard.apply(model, pipeline(model, inputs, schedule=order, count=12))
            steps = autoshard.schedule(model)
            before = devices.memory("cpu:1")[0]
            devices.reset_peak()
            steps.step(**inputs)
            peaks[order] = devices.memory("cpu:1")[1] - before
    assert peaks["1f1b"] < 0.5 * peaks["gpipe"]


@pytest.mark.parametrize("kind", ["counted", "sum"])
def test_a_loss_that_reduces_otherwise_is_refused_before_any_backward(kind):
    loss, _, make = LOSSES[kind]
    model, inputs = words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs, schedule="1f1b"))
        steps = autoshard.schedule(model, loss)
        with pytest.raises(PlanError, match="does not reduce so, and gradients would be wrong"):
            steps.step(inputs["ids"], target=make(8))
        assert not gradients(model)
        steps.loss = mean
        steps.step(inputs["ids"], target=LOSSES["mean"][2](8))


def test_a_contrastive_loss_is_refused():
    def apart(output, target):
        pooled = output["logits"].mean(1)
        return cross_entropy(pooled @ pooled.T, torch.arange(len(pooled), device=target.device))

    model, inputs = words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs))
        with pytest.raises(PlanError, match="does not reduce so"):
            autoshard.schedule(model, apart).step(inputs["ids"], target=inputs["ids"])


@pytest.mark.parametrize("kind", ["1f1b", "eval"])
def test_outputs_that_nobody_wants_are_not_kept(kind):
    """The same gradients and losses; of the logits those of the parts between forward and backward are there."""
    original, model, inputs = words(), words(), sentences()
    target = LOSSES["mean"][2](8)
    mean(original(inputs["ids"]), target).backward()
    alive, most = [], 0

    def watch(output, target):
        nonlocal most
        alive.append(weakref.ref(output["logits"].untyped_storage()))
        most = max(most, sum(one() is not None for one in alive))
        return mean(output, target)

    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs, schedule="1f1b"))
        steps, losses = LocalSchedule(model, watch, check=False), []
        run = steps.eval if kind == "eval" else steps.step
        assert run(inputs["ids"], target=target, losses=losses, return_outputs=False) is None
        assert len(losses) == 4 and most == (1 if kind == "eval" else 3)
        if kind != "eval":
            for ours, theirs in zip(gradients(model), gradients(original), strict=True):
                close(ours, theirs)


def test_evaluation_leaves_no_gradients():
    original, model, inputs = words(), words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs))
        target, losses = LOSSES["mean"][2](8), []
        output = autoshard.schedule(model, mean).eval(inputs["ids"], target=target, losses=losses)
        close(output["logits"], original(inputs["ids"])["logits"])
        close(torch.stack(losses).mean(), mean(original(inputs["ids"]), target))
        assert output["logits"].device == model.head.weight.device
        assert not gradients(model) and not output["logits"].requires_grad


def test_plans_of_one_part_step_too():
    """Placed modules without micro-batches: bit for bit one forward and backward."""
    original, model, inputs = words(), words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs, count=1))
        autoshard.schedule(model).step(**inputs)
        original(**inputs)["loss"].backward()
        assert all(torch.equal(*pair) for pair in zip(gradients(model), gradients(original), strict=True))


def test_parameters_are_copied_once_in_a_step():
    """A tied weight is needed in two stages; a copy of it per micro-batch would be kept until its backward."""
    weight = nn.Parameter(torch.ones(3))
    with autoshard.simulate("2x1MiB") as devices:
        weight.data = weight.data.to("cpu:0")
        copies = Copies()

        def run():
            copies.begin()
            taken = copies.get(weight, torch.device("cpu:1"))
            copies.end()
            return taken

        with copies.joined():
            kept = [run() for _ in range(4)]
            shared = devices.memory("cpu:1")[0]
        again = run()
        assert devices.memory("cpu:1")[0] == 2 * shared
        (sum(kept) + again).sum().backward()
    assert weight.grad.cpu().tolist() == [5.0] * 3


@pytest.mark.parametrize(
    ("change", "kind", "words_of"),
    [
        ({"ids": torch.zeros(3, 6, dtype=torch.long)}, PlanError, "3 rows can't be divided into 4 parts"),
        ({"scale": 2.0}, PlanError, "this call has scale=2.0"),
        ({"target": torch.zeros(5)}, PlanError, r"target has the shape \[5\], and the batch has 8 rows"),
    ],
)
def test_batches_that_can_not_be_divided_are_refused(change, kind, words_of):
    model, inputs = words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs))
        call = {"ids": inputs["ids"], "target": inputs["labels"], **change}
        with pytest.raises(kind, match=words_of):
            autoshard.schedule(model, counted).step(**call)
        assert not gradients(model)


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
        with pytest.raises(SpecError, match="returned a tensor of shape"):
            autoshard.schedule(model, lambda output, target: output["logits"]).step(
                inputs["ids"], target=inputs["labels"]
            )


@pytest.mark.parametrize(
    ("loss", "words_of"),
    [
        (lambda output, target: None, "the loss function returned NoneType"),
        (
            lambda output, target: counted(output, target) if torch.is_grad_enabled() else None,
            "the loss function, called without gradients, returned NoneType",
        ),
        (lambda output, target: output["logits"].detach().square().mean(), "the loss has no gradients"),
        (lambda output, target: torch.tensor(1.0), "the loss has no gradients"),
    ],
)
def test_a_loss_that_is_none_or_without_gradients_is_refused(loss, words_of):
    model, inputs = words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs))
        with pytest.raises(SpecError, match=words_of):
            autoshard.schedule(model, loss).step(inputs["ids"], target=inputs["labels"])
        assert not gradients(model)


def test_a_plan_without_micro_batches_says_how_to_train():
    """Parameters cut over ranks: every call of the model runs on all of them."""
    model = nn.Sequential(nn.Linear(4, 4))
    cut = Cut(
        blocks=("0",), size=4, shares=(2, 2),
        shards=(Shard(name="weight", dim=0, axis="*4"), Shard(name="bias", dim=0, axis="*4")),
        actions=(Action(kind="gather", module="", axis="*4", dim=1),),
    )  # fmt: skip
    devices = tuple(PlanDevice(name=f"cpu:{index}", memory_bytes=1 << 20) for index in range(2))
    plan = Plan(
        strategy="column-parallel", objective="latency", workload=autoshard.Workload(), devices=devices,
        placements={"": "cpu:0"}, cuts=(cut,),
    )  # fmt: skip
    with autoshard.simulate("2x1MiB"):
        autoshard.apply(model, plan)
        with pytest.raises(ApplyError, match="has no micro-batches here"):
            autoshard.schedule(model)
