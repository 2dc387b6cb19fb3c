"""Around the steps of a pipeline over processes: clipping, optimizers, saving, and what goes wrong."""

import copy
import dataclasses
import pathlib
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import autoshard
from autoshard.errors import ApplyError, RankError
from autoshard.plan import Mesh
from autoshard.runtime.moves import named_tensors
from autoshard.runtime.staged import check_stages
from tests.pipelines.models import Scaled, Tied, decoder, shared, tied
from tests.pipelines.plans import plan_of
from tests.pipelines.rank_checks import token_loss
from tests.ranks import run_ranks


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
    for name, make, loss in (("tied", tied, token_loss), ("decoder", partial(decoder, 2, 2), None)):
        losses, norms, model = trained(make, True, loss=loss)
        autoshard.save(model, f"{folder}/{name}")
        autoshard.remove(model)
        state = {key: value.numpy() for key, value in model.state_dict().items()}
        results[name] = losses, norms, state
        if torch.distributed.get_rank() == 0:
            autoshard.save(model, f"{folder}/{name}-removed")
    return results


def test_three_steps_with_clipping_and_saving(tmp_path):
    first, last = run_ranks(train_and_save, 2, str(tmp_path))
    for name, make, loss in (("tied", tied, token_loss), ("decoder", partial(decoder, 2, 2), None)):
        losses, norms, model = trained(make, False, loss=loss)
        assert torch.allclose(torch.tensor(losses), torch.tensor(last[name][0]), rtol=1e-6), name
        for rank in (first, last):
            assert torch.allclose(torch.tensor(norms), torch.tensor(rank[name][1]), rtol=1e-5), name
            for key, value in model.state_dict().items():
                assert torch.allclose(value, torch.from_numpy(rank[name][2][key]), atol=2e-4), (name, key)
        assert files(tmp_path / name) == files(tmp_path / f"{name}-removed")
    assert Tied  # the model of the first case


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
    with pytest.raises(ApplyError, match="float16 needs a GradScaler"), torch.autocast("cpu", torch.float16):
        runner.step(**inputs)
    runner.step(**inputs)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    with pytest.raises(RankError, match=r"scaled by different factors.*autoshard\.clip_grad_norm_"):
        runner.step(**inputs)


def test_gradients_that_are_scaled_by_a_norm_of_one_rank_are_noticed():
    run_ranks(scaled_apart, 2)


def changes():
    """What is changed between steps counts in the next one; copies are models of their own."""
    torch.manual_seed(0)
    model, inputs = Scaled(), {"x": torch.randn(8, 4)}
    alone = copy.deepcopy(model)
    autoshard.apply(model, plan_of(model, [["first"], ["second"]], 2, inputs, parts=2))
    runner, wrong = autoshard.schedule(model), []

    def same(name, model=model, runner=runner):
        alone.zero_grad()
        alone(**inputs)["loss"].backward()
        model.zero_grad()
        runner.step(**inputs)
        own = [one.grad for one in model.parameters() if not one.is_meta]
        wanted = [b.grad for a, b in zip(model.parameters(), alone.parameters(), strict=True) if not a.is_meta]
        if not all(torch.allclose(*pair) for pair in zip(own, wanted, strict=True)):
            wrong.append(name)

    same("first")
    recorded = model.calls
    same("again")
    if model.calls != recorded:
        wrong.append("recorded again")
    for name, value in (("scale", 0.5), ("squared", True)):
        setattr(model, name, value)
        setattr(alone, name, value)
        same(name)
    hooks = [one.register_forward_hook(lambda module, args, out: {"loss": out["loss"] * 3}) for one in (model, alone)]
    same("hook")
    for hook in hooks:
        hook.remove()
    same("hook removed")
    for one in (model, alone):
        one.double()
    inputs["x"] = inputs["x"].double()
    same("dtype")
    other = copy.deepcopy(model)
    same("copy", other, autoshard.schedule(other))
    norms = [float(autoshard.clip_grad_norm_(one.parameters(), 1.0)) for one in (other, alone)]
    if abs(norms[0] - norms[1]) > 1e-6:
        wrong.append("norm of the copy")
    autoshard.remove(other)
    same("after the copy is gone")
    model.first.more = torch.nn.Parameter(torch.ones(()))
    try:
        runner.step(**inputs)
    except ApplyError as error:
        if "first.more was added after autoshard.apply" not in str(error):
            wrong.append(str(error))
    else:
        wrong.append("added")
    return wrong


def test_changes_between_steps_count():
    assert run_ranks(changes, 2) == [[], []]


def refused():
    """What is refused, with a message, on every rank alike; gradients and parameters stay as they were."""
    torch.manual_seed(0)
    model, stages, inputs = tied()
    said = {}
    plan = plan_of(model, stages, 2, inputs, parts=4)
    autoshard.apply(model, plan)
    rank = torch.distributed.get_rank()
    target = torch.randint(0, 11, (8, 5))
    runner = autoshard.schedule(model, token_loss)
    runner.step(**inputs, target=target)
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def attempt(name, do):
        try:
            do()
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    attempt("few rows", lambda: runner.step(ids=inputs["ids"][:3], target=target[:3]))
    attempt("unequal", lambda: runner.step(ids=inputs["ids"][:6], target=target[:6]))
    attempt("no loss", lambda: autoshard.schedule(model).step(**inputs))
    summed = autoshard.schedule(model, lambda output, target: token_loss(output, target) ** 2)
    attempt("not a mean", lambda: summed.step(**inputs, target=target))
    after = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    said["gradients"] = "" if all(torch.equal(before[n], after[n]) for n in before) else "changed"
    autoshard.remove(model)
    attempt("removed", lambda: runner.step(**inputs, target=target))
    attempt(
        "stages", lambda: autoshard.apply(model, plan_of(model, [["embed", "first", "second", "head"], []], 2, inputs))
    )
    attempt(
        "ranks", lambda: autoshard.apply(model, plan_of(model, [["embed"], ["first"], ["second", "head"]], 3, inputs))
    )
    halves = dataclasses.replace(plan, mesh=Mesh(fsdp=2, pp=2), devices=plan.devices * 2)
    attempt("sharded", lambda: check_stages(halves, named_tensors(model)))
    said["rank"] = rank
    said["unknown"] = unknown_output()
    return said


def unknown_output():
    """What an output raises that only the rank of the last stage has, and that the plan doesn't know."""
    model, stages, inputs = shared()
    plan = plan_of(model, [stages[0] + stages[1], stages[2] + stages[3]], 2, inputs, parts=4)
    known = tuple(one for one in plan.batch.outputs if one.path == "loss")
    autoshard.apply(model, dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, outputs=known)))
    try:
        autoshard.schedule(model).step(**inputs)
    except autoshard.AutoshardError as error:
        return str(error) if all(p.grad is None for p in model.parameters()) else "gradients"
    return ""


def test_what_is_refused_is_refused_by_all():
    for said in run_ranks(refused, 2):
        assert "PlanError" in said["few rows"] and "3 rows" in said["few rows"]
        assert "6 rows can't be divided into 4 equal parts" in said["unequal"]
        assert "pass a function" in said["no loss"]
        assert "does not reduce so" in said["not a mean"]
        assert said["gradients"] == ""
        assert "no longer applied" in said["removed"]
        assert "has no parameters" in said["stages"]
        assert "for 3 devices, and 2 processes run" in said["ranks"]
        assert "shard them over replicas, too" in said["sharded"]
        assert "the output x was not there at planning" in said["unknown"]
