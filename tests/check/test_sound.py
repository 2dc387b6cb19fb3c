"""The list of what is sound by construction: for each entry models that are divided, and models that break it.

Those that break it look like the others, and the numbers that a plan compares would not tell them apart.
"""

import contextlib
import math
from itertools import takewhile

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoshard.check.batch import find_batch_axis
from autoshard.errors import PlanError
from autoshard.plan.workload import Workload

WIDTH, EXPERTS, CHOSEN = 8, 4, 2
MANY = 10_000_000
"""More than there are of anything here: what is compared with it is no other for any of the batches that are tried."""


def ways(model: nn.Module, inputs, mode="inference") -> dict[str, str]:
    torch.manual_seed(0)
    return {one.path: one.how for one in find_batch_axis(model, inputs, Workload(mode=mode)).outputs}


def refused(model: nn.Module, inputs, mode="inference") -> str:
    with pytest.raises(PlanError) as error:
        ways(model, inputs, mode)
    return str(error.value)


class Model(nn.Module):
    """Computes what a function says; `gate` is zero, as it may be when planned."""

    def __init__(self, by) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(WIDTH, WIDTH), by
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS))
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x, **more):
        return self.by(self, x, **more)


def rows(count=4):
    return torch.randn(count, 6, WIDTH, generator=torch.Generator().manual_seed(1))


# ---- guards


def _raises_if_large(self, x):
    if (x.abs() > 1e6).any():
        raise ValueError("too large")
    return self.linear(x)


def _asserts(self, x):
    assert x.isfinite().all(), "numbers"
    assert not (x > 1e6).any().item()
    torch._assert((x < 1e6).all(), "too large")
    if x.min() < -1e6:
        raise ValueError("too small")
    return self.linear(x)


def _limits(self, x):
    most, least = x.shape[1], -6
    assert x.max().item() <= most
    if float(x.amin()) < least:
        raise ValueError("too small")
    assert most >= int(x.detach().max())
    return self.linear(x)


def _distribution(self, x):
    given = torch.distributions.Normal(self.linear(x), 1.0, validate_args=True)
    choice = torch.distributions.Categorical(logits=x, validate_args=True)
    return given.log_prob(x) + choice.log_prob(choice.sample())[..., None]


def test_an_error_for_single_elements_is_a_guard():
    assert ways(Model(_distribution), rows()) == {"": "cat"}
    assert ways(Model(_limits), rows()) == {"": "cat"}
    assert ways(Model(_raises_if_large), rows()) == {"": "cat"}
    assert ways(Model(_asserts), rows()) == {"": "cat"}


def _raises_for_the_mean(self, x):
    if x.mean() > 1e6:
        raise ValueError("too large")
    return self.linear(x)


def _raises_if_all_are_large(self, x):
    if (x.abs() > 1e6).all():
        raise ValueError("too large")
    return self.linear(x)


def _raises_far_from_the_others(self, x):
    if ((x - x.mean(0)).abs() > 1e6).any():
        raise ValueError("too far")
    return self.linear(x)


def _halves_if_large(self, x):
    if (x.abs() > 1e6).any():
        x = x / 2
    return self.linear(x)


def _keeps_the_answer(self, x):
    if (large := (x.abs() > 1e6).any().item()) > 1:
        raise ValueError("never")
    return self.linear(x) * (1 + large)


def _catches(self, x):
    try:
        return _raises_if_large(self, x)
    except ValueError:
        return self.linear(x / 2)


def _compares_answers(self, x):
    if not torch.equal((x < 9).all(), (x > -9).all()):
        raise ValueError("one of them only")
    return self.linear(x)


def _grows_with_the_rows(self, x):
    if x.max() > 100 * len(x):
        raise ValueError("too large for so few")
    return self.linear(x)


def _asks_two_things(self, x):
    if (x > 1e6).any() and (x < -1e6).any():
        raise ValueError("too large and too small")
    return self.linear(x)


def _catches_a_check_of_torch(self, x):
    try:
        return torch.distributions.Normal(self.linear(x), x.exp(), validate_args=True).mean
    except ValueError:
        return x


def _suppresses(self, x):
    made = self.linear(x / 2)
    with contextlib.suppress(ValueError):
        made = _raises_if_large(self, x)
    return made


def _is_limited_by_the_rows(self, x):
    most = 100 * len(x)
    assert x.max().item() <= most
    return self.linear(x)


def _is_limited_by_a_row(self, x):
    most = float(x[0].sum()) + 1e6
    assert x.max().item() <= most
    return self.linear(x)


def _turns_the_largest(self, x):
    assert math.cos(x.max().item()) <= 1
    assert math.cos(x.max()) <= 1
    return self.linear(x)


def _has_a_large_element(self, x):
    assert x.max().item() >= -1e6
    return self.linear(x)


def _keeps_the_largest(self, x):
    largest = x.max().item()
    assert largest <= 1e6
    return self.linear(x) * largest


@pytest.mark.parametrize(
    "by",
    [
        _is_limited_by_the_rows, _is_limited_by_a_row, _turns_the_largest, _has_a_large_element, _keeps_the_largest,
        _raises_for_the_mean, _raises_if_all_are_large, _raises_far_from_the_others, _halves_if_large,
        _keeps_the_answer, _catches, _catches_a_check_of_torch, _suppresses, _compares_answers,
        _grows_with_the_rows, _asks_two_things,
    ],
)  # fmt: skip
def test_questions_that_are_no_guards(by):
    assert "can't be divided" in refused(Model(by), rows())


# ---- numbers that stand for padding


class Padded(nn.Module):
    """Leaves out the mask of attention where no token is padding."""

    def __init__(self, change=lambda x: x, number=0) -> None:
        super().__init__()
        self.embed, self.change, self.number = nn.Embedding(20, WIDTH), change, number

    def forward(self, ids):
        padding, x = ids.eq(0), self.embed(ids)
        scores = x @ x.transpose(1, 2)
        if ids.eq(self.number).any():
            scores = self.change(scores.masked_fill(padding[:, None, :], -1e9))
        return scores.softmax(-1) @ x


def test_padding_that_is_asked_for_in_all_rows():
    ids = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(2))
    assert ways(Padded(), ids) == {"": "cat"}
    assert ways(Padded(), ids.clamp(min=1)) == {"": "cat"}
    assert "asks whether any row is masked" in refused(Padded(lambda scores: scores / 2), ids)
    assert "asks whether any row is masked" in refused(Padded(number=3), ids.clamp(min=4))


# ---- elements that a mask chooses


def static(middle=lambda self, e: e, taken=lambda token: token, put=None, after=lambda self, out, found: out):
    """Each expert works on its own tokens, one expert after the other."""

    def by(self, x):
        flat = self.linear(x).view(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(CHOSEN, -1)
        out, found = torch.zeros_like(flat), []
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            found.append(token)
            e = middle(self, expert(flat[taken(token)]) * weights[token, place, None])
            if put is None:
                out.index_add_(0, token, e)
            else:
                put(self, out, token, e)
        return after(self, out, found).view_as(x)

    return by


def masked(middle=lambda self, e: e * 2, put=None):
    """What is above zero is worked on, the rest stays."""

    def by(self, x):
        y = self.linear(x)
        mask = y > 0
        out = torch.zeros_like(y)
        out[~mask] = y[~mask]
        out[mask] = middle(self, y[mask])
        return out

    return by


def test_tokens_go_to_their_experts_and_back():
    assert ways(Model(static()), rows()) == {"": "cat"}
    assert ways(Model(static(put=lambda s, out, t, e: out.index_put_((t,), e, accumulate=True))), rows()) == {"": "cat"}
    assert ways(Model(masked()), rows()) == {"": "cat"}


@pytest.mark.parametrize(
    "by",
    [
        static(lambda self, e: e - self.gate * e.mean(0)),
        static(lambda self, e: e + self.gate * e.flip(0)),
        static(lambda self, e: e + self.gate * e.cumsum(0)),
        static(lambda self, e: e + self.gate * torch.ones_like(e).cumsum(0)),
        static(lambda self, e: e + self.gate * F.scaled_dot_product_attention(e[None], e[None], e[None])[0]),
        static(lambda self, e: e / max(len(e), MANY)),
        static(lambda self, e: e / max(e.data.shape[0], MANY)),
        static(lambda self, e: e / max(e.numel(), MANY)),
        static(taken=lambda token: (token - 1).clamp(min=0)),
        static(put=lambda self, out, token, e: out.index_add_(0, token.flip(0), e)),
        static(put=lambda self, out, token, e: out.index_add_(0, token[:9], e[:9])),
        static(put=lambda self, out, token, e: out.index_add_(0, token, e + self.gate * token[:, None])),
        static(put=lambda self, out, token, e: out.index_copy_(0, token, e)),
        static(after=lambda self, out, found: out * (1 + sum(token.numel() > 0 for token in found))),
        static(after=lambda self, out, found: out * (1 + self.gate * sum((token >= 0).sum() for token in found))),
        masked(lambda self, e: e - self.gate * e.mean()),
        masked(lambda self, e: e + self.gate * e.flip(0)),
        masked(lambda self, e: e / max(len(e), MANY)),
    ],
)
def test_experts_that_look_at_other_tokens(by):
    assert "can't be divided" in refused(Model(by), rows())


# ---- loops over what any token chose


def loop(
    middle=lambda self, e, k, turn: e, each=lambda self, out, k, turn: out, after=lambda self, out, k, turns: out,
    hits=lambda mask: (mask.sum((1, 2)) > 0).nonzero(), part=lambda mask, k: mask[k],
    weight=lambda self, k, turn: self.weights[k],
):  # fmt: skip
    """Only experts that any token chose are called."""

    def by(self, x):
        flat = self.linear(x).view(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(CHOSEN, -1)
        out, turn, k = torch.zeros_like(flat), 0, None
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for hit in hits(mask):
            k = hit[0] if isinstance(hit, torch.Tensor) else hit
            place, token = torch.where(part(mask, k))
            e = middle(self, flat[token] @ weight(self, k, turn) * weights[token, place, None], k, turn)
            out.index_add_(0, token, e)
            out = each(self, out, k, turn)
            turn += 1
        return after(self, out, k, turn).view_as(x)

    return by


def test_experts_that_no_token_chose_are_left_out():
    assert ways(Model(loop()), rows()) == {"": "cat"}
    assert ways(Model(loop(lambda self, e, k, turn: e * (1 + float(k)))), rows()) == {"": "cat"}
    assert ways(Model(loop(hits=lambda mask: (mask.sum((1, 2)) > 0).nonzero().flatten().tolist())), rows())
    by_module = loop(weight=lambda self, k, turn: self.experts[k].weight)
    assert ways(Model(by_module), rows()) == {"": "cat"}
    beyond = loop(hits=lambda mask: [hit for hit in (mask.sum((1, 2)) > 0).nonzero() if hit[0] != EXPERTS])
    assert ways(Model(beyond), rows()) == {"": "cat"}
    assert ways(Model(loop(lambda self, e, k, turn: e * 2 if k == 1 else e)), rows()) == {"": "cat"}


@pytest.mark.parametrize(
    "by",
    [
        loop(lambda self, e, k, turn: e - self.gate * e.mean(0)),
        loop(lambda self, e, k, turn: e * (1 + turn)),
        loop(weight=lambda self, k, turn: self.weights[turn]),
        loop(each=lambda self, out, k, turn: out * 0.9),
        loop(each=lambda self, out, k, turn: out.add_(0.1)),
        loop(each=lambda self, out, k, turn: out + self.gate * self.weights[k].mean()),
        loop(after=lambda self, out, k, turns: out / turns),
        loop(after=lambda self, out, k, turns: out / max(turns, 3)),
        loop(after=lambda self, out, k, turns: out + self.gate * (out @ self.weights[k])),
        loop(after=lambda self, out, k, turns: out * (1 + int(k))),
        loop(hits=lambda mask: (mask.sum((1, 2)) > 9).nonzero()),
        loop(hits=lambda mask: ((mask - 1 + 1).sum((1, 2)) > 0).nonzero()),
        loop(part=lambda mask, k: mask[(k + 1) % EXPERTS]),
        loop(hits=lambda mask: [hit for at, hit in enumerate((mask.sum((1, 2)) > 0).nonzero()) if at != 1]),
        loop(after=lambda self, out, k, turns: out * (1 + int(k) // (EXPERTS - 1))),
        loop(after=lambda self, out, k, turns: out * 2 if k == EXPERTS - 1 else out),
        loop(each=lambda self, out, k, turn: out * 2 if k == EXPERTS - 2 else out),
        loop(hits=lambda mask: takewhile(lambda hit: hit[0] != 1, (mask.sum((1, 2)) > 0).nonzero())),
    ],
)
def test_loops_that_do_more_than_call_their_experts(by):
    assert "can't be divided" in refused(Model(by), rows())


# ---- sums that are divided by sums


def _table(x):
    return (torch.arange(6) < 2).to(x.dtype).expand(x.shape[:2])


def ratio(mask):
    def by(self, x):
        kept = mask(self, x)
        return (self.linear(x).square().mean(-1).cumsum(1) * kept).sum() / kept.sum()

    return by


def test_a_mean_over_what_each_row_has_as_much_of():
    assert ways(Model(ratio(lambda self, x: _table(x))), rows()) == {"": "mean"}
    drawn = ratio(lambda self, x: _table(x).gather(1, torch.rand(x.shape[:2]).argsort(1)))
    assert ways(Model(drawn), rows()) == {"": "mean"}


@pytest.mark.parametrize(
    "mask",
    [
        lambda self, x: (torch.rand(x.shape[:2]) > 0.5).to(x.dtype),
        lambda self, x: (x[..., 0] > -9).to(x.dtype),
        lambda self, x: (torch.arange(len(x)) % 4 < 3).to(x.dtype)[:, None].expand(x.shape[:2]),
        lambda self, x: _table(x).gather(1, torch.randint(6, x.shape[:2])),
        lambda self, x: _table(x).gather(1, torch.rand(x.shape[:2]).argsort(1)) * torch.rand(x.shape[:2]).round(),
    ],
)
def test_a_mean_over_what_rows_have_more_or_less_of(mask):
    assert "can't be divided" in refused(Model(ratio(mask)), rows())


@pytest.mark.parametrize(
    "by",
    [
        lambda self, x: self.linear(x).sum().to(torch.int64),
        lambda self, x: self.linear(x).mean().long().to(x.dtype),
        lambda self, x: F.rrelu(self.linear(x).mean()),
        lambda self, x: F.dropout(self.linear(x).mean()),
        lambda self, x: torch.div(self.linear(x).mean(), 0.1, rounding_mode="floor"),
    ],
)
def test_a_mean_that_is_rounded_or_bent(by):
    assert "can't be divided" in refused(Model(by), rows())


# ---- how many rows there are


def _written(self, x, at):
    made = self.linear(x).clone()
    made[at] = 0
    return made


@pytest.mark.parametrize(
    "by",
    [
        lambda self, x: _written(self, x, slice(None, 100)),
        lambda self, x: _written(self, x, slice(0, 5000)),
        lambda self, x: _written(self, x, (slice(None, 5000), slice(0, 2))),
        lambda self, x: _written(self, x, (Ellipsis, slice(None, 5000), slice(None), slice(None))),
        lambda self, x: self.linear(x)[:5000, :3],
        lambda self, x: self.linear(x)[:5000, ...],
        lambda self, x: torch.cat([part * (1 + at) for at, part in enumerate(self.linear(x).split(100))]),
        lambda self, x: self.linear(x) / max(8, len(x)),
        lambda self, x: self.linear(x) * (1.0 if len(x) < 500 else 0.5),
        lambda self, x: self.linear(x) * (len(x) > 100),
        lambda self, x: self.linear(x) * (0.5 if len(x) == 2 else 1.0),  # as in a part
        lambda self, x: self.linear(x).tanh() if len(x) % 4 == 2 else self.linear(x),
        lambda self, x: self.linear(x) * (1 + len(x) // 50),
        lambda self, x: self.linear(x).narrow(0, 0, min(200, len(x))),
    ],
)
def test_what_holds_for_few_rows_only(by):
    assert "can't be divided" in refused(Model(by), rows())


def test_slices_of_other_dimensions():
    assert ways(Model(lambda self, x: _written(self, x, (slice(None), slice(None, 5000)))), rows()) == {"": "cat"}
    assert ways(Model(lambda self, x: self.linear(x)[:, :5000]), rows()) == {"": "cat"}
    assert ways(Model(lambda self, x: self.linear(x)[: len(x), ..., :3]), rows()) == {"": "cat"}


# ---- places that hold the same for every sample


def _with_tokens(self, x, token, take):
    """Frames [2 b, 3, 8] behind a token each; `take` takes some of their vectors for the rows."""
    frames = self.linear(x).reshape(-1, 3, WIDTH)
    made = torch.cat([token(self, len(frames)), frames], 1) + self.weights[0, :4]
    return torch.cat([take(made, len(x)), x], 1)


def _one_token(self, count):
    return self.weights[1, :1].expand(count, 1, WIDTH)


def _own_tokens(self, count):
    return self.weights.view(-1, WIDTH)[:count, None] + torch.zeros(count, 1, WIDTH)


@pytest.mark.parametrize(
    ("token", "take", "fine"),
    [
        (_one_token, lambda made, count: made[:count, :1], True),
        (_one_token, lambda made, count: made[:count, 0].unsqueeze(1), True),
        (_one_token, lambda made, count: made[:count, 1:2], False),
        (_one_token, lambda made, count: made[:count, :2], False),
        (_one_token, lambda made, count: made.softmax(1)[:count, :1], False),
        (_one_token, lambda made, count: made.mul_(made.mean())[:count, :1], False),
        (_own_tokens, lambda made, count: made[:count, :1], False),
    ],
)
def test_class_tokens_are_those_of_any_row(token, take, fine):
    model = Model(lambda self, x: _with_tokens(self, x, token, take))
    if fine:
        assert ways(model, rows()) == {"": "cat"}
    else:
        assert "can't be divided" in refused(model, rows())
