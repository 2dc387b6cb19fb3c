"""What an applied model costs over the plain one: forward times in one process, one thread, alternating.

    python benchmarks/overhead.py [rounds]

A decoder of 32 small layers. "one device" wraps the forward of the root only; "two devices" that of every layer, and
both names are the plain CPU, so nothing is copied and what is measured is what runs around forwards. Accelerate's
dispatch_model runs on the same maps. Prints medians with quartiles, ratios to the plain model, and microseconds per
call of a wrapped module.

A control says what hooks cost at least: "empty hooks" has one that does nothing on every module that autoshard wraps.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import accelerate
import torch
import transformers

from autoshard.plan import Plan
from autoshard.runtime import apply_plan
from autoshard.runtime.around import layers_of

LAYERS = 32
INPUTS = {"input_ids": torch.arange(16).reshape(1, 16), "use_cache": False}


def decoder() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=LAYERS, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config).eval()


def two_devices(model: torch.nn.Module) -> dict[str, str]:
    """Half of the layers each, cut between two layers."""
    names = [name for name, module in model.named_modules() if not name.startswith("model.layers.")]
    placement = {name: "cpu:0" for name in names if name in ("model.embed_tokens", "model.rotary_emb")}
    placement |= {f"model.layers.{i}": "cpu:0" if i < LAYERS // 2 else "cpu:1" for i in range(LAYERS)}
    return placement | {"model.norm": "cpu:1", "lm_head": "cpu:1"}


def empty_hooks(model: torch.nn.Module) -> torch.nn.Module:
    """Put a hook that does nothing on every module whose forward autoshard wraps in a split of the same model."""
    split = decoder()
    apply_plan(split, Plan.from_device_map(two_devices(split)))
    for path, module in split.named_modules():
        if layers_of(module):
            model.get_submodule(path).register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    return model


def count_hooked(model: torch.nn.Module) -> int:
    return sum(bool(layers_of(module)) for module in model.modules())


def measure(models: dict[str, torch.nn.Module], rounds: int) -> dict[str, list[float]]:
    """Seconds per forward; the models take turns, so that a slow moment of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in models}
    run: Callable[[torch.nn.Module], object] = lambda model: model(**INPUTS)  # noqa: E731
    with torch.no_grad():
        for model in models.values():
            for _ in range(3):
                run(model)
        order = list(models)
        for index in range(rounds):
            for name in order[index % len(order) :] + order[: index % len(order)]:
                start = time.perf_counter()
                run(models[name])
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    models = {name: decoder() for name in ("plain", "plain again", "one device", "two devices")}
    apply_plan(models["one device"], Plan.from_device_map({"": "cpu:0"}))
    apply_plan(models["two devices"], Plan.from_device_map(two_devices(models["two devices"])))
    models["empty hooks"] = empty_hooks(decoder())
    models["accelerate, one"] = accelerate.dispatch_model(decoder(), {"": "cpu"}, force_hooks=True)
    cpu_map = dict.fromkeys(two_devices(models["plain"]), "cpu")
    models["accelerate, two"] = accelerate.dispatch_model(decoder(), cpu_map, main_device="cpu", force_hooks=True)
    times = measure(models, rounds)
    # Ratios are taken round by round, against the plain forward next to it, then their median: drift cancels out.
    plain = times["plain"]
    print(f"{'':18}{'median ms':>10}{'quartiles':>18}{'ratio':>8}{'hooks':>7}{'us per hook':>13}")
    for name, found in times.items():
        low, middle, high = statistics.quantiles(found, n=4)
        ratio = statistics.median(a / b for a, b in zip(found, plain, strict=True))
        hooked = count_hooked(models[name])
        each = statistics.median(a - b for a, b in zip(found, plain, strict=True)) / hooked * 1e6 if hooked else 0.0
        print(
            f"{name:18}{middle * 1e3:10.2f}{low * 1e3:9.2f} …{high * 1e3:7.2f}{ratio:8.3f}{hooked:7d}"
            + (f"{each:13.2f}" if hooked else "")
        )


if __name__ == "__main__":
    main()
