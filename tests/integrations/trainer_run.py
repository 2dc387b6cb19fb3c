"""Transformers' Trainer, and a loop with Accelerate: two processes under a plan, and one without; the same weights.

python tests/integrations/trainer_run.py
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader

import autoshard

ROWS = [
    {"input_ids": ids, "labels": ids}
    for ids in torch.randint(3, 128, (24, 12), generator=torch.Generator().manual_seed(1))
]


def decoder() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    return transformers.LlamaForCausalLM(config).train()


def with_trainer(model: Any, samples: int) -> None:
    """Three steps of two micro-batches each, clipped; evaluated in between."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=samples, gradient_accumulation_steps=2, max_steps=3, eval_steps=2,
            eval_strategy="steps", save_strategy="no", report_to=[], use_cpu=True, seed=0, disable_tqdm=True,
            adam_epsilon=1e-3, learning_rate=1e-2,
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=ROWS, eval_dataset=ROWS[:6]).train()


def with_accelerate(model: Any, samples: int) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(ROWS, batch_size=samples))
    assert prepared is model
    for batch in loader:
        accelerator.backward(prepared(**batch).loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


LOOPS = {"trainer": with_trainer, "accelerate": with_accelerate}


def train_share(folder: Path) -> None:
    """What one of two processes does: its share of each batch, under a plan."""
    dist.init_process_group("gloo")
    batch = {name: torch.stack([row[name] for row in ROWS[:4]]) for name in ROWS[0]}
    for mesh in ("fsdp=2", "dp=2"):
        for name, train in LOOPS.items():
            model = decoder()
            plan = autoshard.plan(
                model, {"cpu:0": "1GiB", "cpu:1": "1GiB"}, inputs=batch, mesh=mesh, launch="processes",
                precision="full", workload=autoshard.Workload(mode="training", optimizer="adamw", batch_size=4),
            )  # fmt: skip
            autoshard.apply(model, plan)
            train(model, 2)
            autoshard.save(model, folder / f"{name} {mesh}", progress=False)
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        train_share(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:  # first: a test forks them off this process, which has no threads yet
        command = [sys.executable, "-m", "autoshard", "run", "--processes", "2", __file__, folder]
        assert subprocess.call(command) == 0
        for name, train in LOOPS.items():
            expected = decoder()
            train(expected, 4)
            for mesh in ("fsdp=2", "dp=2"):
                found = transformers.LlamaForCausalLM.from_pretrained(Path(folder) / f"{name} {mesh}")
                weights = zip(found.parameters(), expected.parameters(), strict=True)
                error = max((mine - its).abs().max().item() for mine, its in weights)
                print(f"{name}, {mesh}: largest difference to one process {error:.1e}", flush=True)
                assert error < 1e-5
    print("all equal to one process: True")


if __name__ == "__main__":
    main()
