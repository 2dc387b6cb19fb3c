"""Plans are the same bytes in every process, survive a file, and leave the model alone."""

import json
import os

import pytest

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.strategies import make_plan
from tests.models import by_name
from tests.strategies import test_make_plan
from tests.test_examples import run

MODELS, STRATEGIES = ("unet", "three-way-tie", "mixtral"), ("sequential", "balanced", "balanced_low_0")


def plans() -> list[str]:
    """Plans of some models, as their files have them; of one of them every strategy for two objectives, trained too."""
    made = []
    for case in map(by_name, MODELS):
        model, inputs = case.model(), case.example()
        profile = autoshard.profile(model, inputs)
        made += [
            autoshard.plan(model, "2x1MiB,1x512KiB", inputs=inputs, strategy=strategy, profile=profile).to_json()
            for strategy in STRATEGIES
        ]
    for mode, size in (("inference", 80), ("training", 330)):
        profile, cluster = test_make_plan.profile_of(mode), parse_devices({f"cpu:{k}": size << 10 for k in range(3)})
        made += [
            make_plan(profile, cluster, strategy=strategy, objective=objective).to_json()
            for strategy in test_make_plan.STRATEGIES
            for objective in ("latency", "throughput")
        ]
    return made


def test_byte_identical_in_another_process():
    """Where sets have another order, too."""
    program = "import json; from tests.conformance.test_plans import plans; print(json.dumps(plans()))"
    done = run("-c", program, PYTHONHASHSEED="2" if os.environ.get("PYTHONHASHSEED") != "2" else "1")
    assert done.returncode == 0, done.stderr[-2000:]
    here = plans()
    assert len(here) == 25 and json.loads(done.stdout) == here


def test_a_plan_survives_its_file_and_a_damaged_one_is_named(tmp_path):
    case, path = by_name("bert"), tmp_path / "plan.json"
    plan = autoshard.plan(case.model(), "2x1MiB", inputs=case.example(), strategy="balanced")
    plan.save(path)
    assert autoshard.Plan.load(path) == plan
    assert json.loads(path.read_text())["placements"] == plan.device_map
    path.write_text(path.read_text()[:-20])
    with pytest.raises(autoshard.PlanError, match=str(path)):
        autoshard.Plan.load(path)
