"""Autograd nodes of a recorded backward pass: which ran, what each sent where, and watching changes nothing."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoshard.capture.capture import capture
from autoshard.capture.nodes import NodeLog
from autoshard.torch_private import engine_runs
from autoshard.workload import Workload

TRAINING = Workload(mode="training")


class Mixed(nn.Module):
    """A residual, a write into a slice, and a layer that is run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        h = h + self.b(h).relu()
        out = h.new_zeros(3, 8)
        out[:, :4] = h
        return checkpoint(self.c, h, use_reentrant=True) + out[:, 2:6]


def test_every_gradient_is_traced_to_its_sender():
    graph = capture(Mixed(), torch.randn(3, 4), workload=TRAINING)
    sent = {}
    for index, node in enumerate(graph.nodes):
        for edge in node.edges:
            sent.setdefault((edge.node, edge.slot), []).append((index, edge))
    unsent = 0
    for index, node in enumerate(graph.nodes):
        for slot, value in enumerate(node.incoming):
            senders = sent.get((index, slot), [])
            unsent += value >= 0 and not senders
            assert all(sender < index for sender, _ in senders)
            if senders:
                last = senders[-1][1]
                assert value == (last.value if last.sum < 0 else graph.ops[last.sum].outputs[0])
                assert sum(edge.sum >= 0 for _, edge in senders) == len(senders) - 1
    assert unsent == 2  # where the two runs of the engine begin
    assert {node.run for node in graph.nodes} == {0, 1}
    leaves = [node.leaf for node in graph.nodes if node.leaf >= 0 and node.run == 0]
    assert len(leaves) == 4 and len(graph.gradients) == 6


def test_a_write_into_a_slice_is_known_by_its_own_op():
    graph = capture(Mixed(), torch.randn(3, 4), workload=TRAINING)
    writes = [op.index for op in graph.ops[: graph.backward_begin] if op.target is torch.ops.aten.copy_.default]
    assert [node.made for node in graph.nodes if node.made in writes] == writes


def test_watching_changes_no_lifetime(monkeypatch):
    torch.manual_seed(0)
    watched = capture(Mixed(), torch.randn(3, 4), workload=TRAINING)
    monkeypatch.setattr(NodeLog, "watching", lambda log: contextlib.nullcontext())
    plain = capture(Mixed(), torch.randn(3, 4), workload=TRAINING)
    assert plain.nodes == () and watched.nodes
    assert watched.storages == plain.storages and watched.saves == plain.saves


def test_inference_has_no_nodes():
    assert capture(Mixed(), torch.randn(3, 4)).nodes == ()


@pytest.mark.parametrize("run", [lambda y: y.backward(), lambda y: torch.autograd.grad(y, y)])
def test_runs_of_the_engine_are_seen(run):
    seen = []
    with engine_runs(lambda outputs: seen.append(len(outputs)), lambda: seen.append("end")):
        run(torch.ones(2, requires_grad=True).sum())
    assert seen == [1, "end"]
