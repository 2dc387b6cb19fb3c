"""Modules on disk that compute on the CPU: copied where a core is free, computed with where they are otherwise."""

import gc

import pytest
import torch
from torch import nn

from autoshard.runtime import apply_plan, read_ahead
from autoshard.runtime.homes import PIECE_BYTES, Homes
from autoshard.runtime.mapped import ALIGNMENT_BYTES, region_of
from autoshard.runtime.slabs import Slabs
from tests.runtime.test_streaming import BLOCKS, net, on_disk, rows, streaming


@pytest.fixture(params=["a core is free", "all compute"])
def free(request, monkeypatch):
    found = request.param == "a core is free"
    monkeypatch.setattr(read_ahead, "_cores", lambda: torch.get_num_threads() + found)
    return found


def streamed(directory, model=None):
    model = on_disk(model or net(), directory)
    return apply_plan(model, streaming(model, "cpu", "disk"))


def _where(weight):
    return weight.data_ptr(), region_of(weight.data) is not None


def test_a_module_computes_in_one_of_two_slabs_or_in_its_file(free, tmp_path):
    model, seen = streamed(tmp_path, net().bfloat16()), []
    for block in model.blocks:
        block.up.register_forward_pre_hook(lambda module, args: seen.append(_where(module.weight)))
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(rows().bfloat16()), net().bfloat16()(rows().bfloat16()))
            assert all(is_in_file != free for _, is_in_file in seen)
            assert all(address % ALIGNMENT_BYTES == 0 for address, _ in seen) or not free
            assert len({address for address, _ in seen}) == (2 if free else len(BLOCKS))
            seen.clear()
    assert all(region_of(parameter) is not None for parameter in model.blocks.parameters())


def test_what_a_module_keeps_of_its_copies_is_not_written_over(free, tmp_path):
    model, kept = streamed(tmp_path), []
    for block in model.blocks:
        block.up.register_forward_pre_hook(lambda module, args: kept.append(module.weight[1:3]))
    with torch.no_grad():
        for _ in range(2):
            model(rows())
    wanted = [block.up.weight[1:3] for block in net().blocks] * 2
    assert all(map(torch.equal, kept, wanted))


def test_a_model_may_go_while_the_next_module_comes(free, tmp_path):
    for _ in range(3):
        layer = on_disk(nn.Linear(1024, 1024), tmp_path)
        ahead = read_ahead.ReadAhead()
        for _ in range(2):
            ahead.done(ahead.begin(Homes.of(layer.parameters())), {})
        del ahead, layer
        gc.collect()


def test_pieces_of_many_sizes_come_together_again(free, tmp_path):
    torch.manual_seed(0)
    model = on_disk(nn.ParameterList(torch.randn(size) for size in (1, PIECE_BYTES // 2 + 3, 7, 90_001, 5)), tmp_path)
    ahead = read_ahead.ReadAhead()
    ticket = ahead.begin(Homes.of(model))
    copies = ahead.take(ticket)
    torch.manual_seed(0)
    for parameter, copy, size in zip(model, copies or [None] * 5, (1, PIECE_BYTES // 2 + 3, 7, 90_001, 5), strict=True):
        assert torch.equal(parameter if copy is None else copy, torch.randn(size))
        assert (copy is not None) == free
    ahead.done(ticket, {})


def test_pages_go_only_while_a_module_runs(tmp_path, monkeypatch):
    """Code between calls may write to parameters, and what it writes while pages are given back would be lost."""
    gone = []
    monkeypatch.setattr(read_ahead, "let_go", lambda regions: gone.append((list(regions), reader.lock.locked())))
    reader, regions = read_ahead.Reader(), [region_of(one) for one in on_disk(net(), tmp_path).parameters()]
    reader.let_go(regions[:2])
    reader.gone.result()
    assert not gone
    reader.calls(True)
    reader.gone.result()
    reader.let_go_here(regions[2:])
    reader.calls(False)
    reader.let_go_here(regions)
    assert gone == [(regions[:2], True), (regions[2:], True)] and reader.waiting == regions


def test_a_slab_is_for_modules_of_its_size():
    slabs = Slabs()
    first = slabs.take(1000)
    slabs.give(first)
    assert slabs.take(900) is first
    slabs.give(first)
    assert slabs.take(500) is not first and not slabs.free  # nothing is kept that nothing fits in


def test_what_others_hold_is_no_free_slab():
    slabs = Slabs()
    slab = slabs.take(1000)
    part = slab.tensor[:3]
    slabs.give(slab)
    assert slabs.take(1000) is not slab and len(part) == 3


def test_processes_of_one_run_share_the_cores(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = read_ahead._cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 * alone))
    assert alone >= 1 and read_ahead._cores() == 0
