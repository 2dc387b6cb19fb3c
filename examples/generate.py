"""A Hugging Face decoder split over three unequal devices; `generate()` with its cache gives the same tokens.

pip install -e ".[hf]"
python examples/generate.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 512, (2, 10))
    settings = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **settings)

    with autoshard.simulate("1x2MiB,1x2MiB,1x1536KiB") as devices:
        # Nobody said which classes must not be split; inputs are derived from the configuration and the workload.
        workload = autoshard.Workload(batch_size=2, sequence_length=10, new_tokens=24)
        plan = autoshard.plan(model, devices, workload=workload, strategy="sequential")
        autoshard.apply(model, plan)
        tokens = model.generate(prompt, **settings)
        print("placed:", plan.device_map)
        print("24 tokens of 2 sequences equal:", torch.equal(tokens.cpu(), expected))
        assert torch.equal(tokens.cpu(), expected)
        autoshard.remove(model)

    assert torch.equal(model.generate(prompt, **settings), expected)


if __name__ == "__main__":
    main()
