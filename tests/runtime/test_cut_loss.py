"""Losses of logits that are cut over classes: all numbers are as before, and no rank has all logits in between."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.search.asked import completed
from tests.blocks import Block
from tests.ranks import run_jobs, run_ranks
from tests.runtime.test_launched import devices_of
from tests.torch_releases import sharded_replicas

pytestmark = sharded_replicas

CLASSES, WIDTH = 32, 16


class Model(nn.Module):
    """A head over classes, and a loss of what `view` makes of the logits."""

    def __init__(self, view, tied=False, **loss):
        super().__init__()
        self.table, self.layers = nn.Embedding(CLASSES, WIDTH), nn.ModuleList(Block(WIDTH, 64) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.table.weight
        self.view, self.loss, self.seen = view, loss, []

    def forward(self, ids, labels=None):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        self.seen = [type(logits)]
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(*self.view(logits, labels), **self.loss), "logits": logits}


def flat(logits, labels):
    return logits.float().view(-1, CLASSES), labels.view(-1)


def shifted(logits, labels):
    return logits[:, :-1].contiguous().view(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)


def turned(logits, labels):
    return (logits / 3).tanh().transpose(1, 2), labels


def scaled_by_length(logits, labels):
    return logits.view(-1, CLASSES) * logits.detach().abs().max(), labels.view(-1)


CASES = {
    "flat": (flat, {}, {}),
    "ignored": (flat, {}, {"ignore_index": 3}),
    "shifted, summed": (shifted, {}, {"reduction": "sum"}),
    "turned": (turned, {}, {"reduction": "none"}),
    "smoothed": (flat, {}, {"label_smoothing": 0.1}),
    "tied": (flat, {"tied": True}, {}),
}
DIVIDED = {"given out in parts": (flat, {}, {})}
WHOLE = {
    "several readers": (scaled_by_length, {}, {}),
    "weighted": (flat, {}, {"weight": torch.arange(CLASSES, dtype=torch.float32)}),
}


def planned(model, batch, **wishes):
    """The plan of rank 0 with its cuts, on all ranks."""
    text = [""]
    if dist.get_rank() == 0:
        workload = Workload(mode="training", batch_size=2)
        plan = autoshard.plan(model, devices_of(2), inputs=batch, workload=workload, mesh={"tp": 2}, **wishes)
        text = [completed(model, plan, batch).to_json()]
    dist.broadcast_object_list(text)
    return Plan.from_json(text[0])


def trained(name):
    """Kinds of actions, whether logits are spread (with, without labels), and the largest error on a rank."""
    torch.manual_seed(0)
    view, made, loss = (CASES | WHOLE | DIVIDED)[name]
    model = Model(view, **made, **loss).train()
    batch = {"ids": torch.randint(CLASSES, (2, 6)), "labels": torch.randint(CLASSES, (2, 6))}
    alone, found = copy.deepcopy(model), []
    plan = planned(model, batch, divided_outputs=name in DIVIDED)
    kinds = {action.kind for cut in plan.cuts for action in cut.actions}
    autoshard.apply(model, plan)
    for one in (model, alone):
        out = one(**batch)
        (out["loss"].sum() + 1e-2 * whole(out["logits"]).square().sum()).backward()
        seen = one.seen
        with torch.no_grad():
            rest = one(batch["ids"]), one(**batch)
        again = one(batch["ids"])["logits"]
        found.append([*out.values(), rest[0]["logits"], *rest[1].values(), again])
        if one is model:
            plain = [type(tensor) is torch.Tensor for tensor in found[-1]]
            spread = issubclass(seen[0], DTensor), issubclass(one.seen[0], DTensor)
        found[-1] = [whole(tensor).detach().clone() for tensor in found[-1]]
    autoshard.remove(model)
    for place, one in enumerate((model, alone)):
        found[place] += [parameter.grad for parameter in one.parameters()]
    errors = [float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in zip(*found, strict=True)]
    return kinds, spread, plain, max(errors)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.fixture(scope="module")
def results():
    names = CASES | WHOLE | DIVIDED
    ranks = run_ranks(run_jobs, 2, {name: (trained, name) for name in names})
    return {name: [rank[name] for rank in ranks] for name in names}


@pytest.mark.parametrize("name", CASES)
def test_each_rank_has_its_classes_of_the_logits_until_the_loss_is_known(name, results):
    for kinds, spread, plain, error in results[name]:
        assert {"spread", "loss"} <= kinds and spread == (True, True) and all(plain) and error < 1e-5


@pytest.mark.parametrize("name", WHOLE)
def test_logits_that_something_else_reads_are_whole(name, results):
    for kinds, spread, plain, error in results[name]:
        assert not {"spread", "loss"} & kinds and spread == (False, False) and all(plain) and error < 1e-5


def test_logits_stay_in_parts_behind_their_loss_where_that_is_asked_for(results):
    for kinds, spread, plain, error in results["given out in parts"]:
        assert {"spread", "loss_in_parts"} <= kinds and "loss" not in kinds and spread == (True, True) and error < 1e-5
        assert plain == [True, False, True, True, True, False]  # of forwards with gradients, logits alone
