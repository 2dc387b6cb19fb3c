"""Context parallelism: ranks divide the tokens, attention meets those of all ranks, and every number is as before."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.check.context import find_context
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.search.traced import trace
from tests.ranks import run_ranks
from tests.runtime.test_launched import largest_error, train
from tests.torch_releases import sharded_replicas

WIDTH, WORDS, SAMPLES, TOKENS = 16, 24, 4, 8


class Attention(nn.Module):
    """Causal attention over positions that the model gives."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x, turn, mask):
        q, k, v = (one(x).view(*x.shape[:-1], 4, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        q, k = (nn.functional.rms_norm(one, (4,), self.scale) * turn for one in (q, k))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.first, self.second = Attention(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, turn, mask):
        x = x + self.attention(self.first(x), turn, mask)
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Scaled(Block):
    """Code that would see a rank's tokens where it means all of them."""

    def forward(self, x, turn, mask):
        return super().forward(x, turn, mask) / x.shape[1]


class Counted(Block):
    """Code that counts tokens, of which a rank has some."""

    def forward(self, x, turn, mask):
        return super().forward(x + torch.arange(x.shape[1]).sum(), turn, mask)


class Numbered(Block):
    """Positions that a rank would count from 0."""

    def forward(self, x, turn, mask):
        return super().forward(x + torch.arange(x.shape[1]).unsqueeze(1), turn, mask)


class Mixing(Block):
    """Tokens are mixed by something else than attention: that has all of them."""

    def forward(self, x, turn, mask):
        return super().forward(x + x.mean(1, keepdim=True), turn, mask)


class Folded(Block):
    """The output has no tokens."""

    def forward(self, x, turn, mask):
        return super().forward(x, turn, mask).cumsum(1)


class Net(nn.Module):
    masked = False

    def __init__(self, kind):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, ids, labels=None):
        x = self.embed(ids)
        turn = torch.arange(ids.shape[1]).cos().view(1, 1, -1, 1)
        near = torch.arange(ids.shape[1])
        mask = (near <= near[:, None]) & (near > near[:, None] - 3) if self.masked else None
        for layer in self.layers:
            x = layer(x, turn, mask)
        logits = self.head(x)
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Masked(Net):
    """Attention to the last three tokens."""

    masked = True


def made(name):
    torch.manual_seed(0)
    kinds = {kind.__name__: kind for kind in (Block, Scaled, Counted, Numbered, Mixing, Folded)}
    return Masked(Block) if name == "Masked" else Net(kinds[name])


def samples():
    return torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))


WORK = Workload(mode="training", batch_size=SAMPLES)


def plan_of(name, mesh, devices, **wishes):
    ids = samples()
    plan = autoshard.plan(
        made(name), {f"cpu:{index}": "8GiB" for index in range(devices)}, inputs={"ids": ids, "labels": ids},
        launch="processes", mesh=mesh, workload=WORK, precision="full", **wishes,
    )  # fmt: skip
    return plan.to_json()


def trained(name, text, degree):
    """How far three steps are from those of one process that has all samples, and how long a block's input is."""
    ids, model, seen = samples(), made(name), []
    expected = train(made(name), ids)
    autoshard.apply(model, Plan.from_json(text), inputs={"ids": ids, "labels": ids})
    model.layers[1].up.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    number, replicas = dist.get_rank() // degree, dist.get_world_size() // degree
    losses, norms, gradients, values = train(model, ids.chunk(replicas)[number])
    total = torch.tensor(losses)
    dist.all_reduce(total)
    same = torch.allclose(total / dist.get_world_size(), torch.tensor(expected[0]), atol=1e-6)
    same = same and torch.allclose(torch.tensor(norms), torch.tensor(expected[1]), rtol=1e-5)
    state = model.state_dict()
    autoshard.remove(model)
    same = same and all(torch.equal(one, state[key]) for key, one in model.state_dict().items())
    return same, max(largest_error(gradients, expected[2]), largest_error(values, expected[3])), set(seen)


@sharded_replicas
@pytest.mark.parametrize(
    ("name", "mesh", "ranks", "degree"),
    [
        ("Block", "cp=2", 2, 2),
        ("Masked", "cp=2", 2, 2),
        ("Mixing", "cp=2", 2, 2),
        ("Block", "dp=2,cp=2", 4, 2),
        ("Masked", "fsdp=2,cp=2", 4, 2),
        ("Block", "cp=4", 4, 4),
    ],
)
def test_parts_of_sequences_train_as_on_one_process(name, mesh, ranks, degree):
    text = plan_of(name, mesh, ranks, recompute="full" if name == "Masked" else "none")
    for same, error, tokens in run_ranks(trained, ranks, name, text, degree):
        assert same and error < 1e-4 and tokens == {TOKENS // degree}


WHYS = {"Scaled": "div", "Counted": "arange", "Numbered": "can't run", "Folded": "does not work on each token"}


@pytest.mark.parametrize(("name", "why"), WHYS.items())
def test_what_depends_on_the_number_of_tokens_is_refused(name, why):
    ids = samples()
    with pytest.raises(PlanError, match=why):
        traced = trace(made(name), {"ids": ids, "labels": ids}, WORK)
        find_context(traced.model, traced.graph, traced.inputs, WORK, 2)


def test_other_dimensions_are_refused():
    with pytest.raises(PlanError, match="sequences are divided in training, with dp and fsdp"):
        autoshard.apply(made("Block"), Plan.from_json(plan_of("Block", "tp=2,cp=2", 4)))
