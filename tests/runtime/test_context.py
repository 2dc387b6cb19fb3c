"""Context parallelism: ranks divide the tokens, attention meets those of all ranks, and every number is as before."""

import functools

import pytest
import torch
from torch import nn

import autoshard
from autoshard.check.cuts import find_context
from autoshard.errors import ApplyError, PlanError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.search.traced import trace
from tests.ranks import run_jobs, run_ranks
from tests.runtime import test_launched as launched
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
        self.gain = nn.Parameter(torch.tensor(0.9))

    def forward(self, x, turn, mask):
        x = x + self.gain * self.attention(self.first(x), turn, mask)
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Merged(Block):
    """Samples and tokens in one dimension, a scale that is cast to what it is, and positions that nobody needs."""

    def forward(self, x, turn, mask):
        rows = x.view(-1, WIDTH) * self.first.weight.to(torch.float32)
        return super().forward(self.up(rows).view(*x.shape[:-1], 2 * WIDTH)[..., :WIDTH], torch.ones(1), mask)


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
    def __init__(self, kind, near=0, normed=False):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if normed else nn.Identity()
        self.embed, self.head, self.near = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), near
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, ids, labels=None, states=False, last=0):
        x, at = self.embed(ids), torch.arange(ids.shape[1])
        turn = at.cos().view(1, 1, -1, 1)
        mask = (at <= at[:, None]) & (at > at[:, None] - self.near) if self.near else None
        for layer in self.layers:
            x = layer(x, turn, mask)
        if last:
            x = x[:, -last:]
        logits = self.head(self.norm(x)).float()
        if states:
            return logits, x
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def made(kind, near=0, normed=False):
    torch.manual_seed(0)
    return Net(kind, near, normed)


MAKES = {
    "plain": functools.partial(made, Block),
    "masked": functools.partial(made, Block, 3),  # attention to the last three tokens
    "normed": functools.partial(made, Block, 0, True),
    "merged": functools.partial(made, Merged),
    "mixing": functools.partial(made, Mixing),
}
IDS = torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
INPUTS = {"ids": IDS, "labels": IDS}
LAST = {"ids": IDS, "last": TOKENS - 2}
WORK = Workload(mode="training", batch_size=SAMPLES)


def plan_of(make, mesh, devices, inputs=INPUTS, **wishes):
    return autoshard.plan(
        make(), launched.devices_of(devices), inputs=inputs, launch="processes", mesh=mesh, workload=WORK,
        precision="full", **wishes,
    ).to_json()  # fmt: skip


CASES = {  # the ranks that found where to divide by themselves have the first
    2: [
        ("plain", "cp=2", "none", 4), ("masked", "cp=2", "full", 4), ("mixing", "cp=2", "none", 4),
        ("normed", "cp=2", "none", 1), ("merged", "cp=2", "none", 2),
    ],
    4: [
        ("plain", "dp=2,cp=2", "none", 2), ("masked", "fsdp=2,cp=2", "full", 2), ("plain", "cp=4", "none", 4),
        ("normed", "fsdp=2,cp=2", "full", 1),
    ],
}  # fmt: skip


class Answering(Net):
    """A loss and the logits that it is of."""

    def forward(self, ids, labels):
        x, turn = self.embed(ids), torch.arange(ids.shape[1]).cos().view(1, 1, -1, 1)
        for layer in self.layers:
            x = layer(x, turn, None)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def answering():
    torch.manual_seed(0)
    return Answering(Block)


def given_out(plan):
    """Of logits that stay in parts: the shape of a rank's, and the errors of the loss, of all, and of a gradient."""
    alone, model = answering(), autoshard.apply(answering(), Plan.from_json(plan), inputs=INPUTS)
    ours, theirs = (one(**{name: ids[:1] for name, ids in INPUTS.items()}) for one in (model, alone))
    for out in (ours, theirs):
        out["loss"].backward()
    pairs = [
        (ours["loss"], theirs["loss"]), (ours["logits"].full_tensor(), theirs["logits"]),
        (model.head.weight.grad.full_tensor(), alone.head.weight.grad),
    ]  # fmt: skip
    with torch.no_grad():
        whole = type(model(**INPUTS)["logits"]) is torch.Tensor
    errors = [float((one - other).abs().max()) for one, other in pairs]
    return tuple(ours["logits"].to_local().shape), whole, errors


def asked(plan):
    """What is said where a rank would hand out the tokens that it has, or the last ones of these."""
    model, said = autoshard.apply(made(Mixing), plan), []
    for asks in ({"states": True}, {"last": 1}, {"last": TOKENS - 2}, {"last": TOKENS - 2, "labels": IDS}):
        with pytest.raises(ApplyError) as caught:
            model(IDS, **asks)
        said.append(str(caught.value))
    with torch.no_grad():
        assert torch.equal(model(IDS, last=1), made(Mixing)(IDS)[:, -1:])
    return said


def last_tokens(plan):
    """How far the last six logits are from the whole model's, where the plan was made for those."""
    alone, model = made(Block), autoshard.apply(made(Block), Plan.from_json(plan), inputs=LAST)
    return float((model(**LAST) - alone(**LAST)).abs().max())


@sharded_replicas
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_of_sequences_train_as_on_one_process(ranks):
    jobs = {}
    for number, (name, mesh, recompute, samples) in enumerate(CASES[ranks]):
        text, plan = plan_of(MAKES[name], mesh, ranks, recompute=recompute, micro_batch=samples), None
        if number or ranks > 2:
            plan = launched.completed(text, MAKES[name](), INPUTS)
        degree = Plan.from_json(text).mesh.cp
        jobs[mesh, name] = launched.trained, MAKES[name], plan or text, IDS, degree, "head"
        if name == "mixing":
            jobs[asked] = asked, plan
    if ranks == 2:
        text = plan_of(answering, "cp=2", 2, recompute="none", micro_batch=1, divided_outputs=True)
        jobs[given_out] = given_out, text
        jobs[last_tokens] = last_tokens, plan_of(MAKES["plain"], "cp=2", 2, LAST)
    for results in run_ranks(run_jobs, ranks, jobs):
        states, *picked = results.pop(asked, ("tensor of shape [4, 4, 16] at '1' that the plan does not know",))
        assert "tensor of shape [4, 4, 16] at '1' that the plan does not know" in states
        assert all("each rank picks from its own" in said for said in picked)
        assert results.pop(last_tokens, 0) < 1e-6
        if given_out in jobs:
            shape, whole, errors = results.pop(given_out)
            assert shape == (1, TOKENS // 2, WORDS) and whole and max(errors) < 1e-5
        for name, found in results.items():
            assert found["losses"] < 1e-5 and found["norms"] < 1e-5, (name, found)
            assert found["gradients"] < 1e-4 and found["values"] < 1e-4, (name, found)
            assert found["lengths"] == {TOKENS // jobs[name][4]}, name


WHYS = {Scaled: "div", Counted: "arange", Numbered: "can't run", Folded: "does not work on each token"}


@pytest.mark.parametrize("kind", WHYS, ids=lambda kind: kind.__name__)
def test_what_depends_on_the_number_of_tokens_is_refused(kind):
    with pytest.raises(PlanError, match=WHYS[kind]):
        traced = trace(made(kind), INPUTS, WORK)
        find_context(traced.model, traced.graph, traced.inputs, WORK, 2)


def test_other_dimensions_are_refused():
    with pytest.raises(PlanError, match="sequences are divided in training, with dp and fsdp"):
        autoshard.apply(made(Block), Plan.from_json(plan_of(MAKES["plain"], "tp=2,cp=2", 4)))
