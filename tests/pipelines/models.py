"""Small models, how they are divided into stages, and a batch for them."""

import itertools

import torch
from torch import nn


class Tied(nn.Module):
    """The table of the first stage is the head of the last; a mask is read by both."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        mask = (ids > 2).float().unsqueeze(-1)
        hidden = self.first(self.embed(ids)) * mask
        return self.head(torch.tanh(self.second(hidden)) + hidden * mask)


class Shared(nn.Module):
    """The last stage shares parameters with others, each of which shares with none but it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.layers[3].weight, self.layers[3].bias = self.layers[0].weight, self.layers[1].bias

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.square().mean(), "x": x}


class Skips(nn.Module):
    """Convolutions whose first results the last stage reads."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, padding=1)
        self.deep = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Dropout(0.0))
        self.deeper = nn.Conv2d(6, 6, 1)
        self.up = nn.Conv2d(12, 2, 1)

    def forward(self, images, targets=None):
        down = torch.relu(self.down(images))
        logits = self.up(torch.cat([self.deeper(self.deep(down)), down], 1)).mean((2, 3))
        if targets is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, targets), "logits": logits}


class Turned(nn.Module):
    """The gradient of what the second stage receives comes out of its module transposed."""

    class Columns(nn.Conv1d):
        def forward(self, x):
            return super().forward(x.transpose(1, 2))

    def __init__(self):
        super().__init__()
        self.rows, self.columns = nn.Linear(4, 4), self.Columns(4, 3, 1)

    def forward(self, x):
        x = self.columns(self.rows(x))
        return {"loss": x.square().mean(), "x": x}


def llama(layers, **config):
    """A small decoder of transformers with its labels' loss, tied unless the config says otherwise."""
    import transformers

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    settings = {"vocab_size": 64, "num_hidden_layers": layers, "tie_word_embeddings": True, **sizes, **config}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def decoder(layers, stages):
    """(model, stages, inputs): a decoder in contiguous stages."""
    paths = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(layers)), "model.norm", "lm_head"]
    model = llama(layers)
    cuts = [round(1 + layers * number / stages) for number in range(stages + 1)]
    cuts[0], cuts[-1] = 0, len(paths)
    divided = [paths[a:b] for a, b in itertools.pairwise(cuts)]
    divided[0].append("model.rotary_emb")
    ids = torch.randint(3, 64, (8, 6))
    return model, divided, {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def tied():
    """(model, stages, inputs)."""
    return Tied(), [["embed", "first"], ["second", "head"]], {"ids": torch.randint(0, 11, (8, 5))}


def turned():
    """(model, stages, inputs)."""
    return Turned(), [["rows"], ["columns"]], {"x": torch.randn(8, 3, 4)}


def skips():
    """(model, stages, inputs)."""
    inputs = {"images": torch.randn(8, 3, 6, 6), "targets": torch.randint(0, 2, (8,))}
    return Skips(), [["down"], ["deep"], ["deeper"], ["up"]], inputs


def shared():
    """(model, stages, inputs)."""
    return Shared(), [["layers.0"], ["layers.1"], ["layers.2"], ["layers.3"]], {"x": torch.randn(8, 6)}


class Scaled(nn.Module):
    """What its own forward does is in the recording: a number, a switch, a counter."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale, self.squared, self.calls = 1.0, False, 0

    def forward(self, x):
        self.calls += 1
        x = self.second(torch.tanh(self.first(x))) * self.scale
        return {"loss": (x**2 if self.squared else x).mean(), "x": x}
