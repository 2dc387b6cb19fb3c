"""Cut models on several devices of one process."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.common.fingerprint import fingerprint
from autoshard.errors import ApplyError, PlanError
from autoshard.plan import Plan
from autoshard.plan.sharding import Action, Cut
from autoshard.plan.workload import Workload
from autoshard.runtime.cuts import apply_cuts, cut_record, remove_cuts
from autoshard.runtime.dispatch import apply_plan, remove
from autoshard.runtime.local_ranks import LocalRanks
from autoshard.runtime.rank_tensor import RankTensor
from autoshard.runtime.slices import CutTensor, merge
from tests.models import by_name
from tests.runtime.cut_checks import CASES, TOLERANCE, check_case, loss_of, make
from tests.runtime.cut_models import columns, cut_plan, decoder_cuts, make_decoder, shard

DEVICES = {"cpu:0": "1MiB", "cpu:1": "1MiB"}
TWO = LocalRanks.of(["cpu", "cpu"])
IDS = torch.tensor([[3, 1, 4, 1, 5]])


LATER = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in ("words", "attention", "means")]


@pytest.mark.parametrize("name", ["attention", "means", *LATER])
def test_equal_to_the_original(name, monkeypatch):
    """Over three; `test_two_ranks` has two of each case."""
    made = []
    for method in ("all_reduce", "add_gathered", "gather"):
        monkeypatch.setattr(LocalRanks, method, counted(getattr(LocalRanks, method), made))
    check_case(name, LocalRanks.of(["cpu"] * 3), lambda: len(made))


def counted(method, made):
    def call(*args):
        made.append(1)
        return method(*args)

    return call


def cut(name):
    """A model that is cut over two ranks, and what it gave before."""
    model = make(name)
    expected = model(*CASES[name].inputs)
    return apply_cuts(model, CASES[name].cuts(2), TWO), expected


@pytest.fixture(scope="module")
def decoder():
    return make_decoder()


@pytest.fixture(params=["", "copies that come out changed go through the host"], ids=["plain", "staged"])
def on_devices(request, decoder, monkeypatch):
    """The decoder on simulated devices, and these; with copies between them, or through ordinary memory."""
    to = torch.Tensor.to

    def watched(tensor, *args, **kwargs):
        made = to(tensor, *args, **kwargs)
        assert None in (tensor.device.index, made.device.index) or tensor.device == made.device
        return made

    with autoshard.simulate("2x1GiB") as names:
        devices = [torch.device(name) for name in names]
        if request.param:
            staged = {(one, two) for one in devices for two in devices}
            monkeypatch.setattr("autoshard.runtime.devices._staged", staged)
        apply_cuts(decoder, decoder_cuts(("model.layers.0", "model.layers.1")), LocalRanks.of(devices))
        if request.param:
            monkeypatch.setattr(torch.Tensor, "to", watched)
        yield decoder, devices
        monkeypatch.undo()
        remove_cuts(decoder)
    decoder.zero_grad()


def test_on_simulated_devices(on_devices):
    """Each device holds its part, and outputs come back to where the inputs were."""
    decoder, devices = on_devices
    found = decoder(IDS).logits
    weight = decoder.model.layers[0].mlp.up_proj.weight
    assert [part.device for part in weight.parts] == devices and found.device == IDS.device
    torch.testing.assert_close(found, make_decoder()(IDS).logits, **TOLERANCE)
    found.sum().backward()


@pytest.mark.parametrize("ranks", ["plain", "simulated"])
def test_generates_the_same_tokens(decoder, ranks):
    """Caches are reordered outside of the forward, by ordinary indices on rank 0's device."""
    ways = [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"do_sample": True}]

    def generate():
        made = []
        for way in ways[1:2] if ranks == "simulated" else ways:
            torch.manual_seed(3)
            made.append(
                decoder.generate(IDS, **{"max_new_tokens": 6, "do_sample": False, "disable_compile": True} | way)
            )
        return made

    expected = generate()
    with autoshard.simulate("2x1GiB") as devices:
        here = LocalRanks.of(devices) if ranks == "simulated" else TWO
        apply_cuts(decoder, decoder_cuts(("model.layers.0", "model.layers.1")), here)
        found = generate()
        remove_cuts(decoder)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_experts_are_computed_as_they_were_planned():
    """On accelerators `generate()` sets another way of computing experts for its decoding, which is not the one cut."""
    case = by_name("mixtral")
    model, ids = case.model().eval(), case.example()["input_ids"]
    settings = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **settings)
    with autoshard.simulate("2x1GiB") as devices:
        plan = autoshard.plan(model, devices, inputs=case.example(), strategy="column-parallel", objective="memory")
        assert any("experts" in shard.name for cut in plan.cuts for shard in cut.shards)
        autoshard.apply(model, plan)
        model.set_experts_implementation("batched_mm")
        assert torch.equal(model.generate(ids, **settings), expected)
        autoshard.remove(model)
    model.set_experts_implementation("batched_mm")
    assert model.get_experts_implementation()[""] == "batched_mm"
    assert torch.equal(model.generate(ids, **settings), expected)


def test_recomputed_layers_have_the_same_gradients(decoder):
    """Activation checkpointing runs a layer again in backward, when the forward of the model is over."""
    gradients = []
    for way in ("whole", "cut"):
        model = make_decoder().train()
        if way == "cut":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            apply_cuts(model, decoder_cuts(("model.layers.0", "model.layers.1")), TWO)
        model(IDS, labels=IDS).loss.backward()
        if way == "cut":
            remove_cuts(model)
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, **TOLERANCE)


def plan_of(ranks, mark):
    return cut_plan(CASES["perceptron"].cuts(ranks), workload=Workload(assumed=True), fingerprint=mark)


def test_a_plan_for_a_model_that_is_applied_already():
    """As removing first, or refused with everything in place."""
    model, inputs = make("perceptron"), CASES["perceptron"].inputs
    mark, expected = fingerprint(model), model(*inputs)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with autoshard.simulate("4x1MiB"):
        apply_plan(model, Plan.from_device_map({"": "cpu:1"}))
        for ranks in (2, 2, 4, 2):
            apply_plan(model, plan_of(ranks, mark))
            assert cut_record(model).ranks.size == ranks
            torch.testing.assert_close(model(*inputs).cpu(), expected)
        with pytest.raises(PlanError, match="made for another model"):
            apply_plan(model, plan_of(2, "0" * 64))
        assert cut_record(model).ranks.size == 2
        remove(model)
    assert all(value.equal(weights[name]) for name, value in model.state_dict().items())


class Masked(nn.Module):
    """A table and an MLP; the mask that it makes meets the ids that were given."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(12, 8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, ids):
        found = self.table(ids)
        seen = torch.zeros(found.shape[:-1], device=found.device)
        seen[:, 1:] = (ids > torch.arange(ids.shape[1], device=found.device))[:, 1:]
        return found + self.down(self.up(found).relu() * seen.unsqueeze(-1))


def test_an_inner_module_is_called_alone():
    """As generation calls encoders, towers and tables: with tensors on the CPU, while no forward of the model runs."""
    model, alone = nn.Sequential(Masked(), nn.Linear(8, 8)), (lambda: model[0](IDS), lambda: model[0].table(IDS))
    expected = [call() for call in alone]
    expected[0].sum().backward()
    gradient = model[0].up.weight.grad.clone()
    model.zero_grad()
    plan = autoshard.plan(model, DEVICES, inputs=IDS, strategy="column-parallel", objective="memory")
    assert any(shard.name.endswith("table.weight") for cut in plan.cuts for shard in cut.shards)
    with autoshard.simulate(DEVICES):
        autoshard.apply(model, plan)
        found = [call() for call in alone]
        for one, other in zip(found, expected, strict=True):
            assert one.device == IDS.device and not isinstance(one, RankTensor)
            torch.testing.assert_close(one, other, **TOLERANCE)
        found[0].sum().backward()
        with pytest.raises(IndexError):
            model[0](torch.tensor([[100]]))
        assert torch.equal(model(IDS), model[1](found[0].detach()))
        autoshard.remove(model)
    torch.testing.assert_close(model[0].up.weight.grad, gradient, **TOLERANCE)


class Fused(nn.Module):
    """Two matrices that share memory: views of a larger one, as libraries load what a checkpoint has fused."""

    def __init__(self, dim):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 24, False), nn.Linear(8, 24, False), nn.Linear(24, 8, False)
        whole = torch.cat([self.up.weight.detach(), self.gate.weight.detach()], dim)
        for layer, part in zip((self.up, self.gate), whole.chunk(2, dim), strict=True):
            layer.weight = nn.Parameter(part)

    def forward(self, x):
        return self.down(self.up(x) * self.gate(x).sigmoid())


@pytest.mark.parametrize("dim", [0, 1])
def test_views_of_one_memory_are_cut_each_by_itself(dim):
    torch.manual_seed(0)
    model, x = Fused(dim), torch.randn(5, 8)
    expected, before = model(x).detach(), copy.deepcopy(model.state_dict())
    plan = autoshard.plan(model, DEVICES, inputs=x, strategy="column-parallel", objective="memory")
    assert {shard.name for cut in plan.cuts for shard in cut.shards} == {"up.weight", "gate.weight", "down.weight"}
    with autoshard.simulate(DEVICES):
        autoshard.apply(model, plan)
        assert torch.allclose(model(x).cpu(), expected, atol=1e-6)
        autoshard.remove(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_tied_names_share_one_tensor_in_the_state_dict():
    """As in that of the plain model: what saves it tells ties by their memory."""
    state = cut("even words")[0].state_dict()
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()


class Remembers(nn.ModuleDict):
    """Keeps what it made in its first forward as an attribute that is no buffer."""

    def forward(self, x):
        if not hasattr(self, "table"):
            self.table = self["up"].weight.detach().sum(0) + 1.0
        return self["down"](self["up"](x * self.table).tanh())


def test_tensors_that_modules_keep_as_attributes_are_brought_to_every_device():
    model, x = Remembers({"up": nn.Linear(8, 32), "down": nn.Linear(32, 8)}), torch.randn(2, 8)
    expected = model(x)
    with autoshard.simulate(DEVICES) as devices:
        apply_cuts(model, [columns(32, 2)], LocalRanks.of(devices))
        torch.testing.assert_close(model(x), expected)
        remove_cuts(model)
    assert torch.equal(model(x), expected)


class Scaled(nn.Module):
    """Its scale is no buffer, so it stays where it was made."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 128), nn.Linear(128, 8), torch.randn(128)

    def forward(self, x):
        x = self.up(x)
        return self.down(x * self.scale.to(x.device))


def test_parts_of_a_plain_tensor_go_to_every_device():
    model, x = Scaled(), torch.randn(2, 8)
    expected = model(x)
    with autoshard.simulate(DEVICES) as devices:
        plan = autoshard.plan(model, devices, inputs=x, strategy="column-parallel", objective="memory")
        assert any(one.kind == "slice" and one.function for cut in plan.cuts for one in cut.actions)
        torch.testing.assert_close(autoshard.apply(model, plan)(x).cpu(), expected)


class Layer(nn.Module):
    """Drops as a module, as a function, in attention, or not at all."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.up, self.down, self.drop = nn.Linear(8, 24), nn.Linear(24, 8), nn.Dropout(0.5)

    def forward(self, x):
        x = F.gelu(self.up(x))
        if self.kind == "module":
            x = self.drop(x)
        elif self.kind == "function":
            x = F.dropout(x, 0.5, self.training)
        elif self.kind == "attention":
            x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 * self.training)
        return self.down(x)


@pytest.mark.parametrize(
    "kind", ["function", "nothing", *(pytest.param(one, marks=pytest.mark.slow) for one in ("module", "attention"))]
)
def test_what_is_drawn_in_training_must_have_been_planned(kind):
    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(kind), Layer(kind)).eval(), torch.ones(2, 3, 8)
    expected = model(x)
    plan = autoshard.plan(model, DEVICES, inputs=x, strategy="column-parallel", objective="memory")
    assert not any(cut.training for cut in plan.cuts)
    autoshard.apply(model, autoshard.Plan.from_json(plan.to_json()))
    torch.testing.assert_close(model(x), expected, **TOLERANCE)
    if kind == "nothing":
        torch.testing.assert_close(model.train()(x), expected, **TOLERANCE)
        return
    model[1].drop.train(), model[1].train()
    with pytest.raises(ApplyError, match=r"^1 .*training.*Plan after model\.train\(\)"):
        model(x)
    with pytest.raises(ApplyError, match=r"^0 "):
        model.train()(x)
    torch.testing.assert_close(model.eval()(x), expected, **TOLERANCE)
    autoshard.remove(model.train())
    torch.manual_seed(3)
    expected = model(x)
    plan = autoshard.plan(model, DEVICES, inputs=x, strategy="column-parallel", objective="memory")
    assert all(cut.training for cut in plan.cuts)
    if kind in ("module", "function"):
        assert "dropout" in {action.kind for cut in plan.cuts for action in cut.actions}
    autoshard.apply(model, plan)
    torch.manual_seed(3)
    torch.testing.assert_close(model(x), expected, **TOLERANCE)


def test_a_training_step_is_planned_with_labels_where_no_inputs_are_given():
    """Its logits get a bias behind the head: without labels nothing would read them before they are given out."""
    model = by_name("bart").model().train()
    asked = Workload(mode="training", batch_size=2, sequence_length=6)
    ids = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(4)
    expected = model(input_ids=ids, labels=ids).loss
    autoshard.apply(model, DEVICES, workload=asked, strategy="column-parallel", objective="memory")
    torch.manual_seed(4)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected, **TOLERANCE)


def test_a_bias_is_added_once_behind_the_sum():
    names, (model, expected) = list(make("perceptron").state_dict()), cut("perceptron")
    inputs, layer = CASES["perceptron"].inputs, model.blocks[0]["down"]
    assert list(dict(model.named_parameters())) == list(model.state_dict()) == names
    torch.testing.assert_close(copy.deepcopy(model)(*inputs), expected, **TOLERANCE)
    whole, added = make("perceptron"), torch.arange(8.0)
    with torch.no_grad():
        for bias in (layer.bias, whole.blocks[0]["down"].bias):
            bias.add_(added)
    torch.testing.assert_close(model(*inputs), whole(*inputs), **TOLERANCE)
    layer.bias = nn.Parameter(added)  # another one is the one that is added
    whole.blocks[0]["down"].bias = nn.Parameter(added)
    torch.testing.assert_close(model(*inputs), whole(*inputs), **TOLERANCE)


@pytest.mark.parametrize("name", ["fused", "even words"])
def test_a_model_that_was_cut_in_inference_mode_is_trained_afterwards(name):
    model = make(name)
    with torch.inference_mode():
        apply_cuts(model, CASES[name].cuts(2), TWO)
        model(*CASES[name].inputs)
    loss_of(model(*CASES[name].inputs)).backward()


def test_what_was_put_in_the_place_of_a_part_is_not_put_together():
    whole = torch.ones(6, 4)
    assert torch.equal(merge(whole, CutTensor(dim=0, axis="*4", shares=(2, 2)), TWO), whole)


def test_sums_have_the_dtype_of_their_layer():
    (model, _), made, inputs = cut("perceptron"), [], CASES["perceptron"].inputs
    model.blocks[0]["down"].register_forward_hook(lambda layer, args, result: made.append(result.dtype))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(model(*inputs), make("perceptron")(*inputs), rtol=2e-2, atol=2e-2)
    assert made == [torch.bfloat16]


def interrupt(*args):
    raise KeyboardInterrupt


def test_an_interrupt_leaves_nothing_behind_after_the_next_forward():
    (model, _), inputs = cut("fused"), CASES["fused"].inputs
    expected = model(*inputs)
    handle = model.back.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(*inputs)
    handle.remove()
    assert torch.equal(model(*inputs), expected)
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0


def test_a_graph_from_before_the_cut_does_not_fill_gradients():
    model, expected = cut("perceptron")
    with pytest.raises(RuntimeError, match="Run the forward again"):
        expected.sum().backward()
    model(*CASES["perceptron"].inputs).sum().backward()


class Seen(nn.Module):
    """Writes what it computes into a buffer, with its history."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(2, 8), persistent=False)

    def forward(self, x):
        self.seen.copy_(self.up(x))
        return self.down(self.seen * self.seen)


def test_a_buffer_that_a_graph_holds_is_refused_before_anything_is_put_together():
    model, x = nn.Sequential(Seen(), Seen()), torch.randn(2, 4)
    expected = model(x)
    for block in model:
        block.seen.detach_()
    units = columns(8, 2, ("0", "1"))
    apply_cuts(model, [replace(units, shards=(*units.shards, shard("seen", 1, "*8")))], TWO)
    model(x)
    with pytest.raises(ApplyError, match=r"0.seen was written by a forward .* detach_\(\)"):
        autoshard.remove(model)
    torch.testing.assert_close(model(x), expected)
    for block in model:
        block.seen.detach_()
    autoshard.remove(model)
    torch.testing.assert_close(model(x), expected)


def wrong_cuts():
    (cut,) = CASES["perceptron"].cuts(2)
    part, action = cut.shards[0], cut.actions[0]
    lookup = Action(kind="lookup", module="up", function="linear", axis="*24")
    return {
        "does not have": {"blocks": ("blocks.7",)},
        "its shape is": {"shards": (replace(part, dim=1),)},
        "does not have 24 slices": {"shards": (replace(part, axis="*12x2"),)},
        "no axis": {"shards": (replace(part, axis="*24x"),)},
        "in two ways": {"shards": (part, replace(part, axis="1x*24"))},
        "do not add up": {"shares": (12, 11)},
        "acts at 'blocks.0.across'": {"actions": (replace(action, module="across"),)},
        "says no axis": {"actions": (Action(kind="gather", module="up"),)},
        "without being a sum": {"actions": (Action(kind="copy_to", module="up", gathered=True),)},
        "only embedding": {"actions": (lookup,)},
        "also told to cut": {"summed": ("up.weight",)},
        "unevenly": {"shares": (10, 14)},
    }


@pytest.mark.parametrize(("words", "changed"), wrong_cuts().items())
def test_a_wrong_cut_is_refused_and_changes_nothing(words, changed):
    model, (cut,) = make("perceptron"), CASES["perceptron"].cuts(2)
    with pytest.raises(PlanError, match=words):
        apply_cuts(model, (replace(cut, **changed),), TWO)
    assert cut_record(model) is None and model.blocks[0]["up"].weight.shape == (24, 8)


def test_models_that_a_cut_does_not_belong_to_are_refused():
    model = make("attention")
    model.config.heads = 10
    with pytest.raises(PlanError, match=r"expects config\.heads = 12"):
        apply_cuts(model, CASES["attention"].cuts(2), TWO)
    with pytest.raises(ApplyError, match="nothing to remove"):
        remove_cuts(model)
    with torch.device("meta"):
        model = CASES["perceptron"].make()
    with pytest.raises(ApplyError, match="has no data"):
        apply_cuts(model, CASES["perceptron"].cuts(2), TWO)
    model = make("perceptron")
    model.blocks[1]["down"].weight.register_hook(lambda gradient: gradient / gradient.norm())
    with pytest.raises(ApplyError, match=r"1\.down\.weight has a hook on its gradient"):
        apply_cuts(model, CASES["perceptron"].cuts(2), TWO)
    model = Fused(0)
    model.gate.weight = nn.Parameter(model.up.weight.detach().view(-1).as_strided((24, 8), (8, 1), 64))
    overlapping = Cut(blocks=("",), size=24, shares=(12, 12), shards=(shard("up.weight", 0, "*24"),))
    with pytest.raises(PlanError, match="different view of the same memory"):
        apply_cuts(model, (overlapping,), TWO)
