"""assume_independent_rows: the user's word is taken, recorded in the plan, and said wherever the plan is shown."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autoshard
from autoshard.cli.main import app
from autoshard.plan import Mesh, Plan
from autoshard.plan.batching import ASSUMED, BatchAxis, BatchInput, BatchOutput
from tests.runtime.test_launched import completed
from tests.search.models import Decoder, Layer

HERE = {"cpu:0": "16MiB", "cpu:1": "16MiB"}


class ClippedByBatch(nn.Module):
    """Rows are scaled down by the norm of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x):
        x = self.layers(x)
        return x * (1.0 / x.norm().clamp(min=1.0))


def plan_of(model, x, **settings):
    workload = autoshard.Workload(batch_size=8)
    return autoshard.plan(model, HERE, inputs=x, workload=workload, **settings)


def test_a_plan_keeps_what_was_assumed_in_its_file(tmp_path):
    batch = BatchAxis(
        size=8, inputs=(BatchInput(path="x", dim=0, axis="*8"),),
        outputs=(BatchOutput(path="", how="cat", axis="*8"),), assumed=True,
    )  # fmt: skip
    plan = plan_of(nn.Linear(8, 8), torch.randn(8, 8), strategy="sequential")
    placed = {"": "cpu:0"}
    plan = replace(plan, mesh=Mesh(dp=2), batch=batch, placements=placed, strategy="data-parallel")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    checked = replace(plan, batch=replace(batch, assumed=False))
    assert "assumed" not in json.loads(checked.to_json())["batch"]
    assert Plan.from_json(checked.to_json()) == checked


@pytest.mark.parametrize("strategy", ["balanced", "sequential", "column-parallel"])
def test_strategies_that_do_not_divide_the_batch_refuse_it(strategy):
    with pytest.raises(autoshard.SpecError, match="assume_independent_rows is about dividing the batch"):
        plan_of(nn.Linear(8, 8), torch.randn(8, 8), strategy=strategy, assume_independent_rows=True)


@pytest.mark.parametrize("strategy", ["data-parallel", "pipeline"])
def test_rows_that_mix_are_divided_on_the_users_word_and_found_with_the_first_batch(strategy):
    torch.manual_seed(0)
    model, x = ClippedByBatch(), 4 * torch.randn(8, 8)
    with pytest.raises(autoshard.PlanError, match="can't be divided"):
        plan_of(model, x, strategy=strategy)
    parts = 4 if strategy == "pipeline" else None
    plan = plan_of(model, x, strategy=strategy, num_microbatches=parts, assume_independent_rows=True)
    assert plan.batch.assumed and plan.reasons[0] == ASSUMED and ASSUMED in plan.summary()
    assert not any("don't mix" in reason for reason in plan.reasons)
    with autoshard.simulate("2x16MiB"):
        autoshard.apply(model, plan, check_first_batch=True)
        with pytest.raises(autoshard.VerifyError, match="the output by up to"):
            model(x)
        autoshard.remove(model)


class Clipped(Layer):
    """Scaled down by the norm of the whole batch."""

    def forward(self, x):
        x = super().forward(x)
        return x / x.norm().clamp(min=1.0)


def test_a_plan_for_processes_keeps_the_word_for_their_apply():
    model, ids = Decoder(32, 2, 4, 48), torch.randint(0, 48, (8, 6))
    model.layers = nn.ModuleList(Clipped(32, 4) for _ in range(2))
    inputs, workload = {"ids": ids, "labels": ids}, autoshard.Workload(mode="training", batch_size=8)
    asked = {"inputs": inputs, "workload": workload, "launch": "processes", "mesh": "pp=2", "micro_batch": 2}
    with pytest.raises(autoshard.PlanError, match="can't be divided"):
        autoshard.plan(model, HERE, **asked)
    plan = autoshard.plan(model, HERE, **asked, assume_independent_rows=True)
    assert plan.reasons[0] == ASSUMED
    assert completed(plan.to_json(), model, inputs).batch.assumed


def test_what_cannot_be_put_together_is_refused_on_any_word():
    class Spread(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return x @ x.T  # a row and a column for every row of the batch

    with pytest.raises(autoshard.PlanError, match="can't be divided"):
        plan_of(Spread(8, 8), torch.randn(8, 8), strategy="data-parallel", assume_independent_rows=True)


def test_the_command_line_takes_the_users_word(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n"
        "class Model(nn.Linear):\n    def forward(self, x):\n        x = super().forward(x)\n"
        "        return x / x.norm()\n\n"
        "model = Model(64, 64)\n\ndef example_inputs(batch_size=8):\n    return torch.randn(batch_size, 64)\n"
    )
    asked = ["plan", str(file), "-d", "2x16MiB", "-s", "data-parallel", "--batch", "8"]
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 1 and "can't be divided" in refused.output
    out = str(tmp_path / "plan.json")
    taken = CliRunner().invoke(app, [*asked, "--assume-independent-rows", "-o", out])
    assert taken.exit_code == 0 and ASSUMED in " ".join(taken.output.split())
    assert Plan.load(out).batch.assumed
    document = json.loads(CliRunner().invoke(app, ["estimate", out, "--json"]).stdout)
    assert ASSUMED in json.dumps(document)
