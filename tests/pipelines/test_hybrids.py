"""Stages whose parameters are cut over ranks, and replicas of pipelines: three optimizer steps as in one process."""

import copy
from dataclasses import replace

import pytest
import torch

import autoshard
from autoshard import Plan, Workload
from autoshard.common.module_paths import is_below, parent
from autoshard.errors import ApplyError, PlanError
from autoshard.nested import tensors_in
from autoshard.plan import Mesh
from tests.models.hf import HF_CASES
from tests.pipelines.models import decoder
from tests.pipelines.plans import plan_of
from tests.ranks import run_ranks
from tests.runtime.test_results import Model

CASES = {case.name: case for case in HF_CASES}
MORE = ["llama-tied", "gpt2", "phi3", "gemma2", "bloom", "mixtral"]
MESHES = {"pp x tp": Mesh(pp=2, tp=2), "dp x pp": Mesh(dp=2, pp=2), "dp x pp x tp": Mesh(dp=2, pp=2, tp=2)}


def make(name):
    """(model, stages, inputs, loss)."""
    torch.manual_seed(0)
    if name == "decoder":
        return *decoder(2, 2), None
    case = CASES[name]
    model, inputs = case.model(), case.inputs(8, 6)
    return model, halves(model, case.layers), inputs, squares


def halves(model, layers):
    """Two stages: up to the first half of the layers, and the rest."""
    stages, number = ([], []), 0
    count = len(model.get_submodule(layers))
    for name, _ in (*model.named_buffers(), *model.named_parameters(remove_duplicate=False)):  # tables come first
        path = parent(name)
        if is_below(path, layers):
            index = path.removeprefix(f"{layers}.").split(".")[0]
            path, number = f"{layers}.{index}", int(int(index) >= count // 2)
        if path not in stages[number]:
            stages[number].append(path)
    return [[path for path in stage if path not in stages[1 - at] or not at] for at, stage in enumerate(stages)]


def squares(output):
    return next(tensor for _, tensor in tensors_in(output) if tensor.dim() == 3).square().mean()


def plan_for(name, mesh):
    model, stages, inputs, _ = make(name)
    cuts = ()
    if mesh.tensor > 1:
        workload = Workload(mode="training", batch_size=8)
        cuts = autoshard.plan(
            model,
            f"{mesh.tensor}x1GiB",
            inputs=inputs,
            strategy="column-parallel",
            objective="memory",
            workload=workload,
        ).cuts
        cuts = tuple(cut for cut in cuts if "" not in cut.blocks)  # those of the whole model are in several stages
        assert cuts
    return plan_of(model, stages, 2, inputs, parts=2, schedule="1f1b", mesh=mesh, cuts=cuts).to_json()


def steps(model, step):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        yield step()
        autoshard.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def trained(plans):
    """Per plan, the losses of the part of the batch that this rank's replica has, and the whole model afterwards."""
    results = {}
    for key, (name, text) in plans.items():
        model, _, inputs, loss = make(name)
        plan = Plan.from_json(text)
        rank = torch.distributed.get_rank()
        replica = plan.mesh.place(rank)[0]
        size = 8 // plan.mesh.data
        own = {
            key: value[replica * size : (replica + 1) * size] if isinstance(value, torch.Tensor) else value
            for key, value in inputs.items()
        }
        autoshard.apply(model, plan)
        runner = autoshard.schedule(model, loss)

        def step(runner=runner, own=own):
            losses = []
            runner.step(**own, losses=losses)
            return sum(map(float, losses)) / len(losses) if losses else None

        losses = list(steps(model, step))
        held = sum(tensor.numel() for tensor in model.parameters() if not tensor.is_meta)
        autoshard.remove(model)
        results[key] = losses, held, {name: value.numpy() for name, value in model.state_dict().items()}
    return results


def check(names, meshes):
    plans = {f"{name}, {mesh}": (name, plan_for(name, MESHES[mesh])) for name in names for mesh in meshes}
    found = run_ranks(trained, max(MESHES[mesh].size for mesh in meshes), plans)
    for key, (name, text) in plans.items():
        model, _, inputs, loss = make(name)

        def step(model=model, inputs=inputs, loss=loss):
            output = model(**inputs)
            value = loss(output) if loss else output["loss"]
            value.backward()
            return float(value.detach())

        wanted = list(steps(model, step))
        size = sum(parameter.numel() for parameter in model.parameters())
        last = [rank[key][0] for rank in found if rank[key][0][0] is not None]
        mesh = Plan.from_json(text).mesh
        assert len(last) == mesh.data * mesh.tensor
        for number, loss in enumerate(wanted):
            mean = sum(one[number] for one in last) / len(last)
            assert abs(mean - loss) <= 1e-6 * max(1.0, abs(loss)), (key, number, mean, loss)
        for rank in found:
            assert rank[key][1] < size, key
            for tensor, value in model.state_dict().items() if name == "decoder" else ():  # AdamW makes steps of noise
                assert torch.allclose(value, torch.from_numpy(rank[key][2][tensor]), atol=2e-4), (key, tensor)


def test_a_decoder_in_stages_that_are_cut():
    check(["decoder"], ["pp x tp"])


def plan_of_maps():
    """Two blocks in a stage each, both cut; nobody has asked for their maps."""
    torch.manual_seed(0)
    model, inputs = Model(), {"x": torch.randn(2, 6, 16)}
    cut = autoshard.plan(model, "2x1GiB", inputs=inputs, strategy="column-parallel", objective="memory")
    cuts = tuple(one for one in cut.cuts if "" not in one.blocks)
    stages = [["inner.blocks.0"], ["inner.blocks.1", "inner.last", "head"]]
    plan = plan_of(model, stages, 2, inputs, parts=1, mesh=MESHES["pp x tp"], cuts=cuts)
    return replace(plan, results=tuple(replace(row, parts=()) for row in cut.results)).to_json()


@torch.no_grad()
def ask_for_maps(text):
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


def test_what_was_not_planned_is_compared_between_ranks_of_a_stage():
    run_ranks(ask_for_maps, 4, plan_of_maps())


@pytest.mark.slow
def test_replicas_of_a_decoder_in_stages():
    check(["decoder"], ["dp x pp"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "llama"])
def test_replicas_of_stages_that_are_cut(name):
    check([name], ["dp x pp x tp"])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_architectures(name):
    check([name], ["pp x tp", "dp x pp"])
