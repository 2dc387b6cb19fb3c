"""Hostile models, part 3: torch's own composite layers, and whole small networks with long skips."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.models.case import Case
from tests.models.hostile_flow import SHAPES, D, rows


def images(batch: int, size: int) -> dict:
    """One float argument `x` of shape [batch, 3, size, size]."""
    return {"x": torch.randn(batch, 3, size, size)}


IMAGE_SHAPES = ((2, 16), (3, 16), (2, 8), (2, 24))


def conv(inside: int, outside: int, stride: int = 1) -> nn.Sequential:
    layers = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Skips from every level of the way down to the same level of the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(3, 8), conv(8, 16, 2), conv(16, 24, 2)])
        self.up = nn.ModuleList([conv(24 + 16, 16), conv(16 + 8, 8)])
        self.grow, self.out = nn.Upsample(scale_factor=2), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
        skips.pop()
        for layer in self.up:
            x = layer(torch.cat([self.grow(x), skips.pop()], dim=1))
        return self.out(x)


class Residual(nn.Module):
    """A residual network whose last activation works in place on the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.blocks = nn.Sequential(Bottleneck(8, 8, 1), Bottleneck(8, 16, 2), Bottleneck(16, 16, 1))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 5)

    def forward(self, x):
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class Bottleneck(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(inside, 8), nn.Conv2d(8, outside, 3, stride, 1), nn.BatchNorm2d(outside))
        self.skip = nn.Identity() if stride == 1 and inside == outside else nn.Conv2d(inside, outside, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.body(x)
        out += self.skip(x)
        return self.relu(out)


class Recurrent(nn.Module):
    """A two-way LSTM, a GRU over a packed sequence, and an LSTM cell called in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.gru, self.cell, self.out = nn.GRU(24, D, batch_first=True), nn.LSTMCell(D, D), nn.Linear(D, D)

    def forward(self, x):
        h, (state, memory) = self.lstm(x)
        lengths = torch.arange(x.shape[1], x.shape[1] - x.shape[0], -1).clamp(min=1)
        packed, _ = self.gru(pack_padded_sequence(h, lengths, batch_first=True))
        h, _ = pad_packed_sequence(packed, batch_first=True)
        pair = None
        for step in range(h.shape[1]):
            pair = self.cell(h[:, step], pair)
        return self.out(pair[0]), state, memory


class Encoder(nn.Module):
    """`nn.TransformerEncoder` with a causal and a padding mask; in eval mode it takes a fused path of its own."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 4, 32, dropout=0.1, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(D), enable_nested_tensor=False)
        self.out = nn.Linear(D, D)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        padding = torch.zeros(x.shape[:2], device=x.device)
        padding[0, -1] = -torch.inf
        return self.out(self.encoder(x, mask=mask, src_key_padding_mask=padding, is_causal=True))


class Translator(nn.Module):
    """`nn.Transformer`: encoder memory read by every decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(D, 4, 2, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(D, D)

    def forward(self, x):
        return self.out(self.body(x, x.flip(1)[:, :-1]))


class Attention(nn.Module):
    """`nn.MultiheadAttention` with weights returned, keys of another size, and scaled dot product by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = nn.MultiheadAttention(D, 4, batch_first=True)
        self.cross = nn.MultiheadAttention(D, 2, kdim=8, vdim=8, add_bias_kv=True)
        self.small, self.qkv = nn.Linear(D, 8), nn.Linear(D, 3 * D)

    def forward(self, x):
        h, weights = self.self_attention(x, x, x)
        keys = self.small(h).transpose(0, 1)
        cross, _ = self.cross(h.transpose(0, 1), keys, keys, need_weights=False)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(cross.transpose(0, 1)).chunk(3, -1))
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h.transpose(1, 2).flatten(2), weights


class Scan(nn.Module):
    """A state-space scan: a python loop that carries and overwrites a state, with complex numbers and a cumsum."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.decay = nn.Parameter(torch.randn(D))

    def forward(self, x):
        u, gate = self.inner(x), torch.sigmoid(self.gate(x))
        decay = torch.exp(-nn.functional.softplus(self.decay))
        state, steps = x.new_zeros(x.shape[0], D), []
        for step in range(x.shape[1]):
            state = state * decay + u[:, step]
            steps.append(state * gate[:, step])
        y = torch.stack(steps, 1)
        spectrum = torch.fft.rfft(y, dim=-1) * torch.polar(torch.ones(D // 2 + 1), torch.arange(D // 2 + 1.0)).to(
            y.device
        )
        return self.out(torch.fft.irfft(spectrum, n=D, dim=-1) + y.cumsum(1))


class Diffuser(nn.Module):
    """Called like a sampler: a python loop of denoising steps with a time embedding, group norms and autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.first, self.norm, self.last = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 3, 3, padding=1),
        )

    def forward(self, x, steps: int = 3):
        frequencies = torch.exp(torch.linspace(0, -3, 4, device=x.device))
        for step in reversed(range(steps)):
            angles = step * frequencies
            shift = self.time(torch.cat([angles.sin(), angles.cos()])[None])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.norm(self.first(x)) + shift[:, :, None, None]
                noise = self.last(nn.functional.silu(h))
            x = (x - 0.1 * noise.float()).clamp(-3, 3)
        return x


BLOCK_CASES = [
    Case(name="unet", build=UNet, inputs=images, shapes=IMAGE_SHAPES),
    Case(name="residual", build=Residual, inputs=images, shapes=IMAGE_SHAPES),
    Case(name="residual-train", build=Residual, inputs=images, shapes=IMAGE_SHAPES, train_mode=True),
    Case(name="recurrent", build=Recurrent, inputs=rows, shapes=((2, 6), (4, 6), (2, 9), (2, 3))),
    Case(name="encoder", build=lambda: Encoder(False), inputs=rows, shapes=SHAPES),
    Case(name="encoder-norm-first-train", build=lambda: Encoder(True), inputs=rows, shapes=SHAPES, train_mode=True),
    Case(name="translator", build=Translator, inputs=rows, shapes=SHAPES),
    Case(name="attention", build=Attention, inputs=rows, shapes=SHAPES),
    Case(name="scan", build=Scan, inputs=rows, shapes=SHAPES),
    Case(name="diffuser", build=Diffuser, inputs=images, shapes=((1, 8), (2, 8), (1, 16))),
]
