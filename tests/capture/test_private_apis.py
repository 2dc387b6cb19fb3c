"""The private torch APIs that capture needs still behave: what fails here says which one moved."""

import torch

from autoshard import torch_private
from autoshard.torch_private import DispatchMode, FakeTensor, FakeTensorMode
from tests.packed_models import Scaled


def test_fake_tensors_claim_the_cpu_and_share_meta_memory():
    meta = torch.empty(6, device="meta")
    left, right = (torch_private.fake_from_meta(FakeTensorMode(), meta[i:]) for i in (0, 2))
    assert type(left) is FakeTensor and left.device == torch.device("cpu") and not left.is_meta
    assert left.untyped_storage()._cdata == right.untyped_storage()._cdata
    assert left.untyped_storage().nbytes() == 24


def test_reading_the_device_of_a_fake_tensor_can_be_watched():
    fake = torch_private.fake_from_meta(FakeTensorMode(), torch.empty(2, device="meta"))
    given = torch.device("cpu")
    with torch_private.fake_device_read(lambda tensor: given if tensor is fake else None):
        assert fake.device is given
    assert fake.device is not given


def test_a_fake_mode_runs_ops_when_asked_without_being_entered():
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = torch_private.fake_from_meta(mode, torch.empty(2, 3, device="meta"))
    out = mode.dispatch(torch.ops.aten.mm.default, (), (fake, fake.new_empty(3, 4)), {})
    assert type(out) is FakeTensor and out.shape == (2, 4)


def test_flop_formulas_and_overrides():
    formula = torch_private.flop_formulas()[torch.ops.aten.mm]
    assert formula(torch.ones(2, 3), torch.ones(3, 4), out_val=torch.ones(2, 4)) == 2 * 2 * 3 * 4

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Watch():
        assert torch.overrides.has_torch_function((torch.ones(1),))
        with torch_private.no_overrides():
            assert not torch.overrides.has_torch_function((torch.ones(1),))


def test_ops_reach_modes_whole_below_autograd():
    seen = []

    class Mode(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, weight = torch.ones(2, 3), torch.ones(4, 3, requires_grad=True)
    with torch_private.below_autograd(), Mode():
        assert not torch.nn.functional.linear(x, weight).requires_grad
    assert seen == [torch.ops.aten.linear.default]
    assert torch.nn.functional.linear(x, weight).requires_grad


def test_a_mode_that_declines_an_op_sees_what_the_wrapper_makes_of_it():
    seen = []

    class Mode(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(map(torch_private.is_wrapper_type, types)):
                return NotImplemented
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        made = Scaled.pack(torch.ones(2, 2)).detach()
    assert type(made) is Scaled and torch.ops.aten.detach.default in seen
    assert not torch_private.is_wrapper_type(torch.Tensor) and not torch_private.is_wrapper_type(FakeTensor)
