"""Loading into stages and replicas over processes: each reads what it has, and trains as the original does."""

from dataclasses import replace

import pytest
import safetensors.torch
import torch

import autoshard
from autoshard.checkpoint.load import load_applied
from autoshard.errors import CheckpointError, RankError
from autoshard.integrations.loading import open_weights
from autoshard.plan import Mesh, Plan
from autoshard.runtime.dispatch import bring_back_to
from autoshard.runtime.sharded import own_part, whole_of
from tests.checkpoint.test_launched import completed
from tests.pipelines.models import decoder
from tests.pipelines.plans import plan_of
from tests.ranks import run_ranks
from tests.runtime import test_launched as launched
from tests.runtime import test_launched_stages as stages
from tests.torch_releases import sharded_replicas


def made():
    torch.manual_seed(0)
    return decoder(2, 2)


def plan_for(mesh):
    model, stages, inputs = made()
    plan = plan_of(model, stages, 2, inputs, parts=2, mesh=mesh)
    if mesh.data == 1:
        return plan
    return replace(plan, stages=(), placements={"": "cpu:0"}, num_microbatches=1, schedule="none")


def loaded(folder, mesh):
    """Bytes that were read here, what differs from the original, and whether removing gives the original."""
    original, _, inputs = made()
    plan = plan_for(mesh)
    model = autoshard.load(folder, plan=plan, model=lambda: made()[0], progress=False)
    own = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
    if mesh.data > 1:
        loss = model(**inputs)["loss"]
        loss.backward()
        losses = [loss.detach()]
    else:
        losses = []
        autoshard.schedule(model).step(**inputs, losses=losses)
    reference = original(**inputs)["loss"]
    reference.backward()
    wanted = dict(original.named_parameters())
    apart = max(float((whole_of(parameter.grad) - wanted[name].grad).abs().max()) for name, parameter in own.items())
    if losses:
        apart = max(apart, abs(float(sum(losses)) / len(losses) - float(reference)))
    autoshard.remove(model)
    back = all(torch.equal(tensor, original.state_dict()[name]) for name, tensor in model.state_dict().items())
    unfilled = open_weights(folder, model=lambda: made()[0])
    report = load_applied(unfilled.model, plan, unfilled.checkpoint, unfilled.sources)
    return report.bytes_read, apart, back


def everything(folder):
    return {name: loaded(folder, mesh) for name, mesh in MESHES.items()}, refused(folder)


MESHES = {"stages": Mesh(pp=2), "replicas": Mesh(dp=2)}


def refused(folder):
    """One rank can't read: all say so, and no parameter has memory."""
    unfilled = open_weights(folder, model=lambda: made()[0])
    if torch.distributed.get_rank() == 1:
        del unfilled.sources["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises((CheckpointError, RankError), match="nothing says how") as error:
        load_applied(unfilled.model, plan_for(MESHES["stages"]), unfilled.checkpoint, unfilled.sources)
    return type(error.value).__name__, all(parameter.is_meta for parameter in unfilled.model.parameters())


def test_every_process_reads_what_it_has(tmp_path):
    model, _, _ = made()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in state.values())
    (first, said), (last, other) = run_ranks(everything, 2, str(tmp_path))
    for rank in (first, last):
        assert all(apart < 1e-6 and back for _, apart, back in rank.values())
        assert rank["replicas"][0] == whole
        assert rank["stages"][0] < 0.7 * whole  # both read the tied table
    assert first["stages"][0] + last["stages"][0] == whole + state["model.embed_tokens.weight"].nbytes
    assert said == ("RankError", True) and other == ("CheckpointError", True)


def loaded_by(folder, text):
    """Bytes that this rank reads and has, and how far two steps are from those of one process; all was on meta."""
    plan, expected = Plan.from_json(text), stages.alone("decoder")
    _, inputs, _ = stages.build("decoder")
    with torch.device("meta"):
        unfilled = open_weights(folder, model=launched.decoder())
    model = unfilled.model
    report = load_applied(model, plan, unfilled.checkpoint, unfilled.sources)
    bring_back_to(model, torch.device("cpu"))
    held = sum(own_part(one).nbytes for one in model.parameters() if not one.is_meta)
    own = stages.part_of(inputs, plan.mesh.place(torch.distributed.get_rank())[0], plan.mesh.data)

    def step():
        if plan.mesh.pp > 1:
            autoshard.schedule(model).step(**own)
        else:
            model(**own).backward()

    _, norms, gradients = stages.train(model, step, autoshard.clip_grad_norm_)
    autoshard.remove(model)
    assert {one.device.type for one in model.parameters()} == {"cpu"}
    apart = launched.largest_error(gradients, {name: expected[2][name] for name in gradients})
    values = launched.largest_error({name: one.detach() for name, one in model.named_parameters()}, expected[3])
    return report.bytes_read, held, max(apart, values, abs(norms[0] - expected[1][0]))


def all_loaded_by(folder, texts):
    return [loaded_by(folder, text) for text in texts]


@sharded_replicas
@pytest.mark.parametrize(
    "meshes",
    [
        ("fsdp=4", "fsdp=2,tp=2", "fsdp=2,pp=2", "pp=2,tp=2"),
        pytest.param(("fsdp=2,tp=2,pp=2",), marks=pytest.mark.slow),
    ],
    ids=["four ranks", "eight ranks"],
)
def test_parts_of_launch_plans_are_read_alone(tmp_path, meshes):
    state = launched.decoder().state_dict()
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    whole, count = sum(tensor.nbytes for tensor in state.values()), 4 if len(meshes) > 1 else 8
    model, inputs, _ = stages.build("decoder")
    plans = [completed(launched.plan_for(mesh, count, precision="full"), model, inputs) for mesh in meshes]
    for found in zip(*run_ranks(all_loaded_by, count, str(tmp_path), plans), strict=True):
        assert all(read == held and apart < 1e-4 for read, held, apart in found)
        assert sum(read for read, _, _ in found) == pytest.approx(whole, rel=0.15)  # norms are on all ranks of a cut
