"""Plans are the same bytes in every process."""

import json
import os

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
