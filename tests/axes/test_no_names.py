"""No rule knows a model: names of families, of their layers and of their attributes appear nowhere in the package."""

import functools
import re

import pytest

from tests.sources import FILES, PACKAGE

# Names of families that are words of English or of this trade.
ORDINARY = {
    "align",
    "aria",
    "beam",
    "bit",
    "clap",
    "clip",
    "ctrl",
    "dac",
    "encoder-decoder",
    "git",
    "led",
    "speech",
    "swift",
}
LAYERS = re.findall(
    r"\S+",
    """
    q_proj k_proj v_proj o_proj out_proj in_proj qkv_proj query_key_value c_attn c_proj c_fc Wqkv wqkv w_q w_k w_v
    gate_proj up_proj down_proj gate_up_proj fc_in fc_out dense_h_to_4h dense_4h_to_h self_attn self_attention
    encoder_attn cross_attn embed_tokens embed_positions word_embeddings position_embeddings wte wpe lm_head
    score_head input_layernorm post_attention_layernorm ln_1 ln_2 ln_f block_sparse_moe shared_expert
    """,
)
ATTRIBUTES = re.findall(
    r"\S+",
    """
    num_heads num_attention_heads num_key_value_heads num_kv_heads num_key_value_groups n_head n_heads n_kv_heads
    n_head_kv head_dim attention_head_size all_head_size hidden_size intermediate_size ffn_dim d_model d_ff d_kv
    d_inner n_embd n_inner embed_dim split_size inner_dim num_experts num_local_experts n_routed_experts
    num_hidden_layers n_layer n_layers multi_query new_decoder_architecture moe_intermediate_size
    """,
)
# Inputs that the user did not give are made from what a config says of them: its words for a width of embeddings, say.
# Nothing else is decided by it. (Integrations speak to one library, in its words.)
READS_CONFIGS = {"capture/inputs.py"}


@functools.cache
def words_of(path):
    """(line, word) of all of a file's text, comments and docstrings too; "a_b" is a word, and so are its parts."""
    return [
        (number, part)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word in re.findall(r"[A-Za-z][A-Za-z0-9]*(?:[_-][A-Za-z0-9]+)*", line)
        for part in {word, *re.split("[_-]", word)}
    ]


def found(path, names):
    return [f"{path.relative_to(PACKAGE)}:{line}: {word}" for line, word in words_of(path) if word in names]


def test_no_family_of_models_is_named():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    families = {name.lower() for name in CONFIG_MAPPING_NAMES} | {
        "llama",
        "mistral",
        "qwen",
        "gemma",
        "deepseek",
        "gpt2",
    }
    families |= {name.capitalize() for name in families} | {name.upper() for name in families}
    families -= {form for name in ORDINARY for form in (name, name.capitalize(), name.upper())}
    assert len(families) > 500
    assert not [hit for path in FILES for hit in found(path, families)]


@pytest.mark.parametrize("names", [LAYERS, ATTRIBUTES], ids=["layers", "attributes"])
def test_no_layer_or_attribute_of_models_is_named(names):
    inside = [path for path in FILES if path.relative_to(PACKAGE).parts[0] != "integrations"]
    if names is ATTRIBUTES:
        inside = [path for path in inside if path.relative_to(PACKAGE).as_posix() not in READS_CONFIGS]
    assert not [hit for path in inside for hit in found(path, set(names))]


def test_names_would_be_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    path = tmp_path / "rule.py"
    path.write_text("# as in llama\nif name.endswith('q_proj.weight'): heads = config.num_attention_heads\n")
    assert found(path, {"llama"}) == ["rule.py:1: llama"]
    assert found(path, set(LAYERS)) == ["rule.py:2: q_proj"]
    assert found(path, set(ATTRIBUTES)) == ["rule.py:2: num_attention_heads"]


def test_what_reads_configs_does_not_cut():
    """The file that knows their words is imported by no room that decides about cuts."""
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] in ("axes", "check", "strategies", "sharding.py", "runtime"):
            assert "capture.inputs" not in path.read_text(), path
