"""Checkpoints of launch plans: each rank reads its part and trains as one process; any run reads what is written."""

import pytest
import safetensors.torch
import torch

import autoshard
from autoshard.checkpoint.load import load_applied
from autoshard.errors import CheckpointError, RankError
from autoshard.integrations.loading import open_weights
from autoshard.runtime.dispatch import bring_back_to
from autoshard.runtime.dtensors import own_part
from tests.ranks import run_ranks
from tests.runtime import test_launched as launched
from tests.runtime import test_launched_stages as stages
from tests.torch_releases import sharded_replicas


def loaded(folder, plan):
    """Bytes that this rank reads and has, and how far two steps are from those of one process; all was on meta."""
    expected = stages.alone("decoder")
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
    return report, held, max(apart, values, abs(norms[0] - expected[1][0]))


def refused(folder, plan):
    """One rank can't read: all say so, and no parameter has memory."""
    with torch.device("meta"):
        unfilled = open_weights(folder, model=launched.decoder())
    if torch.distributed.get_rank() == 1:
        for name in list(unfilled.sources):
            del unfilled.sources[name]
    with pytest.raises((CheckpointError, RankError), match="nothing says how") as error:
        load_applied(unfilled.model, plan, unfilled.checkpoint, unfilled.sources)
    assert all(parameter.is_meta for parameter in unfilled.model.parameters())
    return type(error.value)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)


def step(model, optimizer, ids):
    optimizer.zero_grad()
    model(ids, labels=ids).backward()
    optimizer.step()


def saved(folder, plan):
    """Load by the public call, train one step and save; read that into another model and train it one more."""
    part = launched.own_part(launched.samples(), plan.mesh.tp)
    models = [autoshard.load(folder, plan=plan, model=launched.decoder, progress=False) for _ in range(2)]
    optimizers = [optimizer_of(model) for model in models]
    step(models[0], optimizers[0], part)
    autoshard.save(models[0], folder / "weights")
    autoshard.save_checkpoint(folder / "training", models[0], optimizers[0], state={"step": 1})
    assert autoshard.load_checkpoint(folder / "training", models[1], optimizers[1]) == {"step": 1}
    step(models[1], optimizers[1], part)
    found = launched.wholes(models[1], dict(models[1].named_parameters()))
    return launched.largest_error(found, dict(stepped()[0].named_parameters()))


def stepped():
    """A model after two steps of one process, and its state after the first."""
    reference, ids = launched.decoder(), launched.samples()
    optimizer = optimizer_of(reference)
    step(reference, optimizer, ids)
    first = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    step(reference, optimizer, ids)
    return reference, first


def everything(folder, plans, saving):
    return [loaded(folder, plan) for plan in plans], refused(folder, plans[0]), saved(folder, saving)


@sharded_replicas
@pytest.mark.parametrize(
    "meshes",
    [
        ("fsdp=2", "pp=2"),
        pytest.param(("fsdp=2,tp=2", "fsdp=2,pp=2", "fsdp=4", "pp=2,tp=2", "tp=4"), marks=pytest.mark.slow),
        pytest.param(("fsdp=2,tp=2,pp=2",), marks=pytest.mark.slow),
    ],
    ids=["two ranks", "four ranks", "eight ranks"],
)
def test_every_rank_reads_its_part_and_all_write_the_whole(tmp_path, meshes):
    state = launched.decoder().state_dict()
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    whole, count = sum(tensor.nbytes for tensor in state.values()), launched.size_of(meshes[0])
    ids = {"ids": launched.samples(), "labels": launched.samples()}

    def plan_for(mesh):
        return launched.completed(launched.plan_for(mesh, count, precision="full"), launched.decoder(), ids)

    plans, saving = [plan_for(mesh) for mesh in meshes], plan_for(f"fsdp=2,tp={count // 2}" if count > 2 else "fsdp=2")
    loads, errors, apart = zip(*run_ranks(everything, count, tmp_path, plans, saving), strict=True)
    for found in zip(*loads, strict=True):
        assert all(read == held and apart < 1e-4 for read, held, apart in found)
        assert sum(read for read, _, _ in found) == pytest.approx(whole, rel=0.15)  # norms are on all ranks of a cut
    assert errors == tuple(CheckpointError if rank == 1 else RankError for rank in range(count))
    assert max(apart) < 5e-4  # AdamW divides by the root of small gradients
    reference, first = stepped()
    written = safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors")
    assert launched.largest_error(written, first) < 5e-4
    alone = launched.decoder()
    optimizer = optimizer_of(alone)
    autoshard.load_checkpoint(tmp_path / "training", alone, optimizer)
    step(alone, optimizer, launched.samples())
    assert launched.largest_error(dict(alone.named_parameters()), dict(reference.named_parameters())) < 5e-4
