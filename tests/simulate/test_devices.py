"""Simulated devices behave like GPUs: names, moves, mismatches, exceptions to the rule, errors."""

import copy
import pickle

import pytest
import torch
from torch import nn

from autoshard import nested
from autoshard.cluster.parse import parse_devices
from autoshard.errors import SpecError
from autoshard.simulate import SimulatedTensor, active_devices, simulate

ONE, TWO = torch.device("cpu:0"), torch.device("cpu:1")


@pytest.fixture
def devices():
    with simulate("1x1MiB,1x2MiB") as devices:
        yield devices


def test_names_and_sizes():
    with simulate("2x24GiB,1x12GiB") as devices:
        assert devices == ["cpu:0", "cpu:1", "cpu:2"]
        assert active_devices() is devices
        assert [device.memory_bytes for device in devices.cluster.devices] == [24 << 30, 24 << 30, 12 << 30]
        assert parse_devices("auto").names == ("cpu:0", "cpu:1", "cpu:2")
    for spec in ("0x1GiB", "nonsense", "200x1GiB"):
        with pytest.raises(SpecError), simulate(spec):
            pass
    assert active_devices() is None


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.zeros(2, device=device),
        lambda device: torch.empty(2, device=device).fill_(0),
        lambda device: torch.arange(2, device=device),
        lambda device: torch.tensor([0, 1], device=device),
        lambda device: torch.tensor([torch.tensor(1, device=device), 2], device=device),
        lambda device: torch.as_tensor([0.0, 1.0], device=device),
        lambda device: torch.asarray([0.0, 1.0], device=device),
        lambda device: torch.as_tensor(torch.zeros(2), device=device),
        lambda device: torch.ones(2).to(device),
        lambda device: torch.ones(2).new_zeros(2, device=device),
        lambda device: torch.zeros(2, device=device).new_tensor([1.0, 2.0]),
        lambda device: torch.zeros(2, device=device).new(3),
        lambda device: torch.rand_like(torch.zeros(2), device=device),
        lambda device: torch.randperm(3, device=device),
        lambda device: torch.zeros(2).to(torch.zeros(1, device=device)),
        lambda device: torch.zeros(2, device=ONE).to(device),
    ],
)
def test_every_way_to_make_a_tensor_keeps_the_index(devices, make):
    for device in ("cpu:1", TWO):
        made = make(device)
        assert made.device == TWO and isinstance(made, SimulatedTensor)


@pytest.mark.parametrize("inference", [False, True])
def test_ways_to_ordinary_memory(devices, inference):
    with torch.inference_mode(inference):
        x = torch.arange(3.0, device=TWO)
        for ordinary in (x.cpu(), x.to("cpu"), torch.zeros(3).copy_(x), torch.empty_like(x, device="cpu").copy_(x)):
            assert type(ordinary) is torch.Tensor
            assert ordinary.device == torch.device("cpu") and ordinary.tolist() == [0, 1, 2]
        assert x.cpu().data_ptr() != x.data_ptr()
        assert x.tolist() == [0, 1, 2] and x.sum().item() == 3 and bool(x[1] > 0) and x.numpy().tolist() == [0, 1, 2]
        assert f"{x[1]:.1f}" == "1.0" and repr(x) == "tensor([0., 1., 2.], device='cpu:1')"


def test_mixing_devices_raises(devices):
    x, y, ordinary = torch.ones(2, device=ONE), torch.ones(2, device=TWO), torch.ones(2)
    with pytest.raises(RuntimeError, match=r"same device.*cpu:0 and cpu:1! \(in aten::add"):
        x + y
    with pytest.raises(RuntimeError, match=r"same device.*cpu:1 and cpu!"):
        torch.cat([y, ordinary])
    for mix in (
        lambda: ordinary.add_(x),
        lambda: torch.tensor(1.0).add_(torch.tensor(1.0, device=ONE)),
        lambda: x * torch.tensor(2.0, device=TWO),
        lambda: nn.functional.linear(x, torch.ones(2, 2, device=TWO)),
    ):
        for inference in (False, True):
            with torch.inference_mode(inference), pytest.raises(RuntimeError, match="same device"):
                mix()
    with pytest.raises(RuntimeError, match=r"invalid device ordinal: cpu:2"):
        torch.zeros(1, device="cpu:2")


def test_what_may_mix_on_gpus_may_mix_here(devices):
    x = torch.arange(6.0, device=TWO).view(2, 3)
    assert (x * torch.tensor(2.0)).device == TWO
    assert x[torch.tensor([1])].device == TWO and x[torch.tensor([True, False])].shape == (1, 3)
    x[torch.tensor([0])] = torch.tensor(5.0)
    assert x[0].tolist() == [5, 5, 5]
    with pytest.raises(RuntimeError, match="same device"):
        x[torch.tensor([1], device=ONE)]
    with pytest.raises(RuntimeError, match="same device"):
        x.index_select(0, torch.tensor([1]))
    x.copy_(torch.zeros(2, 3))
    x.copy_(torch.ones(2, 3, device=ONE))
    assert x.sum() == 6


def test_lists_of_tensors_may_span_devices_row_by_row(devices):
    ours = [torch.ones(2, device=ONE), torch.ones(3, device=TWO)]
    torch._foreach_add_(ours, 1)
    doubled = torch._foreach_mul(ours, ours)
    assert [t.device for t in doubled] == [ONE, TWO] and doubled[1].tolist() == [4, 4, 4]
    assert [t._version for t in ours] == [1, 1]  # by which copies of them are known to be out of date
    with pytest.raises(RuntimeError, match="same device"):
        torch._foreach_add(ours, ours[::-1])


def test_lists_of_tensors_are_indices(devices):
    """Torch reads the numbers in a list within an index from memory."""
    plain, at = torch.arange(12.0).reshape(3, 4), torch.tensor([[0, 2], [1, 3]])
    there, (rows, columns) = plain.to(devices[1]), at.to(devices[1])
    found = there[tuple(rows), list(columns)]
    assert found.device == torch.device(devices[1]) and torch.equal(found.cpu(), plain[at[0], at[1]])
    there[list(rows), tuple(columns)] = 0.0
    plain[at[0], at[1]] = 0.0
    assert torch.equal(there.cpu(), plain)


def test_views_share_memory_and_versions(devices):
    x = torch.zeros(2, 3, device=TWO)
    view, transposed, strided = x.view(-1)[1:4], x.t(), x.as_strided((2,), (1,), 4)
    view.fill_(1)
    transposed[0] += 2
    strided.copy_(torch.tensor([7.0, 8.0]))
    assert x.tolist() == [[2, 1, 1], [3, 7, 8]]
    assert x._version == view._version == 4 and view._base is x
    assert x[0, 0] == 2 and view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    detached = x.detach()
    detached.zero_()
    assert x.sum() == 0 and x.data.add_(1).sum() == 6 == x.sum()


def test_reshaping_in_place(devices):
    x = torch.arange(6.0, device=TWO).view(2, 3)
    alias = x.detach()
    assert x.t_() is x and x.shape == (3, 2) and alias.shape == (2, 3)
    x.unsqueeze_(0).squeeze_(0)
    assert x.tolist() == [[0, 3], [1, 4], [2, 5]]
    out = torch.empty(0, device=TWO)
    assert torch.add(x, 1, out=out) is out and out.shape == (3, 2)
    y = torch.zeros(1, device=TWO)
    y.data = x
    y.t_()
    assert y.shape == (2, 3) and x.shape == (3, 2) and y.tolist() == [[0, 1, 2], [3, 4, 5]]
    y.resize_(4)
    assert y.shape == (4,) and y.untyped_storage().nbytes() == 24
    y.set_(torch.ones(5, device=TWO))
    assert y.tolist() == [1] * 5


def test_module_to_leaves_a_graph_good_where_nothing_changes(devices):
    """As on GPUs: some models call `.to` in every forward, and checkpointing runs forwards while a graph is there."""
    model = nn.Sequential(nn.Linear(2, 2, device="cpu:0"), nn.Linear(2, 2, device="cpu:0"))
    output = model(torch.ones(1, 2, device="cpu:0"))
    model.to(torch.float32).to("cpu:0")
    output.sum().backward()
    assert all(p.grad.device == ONE for p in model.parameters())
    model.to(TWO)
    assert all(p.device == p.grad.device == TWO for p in model.parameters())


def test_module_to_keeps_objects_and_ties(devices):
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    weight, before = model[0].weight, copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.to("cpu:1")
    assert model[0].weight is weight is model[1].weight
    assert isinstance(weight, nn.Parameter) and weight.device == TWO and model[2].running_mean.device == TWO
    model(torch.tensor([0, 3], device=TWO)).sum().backward()
    assert weight.grad.device == TWO
    optimizer.step()
    model.load_state_dict(before)
    model.to("cpu")
    assert model[0].weight is weight is model[1].weight
    assert type(weight) is nn.Parameter and type(weight.grad) is torch.Tensor
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_module_to_converts_what_is_referred_to_weakly_or_held(devices):
    """Recurrent layers refer weakly to their weights; the old weight norm keeps a product of its own from the start."""
    lstm = nn.LSTM(2, 2).to(TWO)
    x = torch.ones(1, 1, 2, device=TWO)
    assert lstm(x)[0].device == TWO and lstm.double()(x.double())[0].dtype == torch.float64
    for module, name in ((nn.Linear(2, 2), "weight"), (nn.LSTM(2, 2), "weight_hh_l0")):
        twin = copy.deepcopy(module)
        model = nn.utils.weight_norm(module, name).to(TWO).double()
        found, expected = model(x.double()), twin.double()(torch.ones(1, 1, 2, dtype=torch.float64))
        pairs = zip(nested.flat_tensors(found), nested.flat_tensors(expected), strict=True)
        assert all(one.device == TWO and torch.allclose(one.cpu(), other) for one, other in pairs)
        found[0].sum().backward()
        assert getattr(model, f"{name}_g").grad.device == TWO


def test_module_to_keeps_hooks_on_gradients(devices):
    model, called = nn.Linear(2, 2), []
    model.weight.register_hook(lambda grad: called.append(grad.dtype))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: called.append(parameter.device))
    model.to(TWO).double()(torch.ones(1, 2, device=TWO).double()).sum().backward()
    assert called == [torch.float64, TWO]


def test_data_may_change_the_kind_of_a_parameter(devices):
    parameter = nn.Parameter(torch.ones(2))
    parameter.note = "kept"
    parameter.data = parameter.data.to(TWO)
    assert parameter.device == TWO and isinstance(parameter, nn.Parameter) and parameter.note == "kept"
    (parameter * 3).sum().backward()
    parameter.data = torch.zeros(2)
    assert type(parameter) is nn.Parameter and parameter.grad.tolist() == [3, 3] and parameter.grad.device.index is None
    loss = (parameter * parameter).sum()
    parameter.data = torch.zeros(2, device=TWO)
    with pytest.raises(RuntimeError, match="backward through a graph that was made before"):
        loss.backward()
    packed = nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)  # a quantised weight
    packed.data = packed.data.to(ONE)
    assert packed.device == ONE and packed.dtype == torch.uint8 and not packed.requires_grad


def test_deepcopy_and_pickle(devices):
    model = nn.Linear(2, 2).to("cpu:1")
    model.tied = model.weight
    model(torch.ones(2, device=TWO)).sum().backward()
    twin = copy.deepcopy(model)
    assert twin.tied is twin.weight and twin.weight.device == TWO and twin.weight.requires_grad
    assert torch.equal(twin.weight.grad, model.weight.grad) and twin.weight.data_ptr() != model.weight.data_ptr()
    restored = pickle.loads(pickle.dumps(model.weight.detach()))
    assert type(restored) is torch.Tensor and torch.equal(restored, model.weight.detach().cpu())


def test_tensors_leave_the_context():
    with simulate("2x1MiB"):
        model = nn.Linear(2, 2).to("cpu:1")
        x, other = torch.ones(3, 2, device="cpu:1"), torch.ones(3, 2, device="cpu:0")
    model(x).sum().backward()
    assert model.weight.grad.device == TWO and x.to("cpu:0").device == ONE
    with pytest.raises(RuntimeError, match="same device"):
        x + other
    assert type(model.cpu().weight) is nn.Parameter


def test_nothing_of_torch_stays_replaced():
    before = torch.tensor, torch.as_tensor, torch.asarray
    with pytest.raises(KeyError), simulate("1MiB"):
        assert torch.tensor is not before[0]
        raise KeyError
    assert (torch.tensor, torch.as_tensor, torch.asarray) == before
    assert "data" not in vars(torch.Tensor)
    assert torch.zeros(1, device="cpu:0").device == torch.device("cpu")


@pytest.mark.parametrize("default", ["meta", "cpu", "cpu:1"])
def test_tensors_are_made_on_the_default_device(default):
    with simulate("2x1MiB"):
        with torch.device(default):
            made = torch.tensor([1.0]), torch.empty(1), nn.Linear(2, 2).weight
        assert all(one.device == torch.device(default) for one in made)
        assert torch.tensor([1.0]).device == torch.device("cpu")
