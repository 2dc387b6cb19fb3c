"""Expert parallelism: ranks divide the experts, tokens go to them and come back, and every number is as before."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from tests.ranks import run_jobs, run_ranks
from tests.runtime import test_launched as launched
from tests.torch_releases import sharded_replicas

WIDTH, EXPERTS, WORDS, SAMPLES = 8, 4, 24, 8


class Fused(nn.Module):
    """Experts in one tensor, as many as an attribute says."""

    def __init__(self):
        super().__init__()
        self.count = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)

    def forward(self, rows, chosen, weights):
        made = torch.zeros_like(rows)
        hits = nn.functional.one_hot(chosen, self.count).permute(2, 1, 0)
        for expert in range(self.count):
            place, row = torch.where(hits[expert])
            hidden = nn.functional.gelu(rows[row] @ self.up[expert].T) @ self.down[expert].T
            made.index_add_(0, row, hidden * weights[row, place, None])
        return made


class Listed(nn.ModuleList):
    """Experts that are modules; those without rows are not called."""

    def __init__(self):
        super().__init__(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, rows, chosen, weights):
        made = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():
            row, place = torch.where(chosen == expert)
            made.index_add_(0, row, self[expert](rows[row]) * weights[row, place, None])
        return made


class Capacity(Fused):
    """What comes after the first rows is dropped: another number of them on each rank."""

    def forward(self, rows, chosen, weights):
        kept = nn.functional.one_hot(chosen, self.count).flatten(0, 1).cumsum(0).view(*chosen.shape, -1)
        kept = kept.gather(2, chosen.unsqueeze(2)).squeeze(2) <= 6
        return super().forward(rows, chosen, weights * kept)


class Mixed(Fused):
    """Weights of a row depend on each other."""

    def forward(self, rows, chosen, weights):
        return super().forward(rows, chosen, weights / weights.sum(1, keepdim=True))


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.experts, self.gain = kind(), nn.Parameter(torch.tensor(0.9))

    def forward(self, x):
        x = x + self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True))
        rows = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        return x + self.gain * self.experts(rows, chosen, weights).view_as(x)


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, ids, labels=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def made(kind):
    torch.manual_seed(0)
    return Net(kind)


IDS = torch.randint(0, WORDS, (SAMPLES, 6), generator=torch.Generator().manual_seed(1))
INPUTS = {"ids": IDS, "labels": IDS}


def plan_of(kind, mesh, devices, mode="training"):
    inputs = INPUTS if mode == "training" else {"ids": IDS}
    return autoshard.plan(
        made(kind), launched.devices_of(devices), inputs=inputs, launch="processes", mesh=mesh,
        workload=Workload(mode=mode, batch_size=SAMPLES), assume_independent_rows=True,
        precision="full" if mode == "training" else "auto",
    ).to_json()  # fmt: skip


def resumed(kind, plan, folder):
    """Whether a model that reads the checkpoint of another has its weights."""
    plan = Plan.from_json(plan) if isinstance(plan, str) else plan
    models = [autoshard.apply(made(kind), plan, inputs=INPUTS) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6) for model in models]
    part = launched.own_part(IDS)
    models[0](part, labels=part).backward()
    optimizers[0].step()
    autoshard.save_checkpoint(folder, models[0], optimizers[0])
    autoshard.load_checkpoint(folder, models[1], optimizers[1])
    states = [model.state_dict() for model in models]
    return all(torch.equal(one, states[1][key]) for key, one in states[0].items())


def answered(kind, text):
    model, part = made(kind).eval(), launched.own_part(IDS)
    with torch.no_grad():
        expected = model(part)
        autoshard.apply(model, Plan.from_json(text), inputs={"ids": IDS})
        one = torch.full_like(part, dist.get_rank() + 1)  # all rows of a rank choose the same experts
        return float((model(part) - expected).abs().max()), bool(model(one).isfinite().all())


def refused(kind, text):
    with pytest.raises(PlanError, match="can't be divided over 2 ranks") as caught:
        autoshard.apply(made(kind), Plan.from_json(text), inputs=INPUTS)
    return str(caught.value)


CASES = {
    2: [(Fused, "dp=2,ep=2"), (Listed, "fsdp=2,ep=2")],
    4: [(Fused, "dp=2,fsdp=2,ep=2"), (Listed, "fsdp=4,ep=2"), (Fused, "fsdp=2,dp=2,ep=4")],
}


@sharded_replicas
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_of_all_ranks_train_and_answer_as_on_one_process(ranks, tmp_path):
    """Two ranks find by themselves how to divide the first; what sees more than a choice is refused by all."""
    training, others = {}, {}
    for number, (kind, mesh) in enumerate(CASES[ranks]):
        text = plan_of(kind, mesh, ranks)
        plan = launched.completed(text, made(kind), INPUTS) if number or ranks > 2 else text
        name = f"{kind.__name__}, {mesh}"
        training[name] = launched.trained, functools.partial(made, kind), plan, IDS
        others[f"{name} resumed"] = resumed, kind, plan, str(tmp_path / name)
    if ranks == 2:
        for kind in (Fused, Listed):
            others[kind] = answered, kind, plan_of(kind, "dp=2,ep=2", 2, mode="inference")
        for kind in (Capacity, Mixed):
            others[kind] = refused, kind, plan_of(kind, "dp=2,ep=2", 2)
    for results in run_ranks(run_jobs, ranks, training | others):
        for name in training:
            found = results[name]
            assert found["losses"] < 1e-5 and found["gradients"] < 1e-4 and found["values"] < 1e-4, (name, found)
            assert found["kept"] < 0.8 and results[f"{name} resumed"], name
        for kind in (Fused, Listed) if ranks == 2 else ():
            error, finite = results[kind]
            assert error < 1e-5 and finite
        for kind in (Capacity, Mixed) if ranks == 2 else ():
            assert "not the sum of what each choice makes" in results[kind]


@pytest.mark.parametrize(("kind", "mesh"), [(Fused, "fsdp=4,ep=2"), (Listed, "dp=2,fsdp=2,ep=4")])
def test_plans_that_divide_experts_are_files(kind, mesh):
    plan = launched.completed(plan_of(kind, mesh, launched.size_of(mesh.partition(",ep")[0])), made(kind), INPUTS)
    assert plan.cuts and plan.spread


def test_other_dimensions_are_refused():
    with pytest.raises(PlanError, match="experts are divided among replicas"):
        autoshard.apply(made(Fused), Plan.from_json(plan_of(Fused, "tp=2,ep=2", 2)))
