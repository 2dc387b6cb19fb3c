"""Tiny transformers decoders: generation, training and checkpointing on several devices."""

import pytest
import torch

import autoshard
from autoshard.runtime import apply_device_map, remove
from tests.models import by_name, same


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
    hooked = {path for path, module in model.named_modules() if module._forward_pre_hooks}
    assert hooked == {"", "model", *device_map}  # the list of layers is never called
    remove(model)
    apply_device_map(model, {"": "cpu:0"})
    assert {path for path, module in model.named_modules() if module._forward_pre_hooks} == {""}
