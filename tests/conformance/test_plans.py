"""Plans are the same bytes in every process."""

import json
import os

import pytest

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.strategies import make_plan
from tests.models import by_name
from tests.strategies import test_make_plan
from tests.test_examples import run

MODELS = ("unet", "three-way-tie", "mixtral")


def plans() -> list[str]:
    """Plans of some models, as their files have them; of one every strategy, to answer and to train."""
    made = []
    for case in map(by_name, MODELS):
        model, inputs = case.model(), case.example()
        plan = autoshard.plan(model, "2x1MiB,1x512KiB", inputs=inputs, strategy="balanced")
        made.append(plan.to_json())
    for mode, size, objective in (("inference", 80, "latency"), ("training", 330, "throughput")):
        profile, cluster = test_make_plan.profile_of(mode), parse_devices({f"cpu:{k}": size << 10 for k in range(3)})
        made += [
            make_plan(profile, cluster, strategy=strategy, objective=objective).to_json()
            for strategy in test_make_plan.STRATEGIES
        ]
    return made


@pytest.mark.slow
def test_byte_identical_in_another_process():
    """Where sets have another order, too; of one model `test_as_a_process` of the commands looks at it every day."""
    program = "import json; from tests.conformance.test_plans import plans; print(json.dumps(plans()))"
    done = run("-c", program, PYTHONHASHSEED="2" if os.environ.get("PYTHONHASHSEED") != "2" else "1")
    assert done.returncode == 0, done.stderr[-2000:]
    here = plans()
    assert len(here) == 11 and json.loads(done.stdout) == here
