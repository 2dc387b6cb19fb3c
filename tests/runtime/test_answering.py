"""Models in stages that answer: the model's own forward and generate() on every rank, each computing its stages."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.common.fingerprint import fingerprint
from autoshard.errors import ApplyError, PlanError, RankError, SpecError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from tests.conformance.rank_checks import check_answers, plan_of_answers
from tests.models import by_name
from tests.ranks import run_jobs, run_ranks
from tests.runtime.test_launched import completed, devices_of

ANSWER = Workload(batch_size=2, new_tokens=4)


def plan_of(model, inputs, mesh, ranks=2, **wishes):
    return autoshard.plan(
        model, devices_of(ranks), inputs=inputs, launch="processes", mesh=mesh, workload=ANSWER, **wishes
    ).to_json()


def answers(name, mesh, ranks):
    """What checks a case on one plan, which is made here; in the slow tests of conformance ranks make their own."""
    case = by_name(name)
    plan = completed(plan_of_answers(name, mesh, ranks).to_json(), case.model().eval(), case.example())
    return check_answers, name, mesh, plan


def test_of_transformers():
    """Experts, and an encoder with a decoder; others are in the slow tests of conformance."""
    names = ("mixtral", "t5")
    found = run_ranks(run_jobs, 2, {name: answers(name, "pp=2", 2) for name in names})
    for name in names:
        assert all(0.2 < one[name] < 0.9 for one in found), (name, found)  # what a rank has of the parameters


@pytest.mark.parametrize("mesh", ["tp=2,pp=2", pytest.param("dp=2,pp=2", marks=pytest.mark.slow)])
def test_with_cut_matrices_and_replicas(mesh):
    """Of what a stage has, each rank has about half where they cut its matrices."""
    check, *given = answers("llama", mesh, 4)
    held = run_ranks(check, 4, *given)
    assert max(held) < (0.45 if "tp" in mesh else 0.75), held


class Between(nn.Module):
    """Two layers, and code between them that does what `do` says with what they give."""

    def __init__(self, do):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.75))
        self.do = do

    def forward(self, x):
        return self.do(self, x)


def mixed(model, x):
    """Both stages' results meet, with a parameter of the model itself."""
    h = model.first(x * model.scale)
    return (h * model.scale + model.second(h.tanh()), h.sum(-1, keepdim=True).expand(-1, 8))


def read(model, x):
    h = model.first(x)
    times = 2 if h.mean() > 0 else 3
    return model.second(h[h.argmax(-1) >= 0]) * times, h.tolist()[0][:2], f"{h.max():.3f}"


def written(model, x):
    h = model.first(x)
    h += model.scale
    h.mul_(model.second(h))
    y = torch.zeros_like(h)
    y[:, 2:] = h[:, :6]
    y[h.abs() > 0.5] = 1.0
    return y, h.new_full((2,), 3.0), torch.cat([h, y], -1).topk(3)


def written_in_part(model, x):
    h = model.first(x)
    h[:, :3] = 0.5
    return model.second(h)


def seen_before(model, x):
    """A view of what is written into afterwards."""
    h = model.first(x)
    part = h[:, :3]
    total = part.sum().item()
    h *= total
    return model.second(h) + part.mean()


def of_its_weights(model, x):
    return nn.functional.linear(model.second(model.first(x)), model.first.weight)


class Kept(nn.Module):
    """A layer whose state is in an object that the model hands from layer to layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, state):
        x = self.inner(x if state.last is None else x @ state.last.t() @ x)
        state.last = x
        return x


class State:
    last = None


class Windowed(nn.Linear):
    def forward(self, x, state):
        return super().forward(x)


class Handed(nn.Module):
    """Hands on an object with a constant tensor, as caches with a sliding window have."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Windowed(8, 8), Windowed(8, 8)

    def forward(self, x):
        state = State()
        state.window = torch.tensor(4)
        return self.second(self.first(x, state), state)


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Kept() for _ in range(2))

    def forward(self, x):
        state = State()
        for layer in self.layers:
            x = layer(x, state)
        return x


class Auxiliary(nn.Module):
    """Leaves a number where the model finds it."""

    def __init__(self):
        super().__init__()
        self.inner, self.size = nn.Linear(8, 8), None

    def forward(self, x):
        x = self.inner(x)
        self.size = x.abs().sum()
        return x


class Told(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Auxiliary(), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x)) * self.first.size


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, seen):
        seen *= 0.5
        return self.inner(x)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), Halves()

    def forward(self, x):
        h = self.first(x)
        return self.second(h * 2, h) + h


class Shrinks(nn.Linear):
    def forward(self, x, seen):
        seen *= 0.5
        return super().forward(x)


class WritesLast(nn.Module):
    """The module that writes is the last that is called."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), Shrinks(8, 8)

    def forward(self, x):
        h = self.first(x)
        return self.second(h * 2, h) + h


def made(do):
    torch.manual_seed(0)
    return (do() if isinstance(do, type) else Between(do)).eval()


def answered(do, text, backend=None):
    """What a model in stages gives, beside what it gives whole; or the error. `backend`: of torch.compile."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model, whole = made(do), made(do)
    autoshard.apply(model, Plan.from_json(text), inputs=x)
    if backend is not None:
        for one in (model, model.first, model.second):
            one.compile(backend=backend)
    with torch.no_grad():
        expected = whole(x)
        try:
            return repr(model(x)), repr(expected)
        except (ApplyError, RankError) as error:
            return str(error), repr(expected)


@functools.cache
def of_llama():
    case = by_name("llama")
    return plan_of(case.model(), case.example(), "pp=2")


def staged(do):
    """A plan of two stages, of which each has one layer."""
    model, plan = made(do), Plan.from_json(of_llama())
    paths = (("layers.0",), ("layers.1",)) if do is Shares else (("first",), ("second",))
    if isinstance(model, Between):
        paths = (("first", "scale"), ("second",))
    stages = tuple(replace(stage, paths=own) for stage, own in zip(plan.stages, paths, strict=True))
    placements = {path: f"cpu:{number}" for number, own in enumerate(paths) for path in own}
    return replace(plan, stages=stages, placements=placements, fingerprint=fingerprint(model)).to_json()


def of_values(module, inputs):
    assert not any(isinstance(one, torch.Tensor) and one.is_meta for one in inputs), module
    return module


def test_compiled():
    """Also where the modules of other ranks run on shapes alone, for which inductor makes wrong graphs."""
    for found, expected in run_ranks(answered, 2, mixed, staged(mixed), of_values):
        assert found == expected


def registered(text):
    model, whole = made(mixed), made(mixed)
    autoshard.apply(model, Plan.from_json(text), inputs=torch.ones(4, 8))
    for one in (model, whole):
        one.second.register_buffer("steps", torch.tensor(3.0))
        one.register_parameter("shift", nn.Parameter(torch.ones(8)))
    state = model.state_dict()
    assert list(state) == list(whole.state_dict())
    assert all(torch.equal(value, state[name]) for name, value in whole.state_dict().items())
    model.second.register_buffer("mean", torch.zeros_like(model.second.weight))
    if model.second.weight.is_meta:
        with pytest.raises(ApplyError, match=r"second\.mean was registered after .* of a tensor that another rank has"):
            model.state_dict()
    else:
        with pytest.raises(Exception):  # noqa: B017  the other rank is gone
            model.state_dict()


def test_what_is_registered_after_apply_is_in_the_state():
    run_ranks(registered, 2, staged(mixed))


def of_static_cache(text):
    case = by_name("llama")
    model, inputs = case.model().eval(), case.example()
    autoshard.apply(model, Plan.from_json(text), inputs=inputs)
    with pytest.raises(ApplyError, match=r"layers\.0 is given a StaticCache .* Use a cache that grows"):
        model.generate(inputs["input_ids"], max_new_tokens=4, cache_implementation="static")


def test_a_static_cache_is_refused_on_all_ranks():
    case = by_name("llama")
    run_ranks(of_static_cache, 2, plan_of(case.model(), case.example(), "pp=2"))


@pytest.mark.parametrize("do", [mixed, read, written, Handed])
def test_code_between_stages(do):
    for found, expected in run_ranks(answered, 2, do, staged(do)):
        assert found == expected


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (of_its_weights, "uses a parameter that only one stage has"),
        (Shares, "layers.1 uses what another rank has computed"),
    ],
)
def test_what_is_refused_as_it_runs(do, said):
    """By the rank that finds it; the others lose it."""
    assert any(said in found and "Plan without stages" in found for found, _ in run_ranks(answered, 2, do, staged(do)))


def refused(do, text):
    model = made(do)
    before = dict(model.named_parameters())
    with pytest.raises(PlanError) as caught:
        autoshard.apply(model, Plan.from_json(text), inputs=torch.ones(4, 8))
    assert all(one is before[name] for name, one in model.named_parameters())
    return str(caught.value)


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (Told, "the code between them uses what first keeps"),
        (written_in_part, "the code between stages writes into a part of what first gave"),
        (seen_before, "the code between stages writes into a part of what first gave"),
        (WritesLast, "second writes into a tensor that code around it reads"),
        (Writes, "second writes into a tensor that code around it reads"),
    ],
)
def test_what_is_refused_before(do, said):
    assert all(said in found for found in run_ranks(refused, 2, do, staged(do)))


def scheduled(text):
    case, plan = by_name("llama"), Plan.from_json(text)
    report = autoshard.verify(case.model().eval(), plan, inputs=case.example())
    assert report.ok and "decode" in report.compared, report
    model = autoshard.apply(case.model(), plan, inputs=case.example())
    with pytest.raises(ApplyError, match=r"this plan is for answers: call the model, or its generate\(\)"):
        autoshard.schedule(model)


def test_what_runs_otherwise():
    case = by_name("llama")
    run_ranks(scheduled, 2, of_llama())
    with pytest.raises(SpecError, match="leave micro-batches out"):
        plan_of(case.model(), case.example(), "pp=2", num_microbatches=2)
