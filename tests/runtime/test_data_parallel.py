"""Replicas over processes: three optimizer steps equal to one process on the whole batch, and nothing else changes."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import autoshard
from autoshard.errors import ApplyError, PlanError, RankError
from autoshard.plan import Mesh, Plan, PlanDevice, Stage
from autoshard.plan.batching import BatchAxis, BatchInput
from autoshard.plan.workload import Workload
from tests.ranks import run_jobs, run_ranks
from tests.torch_releases import sharded_replicas

TRAINING = Workload(mode="training")


class Words(nn.Module):
    """Tied weights, a parameter that nothing reads, keyword inputs."""

    def __init__(self):
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.unread, self.head = nn.Linear(4, 4), nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, labels):
        x = self.table(ids)
        q, k, v = self.mix(x).chunk(3, -1)
        logits = self.head(x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return {"loss": self.head(self.steps(x)[0]).square().mean()}


class Experts(nn.Module):
    """Which expert works depends on the rows: some have no gradient on one rank, nor have their scalars."""

    def __init__(self):
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.tensor(1.5)) for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        chosen = (x.sum(-1) > 0).long() + (x[..., 0] > 1.0).long()
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = chosen == index
            if rows.any():
                y = torch.where(rows[..., None], expert(x) * self.gains[index], y)
        return {"loss": y.square().mean()}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": x.square().mean()}


def words(rows):
    ids = torch.randint(0, 32, (rows, 5))
    return {"ids": ids, "labels": ids.roll(1, 0)}


MODELS = {
    "words": (Words, words),
    "recurrent": (Recurrent, lambda rows: {"x": torch.randn(rows, 4, 6)}),
    "layers": (Layers, lambda rows: {"x": torch.randn(rows, 6)}),
    "experts": (Experts, lambda rows: {"x": torch.randn(rows, 6)}),
}


def plan_for(model, given, count, sharded=False, stages=()):
    rows = len(next(iter(given.values())))
    inputs = tuple(BatchInput(path=name, dim=0, axis=f"*{rows}") for name in given)
    return Plan(
        strategy="data-parallel", objective="throughput", workload=TRAINING,
        devices=tuple(PlanDevice(name=f"cpu:{rank}", memory_bytes=1 << 30) for rank in range(count)),
        placements={"": "cpu:0"}, mesh=Mesh(**{"fsdp" if sharded else "dp": count}), stages=stages,
        batch=BatchAxis(size=rows, inputs=inputs, outputs=()),
    )  # fmt: skip


def start(name, seed=0):
    kind, make = MODELS[name]
    torch.manual_seed(seed)
    model = kind()
    torch.manual_seed(seed + 1)
    return model, make


def own_rows(given):
    return {name: tensor.chunk(dist.get_world_size())[dist.get_rank()] for name, tensor in given.items()}


def steps(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], []
    for given in batches:
        optimizer.zero_grad()
        loss = model(**given)["loss"]
        loss.backward()
        gradients = gradients or copy.deepcopy(whole_gradients(model))
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), gradients


def whole_gradients(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in gradients]


def difference(ones, others):
    """The largest between gradients; those of parameters that no rank used are None, or zero until a step."""
    pairs = list(zip(ones, others, strict=True))
    assert all(a is not None or b is None for a, b in pairs)
    return max(float((a if b is None else a - b).abs().max()) for a, b in pairs if a is not None)


def train_on_ranks(name, sharded):
    """Replicas train as one process does, keep their part where they are sharded, and become ordinary again."""
    count = dist.get_world_size()
    model, make = start(name)
    batches = [make(12) for _ in range(3)]
    alone = copy.deepcopy(model)
    expected, wanted = steps(alone, batches)
    stages = tuple(Stage(paths=(f"layers.{index}",)) for index in range(3)) if sharded and name == "layers" else ()
    before, kind = (list(model.state_dict()), list(model.parameters()), list(model.modules())), type(model)
    autoshard.apply(model, plan_for(model, batches[0], count, sharded, stages))
    with torch.no_grad():
        model(**own_rows(batches[0]))  # as before training begins; the optimizer is made afterwards
    losses, gradients = steps(model, [own_rows(given) for given in batches])
    if dist.get_rank() == 0 and not sharded:  # without gradients nobody else has to take part
        with torch.no_grad():
            model(**batches[0])
    mean = losses / count
    dist.all_reduce(mean)
    kept = sum(getattr(one, "to_local", lambda one=one: one)().numel() for one in model.parameters())
    autoshard.remove(model)
    assert not any(module._state_dict_pre_hooks for module in model.modules())  # they would keep the shards
    after = list(model.state_dict()), list(model.parameters()), list(model.modules())
    assert before[0] == after[0] and type(model) is kind
    assert all(a is b for at in (1, 2) for a, b in zip(before[at], after[at], strict=True))
    given = make(4)
    model(**given)["loss"].backward()
    return {
        "losses": float((mean - expected).abs().max()),
        "gradients": difference(gradients, wanted),
        "kept": kept / sum(one.numel() for one in alone.parameters()),
        "after": float((model(**given)["loss"] - alone(**given)["loss"]).abs()),
    }


def answers():
    """Replicas for answers know nothing of each other, and refuse to be trained."""
    model, make = start("words")
    given = make(8)
    wanted = model(**given)["logits"]
    plan = dataclasses.replace(plan_for(model, given, 2), workload=Workload())
    autoshard.apply(model, plan)
    with torch.no_grad():
        assert torch.equal(model(**given)["logits"], wanted)
        if dist.get_rank() == 0:
            model(**given)
    with pytest.raises(ApplyError, match="this plan is for answers"):
        model(**given)
    autoshard.remove(model)


def sharded_habits():
    """Accumulating, an optimizer that was made too early, and a parameter that was made too late."""
    model, make = start("words")
    given = make(8)
    alone, early = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
    autoshard.apply(model, plan_for(model, given, 2, sharded=True))
    mine = own_rows(given)
    halves = [{name: tensor[half * 2 : half * 2 + 2] for name, tensor in mine.items()} for half in range(2)]
    with model.no_sync():
        (model(**halves[0])["loss"] / 2).backward()
    (model(**halves[1])["loss"] / 2).backward()
    alone(**given)["loss"].backward()
    assert difference(whole_gradients(model), [one.grad for one in alone.parameters()]) < 1e-6
    norms = [autoshard.clip_grad_norm_(one.parameters(), 0.1) for one in (model, alone)]
    torch.testing.assert_close(*norms, rtol=0, atol=1e-5)
    with pytest.raises(ApplyError, match=r"made before autoshard\.apply"):
        early.step()
    model.out.more = nn.Parameter(torch.ones(3))  # nobody would average its gradients
    with pytest.raises(ApplyError, match=r"out\.more was added, removed or replaced after"):
        model(**mine)


class Skipping(nn.Module):
    """A residual block that steps may skip, as those with layer dropout do."""

    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3))
        self.layers, self.skipped = nn.ModuleList(blocks), -1

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = x if index == self.skipped else x + layer(x)
        return x.square().mean()


def skipped_later():
    """A block that ran in the first step and in no later one has no gradient there, so the optimizer leaves it."""
    for mesh in ("dp=2", "fsdp=2"):
        torch.manual_seed(0)
        model, given = Skipping(), {"x": torch.randn(8, 8)}
        alone, devices = copy.deepcopy(model), dict.fromkeys(("cpu:0", "cpu:1"), "1GiB")
        settings = {"launch": "processes", "precision": "full", "workload": TRAINING}
        plan = autoshard.plan(model, devices, inputs=given, mesh=mesh, **settings)
        autoshard.apply(model, plan, inputs=given)
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, alone)]
        for skipped in (-1, 1, 1):
            model.skipped = alone.skipped = skipped
            model(**own_rows(given)).backward()
            alone(**given).backward()
            for optimizer in optimizers:
                optimizer.step()
            assert (model.layers[1][0].weight.grad is None) == (skipped == 1)
            for optimizer in optimizers:
                optimizer.zero_grad()
        autoshard.remove(model)
        assert difference(model.parameters(), alone.parameters()) < 1e-5


def scalar_habits():
    """Accumulating with scalars, one step by kernels for lists of tensors, and what a rank does on its own."""
    model, make = start("experts")
    given = make(8)
    alone = copy.deepcopy(model)
    autoshard.apply(model, plan_for(model, given, 2, sharded=True))
    mine = own_rows(given)
    with model.no_sync():
        model(mine["x"][:2])["loss"].backward()
    model(mine["x"][2:])["loss"].backward()
    (2 * alone(**given)["loss"]).backward()
    assert difference(whole_gradients(model), [one.grad for one in alone.parameters()]) < 1e-6
    groups = [{"params": [one for one in model.parameters() if bool(one.dim()) == sized]} for sized in (True, False)]
    with pytest.raises(ApplyError, match="groups of their own"):
        torch.optim.AdamW(model.parameters(), fused=True).step()
    for other in (groups, alone.parameters()):
        torch.optim.AdamW(other, fused=True).step()
    assert [one.grad is None for one in model.gains] == [one.grad is None for one in alone.gains] != [True] * 3
    gains = [torch.stack([gain.detach() for gain in one.gains]) for one in (model, alone)]
    torch.testing.assert_close(*gains, rtol=0, atol=1e-6)
    (model.gains[0] * 2).backward()
    with pytest.raises(ApplyError, match="not averaged over ranks"):
        torch.optim.AdamW(groups).step()


def saved(folder):
    """What is saved is whole, once for tied names."""
    for sharded in (False, True):
        model, make = start("words")
        alone = copy.deepcopy(model)
        autoshard.apply(model, plan_for(model, make(8), 2, sharded=sharded))
        autoshard.save(model, f"{folder}/{sharded}")
        if dist.get_rank() == 0:
            found = load_file(f"{folder}/{sharded}/model.safetensors")
            assert len(found) == len(alone.state_dict()) - 1
            assert all(torch.equal(found[name], one) for name, one in alone.state_dict().items() if name in found)


def refusals():
    model, make = start("layers")
    plan = plan_for(model, make(8), 2)
    for wrong, words in (
        (dataclasses.replace(plan, devices=plan.devices * 2, mesh=Mesh(dp=4)), "for 4 devices, and 2 processes run"),
        (dataclasses.replace(plan, batch=None), "how the batch is divided"),
        (dataclasses.replace(plan, fingerprint="other"), "another model"),
        (dataclasses.replace(plan, mesh=Mesh(dp=2, shares=(5, 3))), "unequal shares of the batch, 5, 3, which one"),
    ):
        with pytest.raises(PlanError, match=words):
            autoshard.apply(model, wrong)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.layers[0][0].weight.add_(1.0)
    with pytest.raises(RankError, match="other weights"):
        autoshard.apply(model, plan)
    with pytest.raises(ApplyError, match="nothing"):
        autoshard.remove(model)


@sharded_replicas
def test_two_ranks(tmp_path):
    """Steps equal to those of one process, replicated and sharded; and what people do with replicas."""
    jobs = {one.__name__: (one,) for one in (answers, sharded_habits, skipped_later, scalar_habits, refusals)} | {
        "saved": (saved, str(tmp_path))
    }
    trained = {(name, sharded): (train_on_ranks, name, sharded) for name in MODELS for sharded in (False, True)}
    check(run_ranks(run_jobs, 2, jobs | trained), trained)


def check(results, trained):
    for name, sharded in trained:
        for rank in results:
            found = rank[name, sharded]
            assert found["losses"] < 1e-5 and found["gradients"] < 1e-6 and found["after"] < 1e-4, (name, found)
            assert found["kept"] < 0.6 or not sharded, (name, found)
