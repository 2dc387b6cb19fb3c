"""Planning Llama-3.1-405B from its configuration alone: no weights, no GPU, a few seconds.

Sixteen H100-80GB hold it, with room for a prompt of 2048 tokens, in a process for each; so do eight H200 (141 GB each),
with less room; eight H100-80GB do not, and the error says by how much. One of them with 200 GB of host memory and a
disk runs it too, slowly: the layers are brought to it one after the other.

    pip install -e ".[hf]"
    python examples/plan_llama_405b.py                 # half a minute, most of it for the last two
    python examples/plan_llama_405b.py 12xH100-80GB    # for other devices

The same from the command line: autoshard plan examples/llama-3.1-405b/config.json --devices 16xH100-80GB
"""

import pathlib
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import autoshard
from autoshard.common.sizes import format_bytes, format_seconds

CONFIG = pathlib.Path(__file__).parent / "llama-3.1-405b"


def main() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIG), dtype=torch.bfloat16).eval()
    workload = autoshard.Workload(batch_size=1, sequence_length=2048)
    started = time.perf_counter()
    profile = autoshard.profile(model, workload=workload)
    print(f"{format_bytes(profile.parameter_bytes)} of parameters, profiled in {time.perf_counter() - started:.1f} s")

    one = {"cuda:0": "80GB", "cpu": "200GB", "disk": "2TB"}
    for devices in sys.argv[1:] or ("16xH100-80GB", "8xH200", "8xH100-80GB", one):
        print(f"\n{devices}")
        try:
            plan = autoshard.plan(model, devices, profile=profile, workload=workload)
        except autoshard.PlanError as error:
            print(f"  {error}")
            continue
        estimate = autoshard.estimate(plan, profile)
        for device in estimate.devices:
            peak, memory = format_bytes(device.peak_bytes), format_bytes(device.memory_bytes)
            print(f"  {device.name:8} {peak:>9} of {memory:>9}, {format_bytes(device.free_bytes):>9} free")
        print(f"  one forward: {format_seconds(estimate.latency_seconds)}; {plan.reasons[0]}")
        for link in estimate.streaming.links if estimate.streaming else ():
            brought = f"{format_bytes(link.nbytes)} in {format_seconds(link.seconds)}"
            print(f"  {link.modules} modules from {link.source} to {link.destination}: {brought} per forward")


if __name__ == "__main__":
    main()
