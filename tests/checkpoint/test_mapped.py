"""What a plan keeps on disk is the checkpoint itself; what is in no file as the model has it is refused."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autoshard
from autoshard.checkpoint.data import Piece, Source
from autoshard.checkpoint.header import open_checkpoint
from autoshard.checkpoint.targets import load_applied
from autoshard.errors import ApplyError, CheckpointError
from autoshard.plan import Plan
from autoshard.runtime import remove
from autoshard.runtime.mapped import file_of


def make(tied=False, empty=False, width=8):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(4)))
    if tied:
        model[1][0].weight = model[0][0].weight
    if empty:  # parameters on meta, buffers real
        on_meta = {parameter: nn.Parameter(parameter.detach().to("meta")) for parameter in model.parameters()}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, on_meta[parameter])
    return model.eval()


def plan_of(device, streamed):
    plan = Plan.from_device_map({str(index): device for index in range(4)})
    return dataclasses.replace(plan, streamed=streamed)


def saved(model, directory):
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    tensors = dict(model.named_parameters())
    sources = {
        name: Source(shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=(Piece(entry=name),))
        for name, tensor in tensors.items()
    }
    return checkpoint, sources


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
@pytest.mark.parametrize("tied", [False, True])
def test_streamed_parameters_are_the_file(device, tied, tmp_path):
    torch.manual_seed(0)
    original = make(tied)
    checkpoint, sources = saved(original, tmp_path)
    x = torch.randn(3, 8)
    with autoshard.simulate("1x1MiB"), torch.no_grad():
        model = make(tied, empty=True)
        report = load_applied(model, plan_of(device, {"0": "disk", "1": "disk", "2": "cpu"}), checkpoint, sources)
        assert report.bytes_read <= sum(parameter.nbytes for parameter in original[2:].parameters())
        assert all(file_of(parameter) for part in model[:2] for parameter in part.parameters())
        assert not any(file_of(parameter) for parameter in model[2:].parameters())
        assert model[2][0].weight.device == torch.device("cpu")
        for _ in range(2):
            assert torch.equal(model(x), original(x))
        remove(model)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(model.parameters(), original.parameters(), strict=True))


def test_what_is_not_in_a_file_as_it_is_needed_is_refused(tmp_path):
    checkpoint, sources = saved(make(), tmp_path)
    plan = plan_of("cpu", {"0": "disk"})
    half = {name: dataclasses.replace(source, dtype=torch.float16) for name, source in sources.items()}
    model = make(empty=True).half()
    with pytest.raises(CheckpointError, match=r"0\.0\.weight on disk.*there it is torch.float32"):
        load_applied(model, plan, checkpoint, half)
    parts = tuple(Piece(entry="0.0.weight", region=((start, 4), (0, 8))) for start in (0, 4))
    made = sources | {"0.0.weight": dataclasses.replace(sources["0.0.weight"], pieces=parts)}
    model = make(empty=True)
    with pytest.raises(CheckpointError, match="of several tensors of the checkpoint"):
        load_applied(model, plan, checkpoint, made)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_file_that_is_cut_short_is_refused_when_it_is_mapped(tmp_path):
    checkpoint, sources = saved(make(), tmp_path)
    path = tmp_path / "model.safetensors"
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 400)
    with pytest.raises((ApplyError, CheckpointError), match=r"model\.safetensors"):
        load_applied(make(empty=True), plan_of("cpu", dict.fromkeys("0123", "disk")), checkpoint, sources)


def load(checkpoint, sources, model=None, plan=None):
    model = make(empty=True, width=16) if model is None else model
    return model, load_applied(model, plan, checkpoint, sources, mapped=True)


@pytest.mark.parametrize("plan", [None, Plan.from_device_map({"": "cpu"})])
def test_what_the_cpu_has_as_the_file_has_it_is_the_file(plan, tmp_path):
    original = make(tied=True, width=16)
    model, report = load(*saved(original, tmp_path), make(tied=True, empty=True, width=16), plan)
    assert report.bytes_read == 0
    assert all(file_of(parameter) is not None for parameter in model.parameters())
    assert model[0][0].weight is model[1][0].weight
    x = torch.randn(3, 16)
    assert torch.equal(model(x), original(x))


def test_what_is_written_to_a_mapped_weight_stays_in_its_model(tmp_path):
    original = make(width=16)
    checkpoint, sources = saved(original, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    (first, _), (second, _) = load(checkpoint, sources), load(checkpoint, sources)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    first(torch.randn(3, 16)).sum().backward()
    optimizer.step()
    assert not torch.equal(first[3][0].weight, original[3][0].weight)
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), original.parameters(), strict=True))
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_what_is_not_in_the_file_as_it_is_needed_is_read(tmp_path):
    original = make(width=16)
    checkpoint, sources = saved(original, tmp_path)
    weight, other = "0.0.weight", "1.0.weight"
    changed = sources | {
        weight: dataclasses.replace(sources[weight], dtype=torch.float16),
        other: dataclasses.replace(sources[other], pieces=(Piece(entry="2.0.weight"),)),  # two are made of one
        "3.0.weight": dataclasses.replace(sources["3.0.weight"], pieces=(Piece(entry="3.0.weight", views=(("t",),)),)),
    }
    model = make(empty=True, width=16)
    model[0][0].weight = nn.Parameter(model[0][0].weight.detach().half())
    load(checkpoint, changed, model)
    in_memory = {name for name, parameter in model.named_parameters() if file_of(parameter) is None}
    assert in_memory == {weight, other, "2.0.weight", "3.0.weight"}
    assert torch.equal(model[0][0].weight, original[0][0].weight.half())
    assert torch.equal(model[3][0].weight, original[3][0].weight.t())
