"""What an applied model costs over the plain one: forward times in one process, one thread, in turns.

    python benchmarks/overhead.py [--rounds N]

A decoder of 32 small layers. "one device" wraps the forward of the root only; "two devices" that of every layer, and
both names are the plain CPU, so nothing is copied and what is measured is what runs around forwards. Accelerate's
dispatch_model runs on the same maps. "empty hooks" says what hooks cost at least: it has one that does nothing on every
module that autoshard wraps.
"""

import accelerate
import torch
from common import decoder, print_header, print_row, ratio, run_command, spread, take_turns

from autoshard.plan import Plan
from autoshard.runtime.around import layers_of
from autoshard.runtime.dispatch import apply_plan

LAYERS = 32
INPUTS = {"input_ids": torch.arange(16).reshape(1, 16), "use_cache": False}
TWO_DEVICES = {
    "model.embed_tokens": "cpu:0", "model.rotary_emb": "cpu:0", "model.norm": "cpu:1", "lm_head": "cpu:1",
    **{f"model.layers.{i}": "cpu:0" if i < LAYERS // 2 else "cpu:1" for i in range(LAYERS)},
}  # fmt: skip


def small() -> torch.nn.Module:
    return decoder(64, LAYERS, 256, kv_heads=4)


def hooked(model: torch.nn.Module) -> list[str]:
    """The modules whose forward autoshard wraps."""
    return [path for path, module in model.named_modules() if layers_of(module)]


@torch.no_grad()
def main(rounds: int = 200) -> None:
    torch.set_num_threads(1)
    models = {name: small() for name in ("plain", "plain again", "one device", "two devices", "empty hooks")}
    apply_plan(models["one device"], Plan.from_device_map({"": "cpu:0"}))
    apply_plan(models["two devices"], Plan.from_device_map(TWO_DEVICES))
    for path in hooked(models["two devices"]):
        module = models["empty hooks"].get_submodule(path)
        module.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    for name, device_map in (("accelerate, one", {"": "cpu"}), ("accelerate, two", dict.fromkeys(TWO_DEVICES, "cpu"))):
        models[name] = accelerate.dispatch_model(small(), device_map, main_device="cpu", force_hooks=True)
    times = take_turns({name: lambda model=model: model(**INPUTS) for name, model in models.items()}, rounds)
    print_header("", "ms", "ratio to the plain model", "wrapped modules")
    for name, found in times.items():
        print_row((name, spread(found, 1e-3, 2), f"{ratio(found, times['plain']):.3f}", len(hooked(models[name]))))


if __name__ == "__main__":
    run_command(main, __doc__)
