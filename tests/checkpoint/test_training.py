"""Training goes on from a checkpoint as if nothing had happened, on other ranks and under other plans too."""

import os
import shutil
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.checkpoint import training
from autoshard.errors import CheckpointError, RankError
from autoshard.nested import tensors_in
from autoshard.runtime.collectives import ProcessRanks
from autoshard.runtime.cuts import apply_cuts, remove_cuts
from autoshard.runtime.local_ranks import LocalRanks
from tests.ranks import run_ranks
from tests.runtime.cut_checks import TOLERANCE, assert_same_state, make
from tests.runtime.cut_models import CASES, uneven_shares

CUT = "attention"


def optimizer_of(model):
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}], lr=0.01, eps=1e-3)


def train(model, optimizer, steps, begin=0):
    """Losses of some steps, each with data of its own."""
    losses = []
    for step in range(begin, begin + steps):
        torch.manual_seed(step)
        inputs = [torch.randn_like(x) if x.is_floating_point() else x for x in CASES[CUT].inputs]
        loss = sum(tensor.square().mean() for _, tensor in tensors_in(model(*inputs)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def finish(path):
    """Read in one process without any plan, and train to the end."""
    model = make(CUT)
    optimizer = optimizer_of(model)
    state = autoshard.load_checkpoint(path, model, optimizer)
    return train(model, optimizer, 2, state["step"]), model.state_dict()


@pytest.fixture(scope="module")
def expected():
    model = make(CUT)
    losses = train(model, optimizer_of(model), 4)
    return losses, model.state_dict()


def check(found, expected, **tolerance):
    assert found[0] == pytest.approx(expected[0][2:], rel=1e-6)
    for name, value in expected[1].items():
        torch.testing.assert_close(torch.as_tensor(found[1][name]), value, **(tolerance or {"rtol": 0, "atol": 0}))


def test_one_process_goes_on_bit_equal(tmp_path, expected):
    model = make(CUT)
    optimizer = optimizer_of(model)
    train(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.01
    autoshard.save_checkpoint(tmp_path / "last", model, optimizer, state={"step": 2, "seen": torch.arange(3)})
    drawn = torch.rand(3)
    assert [file.name for file in tmp_path.iterdir()] == ["last"]
    torch.manual_seed(7)
    other = make(CUT)
    fresh = optimizer_of(other)
    fresh.param_groups[0]["lr"] = 5.0
    state = autoshard.load_checkpoint(tmp_path / "last", other, fresh)
    assert torch.equal(torch.rand(3), drawn)  # the generators go on too
    assert state["step"] == 2 and state["seen"].tolist() == [0, 1, 2] and fresh.param_groups[0]["lr"] == 0.01
    check((train(other, fresh, 2, 2), other.state_dict()), expected)


def test_all_ranks_in_one_process_and_placed_on_simulated_devices(tmp_path, expected):
    model = make(CUT)
    apply_cuts(model, CASES[CUT].cuts(2), LocalRanks.of([torch.device("cpu")] * 2))
    optimizer = optimizer_of(model)
    train(model, optimizer, 2)
    autoshard.save_checkpoint(tmp_path / "cut", model, optimizer, state={"step": 2})
    check(finish(tmp_path / "cut"), expected, **TOLERANCE)
    with autoshard.simulate("2x1GiB"):
        placed = make(CUT)
        names = [name for name, _ in placed.named_parameters()]
        autoshard.apply(placed, {name: f"cpu:{at % 2}" for at, name in enumerate(names)})
        optimizer = optimizer_of(placed)
        autoshard.load_checkpoint(tmp_path / "cut", placed, optimizer)
        autoshard.save_checkpoint(tmp_path / "placed", placed, optimizer, state={"step": 2})
    check(finish(tmp_path / "placed"), expected, **TOLERANCE)
    again = make(CUT)
    apply_cuts(again, CASES[CUT].cuts(2), LocalRanks.of([torch.device("cpu")] * 2))
    optimizer = optimizer_of(again)
    autoshard.load_checkpoint(tmp_path / "placed", again, optimizer)
    losses = train(again, optimizer, 2, 2)
    remove_cuts(again)
    check((losses, again.state_dict()), expected, **TOLERANCE)


def begin_on_ranks(path):
    ranks = ProcessRanks.of()
    model = make(CUT)
    apply_cuts(model, CASES[CUT].cuts(ranks.size), ranks)
    optimizer = optimizer_of(model)
    train(model, optimizer, 2)
    autoshard.save_checkpoint(path, model, optimizer, state={"step": 2})
    autoshard.save_checkpoint(path, model, optimizer, state={"step": 2})  # over the old one


def end_on_ranks(path):
    ranks = ProcessRanks.of()
    model = make(CUT)
    apply_cuts(model, CASES[CUT].cuts(ranks.size, uneven_shares), ranks)
    optimizer = optimizer_of(model)
    state = autoshard.load_checkpoint(path, model, optimizer)
    losses = train(model, optimizer, 2, state["step"])
    return losses, sent(model.state_dict())


def sent(state):
    """Values that outlive the process they come from."""
    return {name: value.clone().numpy() for name, value in state.items()}


def test_another_number_of_ranks_and_none(tmp_path, expected):
    run_ranks(begin_on_ranks, 2, tmp_path / "last")
    assert {file.name for file in tmp_path.iterdir()} == {"last"}
    check(finish(tmp_path / "last"), expected, **TOLERANCE)
    for found in run_ranks(end_on_ranks, 3, tmp_path / "last"):
        check(found, expected, **TOLERANCE)


def failing(path):
    """Two saves that fail: on one rank by what it is given, then by a rank that dies while it writes."""
    ranks = ProcessRanks.of()
    model = make(CUT)
    apply_cuts(model, CASES[CUT].cuts(ranks.size), ranks)
    optimizer = optimizer_of(model)
    train(model, optimizer, 1)
    autoshard.save_checkpoint(path, model, optimizer, state={"step": 1})
    before = sent(model.state_dict())
    train(model, optimizer, 1)
    words = "more than tensors" if ranks.rank == 0 else "rank 0 can't take part"
    with pytest.raises((CheckpointError, RankError), match=words):
        autoshard.save_checkpoint(path, model, optimizer, state={"step": object()})
    if ranks.rank == 1:
        training.SaveParts.resolve_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1"):
        autoshard.save_checkpoint(path, model, optimizer, state={"step": 2})
    return before


def test_failed_saves_leave_the_old_checkpoint(tmp_path):
    before = next(filter(None, run_ranks(failing, 2, tmp_path / "last", may_die=True)))
    model = make(CUT)
    optimizer = optimizer_of(model)
    assert autoshard.load_checkpoint(tmp_path / "last", model, optimizer) == {"step": 1}
    assert_same_state(model.state_dict(), {name: torch.as_tensor(value) for name, value in before.items()})


def test_bad_input_changes_nothing(tmp_path):
    model = make(CUT)
    optimizer = optimizer_of(model)
    train(model, optimizer, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="it does not exist"):
        autoshard.load_checkpoint(tmp_path / "none", model, optimizer)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        autoshard.save_checkpoint(tmp_path / "full", model, optimizer)
    with pytest.raises(CheckpointError, match="does not have"):
        autoshard.save_checkpoint(tmp_path / "x", model, torch.optim.SGD(make(CUT).parameters()))
    autoshard.save_checkpoint(tmp_path / "other", nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match="is not of this model: it lacks"):
        autoshard.load_checkpoint(tmp_path / "other", model, optimizer)
    autoshard.save_checkpoint(tmp_path / "weights", make(CUT))
    with pytest.raises(CheckpointError, match="written without an optimizer"):
        autoshard.load_checkpoint(tmp_path / "weights", model, optimizer)
    autoshard.save_checkpoint(tmp_path / "whole", model, optimizer)
    with pytest.raises(CheckpointError, match="1 groups of"):
        autoshard.load_checkpoint(tmp_path / "whole", model, torch.optim.AdamW(model.parameters()))
    assert not (tmp_path / "x").exists()
    assert_same_state(model.state_dict(), before)
    shutil.rmtree(tmp_path / "whole")
    assert not dist.is_initialized()


def test_tied_weights_frozen_ones_and_other_optimizers(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.norm = nn.BatchNorm1d(4)
            self.norm.weight.requires_grad_(False)

        def forward(self, x):
            return self.head(self.norm(self.embed(x)))

    def run(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.arange(5)).square().sum().backward()
            optimizer.step()

    for make_optimizer in (
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.NAdam(p, lr=0.1),
    ):
        torch.manual_seed(0)
        model = Tied()
        optimizer = make_optimizer(model.parameters())
        run(model, optimizer, 2)
        autoshard.save_checkpoint(tmp_path / "last", model, optimizer)
        other = Tied()
        fresh = make_optimizer(other.parameters())
        assert autoshard.load_checkpoint(tmp_path / "last", other, fresh) is None
        run(model, optimizer, 2), run(other, fresh, 2)
        assert_same_state(other.state_dict(), model.state_dict())
