"""What `autoshard.save` writes: the files of the libraries, the same under every plan, loaded by any reader."""

import os
from dataclasses import replace

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.errors import CheckpointError, RankError, SpecError
from autoshard.plan.sharding import even_shares
from autoshard.runtime.collectives import ProcessRanks
from autoshard.runtime.cuts import apply_cuts, cut_record
from autoshard.runtime.local_ranks import LocalRanks
from tests.checkpoint.directories import assert_same, contents, tensors
from tests.models import by_name
from tests.packed_models import pack_linears
from tests.ranks import run_ranks
from tests.runtime.cut_models import CASES, decoder_cuts, make_decoder, uneven_shares
from tests.runtime.test_streaming import net, on_disk, rows, streaming


@pytest.mark.parametrize(("name", "shards"), [("llama-tied", 3), ("gpt2", 1), ("albert", 3), ("bart", 1), ("mamba", 3)])
def test_directories_are_those_of_save_pretrained(name, shards, tmp_path):
    model = by_name(name).model()
    size = sum(tensor.nbytes for tensor in model.state_dict().values()) // shards + 4096
    autoshard.save(model, tmp_path / "ours", max_shard_size=size)
    loaded = type(model).from_pretrained(tmp_path / "ours")
    loaded.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) >= shards
    for again in (loaded, autoshard.load(tmp_path / "ours", "cpu")):
        autoshard.save(again, tmp_path / "again", max_shard_size=size)
        assert contents(tmp_path / "again") == contents(tmp_path / "ours")


@pytest.mark.parametrize("name", ["mixtral", "jamba"])
def test_fused_experts_are_written_as_the_library_names_them(name, tmp_path):
    """The library keeps views of one tensor in one file, however large it gets; here files have their size."""
    model = by_name(name).model()
    model.save_pretrained(tmp_path / "theirs")
    autoshard.save(model, tmp_path / "ours", max_shard_size="20KB")
    assert_same(tensors(tmp_path / "ours"), tensors(tmp_path / "theirs"))
    assert all(os.path.getsize(file) < 30_000 for file in (tmp_path / "ours").glob("*.safetensors"))
    loaded = type(model).from_pretrained(tmp_path / "ours")
    assert_same(loaded.state_dict(), model.state_dict())


class Odd(nn.Module):
    """Ties, a view of a part, a transposed parameter, buffers of both kinds, a scalar and nothing."""

    def __init__(self):
        super().__init__()
        self.z, self.a = nn.Linear(4, 4), nn.Linear(4, 4)
        self.a.weight = self.z.weight
        self.part = nn.Parameter(self.z.bias.detach()[1:3])
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).T)
        self.register_buffer("kept", torch.tensor(3))
        self.register_buffer("gone", torch.ones(2), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("expanded", torch.ones(1).expand(5))


def test_a_plain_module_is_written_once_and_whole(tmp_path):
    model, other = Odd(), Odd()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    autoshard.save(model, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    found = tensors(tmp_path / "out")
    assert set(found) == set(model.state_dict()) - {"z.weight"}
    other.expanded = other.expanded.clone()
    assert other.load_state_dict(found, strict=False).missing_keys == ["z.weight"]
    assert_same(other.state_dict(), model.state_dict())
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "z.weight": "a.weight"}


def test_ties_that_the_library_does_not_know_are_written_under_each_name(tmp_path):
    model = by_name("llama").model()
    model.lm_head.weight = model.model.embed_tokens.weight
    autoshard.save(model, tmp_path / "out")
    assert_same(type(model).from_pretrained(tmp_path / "out").state_dict(), model.state_dict())


def under_plans(model, save):
    """Save a model under every plan of one process; yields what was written."""
    with autoshard.simulate("1x20MiB,2x30MiB"):
        inputs = {"input_ids": torch.ones(1, 5, dtype=torch.long)}
        plan = autoshard.plan(model, "auto", inputs=inputs, strategy="balanced")
        autoshard.apply(model, plan)
        yield save("balanced")
        autoshard.remove(model)
        autoshard.apply(model, {"model": "cpu:1", "lm_head": "cpu:2"})
        yield save("device map")
        autoshard.remove(model)
        apply_cuts(model, decoder_cuts(("model.layers.0", "model.layers.1")), LocalRanks.of(("cpu:0", "cpu:1")))
        yield save("cut")
        autoshard.remove(model)
    yield save("removed")


def test_bytes_are_the_same_under_every_plan_of_one_process(tmp_path):
    model = make_decoder()

    def save(name):
        autoshard.save(model, tmp_path / name, max_shard_size="20KB")
        return contents(tmp_path / name)

    expected = save("none")
    assert len(expected) > 5
    for found in under_plans(model, save):
        assert found == expected


@pytest.mark.parametrize("kind", ["cpu:0 from cpu", "cpu:0 from disk", "cpu from disk"])
def test_bytes_are_the_same_when_modules_are_streamed_and_over_the_files_that_they_come_from(kind, tmp_path):
    device, _, place = kind.partition(" from ")
    autoshard.save(net(), tmp_path / "none", max_shard_size="50KB")
    expected = contents(tmp_path / "none")
    (tmp_path / "source").mkdir()
    with autoshard.simulate("1x16MiB"), torch.no_grad():
        model = on_disk(net(), tmp_path / "source") if place == "disk" else net()
        result = autoshard.apply(model, streaming(model, device, place))(rows().to(device))
        for _ in range(2):  # the second time, from files that are gone
            autoshard.save(model, tmp_path / "source", max_shard_size="50KB")
            assert contents(tmp_path / "source") == expected
            assert torch.equal(model(rows().to(device)), result)
        autoshard.remove(model)
        assert_same(model.state_dict(), net().state_dict())


def cuts_of(name, degree):
    """Of the decoder with two key and value heads only the units can be cut in four."""
    if name != "decoder":
        return CASES[name].cuts(degree, uneven_shares)
    heads, units = decoder_cuts(("model.layers.0", "model.layers.1"))
    return (heads, units) if degree == 2 else (replace(units, shares=even_shares(48, degree)),)


def make(name):
    torch.manual_seed(0)
    return make_decoder() if name == "decoder" else CASES[name].make()


NAMES = {2: ("decoder", "words"), 4: ("fused", "words")}


def save_cut(path, degree):
    """On each rank: cut and save."""
    for name in NAMES[degree]:
        model = make(name)
        apply_cuts(model, cuts_of(name, degree), ProcessRanks.of())
        autoshard.save(model, path / name, max_shard_size="10KB")
        assert cut_record(model) is not None
    with pytest.raises((CheckpointError, RankError), match=r"names a file"):
        autoshard.save(model, path / "words" / "model.safetensors")
    if dist.get_rank() == 1:
        model.half()
    with pytest.raises((CheckpointError, RankError), match="rank 1 has another model than rank 0"):
        autoshard.save(model, path / "words")


def save_and_load_cut(path, degree, other):
    """Save; then make a model, empty it, cut it, and give it this rank's part of what was saved otherwise."""
    save_cut(path, degree)
    model = make("words")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    torch.nn.init.zeros_(model.embed.weight)
    apply_cuts(model, cuts_of("words", degree), ProcessRanks.of())
    state = tensors(other / "words")
    assert model.load_state_dict(state, strict=False).missing_keys == ["head.weight"]
    autoshard.remove(model)
    assert_same(model.state_dict(), expected)


def test_processes_that_share_a_model_write_the_same_and_load_those_of_another_degree(tmp_path):
    for name in ("decoder", "fused", "words"):
        autoshard.save(make(name), tmp_path / "none" / name, max_shard_size="10KB")
    patient = {"timeout_seconds": 300.0, "group_seconds": 120.0}  # all wait while one waits for a busy disk
    run_ranks(save_and_load_cut, 2, tmp_path / "two", 2, tmp_path / "none", **patient)
    run_ranks(save_and_load_cut, 4, tmp_path / "four", 4, tmp_path / "two", **patient)
    for degree, path in ((2, tmp_path / "two"), (4, tmp_path / "four")):
        assert sorted(os.listdir(path)) == sorted(NAMES[degree])
        for name in NAMES[degree]:
            assert_same(tensors(path / name), tensors(tmp_path / "none" / name))
            assert {*os.listdir(path / name)} == {*os.listdir(tmp_path / "none" / name)}


def test_what_only_the_library_can_save_is_left_to_it(tmp_path):
    model = make_decoder()
    model.hf_quantizer = object()
    with pytest.raises(CheckpointError, match=r"only its own save_pretrained .* autoshard.remove"):
        autoshard.save(model, tmp_path / "out")
    assert not os.listdir(tmp_path)


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"steps": 3}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2, device="meta"), "weight has no data"),
        (nn.Sequential(Extra(2, 2)), "0._extra_state .* is a dict"),
        (nn.Linear(2, 2, dtype=torch.complex128), "weight is of torch.complex128"),
        (nn.ReLU(), "nothing to save"),
        (pack_linears(nn.Sequential(nn.Linear(4, 4))), "0.weight is a Scaled, .* before it is quantised"),
    ],
)
def test_what_safetensors_cannot_hold_is_refused(model, message, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "note").write_text("old")
    with pytest.raises(CheckpointError, match=message):
        autoshard.save(model, tmp_path / "out")
    assert contents(tmp_path) == {"out/note": b"old"}


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(SpecError, match="is not a size"):
        autoshard.save(nn.Linear(2, 2), tmp_path / "out", max_shard_size="many")
    with pytest.raises(CheckpointError, match="names a file"):
        autoshard.save(nn.Linear(2, 2), tmp_path / "model.safetensors")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="names a file"):
        autoshard.save(nn.Linear(2, 2), tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]
