"""Expert parallelism: ranks divide the experts, tokens go to them and come back, and every number is as before."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from tests.ranks import run_ranks
from tests.runtime.test_launched import largest_error, own_part, wholes
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
        self.experts = kind()

    def forward(self, x):
        x = x + self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True))
        rows = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        return x + self.experts(rows, chosen, weights).view_as(x)


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


KINDS = {kind.__name__: kind for kind in (Fused, Listed, Capacity, Mixed)}


def made(name):
    torch.manual_seed(0)
    return Net(KINDS[name])


def samples(seed=1):
    return torch.randint(0, WORDS, (SAMPLES, 6), generator=torch.Generator().manual_seed(seed))


def plan_of(name, mesh, devices, mode="training", **wishes):
    ids = samples()
    inputs = {"ids": ids, "labels": ids} if mode == "training" else {"ids": ids}
    plan = autoshard.plan(
        made(name), {f"cpu:{index}": "8GiB" for index in range(devices)}, inputs=inputs, launch="processes",
        mesh=mesh, workload=Workload(mode=mode, batch_size=SAMPLES), assume_independent_rows=True, **wishes,
    )  # fmt: skip
    return plan.to_json()


def train(model, ids):
    """Losses of three clipped steps of AdamW, the gradients of the first, and the parameters."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6), []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(ids, labels=ids)
        loss.backward()
        losses.append(float(loss.detach()))
        if not step:
            named = model.named_parameters()  # ranks have none of experts that others have
            gradients = wholes(model, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named})
        autoshard.clip_grad_norm_(model, 0.5)
        optimizer.step()
    return losses, gradients, wholes(model, dict(model.named_parameters()))


def trained(name, text, folder):
    """How far three steps are from those of one process, before and after a checkpoint; and what a rank has."""
    ids, model, other = samples(), made(name), made(name)
    expected = train(made(name), ids)
    plan = Plan.from_json(text)
    autoshard.apply(model, plan, inputs={"ids": ids, "labels": ids})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)
    own = sum(getattr(one, "to_local", lambda one=one: one)().numel() for one in model.layers.parameters())
    losses, gradients, values = train(model, own_part(ids))
    total = torch.tensor(losses)
    dist.all_reduce(total)
    rows = torch.allclose(total / dist.get_world_size(), torch.tensor(expected[0]), atol=1e-6)
    model(own_part(ids), labels=own_part(ids)).backward()
    optimizer.step()
    autoshard.save_checkpoint(folder, model, optimizer)
    autoshard.apply(other, plan, inputs={"ids": ids, "labels": ids})
    autoshard.load_checkpoint(folder, other, torch.optim.AdamW(other.parameters(), lr=0.01, eps=1e-6))
    state = model.state_dict()
    same = all(torch.equal(one, state[key]) for key, one in other.state_dict().items())
    autoshard.remove(model)
    same = same and all(torch.equal(one, state[key]) for key, one in model.state_dict().items())
    errors = largest_error(gradients, expected[1]), largest_error(values, expected[2])
    return rows and same, max(errors), own


@sharded_replicas
@pytest.mark.parametrize(
    ("name", "mesh", "ranks"),
    [
        ("Fused", "dp=2,ep=2", 2),
        ("Listed", "fsdp=2,ep=2", 2),
        ("Fused", "dp=2,fsdp=2,ep=2", 4),
        ("Listed", "fsdp=4,ep=2", 4),
        ("Fused", "fsdp=2,dp=2,ep=4", 4),
    ],
)
def test_experts_of_all_ranks_train_as_on_one_process(name, mesh, ranks, tmp_path):
    found = run_ranks(trained, ranks, name, plan_of(name, mesh, ranks, precision="full"), str(tmp_path / "saved"))
    whole = sum(one.numel() for one in made(name).layers.parameters())
    for same, error, own in found:
        assert same and error < 1e-4 and own < 0.75 * whole


def answered(name, text):
    ids, model = samples(), made(name).eval()
    with torch.no_grad():
        expected = model(own_part(ids))
        autoshard.apply(model, Plan.from_json(text), inputs={"ids": ids})
        one = torch.full_like(own_part(ids), dist.get_rank() + 1)  # all rows of a rank choose the same experts
        return float((model(own_part(ids)) - expected).abs().max()), bool(model(one).isfinite().all())


@pytest.mark.parametrize("name", ["Fused", "Listed"])
def test_experts_of_all_ranks_answer_alike(name):
    for error, finite in run_ranks(answered, 2, name, plan_of(name, "dp=2,ep=2", 2, mode="inference")):
        assert error < 1e-5 and finite


def refused(name, text):
    ids = samples()
    with pytest.raises(PlanError, match="can't be divided over 2 ranks") as caught:
        autoshard.apply(made(name), Plan.from_json(text), inputs={"ids": ids, "labels": ids})
    return str(caught.value)


@sharded_replicas
@pytest.mark.parametrize("name", ["Capacity", "Mixed"])
def test_experts_that_see_more_than_a_choice_are_refused(name):
    for text in run_ranks(refused, 2, name, plan_of(name, "dp=2,ep=2", 2, precision="full")):
        assert "not the sum of what each choice makes" in text


def test_other_dimensions_are_refused():
    text = plan_of("Fused", "tp=2,ep=2", 2, precision="full")
    with pytest.raises(PlanError, match="experts are divided among replicas"):
        autoshard.apply(made("Fused"), Plan.from_json(text))
