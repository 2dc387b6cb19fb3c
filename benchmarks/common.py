"""What several benchmarks share: options, a random decoder, runs in turns, rows of a table, the page cache."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import gettempdir
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
import typer

FOLDER = Path(gettempdir()) / "autoshard-benchmarks"
"""Where checkpoints are written once."""


def run_command(main: Callable[..., None], documentation: str) -> None:
    """Call `main` with what the command line says; its arguments are the options."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help="\b\n" + documentation.replace("\n\n", "\n\n\b\n"))(main)
    app()


def decoder(hidden: int, layers: int, words: int, *, kv_heads: int, dtype: torch.dtype = torch.float32) -> Any:
    """A Llama-like decoder of random weights, with a vocabulary of so many words."""
    config = transformers.LlamaConfig(
        vocab_size=words, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=max(4, hidden // 64), num_key_value_heads=kv_heads,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def saved_decoder(folder: Path, layers: int) -> Path:
    """A directory with a bfloat16 decoder of 44 million parameters per layer, written at the first call."""
    folder = folder / str(layers)
    if not folder.exists():
        model = decoder(2048, layers, 32000, kv_heads=4, dtype=torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="1GB")
    return folder


def take_turns(
    cases: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[str], object] = lambda name: None
) -> dict[str, list[float]]:
    """Seconds of each case in each round, after one that warms up.

    Each round begins with another case, so that a slow moment of the machine hits all. `before` isn't timed.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    order = list(cases)
    for index in range(-1, rounds):
        turn = index % len(order)
        for name in order[turn:] + order[:turn]:
            before(name)
            start = time.perf_counter()
            cases[name]()
            if index >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def spread(found: list[float], unit: float = 1.0, places: int = 3) -> str:
    """The median with the quartiles, in a unit of so many seconds."""
    low, middle, high = (f"{one / unit:.{places}f}" for one in statistics.quantiles(found, n=4))
    return f"{middle} ({low} to {high})"


def ratio(found: list[float], other: list[float]) -> float:
    """The median of the ratios of the same round: drift of the machine cancels out."""
    return statistics.median(a / b for a, b in zip(found, other, strict=True))


def print_header(*names: str) -> None:
    """Begin a Markdown table, of which the first column is text."""
    print_row(names)
    print("|---|" + "---:|" * (len(names) - 1))


def print_row(cells: Iterable[object]) -> None:
    """A row of a Markdown table."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def set_cache(folder: Path, *, cold: bool) -> None:
    """Drop all files of a folder from the page cache, or read them into it."""
    for file in folder.iterdir():
        with open(file, "rb", buffering=0) as opened:
            if cold:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while opened.read(16 << 20):
                    pass
