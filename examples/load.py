"""A checkpoint read straight to its devices, and run from disk where there is no room for it.

pip install -e ".[hf]"
python examples/load.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=320, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 512, (2, 10))
    settings = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **settings)
    size = sum(parameter.nbytes for parameter in model.parameters())

    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, max_shard_size="1MB")
        # Devices made of CPU memory; with GPUs leave `simulate` out and name them, or nothing at all.
        with autoshard.simulate({"cpu:0": size, "cpu:1": size}) as devices:
            spread = autoshard.load(directory, devices, inputs={"input_ids": prompt}, strategy="balanced")
            print("on", *sorted({str(parameter.device) for parameter in spread.parameters()}))
            equal = torch.equal(spread.generate(prompt, **settings), expected)
        # Half of the weights fit; the others are mapped from the files, and there only while they compute.
        streamed = autoshard.load(directory, {"cpu": size // 2, "disk": "1GiB"}, inputs={"input_ids": prompt})
        equal &= torch.equal(streamed.generate(prompt, **settings), expected)
        print(f"24 tokens of 2 sequences equal: {equal}")
    assert equal


if __name__ == "__main__":
    main()
