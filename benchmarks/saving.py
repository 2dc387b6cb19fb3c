"""Saving a model: `python benchmarks/saving.py [GB] [folder]`. Seconds until all is on the disk, and extra memory.

A decoder with fused experts and a dense one, random bfloat16 weights; three rounds, the ways one after the other in
each. Peers do not wait for the disk themselves, so their files are synced afterwards, within the time measured.
"""

import os
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import safetensors.torch
import torch
import transformers

import autoshard

ROUNDS = 3
SHARD_BYTES = 500_000_000


def dense(nbytes: float) -> transformers.PreTrainedModel:
    """About 29 MB per layer, as bfloat16."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 16, "vocab_size": 32_000}
    return make(transformers.LlamaConfig(num_hidden_layers=max(1, int(nbytes / 29e6)), **sizes))


def experts(nbytes: float) -> transformers.PreTrainedModel:
    """About 100 MB per layer, as bfloat16."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_attention_heads": 16, "vocab_size": 32_000}
    return make(
        transformers.Qwen3MoeConfig(
            num_experts=32, num_hidden_layers=max(1, int(nbytes / 108e6)), num_key_value_heads=4, head_dim=64, **sizes
        )
    )


def make(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(torch.int16).random_(0x3C00, 0x3F00)
    return model


class Memory:
    """Samples the memory of this process that is mapped from no file, every 2 ms; `extra_bytes`: peak less first."""

    def __enter__(self) -> "Memory":
        self.first = self.peak = anonymous_bytes()
        self.on = True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while self.on:
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self.on = False
        self.thread.join()
        self.extra_bytes = self.peak - self.first


def anonymous_bytes() -> int:
    """Resident memory less what is mapped from files."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


def sync(folder: Path) -> None:
    for file in folder.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())


def by_library(model: transformers.PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    sync(folder)


def by_safetensors(model: transformers.PreTrainedModel, folder: Path) -> None:
    folder.mkdir()
    safetensors.torch.save_model(model, str(folder / "model.safetensors"))
    sync(folder)


def by_autoshard(model: transformers.PreTrainedModel, folder: Path) -> None:
    autoshard.save(model, folder, max_shard_size=SHARD_BYTES)


WAYS = {"save_pretrained": by_library, "safetensors.save_model": by_safetensors, "autoshard.save": by_autoshard}


def main(gigabytes: str = "2", folder: str = ".") -> None:
    transformers.logging.disable_progress_bar()
    for name, build in (("dense", dense), ("experts", experts)):
        model = build(float(gigabytes) * 1e9)
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        extra: dict[str, list[int]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way, save in WAYS.items():
                path = Path(folder) / "saving-benchmark"
                with Memory() as memory:
                    begin = time.perf_counter()
                    save(model, path)
                    seconds[way].append(time.perf_counter() - begin)
                extra[way].append(memory.extra_bytes)
                shutil.rmtree(path)
        ours = statistics.median(seconds["autoshard.save"])
        print(f"{name}: {nbytes / 1e9:.2f} GB in files of {SHARD_BYTES / 1e6:.0f} MB")
        for way in WAYS:
            median = statistics.median(seconds[way])
            print(
                f"  {way:23} {median:6.2f} s ({min(seconds[way]):.2f} to {max(seconds[way]):.2f})  "
                f"{nbytes / median / 1e9:5.2f} GB/s  {median / ours:5.2f} x ours  "
                f"extra memory {max(extra[way]) / 1e6:7.1f} MB"
            )
        del model


if __name__ == "__main__":
    main(*sys.argv[1:])
