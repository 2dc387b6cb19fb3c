"""Tiny transformers decoders: generation, training and checkpointing on several devices."""

import pytest
import torch

import autoshard
from autoshard.runtime import apply_device_map, remove
from autoshard.runtime.around import layers_of
from tests.conformance.checks import split_before
from tests.models import by_name, energise, same


def split(model, cut):
    """Layers from `cut` on, and what comes after them, on the second device; the rest on the first."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers()]
    first = next(index for index, name in enumerate(names) if f".{cut}." in name)
    late = {name for name in names[first:] if "embed" not in name and "rotary" not in name}
    return {name: "cpu:1" if name in late else "cpu:0" for name in names}


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "mamba"])
@pytest.mark.parametrize("cut", [1, 2])
def test_generation_is_the_same(name, cut):
    case = by_name(name)
    original, model = case.model(), case.model()
    inputs = {**case.example(), "use_cache": True}
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = original.generate(**inputs, **settings)
    with autoshard.simulate("2x64MiB"):
        apply_device_map(model, split(model, cut))
        assert torch.equal(model.generate(**inputs, **settings), expected)
        for shape in case.shapes:
            with torch.no_grad():
                assert same(model(**case.example(shape)), original(**case.example(shape)))
        remove(model)
    assert torch.equal(model.generate(**inputs, **settings), expected)


def describer():
    """Two towers and an encoder-decoder, whose own `generate` is called by that of the whole."""
    import transformers

    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Blip2Config(
        vision_config={**tower, "image_size": 16, "patch_size": 8},
        qformer_config={**tower, "vocab_size": 32, "encoder_hidden_size": 16, "cross_attention_frequency": 1},
        text_config={"model_type": "t5", "vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2,
                     "num_heads": 2, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
        num_query_tokens=2, image_token_index=31,
    )  # fmt: skip
    torch.manual_seed(0)
    return energise(transformers.Blip2ForConditionalGeneration(config).eval())


@pytest.mark.parametrize("start", ["vision_model.encoder.layers.1", "qformer", "language_model.decoder.block.1"])
def test_generate_of_an_inner_model(start):
    """An inner model is called, part by part, while no forward of the whole runs."""
    original, model = describer(), describer()
    ids = torch.tensor([[31, 31, 5, 9], [31, 31, 7, 3]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 16, 16)}
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = original.generate(**inputs, **settings)
    with autoshard.simulate("2x64MiB"):
        for devices in (["cpu:0", "cpu:1"], ["cpu:1", "cpu:0"]):
            apply_device_map(model, split_before(model, start, devices))
            assert torch.equal(model.generate(**inputs, **settings), expected)
        remove(model)
    assert torch.equal(model.generate(**inputs, **settings), expected)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_training_a_contiguous_split_is_bitwise(reentrant):
    case = by_name("llama")
    original, model = case.model(), case.model()
    for each in (original, model):
        each.train()
        if reentrant is not None:
            each.gradient_checkpointing_enable({"use_reentrant": reentrant})
            each.enable_input_require_grads()
    inputs = case.example()

    def steps(each):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            each(**inputs, labels=inputs["input_ids"]).loss.backward()
            optimizer.step()
        return {name: p.grad.cpu() for name, p in each.named_parameters()}

    expected = steps(original)
    with autoshard.simulate("2x64MiB"):
        apply_device_map(model, split(model, 1))
        assert same(steps(model), expected)
        remove(model)
    assert same(dict(model.state_dict()), dict(original.state_dict()))


def test_layers_without_transfers_have_one_hook():
    """A contiguous split hooks modules at placement roots, nothing below them."""
    model = by_name("llama").model()
    layers = len(model.model.layers)
    device_map = {"model.embed_tokens": "cpu:0", "model.rotary_emb": "cpu:0", "model.norm": "cpu:1", "lm_head": "cpu:1"}
    device_map |= {f"model.layers.{index}": f"cpu:{index * 2 // layers}" for index in range(layers)}
    apply_device_map(model, device_map)
    hooked = {path for path, module in model.named_modules() if layers_of(module)}
    assert hooked == {"", "model", *device_map}  # the list of layers is never called
    remove(model)
    apply_device_map(model, {"": "cpu:0"})
    assert {path for path, module in model.named_modules() if layers_of(module)} == {""}
