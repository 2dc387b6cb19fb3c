"""Checkpoints of models that are cut and sharded at once: written whole, and trained on from, also by one process."""

from unittest import mock

import safetensors.torch
import torch

import autoshard
from autoshard.plan import Plan
from autoshard.search import asked
from tests.ranks import run_ranks
from tests.runtime.test_launched import decoder, largest_error, own_part, plan_for, samples, wholes
from tests.torch_releases import sharded_replicas


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)


def step(model, optimizer, ids):
    optimizer.zero_grad()
    model(ids, labels=ids).backward()
    optimizer.step()


def completed(text, model, inputs):
    """A plan with its cuts and how its batch is divided, found once here and not by every process."""
    plan = Plan.from_json(text)
    with mock.patch("autoshard.runtime.launched.count_processes", lambda: plan.mesh.size):
        return asked.completed(model, plan, inputs).to_json()


def saved(text, folder):
    """Train one step and save; read that into another model and train it one more: how far it is from one process."""
    plan, ids = Plan.from_json(text), samples()
    models = [autoshard.apply(decoder(), plan) for _ in range(2)]
    optimizers = [optimizer_of(model) for model in models]
    part = own_part(ids, plan.mesh.tp)
    step(models[0], optimizers[0], part)
    autoshard.save(models[0], f"{folder}/weights")
    autoshard.save_checkpoint(f"{folder}/training", models[0], optimizers[0], state={"step": 1})
    assert autoshard.load_checkpoint(f"{folder}/training", models[1], optimizers[1]) == {"step": 1}
    step(models[1], optimizers[1], part)
    reference, _ = stepped()
    return largest_error(wholes(models[1], dict(models[1].named_parameters())), dict(reference.named_parameters()))


def stepped():
    """A model after two steps of one process, and its state after the first."""
    reference, ids = decoder(), samples()
    optimizer = optimizer_of(reference)
    step(reference, optimizer, ids)
    first = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    step(reference, optimizer, ids)
    return reference, first


@sharded_replicas
def test_cut_shards_are_saved_and_read(tmp_path):
    reference, first = stepped()
    inputs = {"ids": samples(), "labels": samples()}
    plan = completed(plan_for("fsdp=2,tp=2", 4, precision="full"), decoder(), inputs)
    for apart in run_ranks(saved, 4, plan, str(tmp_path)):
        assert apart < 5e-4  # AdamW divides by the root of small gradients
    assert largest_error(safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors"), first) < 5e-4
    alone = decoder()
    optimizer = optimizer_of(alone)
    autoshard.load_checkpoint(tmp_path / "training", alone, optimizer)
    step(alone, optimizer, samples())
    assert largest_error(dict(alone.named_parameters()), dict(reference.named_parameters())) < 5e-4
