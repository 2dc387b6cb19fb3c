"""TARGET: what may be given, what is built without its weights, and what is said when the user's file is at fault."""

import json
import re
import textwrap

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autoshard
from autoshard.capture.inputs import derive_inputs
from autoshard.cli.main import app
from autoshard.cli.target import UserCodeError, load_target
from autoshard.errors import SpecError
from autoshard.integrations.skeleton import has_weights, without_weights
from autoshard.plan.workload import Workload

HEADER = "import torch\nfrom torch import nn\n"


def load(tmp_path, text, name="", workload=None, **settings):
    path = tmp_path / "model.py"
    path.write_text(HEADER + textwrap.dedent(text))
    return load_target(f"{path}{name}", workload or Workload(assumed=True), **settings)


@pytest.mark.parametrize(
    "text",
    [
        "model = nn.Linear(3, 4)",
        "def model():\n    return nn.Linear(3, 4)",
        "class model(nn.Linear):\n    def __init__(self):\n        super().__init__(3, 4)",
        "model = lambda: nn.Linear(3, 4)",
    ],
)
def test_a_module_or_a_callable(tmp_path, text):
    target = load(tmp_path, text)
    assert isinstance(target.model, nn.Linear) and target.model.weight.is_meta
    assert target.inputs is None and target.notes == ()
    assert target.title.endswith("model.py")


def test_another_name_and_example_inputs(tmp_path):
    text = """
        small = nn.Linear(3, 4)
        example_inputs = (torch.arange(6.0).reshape(2, 3),)
    """
    target = load(tmp_path, text, ":small")
    assert target.title.endswith("model.py:small")
    assert target.inputs[0].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_example_inputs_may_take_the_shape_of_the_workload(tmp_path):
    text = """
        model = nn.Linear(3, 4)
        def example_inputs(batch_size=1):
            return torch.zeros(batch_size, 3)
    """
    assert load(tmp_path, text).inputs.shape == (1, 3)
    assert load(tmp_path, text, workload=Workload(batch_size=5, sequence_length=3)).inputs.shape == (5, 3)
    with pytest.raises(SpecError, match=r"--seq has no effect.*sequence_length"):
        load(tmp_path, text, workload=Workload(batch_size=5, sequence_length=7))


def test_inputs_of_another_batch_are_examples(tmp_path):
    text = "model = nn.Linear(3, 4)\nexample_inputs = torch.ones(2, 3)"
    target = load(tmp_path, text, workload=Workload(batch_size=6))
    plan = autoshard.plan(target.model, "2x1GiB", inputs=target.inputs, workload=target.workload)
    assert plan.workload.batch_size == 6


def test_files_import_their_neighbours(tmp_path):
    (tmp_path / "my_layers_of_this_test.py").write_text(HEADER + "class Mine(nn.Linear):\n    pass\n")
    target = load(tmp_path, "from my_layers_of_this_test import Mine\nmodel = Mine(2, 2)\n")
    assert type(target.model).__name__ == "Mine"


def test_with_weights(tmp_path):
    target = load(tmp_path, "torch.manual_seed(3)\nmodel = nn.Linear(3, 4)", with_weights=True)
    torch.manual_seed(3)
    assert torch.equal(target.model.weight, nn.Linear(3, 4).weight)


def test_a_file_that_needs_values_is_run_for_real_and_says_so(tmp_path):
    text = """
        model = nn.Linear(3, 4)
        scale = model.weight.abs().max().item()
        print("built")
    """
    target = load(tmp_path, text)
    assert has_weights(target.model)
    assert len(target.notes) == 1 and "with its weights" in target.notes[0]


def test_a_file_that_raises_shows_its_own_traceback(tmp_path):
    text = """
        import torch

        def deeper():
            return torch.ones(2, 3) @ torch.ones(2, 3)  # in a mode of ours, which is not shown

        def model():
            return deeper()
    """
    with pytest.raises(UserCodeError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert re.search("RuntimeError: (mm: )?mat1 and mat2", message)  # torch 2.15 names the op
    assert "line 7, in deeper" in message and "line 10, in model" in message
    assert "autoshard" not in message.replace(str(tmp_path), "") and len(message.splitlines()) < 12


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("import nothing_of_this_name", "", "ModuleNotFoundError"),
        ("def model(:\n    pass", "", "line 3"),
        ("raise SystemExit(3)", "", "SystemExit: 3"),
        ("def model(size):\n    return nn.Linear(size, size)", "", "TypeError"),
        ("def recurse():\n    recurse()\nrecurse()", "", "RecursionError"),
        ("model = nn.Linear(1, 1)\ndef example_inputs():\n    raise KeyError('no data')", "", r"inputs\(\).*no data"),
        ("x = 1", "", "there is no 'model'.*Define model"),
        ("net = nn.Linear(1, 1)", "", r"It has net: write .*model.py:net"),
        ("def model():\n    return 3", "", "'model' in .* is a int"),
        ("model = nn.Linear(1, 1)", ":", "'' is not a name"),
        ("model = nn.Linear(1, 1)", ":a b", "'a b' is not a name"),
    ],
)
def test_faults_of_the_file(tmp_path, text, name, says):
    with pytest.raises((SpecError, UserCodeError), match=says) as caught:
        load(tmp_path, text, name)
    lines = [line for line in str(caught.value).splitlines() if line.strip(" ~^")]  # Python 3.13 marks more places
    assert "model.py" in str(caught.value) and len(lines) <= 12


@pytest.mark.parametrize(
    ("file", "content", "target", "says"),
    [
        ("other", "", "nowhere.py:x", r"nowhere.*does not exist"),
        ("other", "", "nowhere", r"nowhere.*does not exist"),
        ("model.bin", "", "model.bin", "is neither a model"),
        ("model.bin", "", "", r"config\.json does not exist"),
        ("config.json", "{", "", "can't be read as JSON"),
        ("config.json", "[]", "config.json", "no model_type"),
        ("config.json", '{"hidden_size": 3}', "", "no model_type"),
        ("config.json", '{"model_type": "surely-not-a-model"}', "", "transformers does not accept"),
    ],
)
def test_what_is_no_target(tmp_path, file, content, target, says):
    (tmp_path / file).write_text(content)
    with pytest.raises(SpecError, match=says):
        load_target(str(tmp_path / target), Workload())


def test_a_configuration_builds_its_model_on_meta_in_its_dtype(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16", "vocab_size": 64}
    config |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = load_target(str(tmp_path), Workload(assumed=True))
    assert target.title == tmp_path.name
    parameters = list(target.model.parameters())
    assert all(p.is_meta and p.dtype == torch.float16 for p in parameters)
    assert not target.model.training and torch.get_default_dtype() == torch.float32
    assert load_target(str(tmp_path), Workload(mode="training")).model.training  # what it drops then is planned
    again = load_target(str(tmp_path), Workload(assumed=True), with_weights=True)
    assert {n: p.shape for n, p in again.model.named_parameters()} == {
        n: p.shape for n, p in target.model.named_parameters()
    }
    assert has_weights(again.model)
    shown = CliRunner().invoke(app, ["profile", str(tmp_path), "--new-tokens", "3"])
    assert shown.exit_code == 0 and "Cache" in shown.output and "taken to be" not in shown.output
    for words in ([], ["--seq", "16"]):
        refused = CliRunner().invoke(app, ["plan", str(tmp_path), "--devices", "1x20KiB", *words])
        assert refused.exit_code == 1 and ("tokens were assumed" in refused.output) == (not words), refused.output


def test_skeletons_keep_ties_grad_flags_and_buffers():
    with without_weights() as count:
        shared = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        model = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)])
        model[0].weight = shared
        model[2].weight = shared
        model[2].extra = None
    assert model[0].weight is model[2].weight and model[0].weight.is_meta and not model[0].weight.requires_grad
    assert not model[1].running_var.is_meta and model[1].weight.is_meta
    assert count.parameters == 7
    assert not nn.Linear(1, 1).weight.is_meta


def whisper(folder, **more):
    """The configuration of a small speech model in half precision, as such models are published."""
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        architectures=["WhisperForConditionalGeneration"], dtype="float16", d_model=32, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=100, max_target_positions=32, num_mel_bins=16, vocab_size=100, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    config.save_pretrained(folder)
    for path in folder.glob("*.json"):
        data = json.loads(path.read_text())
        path.write_text(json.dumps({**data, **more}))


def test_a_speech_model_in_half_precision_is_planned_from_its_configuration(tmp_path):
    whisper(tmp_path, dtype=None, torch_dtype="float16")
    shown = CliRunner().invoke(app, ["plan", str(tmp_path / "config.json"), "-d", "2x1GiB", "--json"])
    assert shown.exit_code == 0, shown.output
    target = load_target(str(tmp_path), Workload(assumed=True))
    assert target.model.dtype == torch.float16
    _, kwargs = derive_inputs(target.model, target.workload)[0]
    assert kwargs["input_features"].dtype == torch.float16 and kwargs["decoder_input_ids"].dtype == torch.int64


def test_a_name_that_the_hub_cache_has_is_a_target(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    kept = tmp_path / "hub" / "models--some--speech"
    folder = kept / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0123abcd")
    whisper(folder)
    target = load_target("some/speech", Workload(assumed=True))
    assert target.title == "some/speech" and type(target.model).__name__ == "WhisperForConditionalGeneration"
    out = str(tmp_path / "plan.json")
    assert CliRunner().invoke(app, ["plan", "some/speech", "-d", "2x1GiB", "-o", out]).exit_code == 0
    assert CliRunner().invoke(app, ["estimate", out]).exit_code == 0
    with pytest.raises(SpecError, match="hf download some/other"):
        load_target("some/other", Workload(assumed=True))
