"""Pipelines over processes: schedules, steps with clipping, optimizers and saving, and what goes wrong."""

import copy
import dataclasses
import pathlib
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import autoshard
from autoshard.errors import ApplyError, PlanError, RankError
from autoshard.plan import Mesh
from autoshard.runtime.moves import named_tensors
from autoshard.runtime.staged import check_stages
from tests.pipelines.models import Scaled, decoder, shared, skips, tied, turned
from tests.pipelines.plans import plan_of
from tests.pipelines.rank_checks import differences, token_loss
from tests.pipelines.test_ways import other_ways
from tests.ranks import run_jobs, run_ranks


def trained(make, apply_plan, steps=3, loss=None):
    """Losses and gradient norms of some AdamW steps with clipping, and the model."""
    torch.manual_seed(0)
    model, stages, inputs = make()
    model.train()
    target = torch.randint(0, 11, (8, 5)) if loss else None
    if apply_plan:
        autoshard.apply(model, plan_of(model, stages, 2, inputs, parts=4, schedule="1f1b"))
        runner = autoshard.schedule(model, loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for _ in range(steps):
        if apply_plan:
            found = []
            runner.step(**inputs, target=target, losses=found)
            losses.append(float(sum(found)) / max(1, len(found)))
        else:
            output = model(**inputs)
            value = loss(output, target) if loss else output["loss"]
            value.backward()
            losses.append(float(value.detach()))
        norms.append(float(autoshard.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model


def files(folder):
    """What was saved; the order of names in the metadata of a file is the library's, and any."""
    return {
        file.name: {name: value.tolist() for name, value in load_file(file).items()}
        for file in pathlib.Path(folder).glob("*.safetensors")
    }


def train_and_save(folder):
    results = {}
    for name, make, loss in CASES:
        losses, norms, model = trained(make, True, loss=loss)
        autoshard.save(model, f"{folder}/{name}")
        autoshard.remove(model)
        state = {key: value.numpy() for key, value in model.state_dict().items()}
        results[name] = losses, norms, state
        if torch.distributed.get_rank() == 0:
            autoshard.save(model, f"{folder}/{name}-removed")
    return results


def scaled_apart():
    """torch's own clipping, of one rank's stages, is noticed by all in the next step; float16 is refused."""
    torch.manual_seed(0)
    model, stages, inputs = decoder(2, 2)
    autoshard.apply(model, plan_of(model, stages, 2, inputs, parts=4))
    optimizer, runner = torch.optim.SGD(model.parameters(), lr=1e-3), autoshard.schedule(model)
    runner.step(**inputs)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.5  # alike on all of them: nothing is wrong
    optimizer.step()
    runner.step(**inputs)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)  # nor is it where each element is clipped by itself
    autoshard.clip_grad_norm_(model.model.layers.parameters(), 1e-3)
    optimizer.step()
    with pytest.raises(ApplyError, match="float16 needs a GradScaler"), torch.autocast("cpu", torch.float16):
        runner.step(**inputs)
    runner.step(**inputs)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    with pytest.raises(RankError, match=r"scaled by different factors.*autoshard\.clip_grad_norm_"):
        runner.step(**inputs)


def changes():
    """What is changed between steps counts in the next one; copies are models of their own."""
    torch.manual_seed(0)
    model, inputs = Scaled(), {"x": torch.randn(8, 4)}
    alone = copy.deepcopy(model)
    autoshard.apply(model, plan_of(model, [["first"], ["second"]], 2, inputs, parts=2))
    runner = autoshard.schedule(model)

    def check(name, model=model, runner=runner):
        alone.zero_grad()
        alone(**inputs)["loss"].backward()
        model.zero_grad()
        runner.step(**inputs)
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert ours.is_meta or torch.allclose(ours.grad, theirs.grad), name

    check("first")
    recorded = model.calls
    check("again")
    assert model.calls == recorded, "recorded again"
    for name, value in (("scale", 0.5), ("squared", True)):
        setattr(model, name, value)
        setattr(alone, name, value)
        check(name)
    hooks = [one.register_forward_hook(lambda module, args, out: {"loss": out["loss"] * 3}) for one in (model, alone)]
    check("hook")
    for hook in hooks:
        hook.remove()
    check("hook removed")
    for one in (model, alone):
        one.double()
    inputs["x"] = inputs["x"].double()
    check("dtype")
    other = copy.deepcopy(model)
    check("copy", other, autoshard.schedule(other))
    norms = [float(autoshard.clip_grad_norm_(one.parameters(), 1.0)) for one in (other, alone)]
    assert norms[0] == pytest.approx(norms[1], abs=1e-6)
    autoshard.remove(other)
    check("after the copy is gone")
    model.first.more = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(ApplyError, match=r"first\.more was added, removed or replaced after"):
        runner.step(**inputs)


def refusals():
    """What is refused, with a message, on every rank alike; gradients and parameters stay as they were."""
    torch.manual_seed(0)
    model, stages, inputs = tied()
    plan = plan_of(model, stages, 2, inputs, parts=4)
    autoshard.apply(model, plan)
    target = torch.randint(0, 11, (8, 5))
    runner = autoshard.schedule(model, token_loss)
    runner.step(**inputs, target=target)
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with pytest.raises(PlanError, match="3 rows"):
        runner.step(ids=inputs["ids"][:3], target=target[:3])
    with pytest.raises(PlanError, match="6 rows can't be divided into 4 equal parts"):
        runner.step(ids=inputs["ids"][:6], target=target[:6])
    with pytest.raises(autoshard.AutoshardError, match="pass a function"):
        autoshard.schedule(model).step(**inputs)
    summed = autoshard.schedule(model, lambda output, target: token_loss(output, target) ** 2)
    with pytest.raises(autoshard.AutoshardError, match="does not reduce so"):
        summed.step(**inputs, target=target)
    padded = target.clone()
    padded[7, 1:] = -100  # of the last part alone
    with pytest.raises(autoshard.AutoshardError, match="the loss of 2 rows together"):
        autoshard.schedule(model, token_loss).step(**inputs, target=padded)
    assert all(torch.equal(before[n], p.grad) for n, p in model.named_parameters() if n in before)
    autoshard.remove(model)
    with pytest.raises(autoshard.AutoshardError, match="no longer applied"):
        runner.step(**inputs, target=target)
    for stages, count, words in (
        ([["embed", "first", "second", "head"], []], 2, "has no parameters"),
        ([["embed"], ["first"], ["second", "head"]], 3, "for 3 devices, and 2 processes run"),
    ):
        with pytest.raises(autoshard.AutoshardError, match=words):
            autoshard.apply(model, plan_of(model, stages, count, inputs))
    halves = dataclasses.replace(plan, mesh=Mesh(fsdp=2, pp=2), devices=plan.devices * 2)
    with pytest.raises(autoshard.AutoshardError, match="shard them over replicas, too"):
        check_stages(halves, named_tensors(model))


def unknown_output():
    """What an output raises that only the rank of the last stage has, and that the plan doesn't know."""
    torch.manual_seed(0)
    model, stages, inputs = shared()
    plan = plan_of(model, [stages[0] + stages[1], stages[2] + stages[3]], 2, inputs, parts=4)
    known = tuple(one for one in plan.batch.outputs if one.path == "loss")
    autoshard.apply(model, dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, outputs=known)))
    with pytest.raises(autoshard.AutoshardError, match="the output x was not there at planning"):
        autoshard.schedule(model).step(**inputs)
    assert all(parameter.grad is None for parameter in model.parameters())


BFLOAT16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def schedules():
    """What is wrong with outputs, losses and gradients under torch's schedules, by case."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(0, 11, (8, 5), generator=generator)
    return {
        "tied": differences(tied, 2, "gpipe", loss=token_loss, target=target),
        "recomputed": differences(partial(decoder, 4, 4), 2, "interleaved", recompute=True),
        "skips": differences(skips, 2, "interleaved"),
        "unwanted outputs": differences(tied, 2, "1f1b", loss=token_loss, target=target, return_outputs=False),
        "mixed precision": differences(partial(decoder, 2, 2), 2, "1f1b", around=BFLOAT16, tolerance=2**-7),
        "zero bubble": differences(partial(decoder, 4, 4), 2, "zero-bubble"),
        "transposed gradient": differences(turned, 2, "zero-bubble"),
    }


CASES = (("tied", tied, token_loss), ("decoder", partial(decoder, 2, 2), None))


def test_two_ranks(tmp_path):
    """Three steps with clipping, which are saved; and what goes wrong, and is refused by all."""
    jobs = {one.__name__: (one,) for one in (scaled_apart, changes, refusals, unknown_output, other_ways)}
    jobs |= {"trained": (train_and_save, str(tmp_path)), "schedules": (schedules,)}
    first, last = run_ranks(run_jobs, 2, jobs)
    assert not any(first["schedules"].values()), first["schedules"]
    assert not any(last["schedules"].values()), last["schedules"]
    for name, make, loss in CASES:
        losses, norms, model = trained(make, False, loss=loss)
        assert torch.allclose(torch.tensor(losses), torch.tensor(last["trained"][name][0]), rtol=1e-6), name
        for rank in (first["trained"], last["trained"]):
            assert torch.allclose(torch.tensor(norms), torch.tensor(rank[name][1]), rtol=1e-5), name
            for key, value in model.state_dict().items():
                assert torch.allclose(value, torch.from_numpy(rank[name][2][key]), atol=2e-4), (name, key)
        assert files(tmp_path / name) == files(tmp_path / f"{name}-removed")


def on_four():
    return {
        "decoder": differences(partial(decoder, 4, 4), 4, "1f1b"),
        "skips": differences(skips, 4, "gpipe"),
        "shared": differences(shared, 4, "1f1b"),
    }


def more_on_two():
    return {
        "decoder": differences(partial(decoder, 2, 2), 2, "1f1b"),
        "interleaved": differences(partial(decoder, 4, 4), 2, "interleaved"),
        "passed on": differences(skips, 2, "zero-bubble"),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("work", "count"), [(more_on_two, 2), (on_four, 4)])
def test_more_of_them_train_as_one(work, count):
    for result in run_ranks(work, count):
        assert not any(result.values()), result
