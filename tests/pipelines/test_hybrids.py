"""Stages whose parameters are cut over ranks, and replicas of pipelines: three optimizer steps as in one process.

Other architectures than a decoder: `tests/runtime/test_launched_stages.py`.
"""

import copy
from dataclasses import replace

import pytest
import torch

import autoshard
from autoshard import Plan
from autoshard.errors import ApplyError, PlanError
from autoshard.plan import Mesh
from tests.pipelines.models import decoder
from tests.pipelines.plans import plan_of
from tests.ranks import run_jobs, run_ranks
from tests.runtime.cut_models import decoder_cuts
from tests.runtime.test_results import Model

MESHES = {"pp x tp": Mesh(pp=2, tp=2), "dp x pp": Mesh(dp=2, pp=2), "dp x pp x tp": Mesh(dp=2, pp=2, tp=2)}


def make():
    """(model, stages, inputs)."""
    torch.manual_seed(0)
    return decoder(2, 2)


def plan_for(mesh):
    model, stages, inputs = make()
    cuts = decoder_cuts(("model.layers.0", "model.layers.1")) if mesh.tensor > 1 else ()
    return plan_of(model, stages, 2, inputs, parts=2, schedule="1f1b", mesh=mesh, cuts=cuts).to_json()


def steps(model, step):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        losses.append(step())
        autoshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(text):
    """The losses of the part of the batch that this rank's replica has, what it holds, the whole model afterwards."""
    model, _, inputs = make()
    plan = Plan.from_json(text)
    replica, size = plan.mesh.place(torch.distributed.get_rank())[0], 8 // plan.mesh.data
    own = {name: one[replica * size :][:size] if isinstance(one, torch.Tensor) else one for name, one in inputs.items()}
    autoshard.apply(model, plan)
    runner = autoshard.schedule(model)

    def step():
        losses = []
        runner.step(**own, losses=losses)
        return sum(map(float, losses)) / len(losses) if losses else None

    losses = steps(model, step)
    held = sum(tensor.numel() for tensor in model.parameters() if not tensor.is_meta)
    autoshard.remove(model)
    return losses, held, {name: value.numpy() for name, value in model.state_dict().items()}


def plan_of_maps():
    """Two blocks in a stage each, both cut; nobody has asked for their maps."""
    torch.manual_seed(0)
    model, inputs = Model(), {"x": torch.randn(2, 6, 16)}
    found = autoshard.plan(model, "2x1GiB", inputs=inputs, strategy="column-parallel", objective="memory")
    cuts = tuple(cut for cut in found.cuts if "" not in cut.blocks)  # those of the whole model are in several stages
    assert cuts
    stages = [["inner.blocks.0"], ["inner.blocks.1", "inner.last", "head"]]
    plan = plan_of(model, stages, 2, inputs, parts=1, mesh=MESHES["pp x tp"], cuts=cuts)
    return replace(plan, results=tuple(replace(row, parts=()) for row in found.results)).to_json()


@torch.no_grad()
def ask_for_maps(text):
    """What was not planned is compared between ranks of a stage."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 6, 16)
    whole = copy.deepcopy(model.eval())
    autoshard.apply(model, Plan.from_json(text))
    with pytest.raises(PlanError):
        autoshard.schedule(model).eval(x=x, maps=True)
    for called in (model, model.inner, model.inner.blocks[0]):
        with pytest.raises(ApplyError, match=r"autoshard\.schedule\(model\)\.eval"):
            called(x)
    autoshard.apply(model, replace(Plan.from_json(text), batch=None))
    found = autoshard.schedule(model).eval(x)
    if found is not None:
        torch.testing.assert_close(found, whole(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(PlanError, match="it shares more with its caller"):
        autoshard.schedule(model).eval(x, maps=True)


@pytest.mark.parametrize("name", ["pp x tp", *(pytest.param(one, marks=pytest.mark.slow) for one in [*MESHES][1:])])
def test_three_steps_of_a_decoder_in_stages(name):
    mesh = MESHES[name]
    jobs = {"trained": (trained, plan_for(mesh))}
    if name == "pp x tp":
        jobs["maps"] = ask_for_maps, plan_of_maps()
    found = [rank["trained"] for rank in run_ranks(run_jobs, mesh.size, jobs)]
    model, _, inputs = make()

    def step():
        loss = model(**inputs)["loss"]
        loss.backward()
        return float(loss.detach())

    wanted = steps(model, step)
    lasts = [losses for losses, _, _ in found if losses[0] is not None]
    assert len(lasts) == mesh.data * mesh.tensor
    assert [sum(each) / len(each) for each in zip(*lasts, strict=True)] == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    for _, held, state in found:
        assert held < sum(parameter.numel() for parameter in model.parameters())
        for key, value in model.state_dict().items():  # AdamW makes steps of noise
            assert torch.allclose(value, torch.from_numpy(state[key]), atol=2e-4), key
