"""largest: exact by two neighbouring trials, few of them, whatever the curve."""

import pytest
import torch

import autoshard
from autoshard.errors import PlanError, SpecError
from autoshard.plan.workload import Workload
from autoshard.search.largest import largest
from tests.blocks import Blocks
from tests.search.models import Decoder


def curve(full, power=1, base=0.1):
    """What is `base` full with nothing and full at a size."""

    def make(size):
        load = base + (1 - base) * (size / full) ** power
        if load > 1:
            raise PlanError(f"{size} is too much")
        return size, load

    return make


@pytest.mark.parametrize("full", [1, 2, 3, 7, 100, 4321, 123_456])
@pytest.mark.parametrize("power", [1, 2])
def test_finds_the_last_that_fits(full, power):
    found = largest(curve(full, power))
    assert found.size == found.made == full
    assert len(found.trials) <= 25 and (full + 1, None) in found.trials


def test_multiples():
    found = largest(curve(1000), step=48)
    assert found.size == 960 and all(size % 48 == 0 for size, _ in found.trials)


def test_what_does_not_fit_at_all():
    with pytest.raises(PlanError, match="5 is too much"):
        largest(curve(4), start=5)


def test_largest_batch_of_a_model():
    """The exact profile says so: one row more does not fit."""

    def inputs(batch_size):
        return torch.zeros(batch_size, 32, 64)

    limits = {"cpu:0": "2MiB", "cpu:1": "2MiB"}
    plan = autoshard.largest(Blocks(), limits, inputs=inputs, strategy="balanced")
    size = plan.workload.batch_size
    autoshard.plan(Blocks(), limits, inputs=inputs(size), strategy="balanced", workload=Workload(batch_size=size))
    with pytest.raises(PlanError):
        autoshard.plan(Blocks(), limits, inputs=inputs(size + 1), strategy="balanced",
                       workload=Workload(batch_size=size + 1))  # fmt: skip
    assert any("larger" in reason and str(size) in reason for reason in plan.reasons)


def test_largest_batch_over_processes():
    """As on the command line: for the recipe that is given, and with every size looked up in one trace."""
    with torch.device("meta"):
        model = Decoder()

    def inputs(batch_size):
        ids = torch.zeros(batch_size, 512, dtype=torch.long)
        return {"ids": ids, "labels": ids}

    recipe = {"mesh": "fsdp=8", "precision": "full", "recompute": "none"}
    plan = autoshard.largest(
        model, "8xA100-40GB", inputs=inputs, workload=Workload(mode="training"), strategy="fsdp", **recipe
    )
    size = plan.workload.batch_size
    said = f"batch size {size} is the largest multiple of 8 that fits in 1 micro-batch"
    assert plan.mesh.fsdp == 8 and size % 8 == 0 and any(said in why for why in plan.reasons)
    with pytest.raises(PlanError):
        autoshard.plan(model, "8xA100-40GB", inputs=inputs(2), num_microbatches=1, **recipe,
                       workload=Workload(mode="training", batch_size=size + 8))  # fmt: skip


def test_the_longest_sequence_can_be_divided():
    """Ranks that share a sequence take equal parts, so lengths between these would be refused."""
    with torch.device("meta"):
        model = Decoder(layers=2).to(torch.bfloat16)

    def inputs(sequence_length):
        ids = torch.zeros(1, sequence_length, dtype=torch.long)
        return {"ids": ids, "labels": ids}

    workload = Workload(mode="training", batch_size=1)
    plan = autoshard.largest(model, "4x16GiB", "sequence_length", inputs=inputs, workload=workload, mesh="cp=4")
    size = plan.workload.sequence_length
    assert size % 128 == 0 and size > 512
    assert any(f"sequence length {size} is the largest multiple of 128 that fits: of" in why for why in plan.reasons)


def test_inputs_that_can_not_grow():
    with pytest.raises(SpecError, match="function of batch_size"):
        autoshard.largest(Blocks(), {"cpu": "2MiB"}, inputs=torch.zeros(2, 32, 64))
    with pytest.raises(SpecError, match="batch_size or sequence_length"):
        autoshard.largest(Blocks(), {"cpu": "2MiB"}, "width", inputs=None)
