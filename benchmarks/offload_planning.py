"""Planning a 405 B-parameter decoder that is larger than its devices: `python benchmarks/offload_planning.py`.

By the clock and of the processor, the profile and the plan. Beside the predicted seconds of a pass: the lower bound,
and what the same model of cost says of the same modules in other orders: the last ones streamed instead of evenly
spaced ones, and each brought only when it is called. Needs transformers; no weights, no GPU.
"""

import pathlib
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.sizes import format_bytes, format_seconds
from autoshard.strategies import make_plan
from autoshard.strategies.offload_choice import RESIDENT, Offload, choose, pass_seconds
from autoshard.stream_schedule import StreamCall

CONFIG = pathlib.Path(__file__).parents[1] / "examples" / "llama-3.1-405b"
CASES = {
    "one card, host memory, disk": {"cuda:0": "80GB", "cpu": "200GB", "disk": "2TB"},
    "one card, much host memory": {"cuda:0": "80GB", "cpu": "1TB"},
    "two cards, much host memory": {"cuda:0": "80GB", "cuda:1": "80GB", "cpu": "1TB"},
    "host memory and disk alone": {"cpu": "200GB", "disk": "2TB"},
}


def main() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIG), dtype=torch.bfloat16).eval()
    for tokens in (1, 2048):
        begin = time.perf_counter(), time.process_time()
        profile = autoshard.profile(model, workload=autoshard.Workload(batch_size=1, sequence_length=tokens))
        print(f"{tokens} tokens: profile {since(begin)}", flush=True)
        for name, spec in CASES.items():
            cluster = parse_devices(spec)
            begin = time.perf_counter(), time.process_time()
            plan = make_plan(profile, cluster)
            took = since(begin)
            figures = autoshard.estimate(plan, profile, cluster)
            nbytes = figures.streaming.nbytes if figures.streaming else 0
            print(
                f"  {name:28} plan {took}  {len(plan.streamed):3} streamed, {format_bytes(nbytes)} per pass, "
                f"{format_seconds(figures.latency_seconds)}, {figures.gap:.1%} above the bound",
                flush=True,
            )
    orders()


def since(begin: tuple[float, float]) -> str:
    return f"{time.perf_counter() - begin[0]:5.1f} s, processor {time.process_time() - begin[1]:5.1f} s"


def orders(count: int = 32) -> None:
    """Equal blocks on one device: evenly spaced against the last ones, and against no fetch ahead of its call."""
    print(f"{count} equal blocks, two slots: seconds of a pass / those of evenly spaced ones")
    for ratio in (0.5, 1.0, 2.0, 4.0):
        for stay in (count // 4, count // 2, 3 * count // 4):
            task = Offload(
                calls=tuple(StreamCall(module=m, device=0, before_seconds=0.0, seconds=1.0) for m in range(count)),
                after_seconds=0.0, device=(0,) * count, nbytes=(1,) * count, stored_bytes=(1,) * count,
                cpu_seconds=(ratio,) * count, disk_seconds=(float("inf"),) * count,
                room_bytes=(stay + 2,), cpu_bytes=count,
            )  # fmt: skip
            found = choose(task)
            assert found is not None
            kept = found.places.count(RESIDENT)
            last = pass_seconds(task, tuple(int(module >= kept) for module in range(count)))
            when_called = count + (count - kept) * ratio
            print(
                f"  fetch {ratio:3.1f} x compute, {kept:2} of {count} stay: the last ones {last / found.seconds:.2f}, "
                f"when called {when_called / found.seconds:.2f}"
            )


if __name__ == "__main__":
    main()
