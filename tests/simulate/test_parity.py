"""A model on one simulated device computes bit for bit what it computes on the plain CPU, backward included."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoshard.nested import tensors_in
from autoshard.simulate import simulate

R = torch.randn


def _packed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 4, 2]), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(model(packed)[0], batch_first=True)[0]


def _writes(_: Any, a: torch.Tensor) -> tuple:
    b = a.clone()
    b[1:, 2] = 0
    b[torch.tensor([0, 1])] += 1
    b[a > 1] = -1
    b.index_add_(0, torch.tensor([0, 2], device=a.device), a[:2])
    c = b.clone()
    c[:, None].masked_fill_((a > 0)[:, None], 3.0)
    zeros = torch.zeros(4, 2, dtype=torch.long, device=a.device)
    c.scatter_(1, zeros, a[:, :2])
    c.t_()
    c.unsqueeze_(0)
    return b, c, b.gather(1, zeros), b[[0, 3]], b[None, ..., -1], a.unfold(1, 2, 1), a.as_strided((2, 2), (1, 2), 1)


def _through_views(_: Any, a: torch.Tensor) -> tuple:
    x = a * 1
    v, w = x.view(-1)[2:9], x.t()
    v.mul_(2)
    w[1] += v[:4]
    x.narrow(1, 1, 3).copy_(x.narrow(1, 1, 3) * 2)
    return x, v, w


def _random(_: Any, x: torch.Tensor) -> tuple:
    new = (
        torch.empty(3, device=x.device).uniform_(),
        torch.randn(3, device=x.device),
        torch.randperm(5, device=x.device),
    )
    return *new, torch.rand_like(x), torch.bernoulli(x.sigmoid()), F.dropout(x, 0.4), x.clone().normal_()


def _spectrum(_: Any, a: torch.Tensor) -> tuple:
    f = torch.fft.fft(a)
    rotated = torch.view_as_complex(a.reshape(4, 8, 2)) * torch.polar(a[:, :8].abs(), a[:, 8:])
    return f.abs(), f.conj().imag, (f.conj() @ f.conj().T).real, torch.view_as_real(rotated)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, power: int) -> tuple:
        ctx.save_for_backward(x)
        return x**power, x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return 3 * ctx.saved_tensors[0] ** 2 * grads[0] + grads[1], None


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def _encoder(layers: int = 0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, layers) if layers else layer


def _no_grad(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(*args, **kwargs)


_call: Callable = lambda model, *args: model(*args)  # noqa: E731
_sdpa = F.scaled_dot_product_attention
_QUERY, _KEY = (2, 4, 9, 16), (2, 4, 11, 16)
_RAGGED = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()

CASES: dict[str, tuple[Callable | None, Callable, Callable]] = {
    "linear": (lambda: nn.Linear(8, 6), lambda: [R(2, 3, 8)], _call),
    "conv": (lambda: nn.Conv2d(3, 8, 3, stride=2, padding=1), lambda: [R(2, 3, 17, 17)], _call),
    "conv-channels-last": (
        lambda: nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last),
        lambda: [R(1, 16, 32, 32).to(memory_format=torch.channels_last)],
        _call,
    ),
    "conv-depthwise": (lambda: nn.Conv1d(16, 16, 3, groups=16), lambda: [R(1, 16, 32)], _call),
    "conv-transposed": (lambda: nn.ConvTranspose2d(3, 5, 3, 2), lambda: [R(2, 3, 9, 9)], _call),
    "norms-train": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.GroupNorm(2, 4)), lambda: [R(3, 4, 5, 5)], _call),
    "embedding": (lambda: nn.Embedding(10, 4, padding_idx=1), lambda: [torch.tensor([[1, 2], [3, 1]])], _call),
    "lstm": (lambda: nn.LSTM(6, 5, num_layers=2, bidirectional=True, dropout=0.2), lambda: [R(4, 3, 6)], _call),
    "lstm-packed": (lambda: nn.LSTM(6, 5, batch_first=True), lambda: [R(3, 7, 6)], _packed),
    "sdpa": (None, lambda: [R(_QUERY), R(_KEY), R(_KEY)], lambda _, q, k, v: _sdpa(q, k, v)),
    "sdpa-causal": (None, lambda: [R(_QUERY), R(_QUERY)], lambda _, q, k: _sdpa(q, k, k, is_causal=True)),
    "sdpa-bool": (None, lambda: [R(_QUERY), R(_KEY), torch.rand(9, 11) > 0.3], lambda _, q, k, m: _sdpa(q, k, k, m)),
    "sdpa-dropout": (None, lambda: [R(_QUERY), R(_KEY)], lambda _, q, k: _sdpa(q, k, k, dropout_p=0.3)),
    "sdpa-grouped": (None, lambda: [R(_QUERY), R(2, 2, 9, 16)], lambda _, q, k: _sdpa(q, k, k, enable_gqa=True)),
    "encoder-train": (_encoder, lambda: [R(2, 5, 16)], _call),
    "encoder-fused": (lambda: _encoder().eval(), lambda: [R(2, 5, 16)], _no_grad),
    "encoder-ragged": (
        lambda: _encoder(2).eval(),
        lambda: [R(2, 5, 16), _RAGGED],
        lambda model, x, mask: _no_grad(model, x, src_key_padding_mask=mask),
    ),
    "einsum": (None, lambda: [R(2, 3, 4), R(4, 5, 3)], lambda _, a, b: torch.einsum("bij,jki->bk", a, b)),
    "spectrum": (None, lambda: [R(4, 16)], _spectrum),
    "writes": (None, lambda: [R(4, 6)], _writes),
    "through-views": (None, lambda: [R(4, 6)], _through_views),
    "random": (None, lambda: [R(4, 6)], _random),
    "custom": (None, lambda: [R(3, 3)], lambda _, x: _Cube.apply(x, 3)),
    "custom-in-place": (None, lambda: [R(3, 3)], lambda _, x: _Twice.apply(x * 1)),
    "checkpoint": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()),
        lambda: [R(3, 8)],
        lambda model, x: checkpoint(model, x * 1, use_reentrant=False),
    ),
    "in-place-activations": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.SiLU(inplace=True)),
        lambda: [R(3, 8)],
        _call,
    ),
    "pieces": (None, lambda: [R(6, 4)], lambda _, x: (x.narrow(0, 1, 3), *x.chunk(3), *x.chunk(2, 1), *x.split(4))),
    "autocast": (
        lambda: nn.Linear(8, 8),
        lambda: [R(3, 8)],
        lambda model, x: torch.autocast("cpu", dtype=torch.bfloat16)(model)(x).float(),
    ),
    "vmap": (None, lambda: [R(4, 4)], lambda _, x: torch.vmap(lambda row: row.sin() * row.sum())(x)),
}


def _results(model: nn.Module | None, inputs: list, call: Callable, inference: bool) -> list[tuple[str, torch.Tensor]]:
    """Outputs, buffers and all gradients of one run."""
    torch.manual_seed(3)
    inputs = [value.requires_grad_() if value.is_floating_point() else value for value in inputs]
    with torch.inference_mode(inference):
        found = list(tensors_in(call(model, *inputs)))
    losses = [tensor.square().sum() for _, tensor in found if tensor.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
        found += [(f"grad of input {i}", value.grad) for i, value in enumerate(inputs) if value.grad is not None]
    if model is not None:
        found += [(f"grad of {name}", p.grad) for name, p in model.named_parameters() if p.grad is not None]
        found += [(f"buffer {name}", buffer) for name, buffer in model.named_buffers()]
    return found


@pytest.mark.parametrize("inference", [False, True], ids=["autograd", "inference"])
@pytest.mark.parametrize("name", CASES)
def test_ops_are_bitwise_equal(name, inference):
    build, make_inputs, call = CASES[name]
    model, inputs = build() if build else None, make_inputs()
    twin = copy.deepcopy(model)
    expected = _results(model, [value.detach().clone() for value in inputs], call, inference)
    with simulate("2x1GiB") as devices:
        if twin is not None:
            twin.to("cpu:1")
        found = _results(twin, [value.detach().to("cpu:1") for value in inputs], call, inference)
        assert [path for path, _ in found] == [path for path, _ in expected]
        for (path, ours), (_, theirs) in zip(found, expected, strict=True):
            assert ours.device == torch.device("cpu:1"), path
            assert ours.stride() == theirs.stride(), path
            assert torch.equal(torch.nan_to_num(ours.detach().cpu()), torch.nan_to_num(theirs.detach())), path
        del found, ours, twin
        assert devices.memory("cpu:0") == (0, 0) and devices.memory("cpu:1")[0] == 0
