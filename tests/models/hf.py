"""Tiny random transformers of many kinds, built from their configurations: nothing is downloaded."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.models.case import Case

VOCAB = 96
TEXT = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
SMALL = {**TEXT, **SIZE, "max_position_embeddings": 64}
TOWER = {**SIZE, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
TEXT_SHAPES = ((2, 8), (3, 8), (2, 12), (2, 5))
IMAGE_SHAPES = ((2, 16), (1, 16))


def build(class_name: str, config_name: str, config: dict[str, Any], eager: bool = False) -> nn.Module:
    """Make a model of transformers from keyword arguments of its configuration; it comes in eval mode."""
    import transformers

    made = getattr(transformers, config_name)(**config)
    extra = {"attn_implementation": "eager"} if eager else {}
    return getattr(transformers, class_name)._from_config(made, **extra).eval()


def text(batch: int, length: int) -> dict[str, Any]:
    """Token ids with the last row padded on its left, as generation wants it."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, :2] = 0
    return {"input_ids": torch.randint(3, VOCAB - 4, (batch, length)), "attention_mask": mask, "use_cache": False}


def masked(batch: int, length: int) -> dict[str, Any]:
    """As `text`, for models without a cache."""
    return {key: value for key, value in text(batch, length).items() if key != "use_cache"}


def pair(batch: int, length: int) -> dict[str, Any]:
    """Source and target tokens."""
    return {**text(batch, length), "decoder_input_ids": torch.randint(3, VOCAB - 4, (batch, length - 2))}


def pixels(batch: int, size: int, channels: int = 3) -> dict[str, Any]:
    """Images."""
    return {"pixel_values": torch.randn(batch, channels, size, size)}


def text_and_image(batch: int, length: int) -> dict[str, Any]:
    """Token ids and an image, for two towers."""
    return {**masked(batch, length), **pixels(batch, 16)}


def image_in_text(batch: int, length: int) -> dict[str, Any]:
    """Token ids with four image tokens (a 16x16 image in 8x8 patches) at the start of every row."""
    ids = torch.randint(3, VOCAB - 4, (batch, length + 4))
    ids[:, 1:5] = VOCAB - 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels(batch, 16), "use_cache": False}


def wave(batch: int, length: int) -> dict[str, Any]:
    """Raw audio."""
    return {"input_values": torch.randn(batch, 160 * length)}


def spectrum(batch: int, length: int) -> dict[str, Any]:
    """A log-mel spectrum of fixed length and target tokens."""
    ids = torch.randint(3, VOCAB - 4, (batch, length))
    return {"input_features": torch.randn(batch, 16, 40), "decoder_input_ids": ids, "use_cache": False}


def series(batch: int, length: int) -> dict[str, Any]:
    """Two channels of a time series of 24 steps."""
    return {"past_values": torch.randn(batch, 24, 2)}


def decoder(name: str, class_name: str, config_name: str, config: dict[str, Any], layers: str = "model.layers") -> Case:
    """A case that generates."""
    make = partial(build, class_name, config_name, config)
    return Case(name=name, build=make, inputs=text, shapes=TEXT_SHAPES, generates=True, layers=layers)


def encoder(
    name: str, class_name: str, config_name: str, config: dict[str, Any], inputs: Callable, **more: Any
) -> Case:
    """A case that does not generate."""
    eager = more.pop("eager", False)
    make = partial(build, class_name, config_name, config, eager)
    return Case(name=name, build=make, inputs=inputs, shapes=more.pop("shapes", TEXT_SHAPES), **more)


_GROUPED = {**SMALL, "num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_STATE_SPACE = {**TEXT, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4, "intermediate_size": 64}
_TOWERS = {"text_config": {**SMALL, "num_hidden_layers": 2}, "vision_config": TOWER}
_DECODER = {**_GROUPED, "num_hidden_layers": 2}

_HEADS = {**TEXT, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_PAIR = {
    **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
    **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
}

DECODERS = [
    decoder("llama", "LlamaForCausalLM", "LlamaConfig", _GROUPED),
    decoder(
        "llama-tied", "LlamaForCausalLM", "LlamaConfig", {**SMALL, "tie_word_embeddings": True, "attention_bias": True}
    ),
    decoder(
        "gpt2", "GPT2LMHeadModel", "GPT2Config", {**TEXT, "n_embd": 32, "n_layer": 3, "n_head": 4}, "transformer.h"
    ),
    decoder("gemma2", "Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, "head_dim": 8, "sliding_window": 4}),
    decoder("phi3", "Phi3ForCausalLM", "Phi3Config", _GROUPED),
    decoder("bloom", "BloomForCausalLM", "BloomConfig", {**_HEADS, "n_layer": 3, "n_head": 4}, "transformer.h"),
    decoder(
        "falcon", "FalconForCausalLM", "FalconConfig",
        {**_HEADS, "num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False, "bias": False,
         "parallel_attn": True},
        "transformer.h",
    ),
    decoder("mixtral", "MixtralForCausalLM", "MixtralConfig", {**_EXPERTS, "num_local_experts": 4}),
    decoder(
        "deepseek-v3", "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {**SMALL, **_LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
         "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
    ),
    decoder("mamba", "MambaForCausalLM", "MambaConfig", _STATE_SPACE, "backbone.layers"),
    decoder(
        "jamba", "JambaForCausalLM", "JambaConfig",
        {**_EXPERTS, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
         "expert_layer_offset": 0, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
]  # fmt: skip

ENCODERS = [
    encoder("bert", "BertForMaskedLM", "BertConfig", SMALL, masked),
    encoder("bert-eager", "BertModel", "BertConfig", SMALL, masked, eager=True),
    encoder("albert", "AlbertForMaskedLM", "AlbertConfig", {**SMALL, "embedding_size": 16}, masked),
    encoder(
        "deberta-v2", "DebertaV2ForMaskedLM", "DebertaV2Config",
        {**SMALL, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}, masked,
    ),
    encoder(
        "t5", "T5ForConditionalGeneration", "T5Config",
        {**TEXT, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        pair, generates=True, layers="decoder.block",
    ),
    encoder(
        "bart", "BartForConditionalGeneration", "BartConfig",
        {**TEXT, **_PAIR, "d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 2,
         "forced_eos_token_id": None},
        pair, generates=True, layers="model.decoder.layers",
    ),
    encoder("vit", "ViTForImageClassification", "ViTConfig", TOWER, pixels, shapes=IMAGE_SHAPES),
    encoder(
        "swin", "SwinForImageClassification", "SwinConfig",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 4], "window_size": 2},
        pixels, shapes=IMAGE_SHAPES,
    ),
    encoder(
        "convnext", "ConvNextForImageClassification", "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "image_size": 16}, pixels, shapes=IMAGE_SHAPES,
    ),
    encoder(
        "resnet", "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2], "layer_type": "bottleneck"},
        pixels, shapes=((2, 32), (1, 32)),
    ),
    encoder(
        "segformer", "SegformerForSemanticSegmentation", "SegformerConfig",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2],
         "decoder_hidden_size": 16, "sr_ratios": [4, 2, 1, 1]},
        pixels, shapes=((2, 64), (1, 64)),
    ),
    encoder(
        "wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config",
        {**SMALL, "conv_dim": [16, 16], "conv_kernel": [8, 4], "conv_stride": [4, 4], "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0},
        wave,
    ),
    encoder(
        "whisper", "WhisperForConditionalGeneration", "WhisperConfig",
        {**TEXT, **_PAIR, "d_model": 32, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 64,
         "decoder_start_token_id": 1},
        spectrum,
    ),
    encoder("clip", "CLIPModel", "CLIPConfig", {**_TOWERS, "projection_dim": 16}, text_and_image),
    encoder(
        "llava", "LlavaForConditionalGeneration", "LlavaConfig",
        {"text_config": {**_DECODER, "model_type": "llama"},
         "vision_config": {**TOWER, "model_type": "clip_vision_model", "projection_dim": 16},
         "image_token_index": VOCAB - 1, "vision_feature_select_strategy": "default", "vision_feature_layer": -1},
        image_in_text, generates=True, layers="model.language_model.layers",
    ),
    encoder(
        "patchtst", "PatchTSTForPrediction", "PatchTSTConfig",
        {"num_input_channels": 2, "context_length": 24, "patch_length": 6, "patch_stride": 6, "d_model": 16,
         "num_attention_heads": 4, "num_hidden_layers": 2, "ffn_dim": 24, "prediction_length": 4},
        series,
    ),
]  # fmt: skip

HF_CASES = DECODERS + ENCODERS
