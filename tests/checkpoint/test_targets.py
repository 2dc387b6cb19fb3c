"""A model on meta, filled from files where a plan has it: equal to the original, each rank reads what it has."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autoshard
from autoshard import simulate
from autoshard.checkpoint.data import Checkpoint, Piece, Source
from autoshard.checkpoint.header import open_checkpoint
from autoshard.checkpoint.targets import load_applied
from autoshard.errors import ApplyError, CheckpointError, RankError
from autoshard.plan import Plan, PlanDevice
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.moves import named_tensors, tied_groups
from autoshard.workload import Workload
from tests.ranks import run_ranks
from tests.runtime.cut_checks import CASES, TOLERANCE, make


def on_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters have no values; ties and buffers are kept."""
    made = copy.deepcopy(model)
    empty = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in made.parameters()}
    for module in made.modules():
        module._parameters.update({n: empty[id(p)] for n, p in module._parameters.items() if p is not None})
    return made


def saved(model: nn.Module, path) -> tuple[Checkpoint, dict[str, Source]]:
    """What the tied names of a model were saved as, each once, and how they are read."""
    tensors = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    names = [group[0] for group in tied_groups(tensors) if isinstance(named_tensors(model)[group[0]], nn.Parameter)]
    save_file({name: tensors[name] for name in names}, path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    return checkpoint, {
        name: Source(shape=entry.shape, dtype=entry.dtype, pieces=(Piece(entry=name),))
        for name, entry in checkpoint.entries.items()
    }


def cut_plan(name: str, ranks: int) -> Plan:
    devices = tuple(PlanDevice(name=f"cpu:{rank}", memory_bytes=0) for rank in range(ranks))
    return Plan(
        strategy="column_parallel", objective="latency", workload=Workload(assumed=True), devices=devices,
        placements={"": "cpu:0"}, cuts=CASES[name].cuts(ranks),
    )  # fmt: skip


class Tied(nn.Module):
    """Two names for one matrix, on different devices in the plan; a buffer; a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.middle.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([3.0]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embed(ids)) * self.scale)


PLACEMENTS = {"embed": "cpu:0", "middle": "cpu:1", "head": "cpu:2", "scale": "cpu:1"}


def test_placed_over_simulated_devices(tmp_path):
    original, ids = Tied(), torch.arange(6).view(2, 3)
    checkpoint, sources = saved(original, tmp_path)
    model = on_meta(original)
    kept = dict(model.named_parameters(remove_duplicate=False))
    with simulate("3x1MB") as devices:
        plan = Plan.from_device_map(PLACEMENTS)
        report = load_applied(model, plan, checkpoint, sources)
        assert report.bytes_read == sum(entry.nbytes for entry in checkpoint.entries.values())
        assert [devices.memory(device)[0] for device in devices] == [1600, 8 * 9 * 4 + 4, 0]
        assert torch.equal(model(ids).cpu(), original(ids))
        assert model.embed.weight is model.head.weight
        assert all(tensor is kept[name] for name, tensor in model.named_parameters(remove_duplicate=False))
        assert not model.middle.bias.requires_grad
        autoshard.remove(model)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", [name for name in CASES if name != "words"])
def test_cut_over_devices_of_one_process(tmp_path, name, count):
    original = make(name)
    checkpoint, sources = saved(original, tmp_path)
    model = on_meta(original)
    report = load_applied(model, cut_plan(name, count), checkpoint, sources)
    assert report.bytes_read == sum(entry.nbytes for entry in checkpoint.entries.values())
    check_cut_model(model, original, name)


def check_cut_model(model: nn.Module, original: nn.Module, name: str) -> None:
    inputs = CASES[name].inputs
    for key, value in model.state_dict().items():
        assert torch.equal(value, original.state_dict()[key]), key
    model.eval(), original.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs), original(*inputs), **TOLERANCE)
    autoshard.remove(model)
    assert cut_record(model) is None
    assert {tensor.device for tensor in named_tensors(model).values()} == {torch.device("cpu")}
    for key, value in model.state_dict().items():
        assert torch.equal(value, original.state_dict()[key]), key


def cut_over_processes(path, count):
    read = []
    for name in ("perceptron", "attention", "words"):
        original = make(name)
        checkpoint = open_checkpoint(path / name)
        sources = {
            key: Source(shape=entry.shape, dtype=entry.dtype, pieces=(Piece(entry=key),))
            for key, entry in checkpoint.entries.items()
        }
        model = on_meta(original)
        report = load_applied(model, cut_plan(name, count), checkpoint, sources)
        assert report.bytes_read == sum(parameter.nbytes for parameter in model.parameters())
        read.append(report.bytes_read)
        check_cut_model(model, original, name)
    check_failures(path, count)
    return read


def check_failures(path, count):
    """One process can't read its part: all raise, and the model is as it was."""
    rank = torch.distributed.get_rank()
    checkpoint = open_checkpoint(path / "perceptron")
    sources = {
        key: Source(shape=entry.shape, dtype=entry.dtype, pieces=(Piece(entry=key),))
        for key, entry in checkpoint.entries.items()
    }
    if rank == 1:
        sources.pop("blocks.1.down.bias")
    model = on_meta(make("perceptron"))
    with pytest.raises(CheckpointError if rank == 1 else RankError, match=r"blocks\.1\.down\.bias"):
        load_applied(model, cut_plan("perceptron", count), checkpoint, sources)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.blocks[0]["up"].weight.shape == (24, 8)
    assert cut_record(model) is None


@pytest.mark.parametrize("count", [2, 4])
def test_cut_over_processes_that_each_read_their_part(tmp_path, count):
    sizes = []
    for name in ("perceptron", "attention", "words"):
        (tmp_path / name).mkdir()
        checkpoint, _ = saved(make(name), tmp_path / name)
        sizes.append(sum(entry.nbytes for entry in checkpoint.entries.values()))
    read = run_ranks(cut_over_processes, count, tmp_path, count)
    for size, one in zip(sizes, zip(*read, strict=True), strict=True):
        assert max(one) < 0.8 * size


def test_a_failure_leaves_the_model_on_meta(tmp_path):
    original = Tied()
    checkpoint, sources = saved(original, tmp_path)
    plan = Plan.from_device_map(PLACEMENTS)
    model = on_meta(original)
    kept = dict(model.named_parameters())

    def check() -> None:
        assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in kept.items()}
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model.embed.weight is model.head.weight
        assert not autoshard.runtime.is_applied(model)

    with pytest.raises(CheckpointError, match=r"2 tensors of this Tied are filled: middle\.weight"):
        load_applied(model, plan, checkpoint, {"embed.weight": sources["embed.weight"]})
    check()
    with simulate("3x1KB"), pytest.raises(ApplyError, match=r"no room for embed.weight \(1.56 KiB\) on cpu:0"):
        load_applied(model, plan, checkpoint, sources)
    check()
    (tmp_path / "model.safetensors").write_bytes(b"")
    with simulate("3x1MB"), pytest.raises(CheckpointError, match=r"model\.safetensors became shorter"):
        load_applied(model, plan, checkpoint, sources)
    check()
