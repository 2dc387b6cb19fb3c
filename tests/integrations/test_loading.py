"""`autoshard.load` gives what `from_pretrained` gives, bit for bit, where the plan has it; or says what is wrong."""

import copy
import functools
import json

import pytest
import safetensors.torch
import torch
from torch import nn

import autoshard
from autoshard.common.fingerprint import fingerprint
from autoshard.errors import CheckpointError, PlanError, SpecError
from autoshard.integrations.huggingface import load_model
from autoshard.runtime.moves import named_tensors, tied_groups
from tests.conformance.checks import plan_tightly, profiled
from tests.models import by_name
from tests.ranks import run_ranks


def saved(name, directory, files=3):
    """Save a case in several files and load it as the library does."""
    model = by_name(name).model()
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    model.save_pretrained(directory, max_shard_size=size // files)
    return type(model).from_pretrained(directory)


def assert_equal(found, expected):
    """The same class, tensors, ties, settings and mode."""
    mine, theirs = named_tensors(found), named_tensors(expected)
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        assert not mine[name].is_meta, name
        assert mine[name].dtype == value.dtype and mine[name].requires_grad == value.requires_grad, name
        assert torch.equal(mine[name].detach().cpu(), value.detach()), name
    assert tied_groups(mine) == tied_groups(theirs)
    assert type(found) is type(expected) and found.training == expected.training
    assert found.state_dict().keys() == expected.state_dict().keys()
    assert found.config.to_dict() == expected.config.to_dict()
    if expected.can_generate():
        assert found.generation_config.to_dict() == expected.generation_config.to_dict()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            (name, "auto")
            for name in ("llama-tied", "gpt2", "mixtral", "deepseek-v3", "jamba", "bert", "t5", "whisper")
        ),
        *((name, "float16") for name in ("llama", "deepseek-v3", "t5")),
    ],
)
def test_loaded_is_from_pretrained(name, dtype, tmp_path):
    expected = saved(name, tmp_path)
    if dtype != "auto":
        expected = type(expected).from_pretrained(tmp_path, dtype=dtype)
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    assert_equal(autoshard.load(tmp_path, "cpu", dtype=dtype), expected)


@pytest.mark.parametrize(("name", "strategy"), [("llama-tied", "sequential"), ("mixtral", "balanced")])
def test_loaded_to_devices(name, strategy, tmp_path):
    expected, inputs = saved(name, tmp_path), by_name(name).example()
    plan, _ = plan_tightly(profiled(lambda: copy.deepcopy(expected), inputs), strategy)
    devices = {device.name: device.memory_bytes for device in plan.devices}
    with autoshard.simulate(devices), torch.no_grad():
        model = autoshard.load(tmp_path, devices, strategy=strategy, inputs=inputs)
        assert len({tensor.device for tensor in model.parameters()}) > 1
        assert torch.equal(model(**inputs)[0].cpu(), expected(**inputs)[0])
        autoshard.remove(model)
    assert {tensor.device for tensor in named_tensors(model).values()} == {torch.device("cpu")}
    assert_equal(model, expected)


def on_ranks(directory):
    """Each rank loads its part; merged, they are the model of the library."""
    model = autoshard.load(directory, {"cpu:0": "1GiB", "cpu:1": "1GiB"}, strategy="column-parallel")
    expected = type(model).from_pretrained(directory)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids)[0], expected(ids)[0], atol=1e-4)
    parts = sum(parameter.numel() for parameter in model.parameters())
    assert parts < 0.8 * sum(parameter.numel() for parameter in expected.parameters())
    autoshard.remove(model)
    assert_equal(model, expected)


def test_loaded_on_two_processes(tmp_path):
    saved("llama-tied", tmp_path)
    run_ranks(on_ranks, 2, tmp_path)


def test_a_plan_or_a_device_map_that_is_there_already(tmp_path):
    expected = saved("llama", tmp_path, files=1)
    ids = torch.arange(8)[None]
    with autoshard.simulate("2x1GiB"), torch.no_grad():
        plan = autoshard.plan(copy.deepcopy(expected), strategy="balanced")
        for given in (plan, plan.device_map):
            model = autoshard.load(tmp_path, plan=given)
            assert {str(t.device) for t in model.parameters()} == set(plan.placements.values())
            assert torch.equal(model.generate(ids, max_new_tokens=8).cpu(), expected.generate(ids, max_new_tokens=8))
        other = autoshard.plan(by_name("gpt2").model())
        with pytest.raises(PlanError, match="another model"):
            autoshard.load(tmp_path, plan=other)


def test_pipelines_and_generation_settings(tmp_path):
    import transformers

    model = by_name("llama").model()
    model.generation_config.do_sample, model.generation_config.top_k = True, 7
    model.save_pretrained(tmp_path)
    loaded = autoshard.load(tmp_path, "cpu")
    assert loaded.generation_config.top_k == 7 and loaded.name_or_path == str(tmp_path)
    from tokenizers import Tokenizer, models

    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(90)}, unk_token="w0")), eos_token="w2"
    )
    pipeline = functools.partial(transformers.pipeline, "text-generation", tokenizer=words, max_new_tokens=4)
    expected = pipeline(model=loaded)("w5", do_sample=False)
    with autoshard.simulate("2x1GiB"):
        spread = autoshard.load(tmp_path, plan={"model": "cpu:0", "lm_head": "cpu:1"})
        assert pipeline(model=spread)("w5", do_sample=False) == expected
        here = dict.fromkeys(("model.layers", "model.norm", "model.rotary_emb", "lm_head"), "cpu:0")
        offloaded = autoshard.load(tmp_path, plan={"model.embed_tokens": "disk", **here})
        assert pipeline(model=offloaded)("w5", do_sample=False) == expected


def change(directory, edit):
    """Rewrite a single file after changing its tensors."""
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    edit(tensors)
    safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def drop(tensors):
    for name in ("model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
        del tensors[name]


DAMAGE = {
    "missing": (drop, r"2 tensors of the model missing: model.layers.0.mlp.up_proj.weight, model.norm.weight"),
    "unexpected": (
        lambda t: t.update({f"extra{i}": torch.ones(1) for i in range(7)}),
        r"7 tensors that the model does not have: extra0, extra1, extra2, extra3, extra4 and 2 more",
    ),
    "mismatched": (
        lambda t: t.update({"model.norm.weight": torch.ones(3)}),
        r"1 tensor of another shape: model.norm.weight \(\[3\], the model has \[32\]\)",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_differences_are_listed_unless_allowed(kind, tmp_path):
    edit, message = DAMAGE[kind]
    saved("llama", tmp_path, files=1)
    change(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        autoshard.load(tmp_path, "cpu")
    assert f"allow=('{kind}',)" in str(caught.value) and str(tmp_path) in str(caught.value)
    torch.manual_seed(5)
    model = autoshard.load(tmp_path, "cpu", allow=(kind,))
    torch.manual_seed(5)
    assert_equal(model, type(model).from_pretrained(tmp_path, ignore_mismatched_sizes=True))


def test_a_missing_expert_is_found(tmp_path):
    saved("mixtral", tmp_path, files=1)
    change(tmp_path, lambda t: t.pop(next(name for name in t if "experts.1." in name)))
    with pytest.raises(CheckpointError, match=r"can't make 1 tensor .*: model.layers.0.mlp.experts.gate"):
        autoshard.load(tmp_path, "cpu")


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_that_are_there_twice(equal, tmp_path):
    saved("llama-tied", tmp_path, files=1)

    def untie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][0] += not equal

    change(tmp_path, untie)
    model = autoshard.load(tmp_path, "cpu")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == equal
    assert_equal(model, type(model).from_pretrained(tmp_path))


def edit_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_is_refused_before_anything_is_read(tmp_path):
    saved("llama", tmp_path, files=1)
    for arguments, message in (
        ({"dtype": "int3"}, "dtype is 'int3'"), ({"dtype": torch.int8}, "dtype is"),
        ({"allow": "missing"}, "allow is"), ({"allow": ("all",)}, "allow is"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=message):
            autoshard.load(tmp_path, "cpu", **arguments)
    with autoshard.simulate("2x10KiB"), pytest.raises(PlanError):
        autoshard.load(tmp_path, strategy="sequential")
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(CheckpointError, match="adapter"):
        autoshard.load(tmp_path, "cpu")


def test_code_runs_only_if_trusted(tmp_path):
    model = saved("llama", tmp_path, files=1)
    (tmp_path / "modeling_own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    edit_config(
        tmp_path, model_type="own", architectures=["OwnModel"],
        auto_map={"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"},
    )  # fmt: skip
    with pytest.raises(SpecError):
        autoshard.load(tmp_path, "cpu")
    assert not (tmp_path / "ran").exists()
    own = autoshard.load(tmp_path, "cpu", trust_remote_code=True)
    assert type(own).__name__ == "OwnModel" and (tmp_path / "ran").exists()
    for name, value in model.state_dict().items():
        assert torch.equal(own.state_dict()[name], value), name


def test_a_download_of_the_hub_is_found_by_its_name(tmp_path, monkeypatch):
    """Its files are links to blobs beside the snapshots."""
    import huggingface_hub.constants

    expected = saved("llama", tmp_path / "blobs")
    folder = tmp_path / "models--some--model"
    snapshot = folder / "snapshots" / "a1b2c3"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").rename(folder / "blobs")
    for file in (folder / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a1b2c3")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model = autoshard.load("some/model", "cpu")
    assert_equal(model, type(expected).from_pretrained("some/model"))


class Plain(nn.Module):
    """A module that no library knows: a tie, a table that is not saved, running statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, x):
        return self.second(self.norm(self.first(x)).relu()) + self.table


@pytest.mark.parametrize("build", ["function", "meta parameters", "real"])
def test_any_module_is_filled(build, tmp_path):
    expected = Plain().eval()
    expected.norm.running_mean.normal_()
    safetensors.torch.save_model(expected, str(tmp_path / "weights.safetensors"))
    model = Plain
    if build != "function":
        model = Plain()
        if build == "meta parameters":
            for module in model.modules():
                module._parameters.update({n: nn.Parameter(p.to("meta")) for n, p in module._parameters.items()})
            model.second.weight = model.first.weight
        model.eval()
    x = torch.randn(3, 8)
    with autoshard.simulate("2x1MiB"):
        loaded = autoshard.load(tmp_path, model=model, inputs=x, strategy="balanced").eval()
        assert loaded.second.weight is loaded.first.weight
        assert torch.equal(loaded(x).cpu(), expected(x))
        autoshard.remove(loaded)
    assert loaded.state_dict().keys() == expected.state_dict().keys()


def test_a_module_that_does_not_fit_its_files(tmp_path):
    safetensors.torch.save_model(Plain(), str(tmp_path / "weights.safetensors"))

    class Larger(Plain):
        def __init__(self):
            super().__init__()
            self.third = nn.Linear(2, 2)

    with pytest.raises(CheckpointError, match=r"this Larger. 2 tensors of the model missing: third.bias, third.weight"):
        autoshard.load(tmp_path, "cpu", model=Larger)
    with torch.device("meta"):
        empty = Plain()
    with pytest.raises(CheckpointError, match="table is a buffer on meta"):
        autoshard.load(tmp_path, "cpu", model=empty)
    with pytest.raises(SpecError, match="dtype is for models"):
        autoshard.load(tmp_path, "cpu", model=Plain, dtype="float16")
    with pytest.raises(CheckpointError, match=r"third.bias: not in .* without values of its own"):
        autoshard.load(tmp_path, "cpu", model=Larger, allow=("missing",))
    larger = Larger()
    third = larger.third.weight.clone()
    assert torch.equal(autoshard.load(tmp_path, "cpu", model=larger, allow=("missing",)).third.weight, third)


def test_a_plan_from_the_configuration_alone_fits(tmp_path):
    """Some classes keep a few tensors in float32 whatever the dtype; the plan knows it before there are files."""
    config = by_name("deepseek-v3").model().to(torch.bfloat16).config
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path / "config")
    planned = load_model(tmp_path / "config")
    by_name("deepseek-v3").model().to(torch.bfloat16).save_pretrained(tmp_path / "whole")
    loaded = autoshard.load(tmp_path / "whole", "cpu")
    assert loaded.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert fingerprint(planned) == fingerprint(loaded)
