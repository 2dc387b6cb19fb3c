"""Cut models on several devices of one process."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import autoshard
from autoshard import torch_private
from autoshard.errors import ApplyError, PlanError
from autoshard.plan.sharding import Cut, Shard
from autoshard.runtime.collectives import Axis
from autoshard.runtime.cuts import apply_cuts, remove_cuts
from autoshard.runtime.local_ranks import LocalRanks
from autoshard.runtime.rank_tensor import RanksMode, RankTensor, running, spread
from tests.runtime.cut_checks import CASES, TOLERANCE, check_case, check_checkpoint, make
from tests.runtime.cut_models import decoder_cuts, make_decoder


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", [name for name in CASES if name != "words"])
def test_equal_to_the_original(name, count, monkeypatch):
    made = []
    for method in ("all_reduce", "add_gathered", "gather"):
        monkeypatch.setattr(LocalRanks, method, counted(getattr(LocalRanks, method), made))
    check_case(name, LocalRanks.of(["cpu"] * count), lambda: len(made))


def counted(method, made):
    def call(*args):
        made.append(1)
        return method(*args)

    return call


def test_uneven_shares_are_refused():
    model = make("words")
    with pytest.raises(PlanError, match="unevenly"):
        apply_cuts(model, CASES["words"].cuts(2), LocalRanks.of(["cpu", "cpu"]))
    assert model.embed.weight.shape == (25, 8)


def test_checkpoint():
    check_checkpoint(LocalRanks.of(["cpu", "cpu"]))


@pytest.fixture(scope="module")
def decoder():
    return make_decoder()


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"do_sample": True}], ids=str
)
def test_generates_the_same_tokens(decoder, options):
    ids = torch.randint(1, 60, (2, 5), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True, **options}
    torch.manual_seed(3)
    expected = decoder.generate(ids, **options)
    apply_cuts(decoder, decoder_cuts(("model.layers.0", "model.layers.1")), LocalRanks.of(["cpu", "cpu"]))
    try:
        torch.manual_seed(3)
        assert torch.equal(decoder.generate(ids, **options), expected)
    finally:
        remove_cuts(decoder)


def test_beam_search_on_simulated_devices(decoder):
    """Caches are reordered outside of the forward, by ordinary indices on rank 0's device."""
    ids, options = torch.tensor([[3, 1, 4, 1, 5]]), {"max_new_tokens": 4, "num_beams": 3, "do_sample": False}
    expected = decoder.generate(ids, **options)
    with autoshard.simulate("2x1GiB") as devices:
        apply_cuts(decoder, decoder_cuts(("model.layers.0", "model.layers.1")), LocalRanks.of(devices))
        found = decoder.generate(ids, **options)
        remove_cuts(decoder)
    assert torch.equal(found, expected)


def test_copies_that_come_out_changed_go_through_the_host(decoder, monkeypatch):
    ids, to = torch.tensor([[3, 1, 4, 1, 5]]), torch.Tensor.to
    expected = decoder(ids).logits

    def watched(tensor, *args, **kwargs):
        made = to(tensor, *args, **kwargs)
        assert None in (tensor.device.index, made.device.index) or tensor.device == made.device
        return made

    with autoshard.simulate("2x1GiB") as names:
        devices = [torch.device(name) for name in names]
        monkeypatch.setattr("autoshard.runtime.devices._staged", {(one, two) for one in devices for two in devices})
        apply_cuts(decoder, decoder_cuts(("model.layers.0", "model.layers.1")), LocalRanks.of(devices))
        try:
            monkeypatch.setattr(torch.Tensor, "to", watched)
            found = decoder(ids).logits
            found.sum().backward()
        finally:
            monkeypatch.undo()
            remove_cuts(decoder)
    decoder.zero_grad()
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_simulated_tensors_meet_rank_tensors():
    with autoshard.simulate("2x1MiB") as devices:
        devices = [torch.device(name) for name in devices]
        cut = RankTensor([torch.ones(2, device=device) for device in devices], devices)
        ordinary = torch.ones(2, device=devices[0])
        for made in (ordinary + cut, cut + ordinary, ordinary.sum() + cut.sum()):
            assert isinstance(made, RankTensor) and [part.device for part in made.parts] == devices


def test_on_simulated_devices(decoder):
    """Each device holds its part, and outputs come back to where the inputs were."""
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    expected = decoder(ids).logits
    with autoshard.simulate("2x1GiB") as devices:
        apply_cuts(decoder, decoder_cuts(("model.layers.0", "model.layers.1")), LocalRanks.of(devices))
        found = decoder(ids).logits
        weight = decoder.model.layers[0].mlp.up_proj.weight
        assert [str(part.device) for part in weight.parts] == list(devices)
        assert found.device == ids.device
        torch.testing.assert_close(found, expected, **TOLERANCE)
        found.sum().backward()
        remove_cuts(decoder)
    decoder.zero_grad()
    assert torch.equal(decoder(ids).logits, expected)


def test_parts_that_are_not_in_order_are_put_together_where_they_are():
    """Ordinary indices would be on the CPU, and no part is."""
    with autoshard.simulate("2x1MiB") as names:
        devices = tuple(torch.device(name) for name in names)
        ranks = LocalRanks.of(devices)
        axis = Axis.of(ranks, "2x*4", (2, 2))
        whole = torch.arange(8.0, device=devices[0])
        part = axis.take(spread(whole, devices), 0)
        assert [one.tolist() for one in part.parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]
        assert axis.gather(part, 0).agreed().tolist() == whole.tolist()


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
    model, ids = nn.Sequential(Masked(), nn.Linear(8, 8)), torch.tensor([[3, 1, 4, 1, 5]])
    devices, alone = {"cpu:0": "1MiB", "cpu:1": "1MiB"}, (lambda: model[0](ids), lambda: model[0].table(ids))
    expected = [call() for call in alone]
    expected[0].sum().backward()
    gradient = model[0].up.weight.grad.clone()
    model.zero_grad()
    plan = autoshard.plan(model, devices, inputs=ids, strategy="column-parallel", objective="memory")
    assert any(shard.name.endswith("table.weight") for cut in plan.cuts for shard in cut.shards)
    with autoshard.simulate(devices):
        autoshard.apply(model, plan)
        found = [call() for call in alone]
        for one, other in zip(found, expected, strict=True):
            assert one.device == ids.device and not isinstance(one, RankTensor)
            torch.testing.assert_close(one, other, **TOLERANCE)
        found[0].sum().backward()
        with pytest.raises(IndexError):
            model[0](torch.tensor([[100]]))
        assert torch.equal(model(ids), model[1](found[0].detach()))
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
    devices = {"cpu:0": "1MiB", "cpu:1": "1MiB"}
    plan = autoshard.plan(model, devices, inputs=x, strategy="column-parallel", objective="memory")
    assert {shard.name for cut in plan.cuts for shard in cut.shards} == {"up.weight", "gate.weight", "down.weight"}
    with autoshard.simulate(devices):
        autoshard.apply(model, plan)
        assert torch.allclose(model(x).cpu(), expected, atol=1e-6)
        autoshard.remove(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_tied_names_share_one_tensor_in_the_state_dict():
    """As in that of the plain model: what saves it tells ties by their memory."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    model, devices = Tied(), {"cpu:0": "1MiB", "cpu:1": "1MiB"}
    plan = autoshard.plan(model, devices, inputs=torch.arange(8), strategy="column-parallel", objective="memory")
    with autoshard.simulate(devices):
        autoshard.apply(model, plan)
        state = model.state_dict()
        autoshard.remove(model)
    assert plan.cuts and list(state) == ["embed.weight", "head.weight"]
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert torch.equal(state["head.weight"].cpu(), model.head.weight)


def test_views_that_overlap_are_not_cut():
    model = Fused(0)
    model.gate.weight = nn.Parameter(model.up.weight.detach().view(-1).as_strided((24, 8), (8, 1), 64))
    cut = Cut(blocks=("",), size=24, shares=(12, 12), shards=(Shard(name="up.weight", dim=0, axis="*24"),))
    with pytest.raises(PlanError, match="different view of the same memory"):
        apply_cuts(model, (cut,), LocalRanks.of(["cpu", "cpu"]))


def test_recomputed_layers_have_the_same_gradients(decoder):
    """Activation checkpointing runs a layer again in backward, when the forward of the model is over."""
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    decoder.train()
    decoder(ids, labels=ids).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in decoder.named_parameters()}
    decoder.zero_grad()
    decoder.gradient_checkpointing_enable({"use_reentrant": False})
    apply_cuts(decoder, decoder_cuts(("model.layers.0", "model.layers.1")), LocalRanks.of(["cpu", "cpu"]))
    decoder(ids, labels=ids).loss.backward()
    remove_cuts(decoder)
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], **TOLERANCE)
    decoder.gradient_checkpointing_disable()
    decoder.eval().zero_grad()


def ranked(*values):
    cpu = torch.device("cpu")
    return RankTensor([torch.as_tensor(value) for value in values], [cpu, cpu])


def test_values_that_differ_between_ranks_are_not_read():
    different, alike = ranked([1.0, 2.0], [1.0, 3.0]), ranked([1.0, 2.0], [1.0, 2.0])
    assert alike.tolist() == [1, 2] and alike[1].item() == 2 and bool((alike > 0).all())
    for read in (
        lambda: different[1].item(),
        lambda: different.tolist(),
        lambda: bool((different > 2.5).any()),
        lambda: different[different > 2.5],
        lambda: torch.bernoulli(different / 4),
    ):
        with pytest.raises(ApplyError):
            read()


def test_reading_values_calls_no_functions_that_are_counted():
    """A gather at the seventh reshape must not come at the third, because values were compared before it."""

    class Names(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    names = []
    sizes = ranked([2, 3], [2, 3])
    with Names():
        assert sizes.tolist() == [2, 3]
        assert sizes.numpy().tolist() == [2, 3]
    assert not {"detach", "reshape", "equal", "__getitem__"} & set(names), names


@pytest.mark.parametrize("value", [3, 2.5, True, 1j])
def test_tensors_are_made_of_lists_of_numbers_that_all_ranks_have(value):
    """torch.tensor reads such numbers from memory, with dispatch off, and the wrapper has none."""
    item = ranked(value, value)
    for tensor_of in (torch.tensor, torch.as_tensor, torch.asarray, torch.ones((), dtype=item.dtype).new_tensor):
        if value == 1j and tensor_of.__name__ == "new_tensor":
            continue  # ordinary tensors can't do that either
        assert tensor_of([[item], [item]]).tolist() == [[value], [value]]
        with RanksMode([torch.device("cpu")] * 2, torch.device("cpu")):
            made = tensor_of([item, item])
        assert [part.tolist() for part in made.parts] == [[value, value]] * 2
    with pytest.raises(ApplyError, match="different values"):
        torch.tensor([ranked(1, 2)])


def test_a_tensor_is_the_number_that_an_ordinary_one_is():
    assert [0, 1, 2, 3][ranked(2, 2)] == 2 and int(ranked(2.5, 2.5)) == 2 and float(ranked([2], [2])) == 2
    assert math.isnan(ranked(math.nan, math.nan))
    for read, error in (
        (lambda: [1][ranked(0.0, 0.0)], TypeError),
        (lambda: bool(ranked([1, 2], [1, 2])), RuntimeError),
    ):
        with pytest.raises(error):
            read()


def test_writing_into_an_ordinary_tensor_is_refused():
    plain = torch.zeros(2, 2)
    for write in (
        lambda: plain.copy_(ranked([[1.0, 2]], [[3.0, 4]])),
        lambda: plain[0].add_(ranked([1.0, 2], [3.0, 4])),
        lambda: plain.__setitem__(0, ranked([1.0, 2], [3.0, 4])),
        lambda: torch.add(ranked([1.0, 2], [3.0, 4]), 1, out=plain[0]),
        lambda: plain.index_copy_(0, torch.tensor([1]), ranked([[1.0, 2]], [[3.0, 4]])),
    ):
        with pytest.raises(ApplyError, match="made outside"):
            write()
    assert not plain.any()


def test_ordinary_tensors_are_copied_for_each_rank():
    """A view of what was an ordinary tensor must not be one tensor for both ranks."""
    with torch.inference_mode():
        plain = torch.zeros(1, 2)
        both = plain.expand_as(ranked([[1.0, 2]], [[3.0, 4]]))
        both += ranked([[1.0, 2]], [[3.0, 4]])
        assert [part.tolist() for part in both.parts] == [[[1, 2]], [[3, 4]]]
    mixed = torch.stack([torch.ones(2), ranked([1.0, 2], [3.0, 4])])
    assert mixed.parts[1].tolist() == [[1, 1], [3, 4]]


class Remembers(nn.Sequential):
    """Keeps what it made in its first forward as an attribute that is no buffer."""

    def forward(self, x):
        if not hasattr(self, "table"):
            self.table = self[0].weight.detach().sum(0) + 1.0
        return super().forward(x * self.table)


def test_tensors_that_modules_keep_as_attributes_are_brought_to_every_device():
    model, x = Remembers(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)), torch.randn(2, 8)
    devices = {"cpu:0": "1MiB", "cpu:1": "1MiB"}
    plan = autoshard.plan(model, devices, inputs=x, strategy="column-parallel", objective="memory")
    assert plan.cuts
    expected = model(x)
    with autoshard.simulate(devices):
        autoshard.apply(model, plan)
        torch.testing.assert_close(model(x), expected)
        autoshard.remove(model)
    assert torch.equal(model(x), expected)


def test_random_numbers_are_drawn_once():
    with RanksMode([torch.device("cpu")] * 2, torch.device("cpu")):
        torch.manual_seed(0)
        made = torch.randn(3), torch.empty(3).uniform_(), torch.nn.functional.dropout(torch.ones(64))
        after = torch.rand(1)
    torch.manual_seed(0)
    expected = torch.randn(3), torch.empty(3).uniform_(), torch.nn.functional.dropout(torch.ones(64))
    for found, wanted in zip((*made, after), (*expected, torch.rand(1)), strict=True):
        assert all(torch.equal(part, wanted) for part in found.parts)


class Dropping(nn.Sequential):
    """Blocks that drop as a module, as a function, or in attention."""

    def __init__(self, kind):
        super().__init__(Layer(kind), Layer(kind))


class Layer(nn.Module):
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
    model, x = Dropping(kind).eval(), torch.ones(2, 3, 8)
    memory = {"cpu:0": "1GiB", "cpu:1": "1GiB"}
    expected = model(x)
    plan = autoshard.plan(model, memory, inputs=x, strategy="column-parallel", objective="memory")
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
    plan = autoshard.plan(model, memory, inputs=x, strategy="column-parallel", objective="memory")
    assert all(cut.training for cut in plan.cuts)
    if kind in ("module", "function"):
        assert "dropout" in {action.kind for cut in plan.cuts for action in cut.actions}
    autoshard.apply(model, plan)
    torch.manual_seed(3)
    torch.testing.assert_close(model(x), expected, **TOLERANCE)


def test_a_bias_is_added_once_behind_the_sum():
    """The layer's own forward does not see it, and everybody who lists, saves or trains parameters does."""
    model, case = make("perceptron"), CASES["perceptron"]
    expected, names = model(*case.inputs), list(dict(model.named_parameters()))
    layer = model.blocks[0]["down"]
    bias = layer.bias
    apply_cuts(model, case.cuts(2), LocalRanks.of(["cpu", "cpu"]))
    assert layer.bias is None and list(dict(model.named_parameters())) == list(model.state_dict()) == names
    torch.testing.assert_close(copy.deepcopy(model)(*case.inputs), expected, **TOLERANCE)
    with torch.no_grad():
        layer._parameters["bias"].add_(1)
    assert not torch.allclose(model(*case.inputs), expected)
    layer.bias = nn.Parameter(torch.zeros(8))
    with pytest.raises(ApplyError, match=r"blocks\.0\.down was given another bias while its model is cut"):
        model(*case.inputs)
    remove_cuts(model)
    model.blocks[0]["down"].bias = bias
    assert bias is not None and layer.bias is bias


def test_sums_have_the_dtype_of_their_layer():
    model, case = make("perceptron").eval(), CASES["perceptron"]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(*case.inputs)
    apply_cuts(model, case.cuts(2), LocalRanks.of(["cpu", "cpu"]))
    made = []
    model.blocks[0]["down"].register_forward_hook(lambda layer, args, result: made.append(result.dtype))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(model(*case.inputs), expected, rtol=2e-2, atol=2e-2)
    assert made == [torch.bfloat16]


def test_an_interrupt_leaves_nothing_behind_after_the_next_forward():
    model, case = make("fused"), CASES["fused"]
    apply_cuts(model, case.cuts(2), LocalRanks.of(["cpu", "cpu"]))
    expected = model(*case.inputs)
    handle = model.back.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(*case.inputs)
    handle.remove()
    assert torch.equal(model(*case.inputs), expected)
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0


def interrupt(*args):
    raise KeyboardInterrupt


def test_private_torch_still_says_what_cuts_need():
    weight = torch.nn.Parameter(torch.ones(2))
    assert not torch_private.is_held(weight)
    held = weight * 2
    assert torch_private.is_held(weight)
    del held
    weight.register_hook(interrupt)
    assert torch_private.gradient_hooks(weight) == [interrupt]
    torch_private.drop_gradient_hooks(weight, type(interrupt))
    weight.sum().backward()
    assert running() is None
    mode = RanksMode([torch.device("cpu")], torch.device("cpu"))
    with mode:
        assert running() is mode
    assert running() is None


def test_a_graph_from_before_the_cut_does_not_fill_gradients():
    model, case = make("perceptron"), CASES["perceptron"]
    loss = model(*case.inputs).sum()
    apply_cuts(model, case.cuts(2), LocalRanks.of(["cpu", "cpu"]))
    with pytest.raises(RuntimeError, match="Run the forward again"):
        loss.backward()
    model(*case.inputs).sum().backward()


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
    plan = autoshard.plan(model, "2x1GiB", inputs=x, strategy="column-parallel", objective="memory")
    for block in model:
        block.seen.detach_()
    apply_cuts(model, plan.cuts, LocalRanks.of(("cpu", "cpu")))
    model(x)
    with pytest.raises(ApplyError, match=r"0.seen was written by a forward .* detach_\(\)"):
        autoshard.remove(model)
    torch.testing.assert_close(model(x), expected)
    for block in model:
        block.seen.detach_()
    autoshard.remove(model)
    torch.testing.assert_close(model(x), expected)
