"""The private torch functions that simulated tensors stand on: these fail when torch moves them."""

import torch

from autoshard import torch_private

aten = torch.ops.aten


def test_composite_ops_are_told_from_kernels():
    assert torch_private.is_composite(aten.linear.default) and torch_private.is_composite(aten.matmul.default)
    assert not torch_private.is_composite(aten.addmm.default)
    assert not torch_private.is_composite(aten.silu_backward.default)  # has both: the CPU takes its kernel


def test_composite_ops_run_as_on_the_cpu():
    x, weight, bias = torch.randn(4, 3, 6).transpose(0, 1), torch.randn(5, 6, requires_grad=True), torch.randn(5)
    with torch.inference_mode():
        expected = torch.nn.functional.linear(x, weight, bias)
        assert torch.equal(torch_private.run_composite(aten.linear.default, (x, weight, bias), {}), expected)


def test_lazily_conjugated_and_negated_tensors_are_marked():
    x = torch.randn(3, dtype=torch.complex64)
    assert torch_private.conj_and_neg_keys(x.conj()).has(torch._C.DispatchKey.Conjugate)
    assert torch_private.conj_and_neg_keys(x.conj().imag).has(torch._C.DispatchKey.Negative)
    assert not torch_private.conj_and_neg_keys(x).has(torch._C.DispatchKey.Conjugate)
