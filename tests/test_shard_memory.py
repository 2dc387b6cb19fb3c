"""What fully_shard has whole, when: see the picture in `shard_memory`. That it is so is in pipelines/test_peaks.py."""

import torch
from torch import nn

import autoshard
from autoshard.shard_memory import blocks_of, find_whole
from autoshard.workload import Workload

BLOCK, OUTSIDE = 4 * (8 * 8 + 8), 4 * (8 * 3 + 3)


def whole_of(mode):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3))
    graph = autoshard.profile(model, torch.randn(4, 8), workload=Workload(mode=mode)).graph
    blocks = blocks_of(graph, ["0", "1", "2"])
    assert [(block.path, block.parameter_bytes) for block in blocks] == [
        ("0", BLOCK), ("1", BLOCK), ("2", BLOCK), ("", OUTSIDE),
    ]  # fmt: skip
    calls = {call.path: call for call in graph.calls}
    return find_whole(graph, blocks), graph, calls


def test_a_block_and_its_copy_are_there_in_forward():
    whole, _, calls = whole_of("inference")
    for path in ("1", "2"):
        before, inside = 2 * calls[path].begin - 1, 2 * calls[path].begin
        assert (whole.used[before], whole.gathered[before]) == (OUTSIDE + BLOCK, 2 * BLOCK)
        assert (whole.used[inside], whole.gathered[inside]) == (OUTSIDE + BLOCK, BLOCK)
    head = 2 * calls["3"].begin
    assert (whole.used[head], whole.gathered[head]) == (OUTSIDE, BLOCK)  # the copy of the last block waits
    assert whole.used[-1] == OUTSIDE and whole.gathered[-1] == 0 and not whole.scattered.any()
    assert (whole.beside(accelerator=True) - whole.used == 2 * BLOCK).all()


def test_the_next_block_and_gradients_are_there_in_backward():
    whole, graph, _ = whole_of("training")
    back = {path: [op.index for op in graph.ops if op.backward and graph.calls[op.call].path == path] for path in "012"}
    inside = 2 * back["1"][-1]  # beside it the gradients of block 2, on their way, and its own
    assert whole.used[inside] == OUTSIDE + BLOCK + OUTSIDE + 2 * BLOCK
    assert whole.gathered[inside] == BLOCK
    assert whole.scattered[inside] == BLOCK
    assert whole.gathered[2 * back["0"][-1]] == 0
    assert whole.scattered[-1] == 3 * BLOCK + OUTSIDE and whole.used[-1] == 0
    assert len(whole.gradients) == 8
