"""Cut models whose ranks keep their parts in CPU memory or in files between calls: the same bits as without."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import autoshard
from autoshard.checkpoint.header import open_checkpoint
from autoshard.checkpoint.mapped import mapped_entries
from autoshard.errors import ApplyError, PlanError, RankError
from autoshard.runtime import cut_streams
from autoshard.runtime.collectives import ProcessRanks
from autoshard.runtime.cuts import apply_cuts, cut_record
from autoshard.runtime.mapped import file_of
from autoshard.runtime.pinned import CopyAhead
from autoshard.strategies.streamable import divisions
from tests.checkpoint.directories import assert_same, tensors
from tests.models.hf import HF_CASES
from tests.ranks import run_ranks
from tests.runtime.cut_checks import assert_equal, assert_same_state, make
from tests.runtime.cut_models import CASES

CPU = torch.device("cpu")


def in_file(name, directory):
    """The model of a case with its parameters in the file that the parent wrote."""
    model = make(name).eval()
    checkpoint = open_checkpoint(directory / name.replace(" ", "_"))
    names, parameters = zip(*model.named_parameters(), strict=True)
    for parameter, mapped in zip(parameters, mapped_entries(checkpoint.entries[one] for one in names), strict=True):
        parameter.data = mapped
    return model


def blocks_of(case):
    return {block for cut in case.cuts(2) for block in cut.blocks}


def equal_without(directory, gpu=False):
    """Outputs, state and what `remove` leaves, from the file and from CPU memory."""
    for name in ("perceptron", "attention"):
        case = CASES[name]
        plain = make(name).eval()
        before = {key: value.clone() for key, value in plain.state_dict().items()}
        apply_cuts(plain, case.cuts(2), ProcessRanks.of(), device=CPU)
        for store in ("disk", "cpu"):
            model = in_file(name, directory) if store == "disk" else make(name).eval()
            streamed = dict.fromkeys(blocks_of(case), store)
            apply_cuts(model, case.cuts(2), ProcessRanks.of(), device=CPU, streamed=streamed)
            record = cut_record(model)
            if gpu:
                for streamer in record.streams.streams.streamers.values():
                    streamer.carrier = CopyAhead(CPU)
            with torch.no_grad():
                for _ in range(3):
                    assert_equal(model(*case.inputs), plain(*case.inputs), rtol=0, atol=0)
                    for one in (model, plain):  # what is written between two runs is seen
                        next(p for n, p in one.named_parameters() if n in record.tensors).data.mul_(1.5)
            assert_same_state(model.state_dict(), plain.state_dict())
            for one in (model, plain):
                one.load_state_dict(before)
            for key, parameter in model.named_parameters():
                if store == "disk" and key in record.tensors and record.tensors[key].dim == 0:
                    assert file_of(parameter) is not None and parameter.nbytes < before[key].nbytes
            autoshard.remove(model)
            assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
            assert_same_state(model.state_dict(), before)


def refused(directory):
    """What is several stretches of a file, what is in none, and ranks that would keep other things."""
    rank, case = ProcessRanks.of().rank, CASES["fused"]
    model = in_file("fused", directory)
    for streamed, error, words in (
        (dict.fromkeys(blocks_of(case), "disk"), ApplyError, "stretches of its dimension"),
        ({next(iter(blocks_of(case))): "cpu"} if rank else {}, RankError, "another plan"),
    ):
        with pytest.raises((error, RankError), match=words if not (error is RankError and rank == 0) else ""):
            apply_cuts(model, case.cuts(2), ProcessRanks.of(), device=CPU, streamed=streamed)
        assert cut_record(model) is None
    with pytest.raises((ApplyError, RankError), match="has it in memory, not in a file"):
        memory = make("perceptron")
        blocks = dict.fromkeys(blocks_of(CASES["perceptron"]), "disk")
        apply_cuts(memory, CASES["perceptron"].cuts(2), ProcessRanks.of(), device=CPU, streamed=blocks)


def everything(directory):
    equal_without(directory)
    cut_streams.CPU = torch.device("meta")  # the CPU as if it were a GPU: parts are copied to it from CPU memory
    try:
        equal_without(directory, gpu=True)
    finally:
        cut_streams.CPU = CPU
    refused(directory)


def test_outputs_and_state_are_those_without(tmp_path):
    for name in ("perceptron", "attention", "fused"):
        os.makedirs(tmp_path / name)
        state = {key: value.clone() for key, value in make(name).state_dict().items()}
        save_file(state, tmp_path / name / "model.safetensors")
    run_ranks(everything, 2, tmp_path)


def generate(directory, streamed):
    """Load parts straight from the files, and count what is read."""
    plan = autoshard.Plan.load(directory / "plan.json")
    model = autoshard.load(directory, plan=dataclasses.replace(plan, streamed=streamed), progress=False)
    assert len(cut_record(model).tensors) > 4
    kept = [file_of(p) for n, p in model.named_parameters() if any(n.startswith(f"{path}.") for path in streamed)]
    assert all(kept) == ("disk" in streamed.values())
    assert_same(dict(model.state_dict()), tensors(directory))
    first = tokens_of(model)
    assert tokens_of(model) == first
    return first


def tokens_of(model):
    return model.generate(torch.arange(4, 10)[None], max_new_tokens=4, do_sample=False).tolist()


def test_generate_with_parts_from_the_files_is_token_equal(tmp_path):
    case = next(case for case in HF_CASES if case.name == "llama")
    model = case.model()
    autoshard.save(model, tmp_path)
    plan = autoshard.plan(
        model, ["cpu:0", "cpu:1"], inputs=case.example(), strategy="column-parallel", objective="memory"
    )
    plan.save(tmp_path / "plan.json")
    expected = tokens_of(model)
    modules = [module.path for module in divisions(autoshard.capture(model, case.example()))[0]]
    for store in ("disk", "cpu"):
        assert run_ranks(generate, 2, tmp_path, dict.fromkeys(modules, store)) == [expected, expected]


def test_one_process_and_training_are_refused():
    model, case = make("perceptron"), CASES["perceptron"]
    plan = autoshard.Plan.from_device_map({"": "cpu:0"})
    plan = dataclasses.replace(plan, cuts=case.cuts(2), streamed={"blocks.0": "cpu"}, fingerprint="")
    with autoshard.simulate("2x1MiB"), pytest.raises(PlanError, match="Start one process per device with torchrun"):
        autoshard.apply(model, plan)
    assert SimpleNamespace(record=cut_record(model)).record is None
