"""dtype="int8": planned, loaded and run as what Transformers gives with torchao's int8 weights, bit for bit."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autoshard
from autoshard.common.packed import is_packed, named_stored, stored_bytes
from autoshard.errors import CheckpointError, SpecError
from autoshard.integrations.huggingface import load_model, quantization_note
from autoshard.runtime.moves import named_tensors, tied_groups
from tests.models import by_name
from tests.packed_models import TOKENS, Blocks

torchao = pytest.importorskip("torchao.quantization")
INT8 = torchao.Int8WeightOnlyConfig(set_inductor_config=False)
NAMES = ["llama-tied", "gpt2", "mixtral", "bert", "t5"]


def _saved(name, directory, **settings):
    """Save a case in bfloat16 and load it as the library does."""
    model = by_name(name).model().to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(directory, **settings)
    return type(model)


def _from_pretrained(model_class, directory, config=INT8):
    from transformers import TorchAoConfig

    return model_class.from_pretrained(directory, dtype="auto", quantization_config=TorchAoConfig(config))


def _assert_equal(found, expected):
    mine, theirs = named_tensors(found), named_tensors(expected)
    assert list(mine) == list(theirs)
    for name, tensor in theirs.items():
        assert type(mine[name].detach().cpu()) is type(tensor.detach()) or not is_packed(tensor)
        assert mine[name].requires_grad == tensor.requires_grad, name
        for (path, left), (there, right) in zip(named_stored(mine[name]), named_stored(tensor), strict=True):
            assert path == there and left.dtype == right.dtype and left.detach().cpu().equal(right.detach()), name
    assert tied_groups(mine) == tied_groups(theirs)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_loaded_is_what_the_library_quantises(name, tmp_path):
    model_class, inputs = _saved(name, tmp_path), by_name(name).example()
    floats = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    try:
        expected = _from_pretrained(model_class, tmp_path)
    except (NotImplementedError, RuntimeError):
        pytest.skip("the library itself can't quantise this model")
    if not any(map(is_packed, expected.parameters())):
        with pytest.raises(SpecError, match="has none for it"):
            autoshard.load(tmp_path, "cpu", dtype="int8")
        return
    found = autoshard.load(tmp_path, "cpu", dtype="int8")
    _assert_equal(found, expected)
    assert found.is_quantized and not found.training
    left, right = found(**{**inputs, **floats}), expected(**{**inputs, **floats})
    assert left[0].equal(right[0])


@torch.no_grad()
@pytest.mark.parametrize("strategy", ["sequential", "balanced", "column-parallel"])
def test_loaded_to_devices(strategy, tmp_path):
    model_class = _saved("llama-tied", tmp_path, max_shard_size="20KB")
    ids = by_name("llama-tied").example()["input_ids"]
    expected = _from_pretrained(model_class, tmp_path)
    tokens = expected.generate(ids, max_new_tokens=4, do_sample=False)
    nbytes = sum(map(stored_bytes, [*expected.parameters(), *expected.buffers()]))
    with autoshard.simulate("2x1MiB") as devices:
        plan = autoshard.plan(autoshard.load(tmp_path, "cpu", dtype="int8"), devices.cluster, strategy=strategy)
        profile = autoshard.profile(expected)
        assert plan.fingerprint == profile.graph.fingerprint
        pins = None if strategy == "column-parallel" else {"model.layers.0": "cpu:0", "model.layers.2": "cpu:1"}
        found = autoshard.load(tmp_path, devices.cluster, strategy=strategy, dtype="int8", pins=pins)
        live = [devices.memory(name)[0] for name in devices]
        if pins:
            assert sum(live) == nbytes and all(live)
        else:  # what is not cut is on both ranks
            assert nbytes < sum(live) < 2.1 * nbytes
        assert profile.parameter_bytes + profile.buffer_bytes == nbytes
        assert found.generate(ids, max_new_tokens=4, do_sample=False).cpu().equal(tokens)
        autoshard.remove(found)
    _assert_equal(found, expected)


@torch.no_grad()
def test_a_module_of_the_users(tmp_path):
    model = Blocks().bfloat16().eval()
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "a.safetensors")
    found = autoshard.load(tmp_path / "a.safetensors", "cpu", model=lambda: Blocks().bfloat16().eval(), dtype="int8")
    torchao.quantize_(model, INT8)
    _assert_equal(found, model)
    assert found(TOKENS).equal(model(TOKENS))


def test_nothing_to_quantise(tmp_path):
    save_file({"weight": torch.ones(3, 4)}, tmp_path / "a.safetensors")
    with pytest.raises(SpecError, match="Embedding has none for it"):
        autoshard.load(tmp_path / "a.safetensors", "cpu", model=nn.Embedding(3, 4), dtype="int8")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["int8", "int8 activations", "int4 unpacked"])
def test_checkpoints_that_are_quantised(kind, tmp_path):
    config = {
        "int8": INT8,
        "int8 activations": torchao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
        "int4 unpacked": torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(16)),
    }[kind]
    model_class, ids = _saved("llama", tmp_path / "whole"), by_name("llama").example()["input_ids"]
    _from_pretrained(model_class, tmp_path / "whole", config).save_pretrained(tmp_path / "packed")
    expected = model_class.from_pretrained(tmp_path / "packed")
    empty = load_model(tmp_path / "packed")
    assert quantization_note(empty) is None and all(parameter.is_meta for parameter in empty.parameters())
    assert autoshard.profile(empty, ids).modules == autoshard.profile(expected, ids).modules
    with autoshard.simulate("2x1MiB") as devices:
        pins = {"model.layers.2": "cpu:1"}
        found = autoshard.load(tmp_path / "packed", devices.cluster, strategy="balanced", pins=pins)
        assert sum(devices.memory(name)[0] for name in devices) == sum(
            map(stored_bytes, [*expected.parameters(), *expected.buffers()])
        )
        assert found(ids).logits.cpu().equal(expected(ids).logits)
        autoshard.remove(found)
    _assert_equal(found, expected)
    with pytest.raises(SpecError, match="quantised already"):
        autoshard.load(tmp_path / "packed", "cpu", dtype="int8")


def test_a_method_that_is_not_here(tmp_path):
    import json

    _saved("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "larger" in quantization_note(load_model(tmp_path))
    with pytest.raises(CheckpointError, match=r"are quantised \(gptq\), and transformers can't load them here"):
        autoshard.load(tmp_path, "cpu")
