"""A pipeline whose processes all run the user's own forward: results are those of the whole model, bit for bit.

Starting processes takes a while, so each start checks several things.
"""

import os
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.errors import ApplyError, RankError
from tests.models import HF_CASES, HOSTILE_CASES, by_name
from tests.ranks import run_ranks
from tests.runtime.follow_checks import WAYS, atoms_of, check_models, generated, plan_in_stages

QUICK = {2: ["llama", "convnext", "mutated-dict", "running-buffers"], 3: ["t5"]}


class Experts(nn.Module):
    """Reads values in the middle of a module (which experts are hit), and an index that depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero()[:, 0]
            out[rows] = self.experts[number](x[rows])
        return out


class Noisy(nn.Module):
    """Draws random numbers, also in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + torch.rand_like(x)


class Writer(nn.Module):
    """Writes into its argument and into a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        x.mul_(2)
        seen.append(self.layer(x))
        return seen[-1] + len(seen)


class Odd(nn.Module):
    """Stages with habits, and code between them that mixes what they make with what all have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.first = nn.Linear(4, 4)
        self.experts = Experts()
        self.noisy = Noisy()
        self.writer = Writer()
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        skip = torch.arange(4.0)
        h = self.first(x) * self.scale + skip
        if h.sum() > 0:  # all processes must go the same way
            h = h + 1
        h = self.noisy(self.experts(h)) + h
        seen = [h * 2]
        out = self.writer(h, seen)
        total = torch.zeros(4)
        total += h.mean(0)  # written, though all have it
        return {"out": self.last(out) + self.first.weight.sum(), "h": h, "total": total, "seen": torch.stack(seen)}


def habits() -> None:
    torch.manual_seed(0)
    model, x = Odd().eval(), torch.randn(5, 4)

    def run() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        torch.manual_seed(1)
        with torch.no_grad():
            return model(x), torch.rand(3)

    expected, drawn = run()
    autoshard.apply(model, plan_in_stages(model, 2))
    for _ in range(3):  # calls of a kind that was seen before go another way
        found, next_drawn = run()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
        assert torch.equal(next_drawn, drawn)  # all processes go on from one generator
    with torch.inference_mode():
        torch.manual_seed(1)
        assert torch.equal(model(x.clone())["out"], expected["out"])
    refusals(model, x)
    autoshard.remove(model)
    assert all(torch.equal(one, other) for one, other in zip(run()[0].values(), expected.values(), strict=True))


def refusals(model: nn.Module, x: torch.Tensor) -> None:
    model.train()
    with pytest.raises(ApplyError, match=r"autoshard\.schedule\(model, loss\)"):
        model(x)
    model.eval()
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cpu")}
    with pytest.raises(RankError, match="without values"):
        model(x.to("meta"))


class Watched(nn.Module):
    """A hook keeps what a layer returns, which is the output of the module around it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
        self.kept: list[torch.Tensor] = []
        self.inner[1].register_forward_hook(lambda module, args, output: self.kept.append(output))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.kept.clear()
        h = self.inner(x)
        return {"h": h, "out": self.last(h), "kept": list(self.kept)}


def what_hooks_keep() -> None:
    torch.manual_seed(0)
    model, x = Watched().eval(), torch.randn(3, 4)
    with torch.inference_mode():
        expected = model(x)
    autoshard.apply(model, plan_in_stages(model, 2))
    with torch.no_grad():
        for _ in range(2):
            found = model(x)
            assert torch.equal(found["kept"][0], expected["h"]) and torch.equal(found["out"], expected["out"])
            assert found["kept"][0] is found["h"]
    autoshard.remove(model)


def in_parts() -> None:
    """With micro-batches the parts of a call follow one another; what has state runs whole."""
    case = by_name("llama")
    model, inputs = case.model().eval(), case.example((6, 8))
    with torch.no_grad():
        expected = model(**inputs).logits
    tokens = generated(model, inputs)
    batch = BatchAxis(
        size=6,
        inputs=tuple(BatchInput(path=name, dim=0, axis="*6") for name in ("input_ids", "attention_mask")),
        outputs=(BatchOutput(path="logits", how="cat", dim=0, axis="*6"),),
        plain=("use_cache=False",),
    )
    autoshard.apply(model, replace(plan_in_stages(model, 2), batch=batch, num_microbatches=4, schedule="gpipe"))
    with torch.no_grad():
        found = model(**inputs).logits
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert torch.equal(generated(model, inputs), tokens)
    autoshard.remove(model)


def everything_on_two(names: list[str]) -> None:
    check_models(names)
    habits()
    what_hooks_keep()
    in_parts()
    different_inputs()  # last: the processes are out of step afterwards


def different_inputs() -> None:
    case = by_name("llama")
    model, inputs = case.model().eval(), case.example()
    autoshard.apply(model, plan_in_stages(model, 2))
    if dist.get_rank() == 1:
        inputs["input_ids"] = inputs["input_ids"] + 1
    with torch.no_grad(), pytest.raises(RankError, match=r"with different inputs|lost rank"):
        model(**inputs)


def test_equal_to_the_whole_model():
    run_ranks(everything_on_two, 2, QUICK[2])


def test_stages_in_turn_and_three_processes():
    run_ranks(check_models, 3, QUICK[3], WAYS[:1], 2)


def dies_between_layers() -> str:
    case = by_name("llama")
    model, inputs = case.model().eval(), case.example()
    autoshard.apply(model, plan_in_stages(model, 2))
    with torch.no_grad():
        model(**inputs)
        if dist.get_rank() == 1:
            os._exit(1)
        started = time.monotonic()
        with pytest.raises(RankError, match="lost rank 1") as error:
            for _ in range(3):
                model(**inputs)
    assert time.monotonic() - started < 25
    return str(error.value)


def test_a_process_that_dies_is_named():
    assert "rank 0 lost rank 1" in run_ranks(dies_between_layers, 2, may_die=True)[0]


NO_SHAPE = {"recurrent": "packs sequences, whose lengths only their own process knows"}
WORKING = [case.name for case in (*HF_CASES, *HOSTILE_CASES) if not case.refused and case.name not in NO_SHAPE]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", WORKING)
def test_every_kind_is_equal_to_the_whole_model(name, count):
    if count > len(atoms_of(by_name(name).model())):
        pytest.skip("a stage must have parameters")
    run_ranks(check_models, count, [name], WAYS, timeout_seconds=200)
