"""What a cut model gives beside what it gave when the plan was made: the same on all ranks, or refused."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard import torch_private
from autoshard.errors import ApplyError, PlanError
from autoshard.plan import Mesh
from autoshard.runtime.outsiders import refuse_nested
from tests.pipelines.plans import plan_of

DEVICES = {"cpu:0": "1GiB", "cpu:1": "1GiB"}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x, keep=False):
        q, k, v = self.mix(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        maps = torch.softmax(q @ k.mT / 2, -1)
        if keep:
            self.maps = maps
        x = x + self.out((maps @ v).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.last = nn.Linear(16, 32)

    def forward(self, x, keep=False):
        between = [x]
        for block in self.blocks:
            between.append(block(between[-1], keep))
        return self.last(between[-1]), between


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(32, 8)

    def forward(self, x, maps=False, between=False, loss=False):
        wide, seen = self.inner(x, keep=maps)
        made = {"out": self.head(torch.tanh(wide))}
        if loss:
            made["loss"] = made["out"].square().mean()
        if maps:
            made["maps"] = [block.maps for block in self.inner.blocks]
        return made | ({"between": seen} if between else {})


def planned(model, **options):
    inputs = {"x": torch.randn(2, 6, 16), **options}
    return autoshard.plan(model, DEVICES, inputs=inputs, strategy="column-parallel", objective="memory")


@torch.no_grad()
def check_asked(plan):
    """In one process, and on each of several."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 6, 16)
    whole = copy.deepcopy(model)
    assert autoshard.Plan.from_json(plan.to_json()) == plan
    autoshard.apply(model, plan)
    for options in ({}, {"between": True}, {"loss": True, "between": True}):
        found, wanted = model(x, **options), whole(x, **options)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for tokens in (6, 1):  # the maps of one token are ones on all ranks
        with pytest.raises(ApplyError, match=r"\[2, 2, \d, \d\] at 'maps.0' that the plan does not know"):
            model(x[:, :tokens], maps=True)
    with pytest.raises(ApplyError, match="inner was called by itself"):
        model.inner(x)
    twin = copy.deepcopy(model)
    with pytest.raises(ApplyError, match=r"maps.0"):
        twin(x, maps=True)
    torch.testing.assert_close(model(x), whole(x), rtol=1e-5, atol=1e-5)
    autoshard.remove(model)
    assert torch.equal(model.inner(x)[0], whole.inner(x)[0])


def test_what_was_not_planned_is_compared():
    """Between processes: `test_cuts.test_two_ranks`."""
    check_asked(planned(Model()))


class Projector(nn.Module):
    """A module that hands on what its only layer gives, of which two ranks can cut one dimension alone."""

    def __init__(self, mixes):
        super().__init__()
        self.mixes = mixes
        self.layer = nn.Linear(15, 32)

    def forward(self, x):
        return mixed(self.layer(x)) if self.mixes else self.layer(x)


def mixed(x):
    """A function of whole rows."""
    return x.cumsum(-1)


class Projected(nn.Module):
    """Features of an image, say, which other code may ask for by themselves."""

    def __init__(self, mixes):
        super().__init__()
        self.projector = Projector(mixes)
        self.last = nn.Linear(32, 15)

    def forward(self, x):
        return self.last(self.projector(x) if self.projector.mixes else mixed(self.projector(x)))


@pytest.mark.parametrize("mixes", [False, True], ids=["put together in a layer", "sliced by the next layer"])
def test_what_blocks_alone_have_in_parts_is_whole_around_them(mixes):
    """`generate()` of Transformers asks for features of images outside of the forward."""
    torch.manual_seed(0)
    model, x = Projected(mixes), torch.randn(2, 6, 15)
    wanted = model(x), model.projector(x)
    plan = autoshard.plan(model, DEVICES, inputs=x, strategy="column-parallel", objective="memory")
    assert [[action.kind for action in cut.actions] for cut in plan.cuts] == [
        ["copy_to", "gather"],
        ["slice", "reduce"],
    ]
    autoshard.apply(model, plan)
    torch.testing.assert_close((model(x), model.projector(x)), wanted)
    autoshard.remove(model)


def plan_of_maps():
    """Two blocks in a stage each, both cut; nobody has asked for their maps."""
    torch.manual_seed(0)
    model, inputs = Model(), {"x": torch.randn(2, 6, 16)}
    found = planned(model)
    cuts = tuple(cut for cut in found.cuts if "" not in cut.blocks)  # those of the whole model are in several stages
    assert cuts
    stages = [["inner.blocks.0"], ["inner.blocks.1", "inner.last", "head"]]
    plan = plan_of(model, stages, 2, inputs, parts=1, mesh=Mesh(pp=2, tp=2), cuts=cuts)
    return replace(plan, results=tuple(replace(row, parts=()) for row in found.results)).to_json()


@torch.no_grad()
def ask_for_maps(text):
    """What was not planned is compared between ranks of a stage: four in `test_launched_stages`."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 6, 16)
    whole = copy.deepcopy(model.eval())
    autoshard.apply(model, autoshard.Plan.from_json(text))
    with pytest.raises(PlanError):
        autoshard.schedule(model).eval(x=x, maps=True)
    for called in (model, model.inner, model.inner.blocks[0]):
        with pytest.raises(ApplyError, match=r"autoshard\.schedule\(model\)\.eval"):
            called(x)
    autoshard.apply(model, replace(autoshard.Plan.from_json(text), batch=None))
    found = autoshard.schedule(model).eval(x)
    if found is not None:
        torch.testing.assert_close(found, whole(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(PlanError, match="it shares more with its caller"):
        autoshard.schedule(model).eval(x, maps=True)


def test_what_was_planned_is_whole():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 6, 16)
    whole, plan = copy.deepcopy(model), planned(model, maps=True)
    wrong = autoshard.Plan.from_json(plan.to_json().replace('"inner"', '"outer"'))
    with pytest.raises(PlanError, match="knows what 'outer' gives"):
        autoshard.apply(model, wrong)
    assert model.head.weight.shape == (8, 32) and not model._forward_hooks
    autoshard.apply(model, plan)
    torch.testing.assert_close(model(x, maps=True), whole(x, maps=True), rtol=1e-5, atol=1e-5)
    assert model(x)["out"].shape == (2, 6, 8)


def test_padding_masks_that_were_not_planned():
    """Torch makes nested tensors of padded batches where nothing needs a gradient, and copies masks for all heads."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    x, padding = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    autoshard.apply(model, DEVICES, inputs={"src": x}, strategy="column-parallel", objective="memory")
    with torch.no_grad(), pytest.raises(ApplyError, match="enable_nested_tensor=False"):
        model(x, src_key_padding_mask=padding)
    assert refuse_nested in torch_private.forward_pre_hooks(model.layers[0])
    with pytest.raises(ApplyError, match="Linear is cut: a nested tensor"):  # in one of several processes
        refuse_nested(nn.Linear(8, 8), (torch.nested.nested_tensor([x[0], x[1, :2]]),))


class Packed(nn.GRU):
    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(super().forward(packed)[0], batch_first=True)[0]


def test_packed_sequences_take_a_process_per_rank():
    inputs = {"x": torch.randn(2, 3, 8), "lengths": torch.tensor([2, 3])}
    with pytest.raises(PlanError, match=r"packs sequences.*torchrun"):
        autoshard.plan(Packed(8, 8, batch_first=True), DEVICES, inputs=inputs, strategy="column-parallel")


def test_hooks_that_would_get_a_part_are_refused_and_others_run():
    model, x, seen = Model(), torch.randn(2, 6, 16), []
    block = model.inner.blocks[0]
    autoshard.apply(model, planned(model))
    with pytest.raises(ApplyError, match=r"a hook on inner.blocks.0.up would get a rank's part"):
        block.up.register_forward_hook(lambda *_: None)
    handle = block.register_forward_hook(lambda module, args, result: seen.append(result))
    # what code of the model registers in its forward is let through
    model.register_forward_pre_hook(lambda *_: block.up.register_forward_hook(lambda *_: None).remove())
    model(x)
    handle.remove()
    torch.testing.assert_close(seen[0], autoshard.remove(model).inner.blocks[0](x), rtol=1e-5, atol=1e-5)
    assert not block.up.register_forward_hook(lambda *_: None).remove()


def test_layers_with_parts_are_not_called_by_themselves():
    model, x = Model(), torch.randn(2, 6, 16)
    plan = planned(model)
    block = model.inner.blocks[0]
    whole = block(x).detach()
    autoshard.apply(model, plan)
    torch.testing.assert_close(block(x), whole, rtol=1e-5, atol=1e-5)
    with pytest.raises(ApplyError, match=r"inner.blocks.0.up was called by itself"):
        block.up(x)
