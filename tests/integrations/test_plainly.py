"""A model built without a rehearsal is the one of the library in everything; what is not so simple is rehearsed."""

import json
import re

import pytest
import safetensors.torch
import torch
from torch import nn

import autoshard
from autoshard.checkpoint.header import open_checkpoint
from autoshard.integrations.plainly import open_plainly
from autoshard.runtime.mapped import file_of
from tests.integrations.test_loading import assert_equal, saved
from tests.models import by_name


def plainly(model_class, directory, dtype="auto"):
    config = model_class.config_class.from_pretrained(directory)
    return open_plainly(open_checkpoint(directory), model_class, config, dtype)


def attributes(model):
    """What every module holds beside tensors and modules, as text."""
    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules", "config", "name_or_path"):
                said = type(value).__name__ if callable(value) else repr(value)
                found[path, name] = re.sub(r"0x[0-9a-f]+|\(\d+, ", "", said)
    return found


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "bert", "t5", "whisper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_built_plainly_is_that_of_the_library(name, dtype, tmp_path):
    expected = saved(name, tmp_path)
    expected = type(expected).from_pretrained(tmp_path, dtype=dtype)
    unfilled = plainly(type(expected), tmp_path, dtype)
    assert unfilled is not None
    buffers = dict(unfilled.model.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in expected.named_buffers())
    model = autoshard.load(tmp_path, "cpu", dtype=dtype)
    assert_equal(model, expected)
    assert attributes(model) == attributes(expected)


def changed(name, change, directory):
    """Save a case in one file, with its tensors changed."""
    expected = saved(name, directory, files=1)
    path = directory / "model.safetensors"
    state = safetensors.torch.load_file(path)
    change(state)
    safetensors.torch.save_file({key: value.clone() for key, value in state.items()}, path)
    return type(expected)


def test_what_the_library_converts_or_misses_is_rehearsed(tmp_path):
    assert plainly(type(saved("mixtral", tmp_path / "experts")), tmp_path / "experts") is None

    def rename(state):
        state["model.norm.weigth"] = state.pop("model.norm.weight")

    assert plainly(changed("llama", rename, tmp_path / "name"), tmp_path / "name") is None

    def widen(state):
        state["model.norm.weight"] = torch.ones(len(state["model.norm.weight"]) + 1)

    assert plainly(changed("llama", widen, tmp_path / "shape"), tmp_path / "shape") is None

    def tie(state):  # whether they are tied is a matter of their values
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()

    assert plainly(changed("llama-tied", tie, tmp_path / "ties"), tmp_path / "ties") is None


def test_the_cpu_has_the_files_themselves(tmp_path):
    model = by_name("llama").model().bfloat16()
    model.save_pretrained(tmp_path)
    found = autoshard.load(tmp_path, "cpu")
    in_files = [file_of(parameter) is not None for parameter in found.parameters()]
    assert all(in_files) or not any(in_files)  # a processor may compute otherwise where they lie
    assert all(file_of(parameter) is None for parameter in autoshard.load(tmp_path, "cpu", mapped=False).parameters())
    assert all(
        file_of(parameter) is None for parameter in autoshard.load(tmp_path, "cpu", dtype="float32").parameters()
    )
    with torch.no_grad():
        found.lm_head.weight.zero_()
    autoshard.save(found, tmp_path)  # over the files that it is
    again = autoshard.load(tmp_path, "cpu")
    assert not again.lm_head.weight.any()
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), again.parameters(), strict=True))
    assert isinstance(found.lm_head.weight, nn.Parameter) and json.loads((tmp_path / "config.json").read_text())
