"""Replicas over processes: three optimizer steps equal to one process on the whole batch, and nothing else changes."""

import copy
import dataclasses
import functools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import autoshard
from autoshard.errors import ApplyError, PlanError, RankError
from autoshard.nested import tensors_in
from autoshard.plan import Mesh, Plan, PlanDevice, Stage
from autoshard.plan.batching import BatchAxis, BatchInput
from autoshard.plan.workload import Workload
from tests.ranks import run_ranks
from tests.runtime.cut_models import CASES
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


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Linear(8, 1)

    def forward(self, x):
        return {"loss": self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3))).square().mean()}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return {"loss": self.head(self.steps(x)[0]).square().mean()}


class Experts(nn.Module):
    """Which expert works depends on the rows: some have no gradient on one rank."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        chosen = (x.sum(-1) > 0).long() + (x[..., 0] > 1.0).long()
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = chosen == index
            if rows.any():
                y = torch.where(rows[..., None], expert(x), y)
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
    "pictures": (Pictures, lambda rows: {"x": torch.randn(rows, 3, 8, 8)}),
    "recurrent": (Recurrent, lambda rows: {"x": torch.randn(rows, 4, 6)}),
    "layers": (Layers, lambda rows: {"x": torch.randn(rows, 6)}),
    "experts": (Experts, lambda rows: {"x": torch.randn(rows, 6)}),
}


def plan_for(model, given, count, shares=(), sharded=False, stages=()):
    rows = len(next(iter(given.values())))
    inputs = tuple(BatchInput(path=name, dim=0, axis=f"*{rows}") for name in given)
    return Plan(
        strategy="data-parallel", objective="throughput", workload=TRAINING,
        devices=tuple(PlanDevice(name=f"cpu:{rank}", memory_bytes=1 << 30) for rank in range(count)),
        placements={"": "cpu:0"}, mesh=Mesh(shares=shares, **{"fsdp" if sharded else "dp": count}), stages=stages,
        batch=BatchAxis(size=rows, inputs=inputs, outputs=()),
    )  # fmt: skip


def start(name, seed=0):
    kind, make = MODELS[name]
    torch.manual_seed(seed)
    model = kind()
    torch.manual_seed(seed + 1)
    return model, make


def own_rows(given, shares):
    rank = dist.get_rank()
    begin = sum(shares[:rank])
    return {name: tensor[begin : begin + shares[rank]] for name, tensor in given.items()}


def steps(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], []
    for given in batches:
        optimizer.zero_grad()
        loss = model(**given)["loss"]
        loss.backward()
        gradients = gradients or [None if one.grad is None else one.grad.clone() for one in model.parameters()]
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), gradients


def difference(ones, others, zeros=False):
    """The largest between gradients; those of parameters that no rank used are None, or zero until a step."""
    pairs = list(zip(ones, others, strict=True))
    assert all((a is None) == (b is None) or (zeros and b is None) for a, b in pairs)
    return max(float((a if b is None else a - b).abs().max()) for a, b in pairs if a is not None)


def train_on_ranks(names, shares):
    """Replicas train as one process does, and become ordinary again."""
    made = {}
    count = dist.get_world_size()
    rows = shares or (12 // count,) * count
    for name in names:
        model, make = start(name)
        batches = [make(12) for _ in range(3)]
        alone = copy.deepcopy(model)
        expected, wanted = steps(alone, batches)
        before = (list(model.state_dict()), list(model.parameters()), list(model.modules()), type(model))
        autoshard.apply(model, plan_for(model, batches[0], count, shares))
        losses, gradients = steps(model, [own_rows(given, rows) for given in batches])
        gradients = [None if one is None else one.full_tensor() for one in gradients]
        mean = losses * (rows[dist.get_rank()] / 12)
        dist.all_reduce(mean)
        if dist.get_rank() == 0:  # without gradients nobody else has to take part
            with torch.no_grad():
                model(**batches[0])
        autoshard.remove(model)
        same = before[0] == list(model.state_dict()) and before[3] is type(model)
        same &= all(a is b for a, b in zip(before[1], model.parameters(), strict=True))
        same &= all(a is b for a, b in zip(before[2], model.modules(), strict=True))
        made[name] = float((mean - expected).abs().max()), difference(gradients, wanted, True), same
    return made


@sharded_replicas
def test_three_steps_equal_one_process():
    for made in run_ranks(train_on_ranks, 2, list(MODELS), ()):
        for name, (losses, gradients, same) in made.items():
            assert losses < 1e-6 and gradients < 1e-6 and same, (name, losses, gradients, same)


@sharded_replicas
def test_unequal_shares_count_by_their_rows():
    for made in run_ranks(train_on_ranks, 3, ["words", "pictures"], (7, 3, 2)):
        for name, (losses, gradients, same) in made.items():
            assert losses < 1e-5 and gradients < 1e-6 and same, (name, losses, gradients)


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


def test_replicas_for_answers():
    run_ranks(answers, 2)


def sharded_steps(names):
    """Sharded replicas train as one process does, keep their part, and become ordinary again."""
    made, count = {}, dist.get_world_size()
    for name in names:
        model, make = start(name)
        batches = [make(12) for _ in range(3)]
        alone = copy.deepcopy(model)
        expected, wanted = steps(alone, batches)
        before = list(model.state_dict()), list(model.parameters()), type(model)
        stages = tuple(Stage(paths=(f"layers.{index}",)) for index in range(3)) if name == "layers" else ()
        autoshard.apply(model, plan_for(model, batches[0], count, sharded=True, stages=stages))
        losses, gradients = steps(model, [own_rows(given, (12 // count,) * count) for given in batches])
        gradients = [None if one is None else one.full_tensor() for one in gradients]
        mean = losses / count
        dist.all_reduce(mean)
        kept = sum(one.to_local().numel() for one in model.parameters()) / sum(p.numel() for p in alone.parameters())
        same = before[0] == list(model.state_dict()) and isinstance(model, before[2])
        autoshard.remove(model)
        same &= all(a is b for a, b in zip(before[1], model.parameters(), strict=True)) and type(model) is before[2]
        unread = [index for index, one in enumerate(wanted) if one is None]
        same &= all(torch.equal([*model.parameters()][index], [*alone.parameters()][index]) for index in unread)
        given = make(4)
        out = float((model(**given)["loss"] - alone(**given)["loss"]).abs())
        model(**given)["loss"].backward()
        made[name] = float((mean - expected).abs().max()), difference(gradients, wanted, True), same, kept, out
    return made


@sharded_replicas
def test_sharded_replicas():
    for made in run_ranks(sharded_steps, 2, ["words", "layers", "recurrent", "experts"]):
        for name, (losses, gradients, same, kept, out) in made.items():
            assert losses < 1e-6 and gradients < 1e-6 and same and out < 1e-4, (name, losses, gradients, same, out)
            assert kept < 0.6, (name, kept)


def sharded_habits():
    """Saving, accumulating, and an optimizer that was made too early."""
    model, make = start("words")
    given = make(8)
    alone, early = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
    autoshard.apply(model, plan_for(model, given, 2, sharded=True))
    mine, said = own_rows(given, (4, 4)), ""
    halves = [{name: tensor[half * 2 : half * 2 + 2] for name, tensor in mine.items()} for half in range(2)]
    with model.no_sync():
        (model(**halves[0])["loss"] / 2).backward()
    (model(**halves[1])["loss"] / 2).backward()
    alone(**given)["loss"].backward()
    wanted = [one.grad for one in alone.parameters()]
    apart = difference(
        [None if one.grad is None else one.grad.full_tensor() for one in model.parameters()], wanted, True
    )
    norms = [autoshard.clip_grad_norm_(one.parameters(), 0.1) for one in (model, alone)]
    try:
        early.step()
    except ApplyError as error:
        said = str(error)
    model.out.more = nn.Parameter(torch.ones(3))  # nobody would average its gradients
    try:
        model(**mine)
    except ApplyError as error:
        said += str(error)
    return apart, float((norms[0] - norms[1]).abs()), said


@sharded_replicas
def test_what_people_do_with_sharded_replicas():
    for apart, norms, said in run_ranks(sharded_habits, 2):
        assert apart < 1e-6 and norms < 1e-5 and "made before autoshard.apply" in said, (apart, norms, said)
        assert "out.more was added after autoshard.apply sharded" in said


def save_replicas(folder):
    made = []
    for sharded in (False, True):
        model, make = start("words")
        alone = copy.deepcopy(model)
        autoshard.apply(model, plan_for(model, make(8), 2, sharded=sharded))
        autoshard.save(model, f"{folder}/{sharded}")
        if dist.get_rank() == 0:
            saved = load_file(f"{folder}/{sharded}/model.safetensors")
            made.append(
                all(torch.equal(saved[name], tensor) for name, tensor in alone.state_dict().items() if name in saved)
            )
            made.append(len(saved) == len(alone.state_dict()) - 1)  # tied names are one
    return made


@sharded_replicas
def test_saving_writes_whole_tensors(tmp_path):
    assert run_ranks(save_replicas, 2, str(tmp_path))[0] == [True] * 4


def cut_replicas(names):
    """Two replicas, each cut over two ranks."""
    made = {}
    replica = dist.get_rank() // 2
    for name in names:
        case = CASES[name]
        torch.manual_seed(0)
        model = case.make()
        alone = copy.deepcopy(model)
        torch.manual_seed(1)
        batches = [tuple(more_rows(tensor) for tensor in case.inputs) for _ in range(3)]
        plan = plan_for(model, {"x": batches[0][0]}, 4)
        plan = dataclasses.replace(plan, mesh=Mesh(dp=2, tp=2), cuts=case.cuts(2))
        autoshard.apply(model, plan)
        results = []
        for one, parts, own in ((alone, 1, 0), (model, 2, replica)):
            optimizer, losses = torch.optim.AdamW(one.parameters(), lr=1e-3), []
            for given in batches:
                optimizer.zero_grad()
                output = one(*(tensor.chunk(parts)[own] for tensor in given))
                loss = sum(tensor.square().mean() for _, tensor in tensors_in(output))
                loss.backward()
                norm = autoshard.clip_grad_norm_(one.parameters(), 0.5)
                optimizer.step()
                losses += [loss.detach(), norm]
            results.append(torch.stack(losses))
        mean = results[1] / 4
        dist.all_reduce(mean)
        autoshard.remove(model)
        ordinary = all(a.shape == b.shape for a, b in zip(model.parameters(), alone.parameters(), strict=True))
        made[name] = float(((mean - results[0]).abs() / results[0].abs().clamp(min=1)).max()), ordinary
    return made


def more_rows(tensor):
    """Four times as many rows, all different."""
    rows = tensor.repeat(4, *[1] * (tensor.dim() - 1))
    return (
        rows + torch.randn(rows.shape)
        if rows.is_floating_point()
        else torch.stack([row.roll(at) for at, row in enumerate(rows)])
    )


@sharded_replicas
def test_replicas_that_are_cut():
    for made in run_ranks(cut_replicas, 4, [name for name in CASES if name != "dropout"]):
        assert all(losses < 1e-6 and ordinary for losses, ordinary in made.values()), made


def refusals():
    model, make = start("pictures")
    plan = plan_for(model, make(8), 2)
    said = {}
    for name, wrong in {
        "count": dataclasses.replace(plan, devices=plan.devices * 2, mesh=Mesh(dp=4)),
        "batch": dataclasses.replace(plan, batch=None),
        "model": dataclasses.replace(plan, fingerprint="other"),
    }.items():
        try:
            autoshard.apply(model, wrong)
        except PlanError as error:
            said[name] = str(error)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.conv.weight.add_(1.0)
    try:
        autoshard.apply(model, plan)
    except RankError as error:
        said["weights"] = str(error)
    try:
        autoshard.remove(model)
    except ApplyError as error:
        said["remove"] = str(error)
    return said


@sharded_replicas
def test_what_can_not_be_applied_is_refused_on_all_ranks():
    for said in run_ranks(refusals, 2):
        assert "the plan is for 4 devices, and 2 processes run" in said["count"]
        assert "how the batch is divided" in said["batch"]
        assert "another model" in said["model"] and "other weights" in said["weights"]
        assert "nothing" in said["remove"]


def lose_a_rank(sharded, phase):
    """What this rank is told, and after how long, when the other is killed in a step."""
    model, make = start("layers")
    given = make(8)
    stages = tuple(Stage(paths=(f"layers.{index}",)) for index in range(3))
    autoshard.apply(model, plan_for(model, given, 2, sharded=sharded, stages=stages if sharded else ()))
    model(**given)["loss"].backward()
    if dist.get_rank() == 1:
        model.layers[1].register_forward_hook(functools.partial(die, phase))
    begin = time.monotonic()
    try:
        model(**given)["loss"].backward()
    except RankError as error:
        return f"{error}", time.monotonic() - begin
    return "", 0.0


def die(phase, module, args, result):
    if phase == "forward":
        os.kill(os.getpid(), signal.SIGKILL)
    result.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize(
    ("sharded", "phase"),
    [
        pytest.param(False, "backward", marks=sharded_replicas),
        pytest.param(False, "forward", marks=[pytest.mark.slow, sharded_replicas]),
        pytest.param(True, "backward", marks=sharded_replicas),
        pytest.param(True, "forward", marks=[pytest.mark.slow, sharded_replicas]),
    ],
)
def test_a_rank_that_is_killed_is_named(sharded, phase):
    said, seconds = run_ranks(lose_a_rank, 2, sharded, phase, may_die=True)[0]
    assert "lost rank 1" in said and seconds < 20
