"""A Hugging Face decoder over devices that are each too small for it; `generate()` gives the same tokens.

Placed where it is, read from its checkpoint straight to the devices, and run from disk where there is no room for it.

pip install -e ".[hf]"
python examples/generate.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard

SETTINGS = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 512, (2, 10))
    expected = model.generate(prompt, **SETTINGS)
    size = sum(parameter.nbytes for parameter in model.parameters())

    # Devices made of CPU memory; with GPUs leave `simulate` out and name them, or nothing at all.
    with autoshard.simulate("1x2MiB,1x2MiB,1x1536KiB") as devices:
        # Nobody said which classes must not be split; inputs are derived from the configuration and the workload.
        workload = autoshard.Workload(batch_size=2, sequence_length=10, new_tokens=24)
        plan = autoshard.plan(model, devices, workload=workload, strategy="sequential")
        autoshard.apply(model, plan)
        print("placed:", plan.device_map)
        equal = torch.equal(model.generate(prompt, **SETTINGS).cpu(), expected)
        autoshard.remove(model)

    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, max_shard_size="1MB")
        with autoshard.simulate({"cpu:0": size, "cpu:1": size}) as devices:
            spread = autoshard.load(directory, devices, inputs={"input_ids": prompt}, strategy="balanced")
            print("read to", *sorted({str(parameter.device) for parameter in spread.parameters()}))
            equal &= torch.equal(spread.generate(prompt, **SETTINGS).cpu(), expected)
        # Half of the weights fit; the others are mapped from the files, and there only while they compute.
        offloaded = autoshard.load(directory, {"cpu": size // 2, "disk": "1GiB"}, inputs={"input_ids": prompt})
        equal &= torch.equal(offloaded.generate(prompt, **SETTINGS), expected)
    print(f"24 tokens of 2 sequences equal: {equal}")
    assert equal


if __name__ == "__main__":
    main()
