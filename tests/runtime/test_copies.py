"""The memo of copies, the layout of copies, and what the hooks make of arguments."""

import weakref
from collections import OrderedDict, namedtuple
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autoshard
from autoshard.plan import Plan
from autoshard.runtime.copies import Copies
from autoshard.runtime.devices import copy_strides, copy_tensor
from autoshard.runtime.dispatch import apply_device_map, apply_plan, remove
from tests.hooks import is_hooked

D = 8
ONE = "cpu:1"


@pytest.fixture
def devices():
    with autoshard.simulate("3x1MiB") as found:
        yield found


def memo() -> Copies:
    copies = Copies()
    copies.begin()
    return copies


def test_copied_once_and_gone_with_its_source(devices):
    copies, one = memo(), torch.device(ONE)
    mask = torch.ones(64, device="cpu:0")
    first = copies.get(mask, one)
    assert copies.get(mask, one) is first and first.device == one
    assert devices.memory(ONE)[0] == mask.nbytes
    gone = weakref.ref(first)
    del first, mask
    assert gone() is None and devices.memory(ONE)[0] == 0


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.add_(1),
        lambda t: t[0].zero_(),
        lambda t: t.view(-1).detach().mul_(2),
        lambda t: setattr(t, "data", torch.zeros(8, 8, device="cpu:0")),
    ],
    ids=["counted", "part", "detached", "exchanged memory"],
)
def test_written_sources_are_copied_again(devices, write):
    copies, one = memo(), torch.device(ONE)
    for tensor in (torch.ones(8, 8, device="cpu:0"), nn.Parameter(torch.ones(8, 8, device="cpu:0"))):
        with torch.no_grad():
            before = copies.get(tensor, one)
            write(tensor)
            after = copies.get(tensor, one)
        assert after is not before and torch.equal(after.cpu(), tensor.cpu())


def test_weights_last_and_inputs_do_not(devices):
    """An input may be written through numpy between two forwards, which torch does not count."""
    copies, one = memo(), torch.device(ONE)
    weight = nn.Parameter(torch.ones(4, device="cpu:0"))
    array = torch.ones(4).numpy()
    source = torch.from_numpy(array)
    with torch.no_grad():
        alive_after, passing = copies.get(weight, one), copies.get(source, one)
        copies.end()
        array[:] = 5
        copies.begin()
        assert copies.get(weight, one) is alive_after
        assert copies.get(source, one) is not passing and copies.get(source, one).cpu().tolist() == [5] * 4
    copies.end()
    copies.begin()  # with gradients: the weight is going to be trained
    with torch.no_grad():
        assert copies.get(weight, one) is not alive_after


def test_copies_with_history_end_with_the_forward(devices):
    copies, one = memo(), torch.device(ONE)
    weight = nn.Parameter(torch.ones(4, device="cpu:0"))
    copy = copies.get(weight, one)
    assert copy is copies.get(weight, one) and copy.grad_fn is not None
    copies.end()
    gone = weakref.ref(copy)
    del copy
    assert gone() is None
    with torch.no_grad():  # torch's matmul folds by what requires a gradient, also without gradients
        assert copies.get(weight, one).grad_fn is None and copies.get(weight, one).requires_grad
        assert not copies.get(torch.ones(4), one).requires_grad


def test_nothing_made_in_inference_mode_is_trusted(devices):
    copies, one = memo(), torch.device(ONE)
    with torch.inference_mode():
        source = torch.ones(4, device="cpu:0")
        first = copies.get(source, one)
        source.add_(1)
        assert copies.get(source, one).cpu().tolist() == [2] * 4
        weight = nn.Parameter(torch.ones(4))
    assert not first.is_inference() and not copies.get(weight, one).is_inference()


def test_expanded_tensors_are_copied_once_per_element(devices):
    source = torch.arange(6.0, device="cpu:0").reshape(2, 1, 3).expand(2, 1000, 3)
    copy = copy_tensor(source, torch.device(ONE))
    assert copy.stride(1) == 0 and torch.equal(copy.cpu(), source.cpu())
    assert devices.memory(ONE)[0] == 24
    leaf = torch.randn(2, 1, 3, requires_grad=True)
    copy_tensor(leaf.expand(2, 5, 3), torch.device(ONE)).sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 1, 3), 5.0))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_copies_of_slices_are_contiguous_where_the_slice_is(shape, data):
    """Same values; two dimensions can be merged in the copy if and only if they can in the slice."""
    whole = torch.randn(*(size + data.draw(st.integers(0, 3)) for size in shape))
    source = whole[tuple(slice(0, size) for size in shape)]
    source = source.permute(data.draw(st.permutations(range(len(shape)))))
    with autoshard.simulate("2x1MiB") as devices:
        copy = copy_tensor(source, torch.device(ONE))
        assert torch.equal(copy.cpu(), source)
        assert copy.is_contiguous() == source.is_contiguous() or copy_strides(source) is None
        if copy_strides(source) is not None:
            for a in range(source.dim()):
                for b in range(source.dim()):
                    if a != b and source.shape[a] > 1 and source.shape[b] > 1:
                        assert (copy.stride(a) == copy.stride(b) * copy.shape[b]) == (
                            source.stride(a) == source.stride(b) * source.shape[b]
                        )
                        assert (source.stride(a) - copy.stride(a)) % 16 == 0
        assert devices.memory(ONE)[0] <= whole.untyped_storage().nbytes()


def test_copies_of_slices_of_one_channel_stay_channels_first(devices):
    """The stride of a dimension of one element tells torch which convolution to take, and its gradients' layout."""
    source = torch.randn(2, 8, 32, device="cpu:0")[:, None, :, :8]
    weight = torch.randn(6, 1, 3, 3, device="cpu:0", requires_grad=True)
    expected = torch.nn.functional.conv2d(source, weight)
    copy = copy_tensor(source, torch.device(ONE))
    assert copy_strides(source) == (128, 128, 16, 1)
    assert torch.equal(torch.nn.functional.conv2d(copy, weight.to(ONE)).cpu(), expected.cpu())


class Sees(nn.Module):
    """Keeps what it was called with."""

    def __init__(self):
        super().__init__()
        self.lin, self.seen = nn.Linear(D, D), None

    def forward(self, *args, **kwargs):
        self.seen = args, kwargs
        return self.lin(args[0])


def test_arguments(devices):
    """Tensors in tuples are moved, containers and objects pass by identity, what is there stays what it is."""
    Pair = namedtuple("Pair", "left right")
    model, x, here = Sees(), torch.ones(2, D), torch.ones(2, D, device=ONE)
    apply_device_map(model, {"": ONE})
    thing, box, table = object(), [x], OrderedDict(a=x)
    model(
        x, here, (x, (here, 3)), Pair(x, None), x, box, number=2.5, table=table, thing=thing, scalar=torch.tensor(2.0)
    )
    args, kwargs = model.seen
    assert args[0].device == torch.device(ONE) and args[0] is args[4] is args[2][0] is args[3].left
    assert args[1] is here and args[2][1][0] is here and type(args[3]) is Pair
    assert args[5] is box and box[0] is x and kwargs["table"] is table and table["a"] is x
    assert kwargs["thing"] is thing and kwargs["number"] == 2.5 and kwargs["scalar"].device == torch.device(ONE)
    model.seen = None
    assert model(x).device == torch.device("cpu") and model(here).device == torch.device(ONE)


class Glue(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.depth = nn.Linear(D, D), nn.Linear(D, D), []

    def forward(self, x):
        self.depth.append(torch._C._len_torch_function_stack())
        return self.a(x) + self.b(x)


def test_planned_models_are_watched_only_where_the_plan_says(devices):
    """No aligned modules: no watcher, and a raw mix of devices in glue is torch's own error."""
    model, x = Glue(), torch.ones(2, D)
    expected = model(x)
    plan = Plan.from_device_map({"a": "cpu:0", "b": "cpu:1"})
    apply_plan(model, plan)
    with pytest.raises(RuntimeError, match="same device"):
        model(x)
    apply_plan(model, replace(plan, mixed_device=("",)))
    assert torch.equal(model(x), expected)
    assert model.depth == [0, 0, 1] and torch._C._len_torch_function_stack() == 0


class Joins(Glue):
    class Join(nn.Linear):
        def forward(self, parts):
            return super().forward(torch.cat(parts, -1))

    def __init__(self):
        super().__init__()
        self.join = self.Join(2 * D, D)

    def forward(self, x):
        return self.join([self.a(x), self.b(x)])


def test_lists_of_foreign_tensors_start_a_watch(devices):
    model, x = Joins(), torch.ones(2, D)
    expected = model(x)
    apply_plan(model, Plan.from_device_map({"a": "cpu:0", "b": "cpu:1", "join": "cpu:2"}))
    for _ in range(2):
        assert torch.equal(model(x), expected)
        assert torch._C._len_torch_function_stack() == 0
    assert not is_hooked(remove(model))
