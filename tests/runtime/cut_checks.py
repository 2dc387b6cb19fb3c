"""What must hold of a cut model, on any kind of ranks. Run in one process, or on each of several."""

import copy
import pickle

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import autoshard
from autoshard.errors import ApplyError
from autoshard.nested import tensors_in
from autoshard.plan.sharding import even_shares
from autoshard.runtime.cuts import apply_cuts, cut_record, remove_cuts
from autoshard.runtime.slices import merge
from tests.hooks import is_hooked
from tests.runtime.cut_models import CASES

# float32, and sums over ranks are in another order than sums over the whole dimension
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}


def make(name):
    torch.manual_seed(0)
    return CASES[name].make()


def given(case):
    return tuple(x.clone().requires_grad_() if x.is_floating_point() else x for x in case.inputs)


def loss_of(result):
    tensors = [tensor for _, tensor in tensors_in(result)]
    return sum((tensor * torch.linspace(-1, 1, tensor.numel()).view_as(tensor)).sum() for tensor in tensors)


def check_case(name, ranks, count=None, divide=even_shares):
    """Outputs, gradients and three AdamW steps equal to the original's; bit-equal again when removed."""
    case = CASES[name]
    model, original = make(name), make(name)
    before = copy.deepcopy(original.state_dict())
    parameters = dict(model.named_parameters())
    apply_cuts(model, case.cuts(ranks.size, divide), ranks)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert list(model.state_dict()) == list(before)
    assert_same_state(model.state_dict(), before)
    with pytest.raises(ApplyError, match=r"can't be pickled. Call autoshard\.save"):
        pickle.dumps(model)
    others = {name: value + 1 for name, value in before.items()}
    model.load_state_dict(others)
    assert_same_state(model.state_dict(), others)
    for path, part in model.named_children():
        own = {name.removeprefix(f"{path}."): one for name, one in before.items() if name.startswith(f"{path}.")}
        part.load_state_dict(own)
        assert_same_state(part.state_dict(), own)
    model.load_state_dict(before)
    check_outputs(model, original, case, count)
    check_training(model, original, case, count)
    check_penalty(model, original, case)
    state = model.state_dict()
    remove_cuts(model)
    assert cut_record(model) is None
    assert_same_state(model.state_dict(), state)
    for n, parameter in model.named_parameters():
        assert parameter is parameters[n]
        torch.testing.assert_close(parameter, original.get_parameter(n), **TOLERANCE, msg=lambda m, n=n: f"{n}: {m}")
    assert not is_hooked(model)
    model.load_state_dict(before)
    original.load_state_dict(before)
    torch.manual_seed(5)
    expected = original.eval()(*case.inputs)
    torch.manual_seed(5)
    assert_equal(model.eval()(*case.inputs), expected, rtol=0, atol=0)


def check_outputs(model, original, case, count):
    model.eval(), original.eval()
    with torch.no_grad():
        before = count() if count else 0
        found = model(*case.inputs)
        assert count is None or count() - before == case.forward
        assert_equal(found, original(*case.inputs), **TOLERANCE)
    with torch.inference_mode():
        assert_equal(model(*case.inputs), original(*case.inputs), **TOLERANCE)
    model.train(), original.train()


def check_training(model, original, case, count):
    # eps: without it, a step divides gradients that are but rounding by themselves
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, eps=1e-3) for one in (model, original)]
    record = cut_record(model)
    for _ in range(3):
        inputs = [given(case), given(case)]
        before = count() if count else 0
        for one, optimizer, own in zip((model, original), optimizers, inputs, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(2)
            result = one(*own)
            assert all(type(tensor) is torch.Tensor for _, tensor in tensors_in(result))
            loss_of(result).backward()
            if one is model:
                assert count is None or count() - before == case.both
        for found, expected in zip(*inputs, strict=True):
            if expected.grad is not None:
                torch.testing.assert_close(found.grad, expected.grad, **TOLERANCE)
        for n, parameter in model.named_parameters():
            whole = merge(parameter.grad, record.tensors.get(n), record.ranks)
            torch.testing.assert_close(
                whole, original.get_parameter(n).grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=n: n + m
            )
        norms = [autoshard.clip_grad_norm_(one.parameters(), 0.5) for one in (model, original)]
        torch.testing.assert_close(torch.tensor(norms[0].item()), norms[1])
        maxima = [autoshard.clip_grad_norm_(one.parameters(), 1e9, torch.inf) for one in (model, original)]
        torch.testing.assert_close(torch.tensor(maxima[0].item()), maxima[1])
        for optimizer in optimizers:
            optimizer.step()


def check_penalty(model, original, case):
    """Gradients of gradients, as a penalty on the gradients of inputs takes them."""
    record, found = cut_record(model), []
    for one in (model, original):
        one.zero_grad()
        torch.manual_seed(2)
        inputs = given(case)
        wanted = [x for x in inputs if x.requires_grad]
        if wanted:
            with sdpa_kernel(SDPBackend.MATH):  # others have no gradients of gradients
                loss = loss_of(one(*inputs))
            first = torch.autograd.grad(loss, wanted, create_graph=True)
            sum(gradient.square().mean() for gradient in first).backward()
        found.append({name: parameter.grad for name, parameter in one.named_parameters()})
    for name, expected in found[1].items():
        whole = None if expected is None else merge(found[0][name], record.tensors.get(name), record.ranks)
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)


def assert_same_state(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert type(found[name]) is torch.Tensor
        assert torch.equal(found[name], tensor), name


def assert_equal(found, expected, **tolerance):
    found, expected = dict(tensors_in(found)), dict(tensors_in(expected))
    assert found.keys() == expected.keys()
    for path, tensor in expected.items():
        torch.testing.assert_close(found[path], tensor, **tolerance, msg=lambda m, path=path: f"{path}: {m}")
