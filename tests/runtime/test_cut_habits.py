"""What users do with cut models: freeze a part, hook modules, choose an optimizer, share parameters with others.

Equal blocks share one list of actions, and the first of them may be frozen where others are trained.
"""

import gc

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import autoshard
from autoshard.errors import ApplyError
from autoshard.runtime.cuts import apply_cuts
from autoshard.runtime.local_ranks import LocalRanks
from autoshard.runtime.outsiders import check_not_shared
from tests.pipeline_models import Block
from tests.runtime.cut_models import columns

DEVICES = {"cpu:0": "1MiB", "cpu:1": "1MiB"}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # sums over devices have another order


class Adapted(nn.Module):
    """A frozen layer, and a small one beside it that is trained."""

    def __init__(self, layer):
        super().__init__()
        self.layer, sizes = layer.requires_grad_(False), (layer.in_features, layer.out_features)
        self.down, self.up = nn.Linear(sizes[0], 2, bias=False), nn.Linear(2, sizes[1], bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.blocks = nn.Sequential(*[Block(8) for _ in range(3)])

    def forward(self, ids):
        return self.blocks(self.embed(ids))


def adapted():
    torch.manual_seed(0)
    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def gradients(model, ids):
    model(ids).square().mean().backward()
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_gradients_where_some_parameters_are_frozen():
    """As they were when the plan was made, and thawed afterwards."""
    original, model, ids = adapted(), adapted(), torch.arange(6).reshape(2, 3)
    with autoshard.simulate(DEVICES) as devices:
        plan = autoshard.plan(model, devices, inputs=ids, strategy="column-parallel", objective="memory")
        assert any(cut.blocks[0] == "blocks.0" for cut in plan.cuts)
        for thawed in (False, True):
            autoshard.apply(model, plan)
            for one in (original, model):
                one.zero_grad()
                one.requires_grad_(True) if thawed else None
            wanted, _ = gradients(original, ids), gradients(model, ids)
            autoshard.remove(model)
            found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
            torch.testing.assert_close(found, wanted, **TOLERANCE)


class Kept(nn.Module):
    """A forward hook keeps what an inner layer made, and a later layer is given it."""

    def __init__(self, change):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 4)
        self.kept = {}
        self.first.register_forward_hook(self.keep)
        self.second.register_forward_hook(lambda layer, args, output: change(output))

    def keep(self, layer, args, output):
        self.kept["first"] = output

    def forward(self, x):
        made = self.second(self.first(x).relu())
        return self.last(torch.cat([self.kept["first"], made], -1))


def test_a_hook_that_keeps_and_changes_the_output_of_a_cut_layer():
    torch.manual_seed(0)
    model, x = Kept(lambda out: out.flip(-1)), torch.randn(3, 8)
    plan = autoshard.plan(model, DEVICES, inputs=x, strategy="column-parallel", objective="memory")
    cut = {f"{block}.{shard.name}".lstrip(".") for cut in plan.cuts for block in cut.blocks for shard in cut.shards}
    assert cut & {"first.weight", "second.weight", "last.weight"}
    expected = model(x).detach()
    with autoshard.simulate(DEVICES):
        autoshard.apply(model, plan)
        found = model(x).detach().cpu()
        autoshard.remove(model)
    torch.testing.assert_close(found, expected)


def test_what_a_hook_keeps_in_another_object_than_its_model_is_not_cut():
    """A rank is followed on a copy of the model; what a closure fills is not in it, so nothing can be said of it."""
    model, x = Kept(lambda out: None), torch.randn(3, 8)
    kept = model.kept
    model.first._forward_hooks.clear()
    model.first.register_forward_hook(lambda layer, args, output: kept.update(first=output))
    plan = autoshard.plan(model, DEVICES, inputs=x, strategy="column-parallel", objective="memory")
    assert not plan.cuts


class OwnAdam(torch.optim.Adam):
    """Inherits its steps."""


class OwnSteps(torch.optim.SGD):
    """Has steps of its own, about which it says what they do."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def muon(parameters):
    return torch.optim.Muon([one for one in parameters if one.dim() == 2])


EACH = {
    "inherited": OwnAdam,
    "says so": lambda ps: OwnSteps(ps, lr=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "foreach": lambda ps: torch.optim.RMSprop(ps, foreach=True),
}
WHOLE = {"factored": torch.optim.Adafactor, "orthogonal": muon, "directions": torch.optim.LBFGS}


def cut_model():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(4, 8)
    return apply_cuts(model, [columns(32, 2, up="0", down="2")], LocalRanks.of(["cpu", "cpu"])), x


@pytest.mark.parametrize("name", EACH)
def test_what_treats_each_number_by_itself_steps(name):
    model, x = cut_model()
    optimizer = EACH[name](list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(x).square().mean().backward()
    called = []
    optimizer.register_step_pre_hook(lambda *given: called.append(1))
    optimizer.step()
    scheduler.step()
    assert called == [1] and all(not torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", WHOLE)
def test_what_looks_at_whole_matrices_is_refused(name):
    model, x = cut_model()
    optimizer = WHOLE[name](list(model.parameters()))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(x).square().mean().backward()
    for _ in range(2):  # not let through at its second step, either
        with pytest.raises(ApplyError, match="is not known to treat each number of a parameter by itself"):
            optimizer.step(*([lambda: torch.zeros(())] if name == "directions" else []))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    autoshard.remove(model)
    optimizer.step(*([lambda: torch.zeros(())] if name == "directions" else []))


def test_state_of_whole_parameters_is_refused():
    """An optimizer made before the cut may have taken no step, or its state is of another shape."""
    model, x = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    apply_cuts(model, [columns(32, 2, up="0", down="2")], LocalRanks.of(["cpu", "cpu"]))
    model(x).square().mean().backward()
    with pytest.raises(ApplyError, match=r"AdamW has state of the whole 0\.weight"):
        optimizer.step()


@pytest.fixture
def frozen():
    hidden = gc.get_freeze_count()
    yield gc.freeze
    if not hidden:
        gc.unfreeze()


def tied():
    inside, outside = nn.Linear(4, 4), nn.Linear(4, 4)
    outside.weight = inside.weight
    return inside, outside


def test_a_module_outside_is_found_where_objects_are_frozen(frozen):
    inside, outside = tied()
    for hide in (lambda: None, frozen):
        hide()
        with pytest.raises(ApplyError, match="weight is also a parameter of a Linear"):
            check_not_shared(inside, {"weight": inside.weight}, ["weight"])
    assert gc.get_freeze_count() > 0
    del outside


def test_a_module_that_is_gone_but_for_a_cycle_does_not_count(frozen):
    inside, outside = tied()
    outside.me = [outside]
    frozen()
    del outside
    check_not_shared(inside, {"weight": inside.weight}, ["weight"])


def test_forward_mode_derivatives_are_refused():
    model = nn.Sequential(Block(8), Block(8))
    inputs = torch.randn(2, 8)
    plan = autoshard.plan(model, DEVICES, inputs=inputs, strategy="column-parallel", objective="memory")
    assert plan.cuts
    autoshard.apply(model, plan)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        model(forward_ad.make_dual(inputs, torch.randn(2, 8)))


@pytest.mark.parametrize("strategy", ["balanced", "column-parallel"])
def test_export_says_to_take_the_placement_off(strategy):
    with autoshard.simulate({"cpu:0": "4KiB", "cpu:1": "4KiB"}) as devices:
        model, inputs = nn.Sequential(Block(8), Block(8)), torch.randn(2, 8)
        autoshard.apply(model, devices, inputs=inputs, strategy=strategy)
        with pytest.raises(ApplyError, match=r"torch\.export can't record a model that autoshard has placed"):
            torch.export.export(model, (inputs,))
        autoshard.remove(model)
    assert torch.equal(torch.export.export(model, (inputs,)).module()(inputs), model(inputs))


def test_what_would_be_computed_of_one_ranks_part_is_refused():
    """Parametrizations and masks; models beside this one, and this one when it is whole again, may have them."""
    model, ids = Net(), torch.arange(6).reshape(2, 3)
    plan = autoshard.plan(model, DEVICES, inputs=ids, strategy="column-parallel", objective="memory")
    with autoshard.simulate(DEVICES):
        autoshard.apply(model, plan)
        with pytest.raises(ApplyError, match="weight_orig can't be added to blocks"):
            prune.l1_unstructured(model.blocks[1].up, "weight", amount=0.5)
        with pytest.raises(ApplyError, match="parametrizations can't be added to blocks"):
            weight_norm(model.blocks[1].up)
        for owner, name, other in (
            (model.blocks[0].up, "weight", Net().blocks[0].up.weight), (model.blocks, "0", Block(8)),
        ):  # fmt: skip
            with pytest.raises(ApplyError, match=r"blocks\.0.* can't be replaced while"):
                setattr(owner, name, other)
        with pytest.raises(ApplyError, match=r"no adapter can be put around blocks\.0\.up, whose parameters are cut"):
            model.blocks[0].up = Adapted(model.blocks[0].up)
        model.blocks[0] = nn.Sequential(model.blocks[0], nn.LayerNorm(8))  # which is given the whole
        model.blocks[0] = model.blocks[0][0]
        weight_norm(Net().blocks[1].up)
        weight_norm(autoshard.remove(model).blocks[2].up)


class Heads(nn.Module):
    """A norm of each head: every rank has a part of the gradient of its weights."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(4), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.norm(self.up(x).unflatten(-1, (4, 4))).flatten(-2))


def test_a_plan_that_is_applied_again_sums_gradients_again():
    """Torch does not look at a table of hooks that was empty when the tensor behind its parameter was exchanged."""
    torch.manual_seed(0)
    original, model, x = Heads(), Heads(), torch.randn(3, 8)
    original.load_state_dict(model.state_dict())
    model.up.weight.register_hook(torch.neg).remove()
    wanted = gradients(original, x)
    plan = autoshard.plan(model, DEVICES, inputs=x, strategy="column-parallel", objective="memory")
    assert any("norm.weight" in cut.summed for cut in plan.cuts)
    with autoshard.simulate(DEVICES):
        for _ in range(3):
            autoshard.apply(model, plan)
            model(x).square().mean().backward()
            autoshard.remove(model)
            torch.testing.assert_close({name: one.grad for name, one in model.named_parameters()}, wanted, **TOLERANCE)
            model.zero_grad()
        model.up.weight.register_hook(torch.neg)
        model(x).square().mean().backward()
        torch.testing.assert_close(model.up.weight.grad, -wanted["up.weight"], **TOLERANCE)
