"""A model on meta, filled from files where a plan has it: equal to the original, each rank reads what it has."""

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autoshard
from autoshard import simulate
from autoshard.checkpoint.data import Checkpoint, Source, whole_entry
from autoshard.checkpoint.header import open_checkpoint
from autoshard.checkpoint.load import load_applied
from autoshard.checkpoint.traced import traced
from autoshard.errors import ApplyError, CheckpointError
from autoshard.plan import Plan
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.dispatch import is_applied
from autoshard.runtime.mapped import file_of
from autoshard.runtime.moves import named_tensors, tied_groups
from tests.runtime.cut_checks import CASES, TOLERANCE, make
from tests.runtime.cut_models import cut_plan


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
    return opened(path)


def opened(path) -> tuple[Checkpoint, dict[str, Source]]:
    checkpoint = open_checkpoint(path)
    return checkpoint, {name: whole_entry(entry) for name, entry in checkpoint.entries.items()}


def bytes_of(checkpoint: Checkpoint) -> int:
    return sum(entry.nbytes for entry in checkpoint.entries.values())


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
        report = load_applied(model, Plan.from_device_map(PLACEMENTS), checkpoint, sources)
        assert report == bytes_of(checkpoint)
        assert [devices.memory(device)[0] for device in devices] == [1600, 8 * 9 * 4 + 4, 0]
        assert torch.equal(model(ids).cpu(), original(ids))
        assert model.embed.weight is model.head.weight
        assert all(tensor is kept[name] for name, tensor in model.named_parameters(remove_duplicate=False))
        assert not model.middle.bias.requires_grad
        autoshard.remove(model)


@pytest.mark.parametrize("name", [name for name in CASES if name != "words"])
def test_cut_over_devices_of_one_process(tmp_path, name):
    original = make(name)
    checkpoint, sources = saved(original, tmp_path)
    model = on_meta(original)
    report = load_applied(model, cut_plan(CASES[name].cuts(3)), checkpoint, sources)
    assert report == bytes_of(checkpoint)
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


def test_a_failure_leaves_the_model_on_meta(tmp_path):
    original = Tied()
    checkpoint, sources = saved(original, tmp_path)
    plan = Plan.from_device_map(PLACEMENTS)
    model = on_meta(original)
    kept = {name: id(parameter) for name, parameter in model.named_parameters()}

    def check() -> None:
        assert {name: id(p) for name, p in model.named_parameters()} == kept
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model.embed.weight is model.head.weight
        assert not is_applied(model)

    with pytest.raises(CheckpointError, match=r"2 tensors of this Tied are filled: middle\.weight"):
        load_applied(model, plan, checkpoint, {"embed.weight": sources["embed.weight"]})
    check()
    with simulate("3x1KB"), pytest.raises(ApplyError, match=r"no room for embed.weight \(1.56 KiB\) on cpu:0"):
        load_applied(model, plan, checkpoint, sources)
    check()
    (tmp_path / "model.safetensors").write_bytes(b"")
    with simulate("3x1MB"), pytest.raises(CheckpointError, match=r"cannot map .*model\.safetensors"):
        load_applied(model, plan, checkpoint, sources)
    check()


def net(tied=False):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(4)))
    if tied:
        model[1][0].weight = model[0][0].weight
    return model.eval()


def plan_of(device, offloaded):
    plan = Plan.from_device_map({str(index): device for index in range(4)})
    return replace(plan, offloaded=offloaded)


ROWS = torch.randn(3, 16)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_on_disk_are_the_file(device, tied, tmp_path):
    original = net(tied)
    checkpoint, sources = saved(original, tmp_path)
    with simulate("1x1MiB"), torch.no_grad():
        model = on_meta(original)
        plan = plan_of(device, {"0": "disk", "1": "disk", "2": "cpu"})
        report = load_applied(model, plan, checkpoint, sources)
        assert report <= sum(parameter.nbytes for parameter in original[2:].parameters())
        assert all(file_of(parameter) for part in model[:2] for parameter in part.parameters())
        assert not any(file_of(parameter) for parameter in model[2:].parameters())
        assert model[2][0].weight.device == torch.device("cpu")
        for _ in range(2):
            assert torch.equal(model(ROWS), original(ROWS))
        autoshard.remove(model)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(model.parameters(), original.parameters(), strict=True))


def changed(source: Source, change) -> Source:
    made = change(traced(source.made))
    return Source(shape=tuple(made.shape), dtype=made.dtype, made=made.expression)


def test_what_no_file_has_as_it_is_needed_is_not_kept_on_disk(tmp_path):
    original = net()
    checkpoint, sources = saved(original, tmp_path)
    plan = plan_of("cpu", {"0": "disk"})
    half = {name: replace(source, dtype=torch.float16) for name, source in sources.items()}
    with pytest.raises(CheckpointError, match=r"0\.0\.weight on disk.*there it is torch.float32"):
        load_applied(on_meta(original).half(), plan, checkpoint, half)
    model = on_meta(original)
    made = sources | {"0.0.weight": changed(sources["0.0.weight"], lambda x: torch.cat([x[:8], x[8:]]))}
    with pytest.raises(CheckpointError, match="of several tensors of the checkpoint"):
        load_applied(model, plan, checkpoint, made)
    assert all(parameter.is_meta for parameter in model.parameters())
    file = tmp_path / "model.safetensors"
    with open(file, "r+b") as opened_file:
        opened_file.truncate(file.stat().st_size - 400)
    with pytest.raises((ApplyError, CheckpointError), match=r"model\.safetensors"):
        load_applied(model, plan_of("cpu", dict.fromkeys("0123", "disk")), checkpoint, sources)


@pytest.mark.parametrize("plan", [None, Plan.from_device_map({"": "cpu"})])
def test_what_the_cpu_has_as_the_file_has_it_is_the_file(plan, tmp_path):
    original = net(tied=True)
    checkpoint, sources = saved(original, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    first, second = on_meta(original), on_meta(original)
    for model in (first, second):
        assert load_applied(model, plan, checkpoint, sources, mapped=True) == 0
        assert all(file_of(parameter) is not None for parameter in model.parameters())
        assert model[0][0].weight is model[1][0].weight
        assert torch.equal(model(ROWS), original(ROWS))
    # what is written to a mapped weight stays in its model
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    first(ROWS).sum().backward()
    optimizer.step()
    assert not torch.equal(first[3][0].weight, original[3][0].weight)
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), original.parameters(), strict=True))
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_what_is_not_in_the_file_as_it_is_needed_is_read(tmp_path):
    original = net()
    checkpoint, sources = saved(original, tmp_path)
    sources |= {
        "0.0.weight": changed(sources["0.0.weight"], lambda x: x.half()),
        "1.0.weight": sources["2.0.weight"],  # two are made of one
        "3.0.weight": changed(sources["3.0.weight"], lambda x: x.T),
    }
    model = on_meta(original)
    model[0][0].weight = nn.Parameter(model[0][0].weight.detach().half())
    load_applied(model, None, checkpoint, sources, mapped=True)
    in_memory = {name for name, parameter in model.named_parameters() if file_of(parameter) is None}
    assert in_memory == {"0.0.weight", "1.0.weight", "2.0.weight", "3.0.weight"}
    assert torch.equal(model[0][0].weight, original[0][0].weight.half())
    assert torch.equal(model[3][0].weight, original[3][0].weight.t())
