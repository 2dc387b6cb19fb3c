"""Hostile models, part 2: parameters used away from home, buffers, ties, in-place writes, cached tensors, devices."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.models.case import Case
from tests.models.hostile_flow import SHAPES, D, rows, tokens


class BareParameters(nn.Module):
    """`F.linear(x, self.w)`, einsum with a bare parameter, a parameter list and dict, a scalar buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.cls = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(1, 1, D))
        self.mixes = nn.ParameterList(nn.Parameter(torch.randn(D, D)) for _ in range(3))
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(D)), "shift": nn.Parameter(torch.randn(D))})
        self.register_buffer("gain", torch.tensor(1.5))
        self.out = nn.Linear(D, D)

    def forward(self, x):
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1)
        h = F.linear(x, self.w) * self.gain
        for mix in self.mixes:
            h = torch.einsum("bnd,de->bne", h, mix)
        return self.out(h * self.named["scale"] + self.named["shift"])


class RunningBuffers(nn.Module):
    """Buffers that the forward writes in place; layers, dropout and noise that are there in train mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D)
        self.extra, self.drop = nn.Linear(D, D), nn.Dropout(0.3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("scratch", torch.ones(D), persistent=False)

    def forward(self, x):
        h = self.drop(self.fc(x))
        if self.training:
            h = h + F.dropout(self.extra(h), 0.2, training=True) + torch.randn_like(h)
        self.steps += 1
        self.mean.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        self.scratch = self.scratch * 0.5 + self.mean
        h = self.norm((h - self.mean).transpose(1, 2)).transpose(1, 2)
        return self.out(h * self.scratch.exp() / self.steps)


class ThreeWayTie(nn.Module):
    """Encoder, decoder and head share one table, two blocks are one, and a weight is read by the parent alone."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.head = nn.Embedding(32, D), nn.Embedding(32, D), nn.Linear(D, 32, bias=False)
        self.source.weight = self.head.weight = self.target.weight
        self.encoder, self.decoder = nn.Linear(D, D), nn.Linear(D, D)
        self.again, self.never = self.decoder, nn.Linear(D, D)

    def forward(self, ids):
        memory = self.encoder(self.source(ids)).mean(1, keepdim=True) @ self.never.weight.T + self.encoder.bias
        return self.head(self.again(torch.tanh(self.decoder(self.target(ids) + memory))))


class Checkpointed(nn.Module):
    """Activation checkpointing around every second layer, reentrant or not."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(D, D)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, 24), nn.GELU(), nn.Linear(24, D)) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for index, layer in enumerate(self.layers):
            x = x + (checkpoint(layer, x, use_reentrant=self.reentrant) if index % 2 and self.training else layer(x))
        return x


class AddsToArgument(nn.Module):
    """Children add to their argument, in a way that autograd allows, and the caller goes on with it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.first, self.second, self.out = nn.Linear(D, D), Adds(), Adds(), nn.Linear(D, D)

    def forward(self, x):
        h = self.a(x).clone()
        return self.out(h + self.first(h)), self.second(h[:, 1:]).sum() + h.mean()


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(D))

    def forward(self, x):
        x.add_(self.shift)
        return x.mean(-1, keepdim=True)


class FillsSlices(nn.Module):
    """Writes slices of a tensor that it made: by index, by `copy_`, by mask and with `out=`."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.token = nn.Parameter(torch.randn(D))

    def forward(self, x):
        out = x.new_zeros(x.shape[0], x.shape[1], 3 * D)
        for index, part in enumerate(self.parts):
            out[..., index * D : (index + 1) * D] = part(x)
        out[:, 0, :D] = self.token
        out[:, -1].copy_(self.parts[0](x[:, 0]).repeat(1, 3))
        out = torch.where(out > 3, out.detach() * 0.5, out)
        total = torch.empty(x.shape[0], dtype=x.dtype)
        torch.sum(out.detach(), (1, 2), out=total)
        return out.masked_fill(out < -3, 0.25), total


class ReadsDevices(nn.Module):
    """Makes tensors without a device, and asks parameters and inputs for theirs, as much published code does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position, self.fc = nn.Embedding(32, D), nn.Embedding(64, D), nn.Linear(D, D)
        self.wide = nn.Linear(D, D, dtype=torch.float64)

    def forward(self, ids):
        positions = torch.arange(ids.shape[1])
        h = (
            self.embed(ids.to(next(self.parameters()).device))
            + self.position(positions)
            + self.position(positions.flip(0).to(ids.device))
        )
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=h.device).tril()
        scores = (h @ self.fc(h).transpose(1, 2)).masked_fill(~mask, -torch.inf) * torch.tensor(0.25)
        h = scores.softmax(-1) @ h + torch.zeros(1, device=self.fc.weight.device).type_as(h)
        offset = torch.arange(D, device=self.wide.weight.device, dtype=self.wide.weight.dtype)
        wide = self.wide(h.to(self.wide.weight)) + offset
        return wide.to(h.dtype).to(h.device) + h, torch.full((2,), float(h.shape[1]), device=h.device)


class CachedTables(nn.Module):
    """Tables kept on attributes (not buffers): made at the first call, grown and read at later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CachingLayer() for _ in range(3))
        self.out = nn.Linear(D, D)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class CachingLayer(nn.Module):
    _mask: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)
        self.table = torch.linspace(0.5, 1.5, D)

    def forward(self, x):
        if self._mask is None or self._mask.shape[0] < x.shape[1]:
            self._mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril()
        self.table = self.table.to(x.device)
        return self._mask[: x.shape[1], : x.shape[1]] @ self.fc(x) * self.table


class Parametrized(nn.Module):
    """Weights that are computed from others at every use: weight norm and orthogonal parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = parametrizations.weight_norm(nn.Linear(D, D)), parametrizations.orthogonal(nn.Linear(D, D))
        self.conv = parametrizations.weight_norm(nn.Conv1d(D, D, 3, padding=1))

    def forward(self, x):
        return self.b(self.a(x)) + self.conv(x.transpose(1, 2)).transpose(1, 2)


class Double(torch.autograd.Function):
    """A custom function with its own backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight * 2

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight * 2, (grad * x * 2).sum((0, 1))


class CustomFunction(nn.Module):
    """A custom autograd function whose two arguments may be on two devices; detach and no_grad between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale, self.b = nn.Linear(D, D), nn.Parameter(torch.randn(D)), nn.Linear(D, D)

    def forward(self, x):
        h = Double.apply(self.a(x), self.scale)
        with torch.no_grad():
            centre = self.b(h).mean(-1, keepdim=True)
        return self.b(h) - centre + h.detach()


class Passthrough(nn.Module):
    """Returns its input, a parameter and a view of one; holds a module that is never called and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.unused = nn.Linear(D, D), nn.Linear(D, D)
        self.token, self.empty = nn.Parameter(torch.randn(3, D)), nn.Parameter(torch.zeros(0, D))

    def forward(self, x):
        return x, self.token, self.token[1], torch.cat([self.fc(x)[0], self.empty])


STATE_CASES = [
    Case(name="bare-parameters", build=BareParameters, inputs=rows, shapes=SHAPES),
    Case(name="running-buffers", build=RunningBuffers, inputs=rows, shapes=SHAPES),
    Case(name="running-buffers-train", build=RunningBuffers, inputs=rows, shapes=SHAPES, train_mode=True),
    Case(name="three-way-tie", build=ThreeWayTie, inputs=tokens, shapes=SHAPES),
    Case(name="checkpointed", build=lambda: Checkpointed(False), inputs=rows, shapes=SHAPES, train_mode=True),
    Case(name="checkpointed-reentrant", build=lambda: Checkpointed(True), inputs=rows, shapes=SHAPES, train_mode=True),
    Case(name="adds-to-argument", build=AddsToArgument, inputs=rows, shapes=SHAPES),
    Case(name="fills-slices", build=FillsSlices, inputs=rows, shapes=SHAPES),
    Case(name="cached-tables", build=CachedTables, inputs=rows, shapes=SHAPES),
    Case(name="reads-devices", build=ReadsDevices, inputs=tokens, shapes=SHAPES),
    Case(name="parametrized", build=Parametrized, inputs=rows, shapes=SHAPES),
    Case(name="custom-function", build=CustomFunction, inputs=rows, shapes=SHAPES),
    Case(name="passthrough", build=Passthrough, inputs=rows, shapes=SHAPES),
]
