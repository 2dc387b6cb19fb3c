"""Predicted against real peak memory: five models, inference and training, one device and a split.

    python benchmarks/memory.py            # on the GPU if there is one, else on simulated devices
    python benchmarks/memory.py --simulate # on simulated devices in any case

On a GPU the prediction is compared with `torch.cuda.max_memory_allocated` (what tensors took) and, with the context's
overhead, with the reserved peak (what the process holds). On simulated devices it is compared with the bytes that were
really live at once. Prints a Markdown table.
"""

import argparse
import gc

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    BertConfig,
    LlamaConfig,
    MixtralConfig,
    T5Config,
    ViTConfig,
)

import autoshard
from autoshard.capture.backward import training_loss
from autoshard.nested import map_tensors
from autoshard.sizes import format_bytes


def models(scale: int) -> dict[str, tuple[nn.Module, dict[str, torch.Tensor]]]:
    """Five kinds of models with inputs; widths grow with `scale` (1 for a laptop, 8 for a GPU)."""
    text = {
        "vocab_size": 4000 * scale, "hidden_size": 128 * scale, "intermediate_size": 352 * scale,
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    }  # fmt: skip
    tower = {**text, "image_size": 64, "patch_size": 8}
    encoder_decoder = {
        "vocab_size": 4000 * scale, "d_model": 128 * scale, "d_kv": 16 * scale, "d_ff": 352 * scale,
        "num_layers": 4, "num_heads": 8, "decoder_start_token_id": 0,
    }  # fmt: skip
    ids = {"input_ids": torch.randint(0, 4000, (2, 256))}
    pixels = {"pixel_values": torch.randn(8, 3, 64, 64)}
    return {
        "decoder": (AutoModelForCausalLM.from_config(LlamaConfig(**text)), {**ids, "use_cache": False}),
        "mixture of experts": (
            AutoModelForCausalLM.from_config(MixtralConfig(**text, num_local_experts=4)),
            {**ids, "use_cache": False},
        ),
        "encoder": (AutoModel.from_config(BertConfig(**text)), ids),
        "encoder-decoder": (
            AutoModelForSeq2SeqLM.from_config(T5Config(**encoder_decoder)),
            {**ids, "decoder_input_ids": ids["input_ids"][:, :64], "use_cache": False},
        ),
        "vision": (AutoModelForImageClassification.from_config(ViTConfig(**tower)), pixels),
    }


def run(model: nn.Module, inputs: dict[str, torch.Tensor], training: bool, reset) -> None:
    """Two forwards or training steps, of which the second is measured: the first makes what stays.

    The inputs are put on the device of the first module, where the estimate assumes them.
    """
    device = next(model.parameters()).device
    inputs = map_tensors(inputs, lambda tensor: tensor.to(device))
    optimizer = torch.optim.AdamW(model.parameters()) if training else None
    for _ in range(2):
        reset()
        if optimizer is None:
            with torch.no_grad():
                model(**inputs)
            continue
        optimizer.zero_grad(set_to_none=True)
        output = model(**inputs)
        training_loss(output, "model").backward()
        optimizer.step()
        del output


def on_gpu(model: nn.Module, inputs: dict, plan: autoshard.Plan, training: bool) -> dict[str, tuple[int, int]]:
    """Allocated and reserved peak of cuda:0."""
    device = torch.device("cuda:0")
    gc.collect()
    torch.cuda.empty_cache()
    autoshard.apply(model, plan)
    run(model, inputs, training, lambda: torch.cuda.reset_peak_memory_stats(device))
    torch.cuda.synchronize(device)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    autoshard.remove(model)
    return {"cuda:0": peaks}


def on_simulated(model: nn.Module, inputs: dict, plan: autoshard.Plan, training: bool) -> dict[str, tuple[int, int]]:
    """The measured peak of every simulated device, twice: there is no allocator that reserves more."""
    with autoshard.simulate({device.name: "64GiB" for device in plan.devices}) as devices:
        autoshard.apply(model, plan)
        run(model, inputs, training, devices.reset_peak)
        peaks = {name: (devices.memory(name)[1],) * 2 for name in devices}
        autoshard.remove(model)
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulate", action="store_true")
    gpu = torch.cuda.is_available() and not parser.parse_args().simulate
    measure = on_gpu if gpu else on_simulated
    print("| model | use | placement | device | predicted | allocated | error | reserved |")
    print("|---|---|---|---|---:|---:|---:|---:|")
    for name, (model, inputs) in models(8 if gpu else 1).items():
        for training in (False, True):
            model.train(training)
            workload = autoshard.Workload(mode="training" if training else "inference")
            profile = autoshard.profile(model, inputs, workload=workload)
            total = profile.peak_bytes
            split = {"cuda:0": int(0.7 * total) + 2**30, "cpu": "64GiB"} if gpu else {"cpu:0": total, "cpu:1": total}
            whole = {"cuda:0": 2 * total + 2**30} if gpu else {"cpu:0": 2 * total}
            for placement, devices in (("one device", whole), ("split", split)):
                plan = autoshard.plan(
                    model, devices, inputs=inputs, strategy="balanced", objective="memory", workload=workload
                )
                estimate = autoshard.estimate(plan, profile)
                peaks = measure(model, inputs, plan, training)
                for device in estimate.devices:
                    if device.name not in peaks:
                        continue
                    allocated, reserved = peaks[device.name]
                    predicted = device.peak_bytes - device.overhead_bytes
                    error = f"{100 * (predicted / allocated - 1):+.2f} %" if allocated else "unused"
                    figures = " | ".join(
                        (format_bytes(predicted), format_bytes(allocated), error, format_bytes(reserved))
                    )
                    print(f"| {name} | {workload.mode} | {placement} | {device.name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
