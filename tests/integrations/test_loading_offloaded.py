"""Loading models larger than their devices: what no file has as the model does is kept in memory by the plan."""

import pytest
import torch

import autoshard
from autoshard.runtime.mapped import file_of

transformers = pytest.importorskip("transformers")


def test_fused_experts_are_not_planned_on_disk(tmp_path):
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=64, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    original = transformers.MixtralForCausalLM(config).eval()
    original.save_pretrained(tmp_path)
    ids = torch.arange(8).reshape(1, 8)
    experts = sum(p.nbytes for name, p in original.named_parameters() if "experts" in name)
    whole = sum(p.nbytes for p in original.parameters())
    workload = autoshard.Workload(batch_size=1, sequence_length=8)
    devices = {"cpu:0": int(whole * 0.65), "cpu": experts, "disk": "1GiB"}
    with autoshard.simulate({"cpu:0": int(whole * 0.65)}), torch.no_grad():
        model = autoshard.load(tmp_path, devices, workload=workload, progress=False)
        assert torch.equal(model(ids).logits, original(ids).logits)
    with pytest.raises(
        autoshard.PlanError, match=r"too little.* can't be kept on disk, as no file has"
    ):  # nowhere to keep the experts
        autoshard.load(tmp_path, {"cpu": int(whole * 0.5), "disk": "1GiB"}, workload=workload, progress=False)


@torch.no_grad()
@pytest.mark.parametrize("rest", ["cpu", "cpu:0"])
def test_a_device_map_with_modules_on_disk(tmp_path, rest):
    """Of another tool, by hand, or what a plan with offloaded modules gives; they compute where the others do."""
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, vocab_size=64
    )
    torch.manual_seed(0)
    original = transformers.LlamaForCausalLM(config).eval()
    original.save_pretrained(tmp_path)
    ids = torch.arange(8).reshape(1, 8)
    layers = {f"model.layers.{i}": "disk" if i % 2 else rest for i in range(4)}
    given = {"model.embed_tokens": "disk", **layers, "model.norm": rest, "model.rotary_emb": rest, "lm_head": "cpu"}
    with autoshard.simulate({"cpu:0": "1MiB"}):
        model = autoshard.load(tmp_path, plan=given, progress=False)
        assert torch.equal(model(ids).logits, original(ids).logits)
        assert rest == "cpu" or str(model.model.layers[0].mlp.up_proj.weight.device) == rest
        assert file_of(model.model.layers[1].mlp.up_proj.weight) is not None
        assert autoshard.Plan.from_device_map(given).device_map == given
        autoshard.remove(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
