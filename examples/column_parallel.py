"""A Hugging Face decoder whose matrices are cut over two devices; `generate()` gives the same tokens.

pip install -e ".[hf]"
python examples/column_parallel.py                             # both devices behind this one process
torchrun --nproc-per-node 2 examples/column_parallel.py        # one process per device: each computes its half
"""

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard


def main() -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=320, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 512, (2, 10))
    settings = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **settings)
    logits = model(prompt).logits

    # Nobody said what can be cut: it is found in the model's own ops, and checked.
    devices = {f"cpu:{rank}": "1GiB" for rank in range(max(2, processes))}
    plan = autoshard.plan(
        model, devices, inputs={"input_ids": prompt}, strategy="column-parallel", objective="memory"
    )  # fmt: skip
    autoshard.apply(model, plan)
    tokens = model.generate(prompt, **settings)
    error = (model(prompt).logits - logits).abs().max().item()
    if processes == 1 or dist.get_rank() == 0:
        explain(plan)
        print(f"largest error of a logit, since sums are made in another order: {error:.1e}")
        print("24 tokens of 2 sequences equal:", torch.equal(tokens, expected))
    assert torch.equal(tokens, expected) and error < 1e-5

    autoshard.remove(model)  # whole again
    assert torch.equal(model.generate(prompt, **settings), expected)
    if processes > 1:
        dist.destroy_process_group()


def explain(plan: autoshard.Plan) -> None:
    """Print what is cut, how that was shown to be right, and why the rest is whole."""
    for cut in plan.cuts:
        names = ", ".join(f"{shard.name} (dimension {shard.dim}: {shard.axis})" for shard in cut.shards)
        print(f"{cut.size} slices, {cut.shares} per device, in {len(cut.blocks)} x {names}\n  {cut.proof}")
    for row in plan.whole:
        print(f"whole: {', '.join(row.names)}, because {row.reason}")
    print(*plan.reasons, sep="\n")


if __name__ == "__main__":
    main()
