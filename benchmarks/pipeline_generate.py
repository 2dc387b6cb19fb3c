"""Decoding with a model whose layers are on two processes, each running the user's own forward, beside one process.

    OMP_NUM_THREADS=1 python benchmarks/pipeline_generate.py [--layers 8] [--hidden 1024] [--tokens 32]

One process after the other computes, so a token can't be faster than on one process; what it costs more is messages and
following the other process's layers. The last line is what following costs: seconds of the CPU per layer and token.
"""

import argparse
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import autoshard
from autoshard.runtime.stage_calls import Follower
from tests.ranks import run_ranks
from tests.runtime.follow_checks import plan_in_stages


def build(layers: int, hidden: int) -> torch.nn.Module:
    """A decoder of the usual kind, with random weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=1000,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def seconds_per_token(model: torch.nn.Module, tokens: int) -> float:
    """The median of three runs."""
    ids, times = torch.arange(12).view(1, 12), []
    with torch.no_grad():
        for _ in range(3):
            started = time.perf_counter()
            model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            times.append((time.perf_counter() - started) / tokens)
    return statistics.median(times)


def following_seconds(model: torch.nn.Module) -> float:
    """What it takes to follow one layer of the other process for one token, without waiting for anything."""
    usual, times = Follower._stage, []

    def timed(self: Follower, forward, /, *args, **kwargs):
        started = time.perf_counter()
        result = usual(self, forward, *args, **kwargs)
        if ".layers." in self.path and self.position != self.following.wire.position:
            times.append(time.perf_counter() - started)
        return result

    Follower._stage = timed
    try:
        seconds_per_token(model, 8)
    finally:
        Follower._stage = usual
    return statistics.median(times)


def measure(layers: int, hidden: int, tokens: int) -> tuple[float, float, float]:
    """Seconds per token in one process and in two, and to follow one layer."""
    model = build(layers, hidden)
    dist.barrier()
    alone = seconds_per_token(model, tokens) if dist.get_rank() == 0 else 0.0  # the other one waits
    dist.barrier()
    autoshard.apply(model, plan_in_stages(model, 2))
    seconds_per_token(model, 4)
    return alone, seconds_per_token(model, tokens), following_seconds(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 8), ("hidden", 1024), ("tokens", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    first, second = run_ranks(measure, 2, given.layers, given.hidden, given.tokens, timeout_seconds=600)
    print(f"one process    {first[0] * 1e3:8.2f} ms per token")
    print(f"two processes  {first[1] * 1e3:8.2f} ms per token, {first[1] / first[0]:.2f} x")
    print(f"following      {statistics.mean([first[2], second[2]]) * 1e3:8.2f} ms per layer of the other and token")


if __name__ == "__main__":
    main()
