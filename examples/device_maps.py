"""The four device maps of Transformers, and 8-bit weights, for a model that fits on no single device.

pip install -e ".[hf,int8]"
python examples/device_maps.py

On a machine with GPUs the maps that are printed can be given to `from_pretrained(device_map=…)` as they are.
"""

import importlib.util
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import autoshard


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=320, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    prompt = torch.randint(0, 256, (2, 12))
    dtypes = ["float32"] + ["int8"] * (importlib.util.find_spec("torchao") is not None)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        LlamaForCausalLM(config).save_pretrained(folder)
        expected = AutoModelForCausalLM.from_pretrained(folder).eval()(prompt).logits
        for dtype in dtypes:
            settings = {} if dtype == "float32" else {"dtype": dtype}
            alone = autoshard.load(folder, {"cpu": "1GiB"}, **settings).eval()
            reference = alone(prompt).logits
            close = (reference - expected).abs().max() / expected.abs().max()
            print(f"{dtype}: on one device within {close:.1%} of float32")
            assert close < (0.05 if dtype == "int8" else 1e-9)
            for strategy in ("auto", "balanced", "balanced_low_0", "sequential"):
                with autoshard.simulate("3x2MiB") as devices:
                    plan = autoshard.plan(alone, devices, inputs={"input_ids": prompt}, strategy=strategy)
                    model = autoshard.load(folder, plan=plan, **settings).eval()
                    found = model(prompt).logits.cpu()
                used = sorted(set(plan.device_map.values()))
                equal = torch.equal(found, reference)
                print(f"  {strategy:15} {len(plan.device_map)} entries on {', '.join(used)}; equal: {equal}")
                assert equal
    print("every map equal to one device, bit for bit: True")


if __name__ == "__main__":
    main()
