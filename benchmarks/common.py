"""What several benchmarks share: options, random decoders, rows of a table."""

import os
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
import typer


def run_command(documentation: str, *mains: Callable[..., None]) -> None:
    """Call `main`, or the one that the command line names, with what that says; its arguments are the options."""
    told = "\b\n" + documentation.replace("\n\n", "\n\n\b\n")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=told)
    for main in mains:
        app.command(help=told)(main)
    app()


def decoder(hidden: int, layers: int, words: int, *, kv_heads: int, dtype: torch.dtype = torch.float32) -> Any:
    """A Llama-like decoder of random weights, with a vocabulary of so many words."""
    config = transformers.LlamaConfig(
        vocab_size=words, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=max(4, hidden // 64), num_key_value_heads=kv_heads,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def device_map(layers: Iterable[str], first: str, last: str) -> dict[str, str]:
    """Where the parts of a decoder go: each layer to a device of its own, the rest to the first and the last device."""
    placed = {f"model.layers.{index}": device for index, device in enumerate(layers)}
    return {"model.embed_tokens": first, "model.rotary_emb": first, **placed, "model.norm": last, "lm_head": last}


def print_header(*names: str) -> None:
    """Begin a Markdown table, of which the first column is text."""
    print_row(*names)
    print("|---|" + "---:|" * (len(names) - 1))


def print_row(*cells: object) -> None:
    """A row of a Markdown table."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
