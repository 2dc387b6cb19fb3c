"""Device maps are given to Accelerate and Transformers and taken from them; their trainers leave a model in place."""

import accelerate
import pytest
import torch
import transformers
from accelerate.utils import get_balanced_memory
from torch.utils.data import DataLoader

import autoshard
from tests.scripts import run_script

PROMPT = torch.arange(24).reshape(2, 12)
TRAINING = autoshard.Workload(mode="training", optimizer="adamw")


def decoder(layers=4):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, vocab_size=128
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def checkpoint(tmp_path):
    decoder().save_pretrained(tmp_path)
    return tmp_path


def cpu_and_disk(model):
    """A plan that has half of the weights on disk."""
    half = sum(parameter.nbytes for parameter in model.parameters()) // 2
    plan = autoshard.plan(model, {"cpu": half + 200_000, "disk": "1GiB"}, inputs={"input_ids": PROMPT})
    assert set(plan.device_map.values()) == {"cpu", "disk"}
    return plan


def test_from_pretrained_takes_the_map_of_a_plan(checkpoint, tmp_path):
    model = decoder()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, device_map=cpu_and_disk(model).device_map, offload_folder=tmp_path / "offload"
    )
    with torch.no_grad():
        assert torch.equal(loaded(PROMPT).logits, model(PROMPT).logits)


def test_a_map_of_accelerate_is_applied():
    model = decoder()
    expected = model(PROMPT).logits.detach()
    room = {0: 300_000, 1: 300_000, "cpu": 10_000_000}
    whole = ["LlamaDecoderLayer"]
    theirs = accelerate.infer_auto_device_map(model, get_balanced_memory(model, dict(room), whole), whole)
    assert len(set(theirs.values())) > 1
    with autoshard.simulate("3x8MiB"), torch.no_grad():
        names = {0: "cpu:0", 1: "cpu:1", "cpu": "cpu:2"}
        autoshard.apply(model, {path: names[device] for path, device in theirs.items()})
        assert torch.equal(model(PROMPT).logits.cpu(), expected)
        autoshard.remove(model)


def rows():
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 128, (8, 12), generator=_seeded())]


def _seeded():
    return torch.Generator().manual_seed(1)


def trained(model, tmp_path, clipped=1.0):
    """Weights after two steps of Transformers' Trainer."""
    arguments = transformers.TrainingArguments(
        tmp_path / "runs", per_device_train_batch_size=4, max_steps=2, report_to=[], use_cpu=True, seed=0,
        save_strategy="no", disable_tqdm=True, max_grad_norm=clipped,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=rows()).train()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    "strategy", ["balanced", *(pytest.param(one, marks=pytest.mark.slow) for one in ("pipeline", "column-parallel"))]
)
def test_trainer_leaves_an_applied_model_where_it_is(strategy, tmp_path):
    clipped = 0.0 if strategy == "column-parallel" else 1.0  # torch's own clipping knows nothing of parts, and raises
    expected, model = trained(decoder(2), tmp_path, clipped), decoder(2).train()
    batch = {name: torch.stack([row[name] for row in rows()[:4]]) for name in rows()[0]}
    settings = {"objective": "memory"} if strategy == "column-parallel" else {}
    room = "2x1300KiB" if strategy == "balanced" else "2x16MiB"
    with autoshard.simulate(room) as devices:
        plan = autoshard.plan(model, devices, inputs=batch, strategy=strategy, workload=TRAINING, **settings)
        autoshard.apply(model, plan)
        assert len(set(model.hf_device_map.values())) == 2
        trained(model, tmp_path, clipped)
        autoshard.remove(model)
    assert not hasattr(model, "hf_device_map")
    for name, value in model.named_parameters():
        assert (value - expected[name]).abs().max() < 1e-5, name


@pytest.mark.parametrize("room", ["2x2MiB", "1x16MiB"])
def test_accelerator_leaves_an_applied_model_where_it_is(room):
    model, twin, x = decoder().train(), decoder().train(), {"input_ids": PROMPT, "labels": PROMPT}
    loss = twin(**x).loss
    loss.backward()
    with autoshard.simulate(room) as devices:
        autoshard.apply(model, devices, inputs=x, strategy="balanced", workload=TRAINING)
        places = {name: parameter.device for name, parameter in model.named_parameters()}
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model.parameters())
        prepared, optimizer, _ = accelerator.prepare(model, optimizer, DataLoader([0]))
        assert prepared is model
        assert {name: parameter.device for name, parameter in model.named_parameters()} == places
        found = prepared(**x).loss
        accelerator.backward(found)
        assert torch.equal(found.cpu(), loss)
        optimizer.step()
        autoshard.remove(model)


def test_processes_are_trained_by_a_trainer_and_with_accelerate():
    pytest.importorskip("accelerate", minversion="1.14")  # earlier ones put any model into DDP
    done = run_script("tests/integrations/trainer_run.py")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all equal to one process: True" in done.stdout, done.stdout
